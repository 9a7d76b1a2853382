"""Measure with plain sockets whether several TCP connections between two hosts carry more data than one.

Two linked network namespaces stand for the hosts and send 64 MiB to each other at the same time. The runs alternate
between 1, 2, 4 and 8 connections, with two threads per connection. sparkhvd's transport has one connection per pair of
ranks; the figures show what more connections would gain on this machine. The program needs root and ip.

    python -m bench.connections [--rounds 15]
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from bench import machine
from bench.network import ROOT, linked_namespaces

COUNTS = (1, 2, 4, 8)
BYTES = 64 << 20
PIECE = 4 << 20
HOST, PORT = "10.231.0.1", 29402
DEADLINE = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--side", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side is not None:
        _side(arguments.side, arguments.rounds)
        return
    print(machine.describe(), flush=True)
    with linked_namespaces(limited=False) as namespaces:
        program = [sys.executable, "-m", "bench.connections", "--rounds", str(arguments.rounds), "--side"]
        sides = [
            subprocess.Popen(["ip", "netns", "exec", name, *program, str(side)], cwd=ROOT)
            for side, name in enumerate(namespaces)
        ]
        if any(process.wait() for process in sides):
            raise SystemExit("A process failed; see above.")
    print(f"\nafterwards: {machine.load()}")


def _side(side: int, rounds: int) -> None:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(connection) for connection in (_accept() if side == 0 else _connect())]
        seconds: dict[int, list[float]] = {count: [] for count in COUNTS}
        for _ in range(rounds):
            for count in COUNTS:
                _synchronize(sockets[0])
                start = time.perf_counter()
                _exchange(sockets[:count])
                seconds[count].append(time.perf_counter() - start)
    if side == 0:
        _print_table(seconds)


def _accept() -> list[socket.socket]:
    with socket.create_server((HOST, PORT), backlog=max(COUNTS)) as server:
        server.settimeout(DEADLINE)
        return [server.accept()[0] for _ in range(max(COUNTS))]


def _connect() -> list[socket.socket]:
    return [_dial(time.monotonic() + DEADLINE) for _ in range(max(COUNTS))]


def _dial(deadline: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection((HOST, PORT), timeout=DEADLINE)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _synchronize(connection: socket.socket) -> None:
    connection.sendall(b"!")
    connection.recv(1)


def _exchange(connections: Sequence[socket.socket]) -> None:
    share = BYTES // len(connections)
    threads = [threading.Thread(target=move, args=(one, share)) for one in connections for move in (_send, _receive)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _send(connection: socket.socket, size: int) -> None:
    piece = memoryview(bytearray(PIECE))
    while size > 0:
        size -= connection.send(piece[: min(size, PIECE)])


def _receive(connection: socket.socket, size: int) -> None:
    piece = memoryview(bytearray(PIECE))
    while size > 0:
        size -= connection.recv_into(piece[: min(size, PIECE)])


def _print_table(seconds: dict[int, list[float]]) -> None:
    print(f"\n{BYTES >> 20} MiB in both directions at once, plain TCP: GiB/s per direction, median (min to max)\n")
    one = statistics.median(seconds[1])
    for count, times in seconds.items():
        rates = [BYTES / duration / (1 << 30) for duration in (statistics.median(times), max(times), min(times))]
        print(
            f"{count} connection{'s' * (count > 1):<2} {rates[0]:>6.2f} ({rates[1]:.2f} to {rates[2]:.2f})"
            f"   speed-up: {one / statistics.median(times):.2f}"
        )


if __name__ == "__main__":
    main()
