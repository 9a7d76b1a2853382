"""A subset of a launched job's ranks as a separate job."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.comm.connect.mpi import require_member
from sparkhvd.comm.connect.rendezvous import RendezvousClient
from sparkhvd.comm.stall.stragglers import INIT, straggler_error, warning_of_stragglers
from sparkhvd.deadline import Deadline
from sparkhvd.errors import DeadlineExceededError
from sparkhvd.world import World, layout


def subset(context: LaunchContext, ranks: Sequence[int], scope: str) -> LaunchContext:
    """Return the launch context of this rank in the job of ``ranks``, numbered in this order; collective over them.

    Args:
        context: the launch context of the whole job.
        ranks: ranks of the whole job.
        scope: distinguishes the subsets that the ranks of one job form one after the other; equal on all members.

    Raises:
        ConfigError: this rank is not among ``ranks``, or some of them are not ranks of the job.
        DeadlineExceededError: not all members called it in time.
    """
    require_member(context.world.rank, context.world.size, ranks)
    own_index = list(ranks).index(context.world.rank)
    if len(ranks) == 1:
        return dataclasses.replace(context, world=World(), rendezvous=())
    deadline = Deadline.after(context.config.start_timeout)
    with RendezvousClient(context.rendezvous, context.token, deadline, encrypt=context.config.encrypt) as store:
        prefix = f"{scope}/host/"
        store.set(f"{prefix}{own_index}", context.host_key.encode(), deadline)
        try:
            with warning_of_stragglers(store, context, prefix, ranks, INIT):
                hosts = [host.decode() for host in store.get_all(prefix, range(len(ranks)), deadline)]
        except DeadlineExceededError as error:
            raise straggler_error(store, context, prefix, ranks, INIT) or error from None
    return dataclasses.replace(context, world=layout(hosts)[own_index], members=tuple(ranks))
