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
PER_PART = 100e-6  # seconds; as in core/collectives/select.h
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


@dataclass(frozen=True)
class Exchange:
    """A way to exchange gradients.

    Attributes:
        bytes_per_number: bytes of a gradient.
        passes: forward and backward passes of a step, whose gradients are exchanged together.
        after: whether the exchange waits for the end of the backward pass, as the average of weights does.
        adasum: whether the ranks compute adaptive sums, among all ranks and without the shared memory of a host.
    """

    bytes_per_number: int = 4
    passes: int = 1
    after: bool = False
    adasum: bool = False


@dataclass(frozen=True)
class Job:
    """The GPUs of a job, the speed of their links, and the images per GPU and pass."""

    hosts: int
    per_host: int
    gigabits: int
    images: float


@dataclass(frozen=True)
class Step:
    """The seconds of a step.

    Attributes:
        computing: without communication.
        total: with communication.
        exchange: communication, including the part behind the computation.
        link: the part of ``exchange`` in which the links between hosts transfer bytes, at least.
        in_host: the part of ``exchange`` in which the ranks of a host combine gradients and nothing else happens.
    """

    computing: float
    total: float
    exchange: float
    link: float
    in_host: float

    @property
    def efficiency(self) -> float:
        return self.computing / self.total


IMAGES = 64  # per GPU and step, in weak scaling
ALL_IMAGES = 8192  # per step of all GPUs, in strong scaling
BACKWARD = 2 / 3  # of a step's computation
# The speeds are those of one Tesla P100 in TensorFlow's published benchmarks of 2017.
MODELS = {
    "ResNet-50": Model(25.6e6, 219, 0.08),
    "Inception V3": Model(23.9e6, 142, 0.09),
    "VGG-16": Model(138.4e6, 154, 0.89),
}
EXCHANGES = {
    "average": Exchange(),
    "fp16": Exchange(bytes_per_number=2),
    "adasum": Exchange(adasum=True),
    "every 4th": Exchange(passes=4),
    "local SGD": Exchange(passes=4, after=True),
}
LINES = (10, 25, 100)  # Gbit/s


class Simulator:
    """The program of ``bench/simulation``, which answers one case at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.cycle = cache(self._cycle)
        self.allreduce = cache(self._allreduce)
        self.parts = cache(self._parts)
        self.broadcast = cache(self._broadcast)
        self.reducescatter = cache(self._reducescatter)
        self.alltoall = cache(self._alltoall)
        self.start = cache(self._start)
        self.stragglers = cache(self._stragglers)
        self.adasum = cache(self._adasum)

    def _cycle(self, hosts: int, per_host: int, fan_in: int) -> list[float]:
        """Return the seconds of a cycle, rank 0's messages and bytes, and the most messages of another rank."""
        return self._ask("negotiate", hosts, per_host, fan_in, *_costs(25))

    def _allreduce(
        self, hosts: int, per_host: int, size: float, algorithm: str, gigabits: int, *, slowness: float = 1
    ) -> float:
        """Return the seconds of an allreduce between hosts, one of which has a slower link."""
        return self._ask("allreduce", hosts, per_host, size, algorithm, slowness, *_costs(gigabits))[0]

    def _parts(self, hosts: int, per_host: int, size: float) -> int:
        """Return the number of parts of an allreduce, whose exchange between hosts overlaps with work inside them."""
        return int(self._ask("parts", hosts, per_host, size)[0])

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

    def _adasum(self, hosts: int, per_host: int, size: float, gigabits: int) -> float:
        """Return the seconds of an adaptive sum of one tensor."""
        return self._ask("adasum", hosts, per_host, size, *_costs(gigabits))[0]

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
        print_weak_scaling(simulated)
        print_strong_scaling(simulated)
        print_exchanges(simulated, 25)
        print_steps(simulated, 25)


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


def print_weak_scaling(simulated: Simulator) -> None:
    print(f"weak scaling, {IMAGES} images per GPU and step: speed as a share of N times the speed of one GPU\n")
    print(f"{'model':<14}{'hosts':>6}{'GPUs':>6}" + "".join(f"{line:>8} Gbit/s" for line in LINES))
    for name, model in MODELS.items():
        for hosts, per_host in ((1, 8), (8, 8), (64, 8), (128, 4), (128, 8)):
            steps = [step(simulated, model, Job(hosts, per_host, line, IMAGES)) for line in LINES]
            print(f"{name:<14}{hosts:>6}{hosts * per_host:>6}" + "".join(f"{one.efficiency:>15.0%}" for one in steps))
    print()


def print_strong_scaling(simulated: Simulator) -> None:
    print(
        f"strong scaling, {ALL_IMAGES} images per step of all GPUs: speed as a share of N times the speed of one GPU\n"
    )
    print(f"{'model':<14}{'GPUs':>6}{'images each':>13}" + "".join(f"{line:>8} Gbit/s" for line in LINES))
    for name, model in MODELS.items():
        for hosts in (1, 8, 32, 64, 128):
            ranks = hosts * PER_HOST
            steps = [step(simulated, model, Job(hosts, PER_HOST, line, ALL_IMAGES / ranks)) for line in LINES]
            shares = "".join(f"{one.efficiency:>15.0%}" for one in steps)
            print(f"{name:<14}{ranks:>6}{ALL_IMAGES // ranks:>13}{shares}")
    print()


def print_exchanges(simulated: Simulator, gigabits: int) -> None:
    print(f"ways to exchange gradients, {IMAGES} images per GPU and pass, {gigabits} Gbit/s: the same share\n")
    print(f"{'model':<14}{'GPUs':>6}" + "".join(f"{name:>12}" for name in EXCHANGES))
    for name, model in MODELS.items():
        for hosts in (1, 8, 64, 128):
            job = Job(hosts, PER_HOST, gigabits, IMAGES)
            steps = [step(simulated, model, job, exchange) for exchange in EXCHANGES.values()]
            print(f"{name:<14}{hosts * PER_HOST:>6}" + "".join(f"{one.efficiency:>12.0%}" for one in steps))
    print()


def print_steps(simulated: Simulator, gigabits: int) -> None:
    print(f"times of a step, {IMAGES} images per GPU, {gigabits} Gbit/s: ms\n")
    print(
        f"{'model':<14}{'GPUs':>6}{'computing':>11}{'exchange':>10}{'visible':>9}{'link':>8}{'in host':>9}{'rest':>8}"
    )
    for name, model in MODELS.items():
        for hosts in (1, 8, 64, 128):
            one = step(simulated, model, Job(hosts, PER_HOST, gigabits, IMAGES))
            rest = one.exchange - one.link - one.in_host
            cells = f"{one.computing * 1e3:>11.1f}{one.exchange * 1e3:>10.1f}{(one.total - one.computing) * 1e3:>9.1f}"
            cells += f"{one.link * 1e3:>8.1f}{one.in_host * 1e3:>9.1f}{rest * 1e3:>8.1f}"
            print(f"{name:<14}{hosts * PER_HOST:>6}{cells}")


def step(simulated: Simulator, model: Model, job: Job, exchange: Exchange | None = None) -> Step:
    """Return the times of a step, by default with the average of gradients."""
    exchange = exchange or Exchange()
    one_pass = job.images / model.images_per_second
    computing = exchange.passes * one_pass
    finished = transferring = in_host = 0.0
    for ready, size in batches_of_gradients(model, one_pass, exchange):
        seconds, inside = transfer(simulated, job, size, adasum=exchange.adasum)
        finished = max(finished, computing - one_pass + ready) + seconds
        transferring += seconds
        in_host += inside
    size = exchange.bytes_per_number * model.parameters
    link = 2 * (job.hosts - 1) / job.hosts * size * PER_BYTE_AT_1_GBIT / job.gigabits
    return Step(computing, max(computing, finished), transferring, link, in_host)


def batches_of_gradients(model: Model, one_pass: float, exchange: Exchange) -> Sequence[tuple[float, float]]:
    """Return the groups of gradients that are exchanged together: when they are ready in a pass, and their bytes.

    The real engine exchanges ready gradients, up to the fusion threshold, as soon as the previous exchange has ended.
    The simulation waits until the threshold is reached by float32 gradients or the backward pass has ended, so it
    overlaps less.
    """
    total = 4 * model.parameters
    begin, duration = (1 - BACKWARD) * one_pass, BACKWARD * one_pass
    batches = []
    left = total
    while left > 0:
        size = min(left, float(FUSION_BYTES))
        left -= size
        done = (total - left) / total
        late = 1.0 if exchange.after else max(0.0, (done - model.early) / (1 - model.early))
        batches.append((begin + duration * late, size / 4 * exchange.bytes_per_number))
    return batches


def transfer(simulated: Simulator, job: Job, size: float, *, adasum: bool) -> tuple[float, float]:
    """Return the seconds from the request of an allreduce to its result, and those of work inside the hosts alone."""
    seconds = simulated.cycle(job.hosts, job.per_host, FAN_IN)[0]
    if adasum:
        return seconds + simulated.adasum(job.hosts, job.per_host, size, job.gigabits), 0.0
    inside = 2 * (job.per_host - 1) / job.per_host * size * PER_BYTE_IN_HOST
    if job.hosts == 1:
        return seconds + inside, inside
    parts = simulated.parts(job.hosts, job.per_host, size)
    inside /= parts
    between = simulated.allreduce(job.hosts, job.per_host, size / parts, "ours", job.gigabits)
    alone = inside + (parts - 1) * max(0.0, inside - between)
    return seconds + alone + parts * between + (parts - 1) * PER_PART, alone


def _costs(gigabits: int) -> tuple[float, ...]:
    return LATENCY, LATENCY_IN_HOST, PER_MESSAGE, PER_BYTE_AT_1_GBIT / gigabits, PER_BYTE_IN_HOST


if __name__ == "__main__":
    main()
