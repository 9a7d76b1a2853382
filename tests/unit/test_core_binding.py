"""The contract of the compiled core with Python, tested only through ``_core``, with real processes as ranks.

This file is two programs. Under pytest, it starts ranks and checks their reports. As a script, it is one rank: it runs
the case with the given name and prints its reports as lines of JSON.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pytest

from sparkhvd import _core

SECONDS = 30.0
TOKEN = b"0123456789abcdef"
_ROOT = Path(__file__).parents[2]


class Ranks:
    """Run ``case`` in ``size`` processes; a context manager that kills the remaining processes at its end."""

    def __init__(self, case: str, size: int, **options: Any) -> None:
        self._server = _core.RendezvousServer(TOKEN)
        self._unread = [b""] * size
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, case, str(rank), str(size), str(self._server.port), json.dumps(options)],
                cwd=_ROOT,
                env=os.environ | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
            )
            for rank in range(size)
        ]

    def next_report(self, rank: int) -> Any:
        """Return the next report of a rank."""
        stream = self.processes[rank].stdout
        deadline = time.monotonic() + SECONDS
        while b"\n" not in self._unread[rank]:
            ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
            received = os.read(stream.fileno(), 65536) if ready else b""
            if not received:
                self.processes[rank].kill()
                pytest.fail(f"rank {rank} reported nothing; stderr: {self.processes[rank].stderr.read().decode()}")
            self._unread[rank] += received
        line, _, self._unread[rank] = self._unread[rank].partition(b"\n")
        return json.loads(line)

    def next_reports(self) -> list[Any]:
        return [self.next_report(rank) for rank in range(len(self.processes))]

    def resume(self, rank: int) -> None:
        """Let a rank return from ``await_resume``."""
        self.processes[rank].stdin.write(b"\n")

    def exits(self, *ranks: int) -> list[tuple[int, str]]:
        """Wait until these ranks, by default all, end by themselves, and return their exit codes and stderr."""
        chosen = [self.processes[rank] for rank in ranks] or self.processes
        return [(p.wait(SECONDS), p.stderr.read().decode()) for p in chosen]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()  # also ends a suspended process
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                stream.close()
        self._server.close()


# A rank and its reports.


class Rank:
    """One rank: its engine and the calls that cases need."""

    def __init__(self, rank: int, size: int, port: int, options: dict[str, Any]) -> None:
        self.rank, self.size, self._options = rank, size, options
        self._client = _core.RendezvousClient([("127.0.0.1", port)], TOKEN, SECONDS)
        self.engine = self.connect("first")

    def connect(self, scope: str) -> _core.Engine:
        return _core.Engine(
            self.rank,
            self.size,
            rendezvous=self._client,
            token=TOKEN,
            scope=scope,
            host_key="one",
            timeout_s=SECONDS,
            **self._options,
        )

    def allreduce(self, name: str, array: np.ndarray, **options: Any) -> _core.Operation:
        return allreduce(self.engine, name, array, **options)

    def barrier(self, name: str) -> None:
        self.engine.barrier(name).wait(SECONDS)


def allreduce(engine: _core.Engine, name: str, array: np.ndarray, dtype: str = "", **options: Any) -> _core.Operation:
    """Reduce an array in place."""
    address = array.ctypes.data
    dtype = dtype or str(array.dtype)
    return engine.allreduce(name, address, address, array.shape, dtype, keep_alive=array, **options)


def report(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def await_resume() -> None:
    sys.stdin.readline()


def failure_of(operation: _core.Operation) -> list[str]:
    try:
        operation.wait(SECONDS)
    except _core.CoreError as error:
        return list(error.args)
    return ["ok", ""]


# Functions that the ranks run.


def every_collective(me: Rank) -> None:
    ranks = range(me.size)
    for dtype in ("uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64"):
        for count in (0, 1, 1001):
            array = (np.arange(count) % 5 + me.rank).astype(dtype)
            me.allreduce(f"sum {dtype} {count}", array).wait(SECONDS)
            assert array.tolist() == [me.size * (i % 5) + sum(ranks) for i in range(count)], (dtype, count)
    flags = np.array([me.rank == 0, False, True])
    me.allreduce("or", flags).wait(SECONDS)
    assert flags.tolist() == [True, False, True]
    halves = np.array([0x3F80 if me.rank == 0 else 0x4000], np.uint16)  # 1.0 or 2.0 as bfloat16
    me.allreduce("bfloat16", halves, dtype="bfloat16", op="max").wait(SECONDS)
    assert halves.tolist() == [0x4000]
    several_megabytes(me)
    ragged_allgather(me)
    for root in ranks:
        source, target = np.full(70_000, me.rank, np.int64), np.empty(70_000, np.int64)
        addresses = source.ctypes.data, target.ctypes.data
        me.engine.broadcast(f"from {root}", *addresses, (70_000,), "int64", root).wait(SECONDS)
        assert (target == root).all()
        assert (source == me.rank).all()
    me.barrier("end")
    report([me.engine.local_ranks(), me.engine.counters()["operations"]])


def several_megabytes(me: Rank) -> None:
    source = np.arange(1_500_000, dtype=np.float32) % 1000 * (me.rank + 1)
    kept, target = source.copy(), np.empty_like(source)
    addresses = source.ctypes.data, target.ctypes.data
    me.engine.allreduce("large", *addresses, source.shape, "float32", "average", 2.0, 0.5).wait(SECONDS)
    expected = np.arange(1_500_000, dtype=np.float32) % 1000 * ((me.size + 1) / 2)
    assert np.array_equal(target, expected)
    assert np.array_equal(source, kept), "the source is only read"


def ragged_allgather(me: Rank) -> None:
    for rows in (1, 20_000):
        mine = np.full((rows * me.rank, 2), me.rank, np.int32)
        operation = me.engine.allgather(f"rows {rows}", mine.ctypes.data, mine.shape, "int32")
        operation.wait(SECONDS)
        view = operation.output()
        del operation  # the view keeps it
        assert (view.format, view.ndim) == ("B", 1)
        expected = [rank for rank in range(me.size) for _ in range(2 * rows * rank)]
        assert np.frombuffer(view, np.int32).tolist() == expected
    nothing = me.engine.allgather("nothing", 0, (0, 3), "float64")
    nothing.wait(SECONDS)
    assert (nothing.output().nbytes, nothing.rows()) == (0, [0] * me.size)


def wait_for_a_lost_rank(me: Rank, lost: int) -> None:
    array = np.ones(1000, np.float32)
    me.allreduce("known", array).wait(SECONDS)
    report("ready")
    if me.rank == lost:
        await_resume()
    report(failure_of(me.allreduce("wanted", array)))


def wait_for_rank_0(me: Rank) -> None:
    wait_for_a_lost_rank(me, 0)


def wait_for_rank_1(me: Rank) -> None:
    wait_for_a_lost_rank(me, 1)


def abort_on_rank_1(me: Rank) -> None:
    me.barrier("start")
    report("ready")
    if me.rank == 1:
        await_resume()  # all ranks have left the barrier by then
        me.engine.abort("the data ran out")
        return
    array = np.ones(3)
    first = failure_of(me.allreduce("needed", array))
    try:
        me.allreduce("later", array)
    except _core.CoreError as error:
        report([first, list(error.args)])


def wait_and_be_interrupted(me: Rank) -> None:
    array = np.full(4, 1.0)
    operation = None
    if me.rank == 0:
        operation = me.allreduce("late", array)
        interrupted = interrupt_the_next_wait(operation)
        report("interrupted" if interrupted else "not interrupted")
    await_resume()
    (operation or me.allreduce("late", array)).wait(SECONDS)
    report(array.tolist())


def interrupt_the_next_wait(operation: _core.Operation) -> bool:
    """Return whether Ctrl-C ends ``wait``; no other thread runs before ``wait`` releases the GIL."""
    sys.setswitchinterval(SECONDS)
    go = threading.Event()
    thread = threading.Thread(target=lambda: (go.wait(), os.kill(os.getpid(), signal.SIGINT)))
    thread.start()
    go.set()
    try:
        operation.wait(SECONDS)
    except KeyboardInterrupt:
        return True
    finally:
        thread.join()
    return False


def drop_in_flight(me: Rank) -> None:
    array = np.full(100_000, me.rank + 1.0)
    if me.rank == 1:
        me.barrier("dropped")
        me.allreduce("orphan", array).wait(SECONDS)
        me.barrier("reduced")
        report(float(array[-1]))
        return
    operation = me.allreduce("orphan", array)
    buffer = weakref.ref(array)
    del operation, array
    gc.collect()
    alive = buffer() is not None
    me.barrier("dropped")
    me.barrier("reduced")
    me.engine.barrier("never awaited by the other")  # a call that holds the GIL releases finished operations
    report([alive, buffer() is None])


def exit_without_shutdown(me: Rank) -> None:
    me.barrier("start")
    report("ending")
    array = np.ones(100_000)
    if me.rank == 0:
        me.pending = [me.allreduce("never awaited", array), me.engine.barrier("nor this")]
    globals()["me"] = me  # lives until the interpreter clears its modules


class ShutsDownLate:
    """Shuts an engine down when the interpreter clears its modules, some time after all other threads have stopped."""

    def __init__(self, engine: _core.Engine) -> None:
        self.engine, self.sleep = engine, time.sleep

    def __del__(self) -> None:
        self.sleep(0.3)  # a waiting direct call checks for interruptions more often
        self.engine.shutdown(SECONDS)


def exit_during_a_direct_call(me: Rank) -> None:
    me.barrier("start")
    if me.rank == 1:
        report("waiting")
        await_resume()
        return
    arguments = (np.ones(3), np.empty(3), "sum")
    threading.Thread(target=me.engine.allreduce_now, args=arguments, daemon=True).start()
    while not me.engine.pending():
        os.sched_yield()
    report("ending")
    globals()["late"] = ShutsDownLate(me.engine)


def connect_many_engines(me: Rank) -> None:
    me.engine.shutdown(SECONDS)
    before = descriptors_and_threads()
    for cycle in range(30):
        me.engine = me.connect(f"cycle {cycle}")
        array = np.ones(1000)
        me.allreduce("again", array).wait(SECONDS)
        assert array[0] == me.size
        me.engine.shutdown(SECONDS)
    deadline = time.monotonic() + SECONDS
    while len(descriptors_and_threads()) > len(before) and time.monotonic() < deadline:
        os.sched_yield()  # the kernel lists a thread for a moment after it was joined
    report([sorted(before), sorted(descriptors_and_threads())])


def descriptors_and_threads() -> list[str]:
    """Return the open files and the threads of this process, without inode numbers."""
    descriptors = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor that lists the folder
            descriptors.append(str(path.readlink()).partition("[")[0])
    return descriptors + ["thread" for _ in Path("/proc/self/task").iterdir()]


def weighted_sums(me: Rank) -> None:
    tensors, rounds = 40, 8
    for number in range(rounds):
        arrays = [np.full(i + 1, i + me.rank, np.float64) for i in range(tensors)]
        operations = [
            me.allreduce(f"gradient {i}", array, prescale=weight(me.rank, i, number), postscale=0.5)
            for i, array in enumerate(arrays)
        ]
        for i, (operation, array) in enumerate(zip(operations, arrays, strict=True)):
            operation.wait(SECONDS)
            expected = sum((i + rank) * weight(rank, i, number) for rank in range(me.size)) / 2
            assert array.tolist() == [expected] * (i + 1), f"round {number}, tensor {i}"
    counters = me.engine.counters()
    report([counters["fused_buffers"] > 0, counters["cache_hits"] == tensors * (rounds - 2)])


def weight(rank: int, tensor: int, number: int) -> float:
    """Return a weight that is a binary fraction, so that sums are exact; it is 0 for some ranks."""
    return ((rank * 3 + tensor + number) % 5) / 4


CASES = {
    case.__name__: case
    for case in (
        every_collective,
        wait_for_rank_0,
        wait_for_rank_1,
        abort_on_rank_1,
        wait_and_be_interrupted,
        drop_in_flight,
        exit_without_shutdown,
        exit_during_a_direct_call,
        connect_many_engines,
        weighted_sums,
    )
}

# The tests with several processes.

BOTH_TRANSPORTS = pytest.mark.parametrize("shared_memory", [True, False], ids=["shm", "tcp"])


@BOTH_TRANSPORTS
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_every_collective_is_correct_across_processes(size, shared_memory):
    with Ranks("every_collective", size, shared_memory=shared_memory) as ranks:
        for rank, (local_ranks, operations) in enumerate(ranks.next_reports()):
            assert local_ranks == (list(range(size)) if shared_memory else [rank])
            assert operations == 34 + size
        assert ranks.exits() == [(0, "")] * size


@BOTH_TRANSPORTS
def test_each_rank_scales_its_own_contribution_even_in_fused_operations(shared_memory):
    with Ranks("weighted_sums", 3, shared_memory=shared_memory) as ranks:
        for fused, every_repetition_was_a_hit in ranks.next_reports():
            assert fused, "tensors that are ready together are fused"
            assert every_repetition_was_a_hit, "another prescale needs no new negotiation"


@pytest.mark.parametrize(
    ("lost", "shared_memory"),
    [
        pytest.param(0, False, id="0-tcp"),
        pytest.param(1, True, id="1-shm"),
        pytest.param(0, True, id="0-shm", marks=pytest.mark.soak),
        pytest.param(1, False, id="1-tcp", marks=pytest.mark.soak),
    ],
)
def test_the_errors_of_waiting_ranks_name_a_killed_rank(lost, shared_memory):
    with Ranks(f"wait_for_rank_{lost}", 3, shared_memory=shared_memory) as ranks:
        ranks.next_reports()
        ranks.processes[lost].kill()
        for rank in {0, 1, 2} - {lost}:
            code, message = ranks.next_report(rank)
            assert code == "peer_lost", message
            assert message.startswith("allreduce 'wanted': ")
            assert f"lost rank {lost}: " in message


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_the_errors_of_waiting_ranks_name_a_suspended_rank_after_the_collective_timeout(lost):
    with Ranks(f"wait_for_rank_{lost}", 3, collective_timeout_s=0.5) as ranks:
        assert ranks.next_reports() == ["ready"] * 3
        ranks.processes[lost].send_signal(signal.SIGSTOP)
        for rank in {0, 1, 2} - {lost}:
            code, message = ranks.next_report(rank)
            assert code == "timeout", message
            assert message.startswith("allreduce 'wanted': ")
            assert f"rank {lost}" in message


@BOTH_TRANSPORTS
def test_an_abort_reaches_the_other_processes_with_its_reason(shared_memory):
    with Ranks("abort_on_rank_1", 3, shared_memory=shared_memory) as ranks:
        assert ranks.next_reports() == ["ready"] * 3
        ranks.resume(1)
        for rank in (0, 2):
            (first_code, message), (second_code, second_message) = ranks.next_report(rank)
            assert (first_code, second_code) == ("aborted", "aborted")
            assert message.startswith("allreduce 'needed': rank 1")
            assert "the data ran out" in message
            assert "the data ran out" in second_message


def test_ctrl_c_ends_a_wait_but_not_the_operation():
    with Ranks("wait_and_be_interrupted", 2) as ranks:
        assert ranks.next_report(0) == "interrupted"
        for rank in range(2):
            ranks.resume(rank)
        assert ranks.next_reports() == [[2.0] * 4] * 2
        assert ranks.exits() == [(0, "")] * 2


def test_the_buffer_of_a_dropped_operation_lives_until_it_is_done():
    with Ranks("drop_in_flight", 2) as ranks:
        alive_in_flight, released_when_done = ranks.next_report(0)
        assert alive_in_flight
        assert released_when_done
        assert ranks.next_report(1) == 3.0, "the other rank got the contribution"


@BOTH_TRANSPORTS
def test_processes_that_never_shut_down_end_cleanly(shared_memory):
    with Ranks("exit_without_shutdown", 2, shared_memory=shared_memory) as ranks:
        assert ranks.next_reports() == ["ending"] * 2
        assert ranks.exits() == [(0, "")] * 2


def test_a_direct_call_of_a_daemon_thread_does_not_keep_an_ending_process_alive():
    with Ranks("exit_during_a_direct_call", 2) as ranks:
        assert ranks.next_reports() == ["ending", "waiting"]
        assert ranks.exits(0) == [(0, "")]
        ranks.resume(1)
        assert ranks.exits(1) == [(0, "")]


@BOTH_TRANSPORTS
def test_connecting_and_closing_engines_leaks_no_descriptor_and_no_thread(shared_memory):
    with Ranks("connect_many_engines", 2, shared_memory=shared_memory) as ranks:
        for before, after in ranks.next_reports():
            assert after == before


# The tests with one process.


@pytest.fixture
def alone():
    engine = _core.Engine(0, 1)
    yield engine
    engine.shutdown(SECONDS)


def test_waits_let_other_threads_run():
    """Run both ranks in this process: neither could connect or finish if the other's wait held the GIL."""
    sums = []

    def take_part(rank):
        client = _core.RendezvousClient([("127.0.0.1", server.port)], TOKEN, SECONDS)
        engine = _core.Engine(rank, 2, rendezvous=client, token=TOKEN, host_key="one", timeout_s=SECONDS)
        array = np.full(10, rank + 1.0)
        allreduce(engine, "sum", array).wait(SECONDS)
        sums.append(float(array[0]))
        engine.shutdown(SECONDS)
        client.close()

    server = _core.RendezvousServer(TOKEN)
    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.close()
    assert sums == [3.0, 3.0]


def test_the_timeout_of_a_wait_names_the_tensor():
    server = _core.RendezvousServer(TOKEN)
    clients = [_core.RendezvousClient([("127.0.0.1", server.port)], TOKEN, SECONDS) for _ in range(2)]
    engines = [None, None]

    def connect(rank):
        engines[rank] = _core.Engine(rank, 2, rendezvous=clients[rank], token=TOKEN, timeout_s=SECONDS)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    array = np.ones(3)
    operation = allreduce(engines[0], "early", array)
    with pytest.raises(_core.CoreError) as caught:
        operation.wait(0.01)
    assert caught.value.args[0] == "timeout"
    assert "allreduce 'early'" in caught.value.args[1]
    assert not operation.done()
    allreduce(engines[1], "early", np.ones(3)).wait(SECONDS)
    operation.wait(SECONDS)
    assert array.tolist() == [2.0] * 3
    for engine in engines:
        engine.shutdown(SECONDS)
    for client in clients:
        client.close()
    server.close()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda e: e.allreduce("x", 0, 0, (1,), "complex64"), "unknown dtype 'complex64'; expected one of bool"),
        (lambda e: e.allreduce("x", 0, 0, (1,), "float32", "median"), "unknown op 'median'; expected one of sum"),
        (lambda e: e.allreduce("x", 0, 0, (-1,), "float32"), "allreduce 'x': shape (-1,)"),
        (lambda e: e.allreduce("x", 0, 0, (0,), "float32", prescale=float("nan")), "must be finite"),
        (lambda e: e.broadcast("x", 0, 0, (0,), "float32", 1), "root 1 is out of range for a job of size 1"),
        (lambda e: e.allgather("x", 0, (), "float32"), "a scalar has no first dimension"),
        (lambda e: e.barrier("x").output(), "barrier 'x' has no output of its own"),
        (lambda e: e.barrier("x").rows(), "barrier 'x' has no output of its own"),
        (lambda _: _core.Engine(2, 2), "rank 2 is out of range for a job of size 2"),
        (lambda _: _core.Engine(0, 2), "a job of 2 ranks needs a rendezvous"),
    ],
)
def test_invalid_arguments_are_refused_with_the_reason(alone, call, words):
    with pytest.raises(_core.CoreError) as caught:
        call(alone)
    code, message = caught.value.args
    assert code == "invalid_argument"
    assert words in message


def test_submissions_after_shutdown_are_refused_and_shutdown_is_idempotent():
    engine = _core.Engine(0, 1)
    engine.barrier("before").wait(SECONDS)
    engine.shutdown(SECONDS)
    engine.shutdown(SECONDS)
    with pytest.raises(_core.CoreError) as caught:
        engine.barrier("after")
    assert caught.value.args[0] == "shut_down"
    assert "barrier 'after'" in caught.value.args[1]


def main() -> None:
    case, rank, size, port, options = sys.argv[1:]
    CASES[case](Rank(int(rank), int(size), int(port), json.loads(options)))


if __name__ == "__main__":
    main()
