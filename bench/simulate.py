"""Simulate jobs of up to 1,024 ranks: the real negotiation and collectives, over a network in virtual time.

The program measures nothing. Every message has a cost from a model (``tests/core/simulation/virtual_network.h`` and
``virtual_store.h``), so the times depend only on the costs below, not on the machine.

    python -m bench.simulate
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
PER_HOST = 8
HOSTS = (2, 8, 32, 128)
SIZES = (4096, 64 << 10, MIB, 16 * MIB, 64 * MIB)
FAN_IN = 16  # as in core/scheduler/negotiation.h
FUSION_BYTES = 64 * MIB  # as in core/scheduler/tunables.h
LATENCY, LATENCY_IN_HOST, PER_MESSAGE = 20e-6, 5e-6, 2e-6  # seconds
PER_BYTE_IN_HOST = 1e-10  # seconds; the ranks of a host exchange data at 10 GB/s
PER_BYTE_AT_1_GBIT = 8e-9  # seconds; divide it by the Gbit/s of a link
SLOWNESS = 4  # of one host's link
MEAN_DELAY = 1e-3  # seconds; of a rank in a step


@dataclass(frozen=True)
class Model:
    """A network and the GPU that trains it.

    Attributes:
        parameters: number of float32 gradients.
        images_per_second: speed of one GPU alone.
        early: share of the gradients that are ready when the backward pass begins: those of dense layers at the end of
            the network. The others become ready at a constant rate.
    """

    parameters: float
    images_per_second: float
    early: float

    @property
    def seconds(self) -> float:
        """Return the time of a step without communication."""
        return IMAGES / self.images_per_second


IMAGES = 64  # per GPU and step
BACKWARD = 2 / 3  # of a step's computation
# The speeds are those of one Tesla P100 in TensorFlow's published benchmarks of 2017.
MODELS = {
    "ResNet-50": Model(25.6e6, 219, 0.08),
    "Inception V3": Model(23.9e6, 142, 0.09),
    "VGG-16": Model(138.4e6, 154, 0.89),
}


class Simulator:
    """The program of ``bench/simulation``, which answers one case at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.cycle = cache(self._cycle)
        self.allreduce = cache(self._allreduce)
        self.broadcast = cache(self._broadcast)
        self.reducescatter = cache(self._reducescatter)
        self.alltoall = cache(self._alltoall)
        self.start = cache(self._start)
        self.stragglers = cache(self._stragglers)

    def _cycle(self, hosts: int, per_host: int, fan_in: int) -> list[float]:
        """Return the seconds of a cycle, rank 0's messages and bytes, and the most messages of another rank."""
        return self._ask("negotiate", hosts, per_host, fan_in, *_costs(25))

    def _allreduce(
        self, hosts: int, per_host: int, size: float, algorithm: str, gigabits: int, *, slowness: float = 1
    ) -> float:
        """Return the seconds of an allreduce between hosts, one of which has a slower link."""
        return self._ask("allreduce", hosts, per_host, size, algorithm, slowness, *_costs(gigabits))[0]

    def _reducescatter(self, hosts: int, size: float, algorithm: str, gigabits: int) -> float:
        """Return the seconds of a reduce-scatter between hosts with one rank each."""
        return self._ask("reducescatter", hosts, size, algorithm, *_costs(gigabits))[0]

    def _alltoall(self, hosts: int, per_host: int, size: int, algorithm: str, gigabits: int) -> float:
        """Return the seconds of an alltoall with `size` bytes from each rank to each rank."""
        return self._ask("alltoall", hosts, per_host, size, algorithm, *_costs(gigabits))[0]

    def _start(self, hosts: int, per_host: int, gigabits: int) -> list[float]:
        """Return the seconds of the rendezvous, the messages of a rank and the server, and bytes of the server."""
        return self._ask("start", hosts, per_host, *_costs(gigabits))

    def _stragglers(self, hosts: int, mean: float, gigabits: int) -> float:
        """Return by how many seconds a step is longer than a rank computes on average."""
        return self._ask("stragglers", hosts, mean, *_costs(gigabits))[0]

    def _broadcast(self, hosts: int, size: float, route: str, gigabits: int) -> float:
        """Return the seconds of a broadcast between hosts."""
        return self._ask("broadcast", hosts, size, route, *_costs(gigabits))[0]

    def _ask(self, *case: object) -> list[float]:
        if self._process.stdin is None or self._process.stdout is None:
            raise AssertionError("The simulator has no pipes.")
        self._process.stdin.write(" ".join(map(str, case)) + "\n")
        self._process.stdin.flush()
        return [float(number) for number in self._process.stdout.readline().split()]


def main() -> None:
    with simulator() as simulated:
        print(f"Virtual time: {LATENCY * 1e6:.0f} us between hosts, {LATENCY_IN_HOST * 1e6:.0f} us within one,")
        print(f"{PER_MESSAGE * 1e6:.0f} us of processor time per message at each end, {PER_HOST} ranks per host.\n")
        print_starts(simulated, 25)
        print_cycles(simulated)
        print_allreduces(simulated, 25)
        print_reducescatters(simulated, 25)
        print_broadcasts(simulated, 25)
        print_alltoalls(simulated, 25)
        print_slow_links(simulated, 25)
        print_stragglers(simulated, 25)
        print_efficiency(simulated)


@contextmanager
def simulator() -> Iterator[Simulator]:
    """Build the program and run it."""
    sources = subprocess.run(["tools/googletest-source"], cwd=ROOT, check=True, capture_output=True, text=True)
    configure = ["cmake", "--preset", "release", "-G", "Ninja", "-DSPARKHVD_BUILD_EXTENSION=OFF"]
    for command in (
        [*configure, f"-DSPARKHVD_GTEST_SOURCE={sources.stdout.strip()}"],
        ["cmake", "--build", "--preset", "release", "--target", "simulate"],
    ):
        built = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
        if built.returncode != 0:
            raise SystemExit(built.stdout + built.stderr)
    program = ROOT / "build" / "release" / "simulate"
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Simulator(process)


def print_starts(simulated: Simulator, gigabits: int) -> None:
    print(f"rendezvous of a job's start, without the links between ranks, {gigabits} Gbit/s at the server\n")
    print(f"{'ranks':>8}{'ms':>10}{'least':>10}{'messages of a rank':>20}{'of the server':>15}{'its MB':>10}")
    for hosts in (1, *HOSTS):
        ranks = hosts * PER_HOST
        seconds, own, sent, size = simulated.start(hosts, PER_HOST, gigabits)
        # The server receives as many messages as it sends, or transfers the bytes of its answers.
        least = max(2 * sent * PER_MESSAGE, size * PER_BYTE_AT_1_GBIT / gigabits)
        times = f"{seconds * 1e3:>10.2f}{least * 1e3:>10.2f}"
        print(f"{ranks:>8}{times}{own:>20.0f}{sent:>15.0f}{size / 1e6:>10.1f}")
    print()


def print_cycles(simulated: Simulator) -> None:
    print("a cycle of the negotiation with one cached operation: us, and messages that rank 0 sends\n")
    print(f"{'ranks':>8}{'tree':>10}{'messages':>10}{'one coordinator':>18}{'messages':>10}")
    for hosts in (1, *HOSTS):
        ranks = hosts * PER_HOST
        tree, star = (simulated.cycle(hosts, PER_HOST, fan_in) for fan_in in (FAN_IN, max(ranks, FAN_IN)))
        print(f"{ranks:>8}{tree[0] * 1e6:>10.0f}{tree[1]:>10.0f}{star[0] * 1e6:>18.0f}{star[1]:>10.0f}")
    print()


def print_allreduces(simulated: Simulator, gigabits: int) -> None:
    print(f"allreduce between hosts, {gigabits} Gbit/s per host: ms\n")
    print(f"{'hosts':>7}{'bytes':>12}{'ours':>10}{'ring':>10}{'halving':>10}{'doubling':>10}{'least':>10}")
    for hosts in HOSTS:
        for size in SIZES:
            names = ("ours", "ring", "halving", "doubling")
            times = [simulated.allreduce(hosts, PER_HOST, size, name, gigabits) for name in names]
            least = 2 * (hosts - 1) / hosts * size * PER_BYTE_AT_1_GBIT / gigabits  # 2 (N - 1) / N times the bytes
            print(f"{hosts:>7}{size:>12}" + "".join(f"{time * 1e3:>10.3f}" for time in (*times, least)))
    print()


def print_reducescatters(simulated: Simulator, gigabits: int) -> None:
    print(f"reduce-scatter between hosts with one rank each, {gigabits} Gbit/s per host: ms\n")
    print(f"{'hosts':>7}{'bytes':>12}{'ours':>10}{'ring':>10}{'halving':>10}{'least':>10}")
    for hosts in (2, 8, 12, 32, 128):
        for size in SIZES:
            times = [simulated.reducescatter(hosts, size, name, gigabits) for name in ("ours", "ring", "halving")]
            least = (hosts - 1) / hosts * size * PER_BYTE_AT_1_GBIT / gigabits
            print(f"{hosts:>7}{size:>12}" + "".join(f"{time * 1e3:>10.3f}" for time in (*times, least)))
    print()


def print_alltoalls(simulated: Simulator, gigabits: int) -> None:
    print(f"alltoall, bytes from each rank to each rank, {gigabits} Gbit/s per host: ms\n")
    print(f"{'':>19}{'simulated':>30}{'closed form':>20}")
    print(f"{'ranks':>7}{'bytes':>12}{'ours':>10}{'direct':>10}{'Bruck':>10}{'direct':>10}{'Bruck':>10}")
    for hosts, sizes in ((8, (64, 1024, 16384)), (16, (64, 1024)), (32, (64, 1024)), (128, (64, 1024))):
        for size in sizes:
            ranks = hosts * PER_HOST
            names = ("ours", "direct", "Bruck")
            times = [simulated.alltoall(hosts, PER_HOST, size, name, gigabits) for name in names]
            times += alltoall_bounds(ranks, size, gigabits)
            print(f"{ranks:>7}{size:>12}" + "".join(f"{time * 1e3:>10.3f}" for time in times))
    print()


def alltoall_bounds(ranks: int, size: int, gigabits: int) -> tuple[float, float]:
    """Return the least time of an alltoall with a message per pair, and the time of Bruck's algorithm.

    The first is that of the LogGP model (Alexandrov et al., 1997): the processor sends and receives a message per peer,
    while the link of the host transfers the bytes of its ranks. The second is the closed form in Thakur, Rabenseifner
    and Gropp (2005), for log2(N) rounds with half of the data each (Bruck et al., "Efficient algorithms for all-to-all
    communications in multiport message-passing systems", 1997).
    """
    per_byte = PER_BYTE_AT_1_GBIT / gigabits * PER_HOST  # a rank's share of the link
    processor = 2 * (ranks - 1) * PER_MESSAGE
    link = LATENCY + 2 * PER_MESSAGE + (ranks - PER_HOST) * size * per_byte
    rounds = math.log2(ranks)
    return max(processor, link), rounds * (LATENCY + 2 * PER_MESSAGE + ranks / 2 * size * per_byte)


def print_slow_links(simulated: Simulator, gigabits: int) -> None:
    print(f"allreduce between hosts, one link {SLOWNESS} times slower than {gigabits} Gbit/s: ms\n")
    print(f"{'hosts':>7}{'bytes':>12}{'ours':>10}{'all equal':>12}{'least':>10}")
    for hosts in HOSTS:
        for size in (4096, MIB, 64 * MIB):
            times = [
                simulated.allreduce(hosts, PER_HOST, size, "ours", gigabits, slowness=slow) for slow in (SLOWNESS, 1)
            ]
            least = 2 * (hosts - 1) / hosts * size * SLOWNESS * PER_BYTE_AT_1_GBIT / gigabits
            print(f"{hosts:>7}{size:>12}{times[0] * 1e3:>10.3f}{times[1] * 1e3:>12.3f}{least * 1e3:>10.3f}")
    print()


def print_stragglers(simulated: Simulator, gigabits: int) -> None:
    print(
        f"steps with an exponential delay of {MEAN_DELAY * 1e3:.0f} ms on average on each rank: ms beyond the average\n"
    )
    print(f"{'ranks':>7}{'simulated':>12}{'expected':>10}")
    for ranks in HOSTS:
        seconds = simulated.stragglers(ranks, MEAN_DELAY, gigabits)
        print(f"{ranks:>7}{seconds * 1e3:>12.2f}{straggling(ranks) * 1e3:>10.2f}")
    print()


def straggling(ranks: int) -> float:
    """Return by how many seconds the last rank's expected delay is above the average.

    The expected maximum of N exponential variables is their mean times the N-th harmonic number (David and Nagaraja,
    "Order Statistics", 2003).
    """
    return MEAN_DELAY * (sum(1 / number for number in range(1, ranks + 1)) - 1)


def print_broadcasts(simulated: Simulator, gigabits: int) -> None:
    print(f"broadcast between hosts, {gigabits} Gbit/s per host: ms\n")
    print(f"{'hosts':>7}{'bytes':>12}{'ours':>10}{'tree':>10}{'least':>10}")
    for hosts in HOSTS:
        for size in (*SIZES, 1024 * MIB):
            times = [simulated.broadcast(hosts, size, name, gigabits) for name in ("ours", "tree")]
            least = size * PER_BYTE_AT_1_GBIT / gigabits
            print(f"{hosts:>7}{size:>12}" + "".join(f"{time * 1e3:>10.3f}" for time in (*times, least)))
    print()


def print_efficiency(simulated: Simulator) -> None:
    lines = (10, 25, 100)
    print(f"weak scaling, {IMAGES} images per GPU and step: speed as a share of N times the speed of one GPU\n")
    print(f"{'model':<14}{'hosts':>6}{'GPUs':>6}" + "".join(f"{line:>8} Gbit/s" for line in lines))
    for name, model in MODELS.items():
        for hosts, per_host in ((1, 8), (8, 8), (64, 8), (128, 4), (128, 8)):
            shares = [efficiency(simulated, model, hosts, per_host, line) for line in lines]
            cells = "".join(f"{share:>15.0%}" for share in shares)
            print(f"{name:<14}{hosts:>6}{hosts * per_host:>6}{cells}")


def efficiency(simulated: Simulator, model: Model, hosts: int, per_host: int, gigabits: int) -> float:
    """Return the computation time of a step, divided by its time with communication."""
    computing = model.seconds
    finished = 0.0
    for ready, size in batches_of_gradients(model):
        finished = max(finished, ready) + transfer(simulated, hosts, per_host, size, gigabits)
    return computing / max(computing, finished)


def batches_of_gradients(model: Model) -> Sequence[tuple[float, float]]:
    """Return the groups of gradients that are exchanged together: when they are ready within the step, and their bytes.

    The real engine exchanges ready gradients, up to the fusion threshold, as soon as the previous exchange has ended.
    The simulation waits until the threshold is reached or the backward pass has ended, so it overlaps less.
    """
    total = 4 * model.parameters
    begin, duration = (1 - BACKWARD) * model.seconds, BACKWARD * model.seconds
    batches = []
    left = total
    while left > 0:
        size = min(left, float(FUSION_BYTES))
        left -= size
        done = (total - left) / total
        late = max(0.0, (done - model.early) / (1 - model.early))
        batches.append((begin + duration * late, size))
    return batches


def transfer(simulated: Simulator, hosts: int, per_host: int, size: float, gigabits: int) -> float:
    """Return the seconds from the request of an allreduce to its result."""
    seconds = simulated.cycle(hosts, per_host, FAN_IN)[0]
    if per_host > 1:
        seconds += 2 * (per_host - 1) / per_host * size * PER_BYTE_IN_HOST
    return seconds + (simulated.allreduce(hosts, per_host, size, "ours", gigabits) if hosts > 1 else 0.0)


def _costs(gigabits: int) -> tuple[float, ...]:
    return LATENCY, LATENCY_IN_HOST, PER_MESSAGE, PER_BYTE_AT_1_GBIT / gigabits, PER_BYTE_IN_HOST


if __name__ == "__main__":
    main()
