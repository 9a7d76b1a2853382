"""A forked child is not a rank: its use of the session does not disturb any rank."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sparkhvd.comm import session
from sparkhvd.comm.connect.rendezvous import RendezvousClient
from sparkhvd.deadline import Deadline
from sparkhvd.errors import CollectiveError, ConfigError, NotInitializedError
from tests.ranks import RankGroup

LAYOUTS = {"one host": ("one", "one"), "two hosts": ("one", "two")}


def in_child(body: Callable[[], None]) -> None:
    """Fork, run ``body`` in the child, and fail unless it succeeds."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        except BaseException:  # noqa: BLE001  a forked child must not continue as its parent
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the child failed; its stderr says why"


def use_the_session_in_children():
    communicator = session.current()
    rank = session.rank()
    pending = communicator.allreduce_async(np.ones(5), name="pending") if rank == 0 else None

    def use_everything():
        assert session.rank() == rank
        assert session.size() == 2
        if pending is not None:
            assert pending.done()
            with pytest.raises(CollectiveError, match="forked from a rank"):
                pending.wait(5.0)
        with pytest.raises(NotInitializedError, match=f"forked from rank {rank}"):
            communicator.allreduce(np.ones(3))
        with pytest.raises(NotInitializedError, match=f"forked from rank {rank}"):
            session.current().barrier()
        communicator.close()
        session.shutdown()
        session.shutdown()
        with pytest.raises(ConfigError, match="forked from a rank"):
            session.init()

    def end_like_a_program():
        atexit.register(session.shutdown)
        atexit._run_exitfuncs()
        gc.collect()

    in_child(use_everything)
    in_child(end_like_a_program)
    in_child(lambda: None)
    process = multiprocessing.get_context("fork").Process(target=session.shutdown)
    process.start()
    process.join()
    assert process.exitcode == 0
    communicator.barrier()  # so that the operation stays pending while the children of rank 0 live
    handle = communicator.allreduce_async(np.ones(5), name="pending") if pending is None else pending
    return handle.wait().tolist(), communicator.allreduce(np.full(100_000, 1.0 + rank)).mean()


@pytest.mark.parametrize(
    ("hosts", "encrypt"),
    [
        pytest.param(LAYOUTS["one host"], False, id="plain-one host"),
        pytest.param(LAYOUTS["two hosts"], True, id="encrypted-two hosts"),
        pytest.param(LAYOUTS["one host"], True, id="encrypted-one host", marks=pytest.mark.soak),
        pytest.param(LAYOUTS["two hosts"], False, id="plain-two hosts", marks=pytest.mark.soak),
    ],
)
def test_exiting_children_disturb_neither_their_parent_nor_its_peers(hosts, encrypt):
    with RankGroup(2, hosts=hosts, encrypt=encrypt) as group:
        for _ in range(2):
            assert group.run(use_the_session_in_children) == [([1.0] * 5, 1.5)] * 2


def leave_a_child_and_die(path: str):
    communicator = session.current()
    if session.rank() == 1:
        pid = os.fork()
        if pid == 0:
            time.sleep(60.0)
            os._exit(0)
        Path(path).write_text(str(pid))
    communicator.barrier()
    if session.rank() == 1:
        os.kill(os.getpid(), 9)
    began = time.monotonic()
    with pytest.raises(CollectiveError, match="rank 1"):
        communicator.allreduce(np.ones(3))
    seconds = time.monotonic() - began
    os.kill(int(Path(path).read_text()), 9)  # the child holds the test's link to its parent
    return seconds


@pytest.mark.parametrize("hosts", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_the_end_of_a_rank_is_detected_while_its_child_lives(hosts, tmp_path):
    note = tmp_path / "pid"
    with RankGroup(2, hosts=hosts) as group:
        first, second = group.outcomes(leave_a_child_and_die, str(note))
        assert second.died
        assert not first.failure, first.failure
        assert first.value < 10.0


def connect_in_child(port: int):
    token = session.launch_context().token
    with RendezvousClient([("127.0.0.1", port)], token, Deadline.after(10.0)) as client:
        client.set("before", b"1", Deadline.after(10.0))

        def refused():
            with pytest.raises(NotInitializedError, match="forked from a rank"):
                client.get("before", Deadline.after(1.0))
            client.close()

        in_child(refused)
        return client.get("before", Deadline.after(10.0))


def test_a_child_does_not_affect_the_clients_of_the_rendezvous():
    with RankGroup(1) as group:
        assert group.run(connect_in_child, group.port) == [b"1"]
