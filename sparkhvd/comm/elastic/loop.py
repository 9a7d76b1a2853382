"""``hvd.elastic.run``: calls the training function again after the ranks of an elastic job have changed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from sparkhvd._util.texts import first_line
from sparkhvd.comm import session
from sparkhvd.comm.connect.commit_folder import number_of
from sparkhvd.comm.connect.membership import LOST_CONNECTIONS, Membership
from sparkhvd.comm.elastic.state import State
from sparkhvd.errors import HostsUpdatedInterrupt, MismatchError, SparkHvdError

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=State)
P = ParamSpec("P")
Result = TypeVar("Result")


def run(func: Callable[Concatenate[S, P], Result]) -> Callable[Concatenate[S, P], Result]:
    """Decorate a training function so that it survives changes of the ranks.

    Call the decorated function after ``hvd.init()``, with a state as the first argument, on all ranks. The function
    synchronizes the state and calls ``func``. If a rank is lost, the other ranks return to the state of the last
    commit. If slots are added or withdrawn, the ranks keep their state. In both cases, the ranks reconnect, call the
    reset callbacks, synchronize the state from a rank that has the newest commit, and call ``func`` again. So ``func``
    must continue from the state.

    In a job that is not elastic, the decorated function synchronizes the state and calls ``func`` once.

    Args:
        func: the training function; its first argument is the state.

    Returns:
        The decorated function. It returns the result of ``func``, once ``func`` has returned on all ranks.
    """

    @wraps(func)
    def wrapper(state: S, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        session.current()  # raises if init() is missing
        membership = session.membership()
        if membership is None:
            state.sync()
            return func(state, *args, **kwargs)
        return _run(membership, state, lambda: func(state, *args, **kwargs))

    return wrapper


def _run(membership: Membership, state: State, train: Callable[[], Result]) -> Result:
    is_reset = False
    while True:
        try:
            if is_reset:
                state.on_reset()
            _synchronize(membership, state)
            result = train()
            # Also raises if ``train`` has swallowed the error of a collective.
            session.current().barrier(name="elastic.end")
        except MismatchError:
            raise  # an error of the program, which would return every time
        except LOST_CONNECTIONS as error:
            logger.info("A collective failed, so this rank returns to its last commit: %s", error)
            membership.reason = first_line(error)
            state.restore()
        except HostsUpdatedInterrupt:
            membership.reason = ""
        else:
            if (publisher := session.publisher()) is not None:
                publisher.finish()  # the driver deletes all commits once the job has succeeded
            membership.finished()
            return result
        _leave_generation()
        session.init()
        is_reset = True


def _synchronize(membership: Membership, state: State) -> None:
    """Synchronize the state and the number of its commit."""
    if session.rank() == 0 and membership.commit < 0:
        _resume(membership, state)
    number = np.array([max(membership.commit, 0)], np.int64)
    newest = int(session.current().broadcast(number, 0, name="elastic.commit").item())
    state.sync()
    membership.commit = newest  # from here on, this rank can hand the state on if all others are lost
    membership.synced()


def _resume(membership: Membership, state: State) -> None:
    """Load the last published commit. All ranks with the job's state are lost, or rank 0 would have the state."""
    publisher = session.publisher()
    if publisher is None or membership.generation == 1:
        return
    path = publisher.folder.newest(membership.generation, membership.newest_published)
    if path:
        state.load_commit(publisher.folder.read(path))
        membership.commit = number_of(path)
        logger.info("This job resumes from commit %d in its Store.", membership.commit)
    else:
        logger.warning("No commit of this job has been published, so its training begins anew.")


def _leave_generation() -> None:
    try:
        session.shutdown()
    except SparkHvdError as error:  # its ranks are lost anyway
        logger.debug("The previous generation ended with an error: %s", error)
