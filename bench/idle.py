"""Measure the processor time of a process that waits for a slow rank, for half a minute per kind of wait.

python -m bench.idle [--ranks 2] [--seconds 30]
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import secrets
import time
from multiprocessing.connection import Connection

import numpy as np

from bench import machine
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.communicator import Communicator
from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.comm.connect.rendezvous import RendezvousServer
from sparkhvd.config import Config
from sparkhvd.world import layout

SHARES = ("waits for a rank that has not come", "waits for a tensor that others lack", "waits in a direct call")


def main() -> None:
    arguments = _arguments()
    print(machine.describe())
    for shared_memory in (True, False):
        print(f"\n{'shared memory' if shared_memory else 'sockets'}, {arguments.ranks} ranks: % of a core\n")
        for line in _measure(arguments.ranks, arguments.seconds, shared_memory=shared_memory):
            print(line)


def _measure(ranks: int, seconds: float, *, shared_memory: bool) -> list[str]:
    token = secrets.token_bytes(16)
    context = multiprocessing.get_context("spawn")
    with RendezvousServer(token) as server:
        receiver, sender = context.Pipe(duplex=False)
        config = Config(shared_memory=shared_memory)
        contexts = [
            LaunchContext(world, (("127.0.0.1", server.port),), token, "here", config=config)
            for world in layout(["here"] * ranks)
        ]
        processes = [context.Process(target=_rank, args=(each, seconds, sender)) for each in contexts]
        for process in processes:
            process.start()
        sender.close()
        lines: list[str] = receiver.recv()
        for process in processes:
            process.join(60)
    return lines


def _rank(context: LaunchContext, seconds: float, sender: Connection) -> None:
    last = context.world.size - 1
    with Communicator(context) as me:
        slow = me.world.rank == last
        shares = [
            _share(lambda: me.allreduce(_ONE, name="slow"), seconds, slow=slow),
            _share_of_crossed(me, seconds, slow=slow),
            _share(lambda: me.allreduce_now(_ONE, ReduceOp.SUM), seconds, slow=slow),
        ]
        everybody = me.allgather(np.array([shares]))
        if me.world.rank == 0:
            sender.send([f"{kind:40} {100 * everybody[:-1, i].max():.2f}" for i, kind in enumerate(SHARES)])


def _share(collective, seconds: float, *, slow: bool) -> float:
    """Return the share of a processor that a rank uses while it waits for the last rank, which sleeps."""
    if slow:
        time.sleep(seconds)
    start, used = time.perf_counter(), _used()
    collective()
    return (_used() - used) / (time.perf_counter() - start)


def _share_of_crossed(me: Communicator, seconds: float, *, slow: bool) -> float:
    """Return the same share while the slow rank has a pending operation that the others submit later."""
    if slow:
        pending = me.allreduce_async(_ONE, name="early")
        share = _share(lambda: me.allreduce(_ONE, name="late"), seconds, slow=True)
    else:
        share = _share(lambda: me.allreduce(_ONE, name="late"), seconds, slow=False)
        pending = me.allreduce_async(_ONE, name="early")
    pending.wait()
    return share


def _used() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


_ONE = np.ones(1, np.float32)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds per kind of wait")
    return parser.parse_args()


if __name__ == "__main__":
    main()
