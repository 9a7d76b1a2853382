from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from unittest import mock

import numpy as np
import pytest

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.comm.connect.rendezvous import RendezvousClient
from sparkhvd.deadline import Deadline
from sparkhvd.errors import (
    CollectiveError,
    ConfigError,
    DeadlineExceededError,
    NotInitializedError,
    PeerLostError,
)
from sparkhvd.world import World
from tests.ranks import RankGroup


@pytest.fixture(autouse=True)
def _closed_session():
    session.set_launch_context(LaunchContext())
    yield
    session.shutdown()


def test_before_init_the_error_names_the_next_step():
    assert not session.is_initialized()
    with pytest.raises(NotInitializedError, match=r"has not been initialized; call hvd\.init\(\) first"):
        session.current()


def test_after_shutdown_the_error_names_the_shutdown():
    session.init()
    session.shutdown()
    session.shutdown()
    with pytest.raises(NotInitializedError, match=r"has been shut down; call hvd\.init\(\)"):
        session.current()


def test_init_without_a_launcher_is_a_job_of_one_rank_and_idempotent():
    session.init()
    first = session.current()
    session.init()
    assert session.current() is first
    assert first.world == World()
    session.shutdown()
    session.init()
    assert session.current() is not first


def test_an_interrupted_shutdown_closes_everything():
    session.init()
    communicator = session.current()
    session._session.watch = mock.Mock(close=mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        session.shutdown()
    assert communicator.closed
    assert not session.is_initialized()


def test_a_signal_handler_may_shut_down_during_init():
    previous = signal.signal(signal.SIGUSR2, lambda number, frame: session.shutdown())
    try:
        session.set_launch_context(LaunchContext(), joined=lambda: signal.raise_signal(signal.SIGUSR2))
        session.init()
    finally:
        signal.signal(signal.SIGUSR2, previous)
    assert not session.is_initialized()


def test_threads_that_call_init_at_the_same_time_share_one_communicator():
    communicators = []
    start = threading.Barrier(4)

    def join():
        start.wait(60.0)
        session.init()
        communicators.append(session.current())

    threads = [threading.Thread(target=join) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(communicators) == 4
    assert len(set(map(id, communicators))) == 1


def test_a_context_cannot_be_offered_to_a_running_session():
    session.init()
    with pytest.raises(ConfigError, match=r"call shutdown\(\) before setting"):
        session.set_launch_context(LaunchContext())


def test_a_process_that_never_calls_shutdown_ends_by_itself():
    script = "from sparkhvd.comm import session; session.init(); session.current().barrier(); print('end')"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "end\n", "")


# Ranks that connect again get a separate group: their links must not outlive the test.


def connect_again(times):
    sums = []
    for _ in range(times):
        session.init()
        sums.append(session.current().allreduce(np.ones(2), ReduceOp.SUM).tolist())
        session.shutdown()
    return sums, session.is_initialized()


def layout_seen():
    communicator = session.current()
    return communicator.world, communicator.homogeneous


def why_a_collective_fails(communicator):
    """Return the message of the error that a collective raises because a rank is lost."""
    with pytest.raises(PeerLostError) as caught:
        communicator.allreduce(np.ones(3), name="wanted")
    return str(caught.value)


def leave_while_others_wait():
    communicator = session.current()
    if communicator.world.rank == 0:
        session.shutdown()
        return "left"
    return why_a_collective_fails(communicator)


def die_while_others_wait():
    communicator = session.current()
    if communicator.world.rank == 1:
        os._exit(3)
    return why_a_collective_fails(communicator)


def abort_while_others_wait():
    communicator = session.current()
    if communicator.world.rank == 1:
        communicator.abort("the data ran out")
        return ""
    return why_a_collective_fails(communicator)


def raise_inside_the_communicator():
    communicator = session.current()
    if communicator.world.rank == 1:
        with pytest.raises(KeyError, match="weights"), communicator:
            raise KeyError("weights")
        return ""
    return why_a_collective_fails(communicator)


def close_with_an_operation_pending():
    communicator = session.current()
    if communicator.world.rank == 0:
        handle = communicator.allreduce_async(np.ones(3), name="pending")
        session.shutdown()
        with pytest.raises(CollectiveError, match=r"'pending' was pending when its communicator was closed"):
            handle.wait()


def test_init_after_shutdown_connects_the_ranks_again():
    with RankGroup(2, connect=False) as group:
        assert group.run(connect_again, 3) == [([[2.0, 2.0]] * 3, False)] * 2


@pytest.mark.parametrize("case", [leave_while_others_wait, die_while_others_wait])
def test_a_rank_that_leaves_fails_the_ranks_that_wait_for_it(case):
    with RankGroup(3) as group:
        outcomes = group.outcomes(case)
    gone = 0 if case is leave_while_others_wait else 1
    for rank, outcome in enumerate(outcomes):
        assert outcome.failure == ""
        if rank != gone:
            assert f"rank {gone}" in outcome.value
    assert outcomes[1].died == (case is die_while_others_wait)


def test_an_abort_reaches_every_rank_with_its_reason():
    with RankGroup(3) as group:
        others = group.run(abort_while_others_wait)
    assert "the data ran out" in others[0]
    assert "the data ran out" in others[2]


def test_an_exception_inside_the_communicator_aborts_the_others_with_its_message():
    with RankGroup(2) as group:
        assert "rank 1 left with KeyError: 'weights'" in group.run(raise_inside_the_communicator)[0]


def test_closing_fails_pending_operations():
    with RankGroup(2) as group:
        group.run(close_with_an_operation_pending)


def test_ranks_know_the_layout_of_their_hosts():
    with RankGroup(3, hosts=("a", "b", "a")) as group:
        seen = group.run(layout_seen)
    assert [world.local_rank for world, _ in seen] == [0, 0, 1]
    assert [world.cross_size for world, _ in seen] == [2, 2, 1]
    assert [homogeneous for _, homogeneous in seen] == [False] * 3


def test_a_process_without_a_launcher_reads_its_own_environment():
    script = (
        "import logging; from sparkhvd.comm import session; session.init(); "
        "print(session.current().channel().waits.timeout, logging.getLogger('sparkhvd').level)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"SPARKHVD_COLLECTIVE_TIMEOUT": "7", "HOROVOD_LOG_LEVEL": "error", "HOROVOD_CYCLE_TIME": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout.split() == ["7.0", "40"]
    assert "HOROVOD_CYCLE_TIME (a collective starts as soon as all ranks have submitted it" in result.stderr


def retry_after_a_timeout():
    context = session.launch_context()
    if context.world.rank == 0:
        short = dataclasses.replace(context, config=dataclasses.replace(context.config, start_timeout=3.0))
        session.set_launch_context(short)
        with pytest.raises(DeadlineExceededError, match="rank 1"):
            session.init()
    else:
        with RendezvousClient(context.rendezvous, context.token, Deadline.after(30.0)) as store:
            store.get("init-2/begun", Deadline.after(30.0))
    session.init()
    total = session.current().allreduce(np.ones(2), ReduceOp.SUM).tolist()
    session.shutdown()
    session.init()
    return total, session.current().allreduce(np.ones(2), ReduceOp.SUM).tolist()


def test_a_rank_can_retry_init_after_a_timeout_and_connect_to_later_ranks():
    with RankGroup(2, connect=False) as group:
        assert group.run(retry_after_a_timeout) == [([2.0, 2.0], [2.0, 2.0])] * 2


def retry_after_a_mistake():
    context = session.launch_context()
    if context.world.rank == 0:
        wrong = dataclasses.replace(context.config, network_interfaces="there-is-none")
        session._session.context = dataclasses.replace(context, config=wrong)
        with pytest.raises(ConfigError, match="there-is-none"):
            session.init()
        session._session.context = context
    session.init()
    return session.current().allreduce(np.ones(2), ReduceOp.SUM).tolist()


def test_a_rank_whose_init_failed_early_is_still_awaited():
    with RankGroup(2, connect=False) as group:
        assert group.run(retry_after_a_mistake) == [[2.0, 2.0]] * 2
