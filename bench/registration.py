"""Measure how long the driver takes to register up to 1,000 tasks, through its real services.

Each task is a thread of another process, which connects to the driver, reports its status and registers as a Spark task
does. All tasks start at once, which is the driver's worst case. The table shows

- barrier: until every task has the introductions of all others;
- mpi: until every task is acknowledged and the driver has all registrations;
- plain TCP: until every task has the same answer as in a barrier job from an asyncio server without authentication,
  which is as fast as Python serves so many tasks.

Both processes are on this machine, so the time includes the work of all tasks. The driver's processor time does not.

    python -m bench.registration --tasks 128 512 1000 --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import io
import secrets
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager

from bench import machine
from bench.network import ROOT
from sparkhvd import _core
from sparkhvd.deadline import Deadline
from sparkhvd.driver.log_stream import LogStream
from sparkhvd.driver.mpi.service import DriverService
from sparkhvd.driver.spark.task_exchange import TaskExchange
from sparkhvd.rpc.frames import FrameSocket
from sparkhvd.rpc.messages import (
    ExchangeIntroductions,
    Introductions,
    Message,
    Register,
    TaskStatus,
    decode,
    encode,
)
from sparkhvd.rpc.registration import Introduction, TaskOffer, TaskRegistration, TaskServer
from sparkhvd.rpc.server import Handler, Server
from sparkhvd.task.failure_report import STARTING

SECONDS = 300.0
SIZE = struct.Struct("!I")
_STACK_BYTES = 256 << 10  # of a task's thread


def main() -> None:
    options = parse_options()
    if options.client is not None:
        run_tasks(options.client, options.tasks[0], options.port, bytes.fromhex(options.secret))
        return
    print(machine.describe())
    print(f"\n{'tasks':>6} {'service':>10} {'seconds':>9} {'of plain TCP':>13} {'driver s':>9}")
    for tasks in options.tasks:
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in SERVICES}
        for _ in range(options.rounds):
            for name in SERVICES:
                seconds[name].append(measure(name, tasks))
        plain = statistics.median(wall for wall, _ in seconds["plain TCP"])
        for name, runs in seconds.items():
            wall, cpu = (statistics.median(column) for column in zip(*runs, strict=True))
            print(f"{tasks:>6} {name:>10} {wall:>9.2f} {wall / plain:>13.1f} {cpu:>9.2f}", flush=True)
    print(f"\nafterwards: {machine.load()}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, nargs="+", default=[128, 512, 1000])
    parser.add_argument("--rounds", type=int, default=3)
    for hidden in ("--client", "--secret"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(name: str, tasks: int) -> tuple[float, float]:
    """Return the seconds until all tasks are registered, and the processor time of the driver in them."""
    with SERVICES[name](tasks) as (port, secret):
        options = ["--client", name, "--tasks", str(tasks), "--port", str(port), "--secret", secret]
        client = subprocess.Popen(
            [sys.executable, "-m", "bench.registration", *options], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert client.stdout is not None
        if client.stdout.readline() != "ready\n":
            raise SystemExit("A task failed; see above.")
        before = time.process_time()
        seconds = client.stdout.readline()
        cpu = time.process_time() - before
        if client.wait() or not seconds:
            raise SystemExit("A task failed; see above.")
        return float(seconds), cpu


@contextmanager
def serving(handler: Handler) -> Iterator[tuple[int, str]]:
    secret = secrets.token_bytes(32)
    with Server(secret, handler, name="bench-driver") as server:
        yield server.port, secret.hex()


@contextmanager
def barrier(tasks: int) -> Iterator[tuple[int, str]]:
    exchange = TaskExchange(tasks, LogStream(io.StringIO(), io.StringIO(), timestamps=False))
    with serving(exchange) as address:
        yield address
        exchange.end()


@contextmanager
def mpi(tasks: int) -> Iterator[tuple[int, str]]:
    service = DriverService(tasks, LogStream(io.StringIO(), io.StringIO(), timestamps=False))
    with serving(service) as address:
        yield address
        service.await_registrations(-1, Deadline.after(SECONDS))


@contextmanager
def plain(tasks: int) -> Iterator[tuple[int, str]]:
    answer = encode(Introductions(tuple(introduction(index) for index in range(tasks))))
    ready: asyncio.Future[None]
    connected = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connected
        await reader.readexactly(SIZE.unpack(await reader.readexactly(SIZE.size))[0])
        connected += 1
        if connected == tasks:
            ready.set_result(None)
        await ready
        writer.write(SIZE.pack(len(answer)) + answer)
        await writer.drain()
        writer.close()

    async def listen() -> None:
        nonlocal ready
        ready = asyncio.get_running_loop().create_future()
        async with await asyncio.start_server(serve, sock=listener) as server:
            await asyncio.wait_for(ready, SECONDS)
            while server.sockets and not stopped.is_set():
                await asyncio.sleep(0.01)

    stopped = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    thread = threading.Thread(target=lambda: asyncio.run(listen()))
    thread.start()
    yield listener.getsockname()[1], ""
    stopped.set()
    thread.join()


def run_tasks(service: str, tasks: int, port: int, secret: bytes) -> None:
    """Register all tasks at once; print "ready" and then the seconds that this took."""
    register = TASKS[service]
    threading.stack_size(_STACK_BYTES)
    start = threading.Barrier(tasks + 1)
    answered: list[int] = []

    def run(index: int) -> None:
        start.wait()
        register(index, port, secret)
        answered.append(index)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(tasks)]
    for thread in threads:
        thread.start()
    print("ready", flush=True)
    begin = time.perf_counter()
    start.wait()
    for thread in threads:
        thread.join(SECONDS)
    if len(answered) < tasks:
        raise SystemExit(f"Only {len(answered)} of {tasks} tasks were answered.")
    print(time.perf_counter() - begin, flush=True)


def introduction(index: int) -> Introduction:
    host = index // 8
    offer = TaskOffer(index, f"{host:032x}", f"executor-{host}.cluster.example", "10.0.0.1", versions=("torch 2.8.0",))
    return Introduction(index, offer, 40000)


def introduce(index: int, port: int, secret: bytes) -> None:
    answer = ask(index, ExchangeIntroductions(introduction(index)), port, secret)
    # Decoding all answers would measure this process, which has the work of all executors.
    if index == 0 and not isinstance(decode(answer), Introductions):
        raise SystemExit(f"The driver answered {answer!r:.200}.")


def register_for_mpi(index: int, port: int, secret: bytes) -> None:
    servers = (TaskServer("eth0", "10.0.0.1", 40000, "10.0.0.0/16"),)
    ask(index, Register(TaskRegistration(index, introduction(index).offer, servers, "/usr/bin/orted")), port, secret)


def ask(index: int, message: Message, port: int, secret: bytes) -> bytes:
    """Connect as ``sparkhvd.rpc.client`` does, report the task's status, and return the encoded answer."""
    deadline = Deadline.after(SECONDS)
    core = _core.FrameConnection.connect([("127.0.0.1", port)], secret, deadline.remaining(), False)
    with closing(FrameSocket(core)) as frames:
        frames.send(encode(TaskStatus(index, -1, "host", index, STARTING)), deadline)
        frames.send(encode(message), deadline)
        return frames.receive(deadline)


def exchange_plainly(index: int, port: int, _: bytes) -> None:
    message = encode(ExchangeIntroductions(introduction(index)))
    with socket.create_connection(("127.0.0.1", port), SECONDS) as connection:
        connection.sendall(SIZE.pack(len(message)) + message)
        stream = connection.makefile("rb")
        size = SIZE.unpack(stream.read(SIZE.size))[0]
        if len(stream.read(size)) < size:
            raise SystemExit(f"Task {index} lost its connection.")


SERVICES: dict[str, Callable[[int], AbstractContextManager[tuple[int, str]]]] = {
    "barrier": barrier,
    "mpi": mpi,
    "plain TCP": plain,
}
TASKS: dict[str, Callable[[int, int, bytes], None]] = {
    "barrier": introduce,
    "mpi": register_for_mpi,
    "plain TCP": exchange_plainly,
}

if __name__ == "__main__":
    main()
