"""Real processes as ranks for tests: a group starts once and runs many cases.

A case is a module-level function of a test module; every rank runs it with the same arguments, inside an initialized
session. Functions are pickled by value, so they can stand next to the assertions that need them.

A starter process forks the ranks of a group. It leaves a warm process behind, as the workers of jobs do, from which the
starters of later groups with the same imports and environment are forked.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import secrets
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import cloudpickle

from sparkhvd._util.framework_imports import gc_paused_for_import
from sparkhvd.comm import session
from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.comm.connect.rendezvous import RendezvousServer
from sparkhvd.config import SCRATCH, Config, export
from sparkhvd.deadline import Deadline
from sparkhvd.task.worker.exit import end_process
from sparkhvd.task.worker.process import TEMPLATES
from sparkhvd.task.worker.scratch import remove_scratch
from sparkhvd.task.worker.template import ForkedProcess, Offer, Origin, native_threads, split_off_template
from sparkhvd.world import layout

CASE_SECONDS = 180.0
_END_SECONDS = 15.0
_START_SECONDS = 150.0  # importing a framework is slow on a busy machine
_COLLECTIVE_SECONDS = 90.0
# A case that still runs after this time prints its stacks, which show why a rank does not reach the others. The
# time is long because faulthandler reads the stacks of running threads and may crash a rank that is only slow.
_STACKS_SECONDS = 150.0
# Imports of the groups of several modules: groups with the same imports share a warm process.
TORCH = ("torch", "torch._dynamo", "torch.optim", "sparkhvd.torch", "sparkhvd.torch.buffers")
LIGHTNING = ("torch._dynamo", "sparkhvd.lightning", "lightning.pytorch", "torchmetrics")
_MAX_RANKS = 100
_WARM_SECONDS = 300.0  # how long an unused warm process lives
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case on one rank: a value, a traceback, or neither if the process died."""

    value: Any = None
    failure: str = ""
    died: bool = False


class _Starter:
    """A process that forks ranks and waits for them.

    Args:
        imports: modules to import before the ranks are forked.
        environment: the variables of the ranks.
        links: this side's ends of the links to the ranks, one per rank, are appended here.
        count: the number of ranks.
        prefix: the prefix of the command. Without one, a warm process of earlier groups may fork the starter.
    """

    def __init__(
        self,
        imports: tuple[str, ...],
        environment: dict[str, str],
        links: list[Connection],
        count: int,
        prefix: tuple[str, ...] = (),
    ) -> None:
        self._control, control = socket.socketpair()
        pairs = [socket.socketpair() for _ in range(count)]
        links += [Connection(ours.detach()) for ours, _ in pairs]
        ends = [end for _, end in pairs]
        with contextlib.ExitStack() as stack:
            for end in (control, *ends):
                stack.enter_context(end)
            self._process = self._start(imports, environment, control, prefix)
            socket.send_fds(self._control, [b"links"], [end.fileno() for end in ends])

    def close(self, deadline: Deadline, ranks: Sequence[int]) -> None:
        """Wait for the end of the process after its ranks; at the deadline, kill all of them."""
        self._control.settimeout(max(deadline.remaining(), 0.001))
        try:
            self._control.recv(1)  # returns when the process has ended
        except TimeoutError:
            for pid in (*ranks, self._process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._control.close()
        if isinstance(self._process, ForkedProcess):
            self._process.wait()
            self._process.release()
        else:
            self._process.wait()

    def _start(
        self, imports: tuple[str, ...], environment: dict[str, str], control: socket.socket, prefix: tuple[str, ...]
    ) -> ForkedProcess | subprocess.Popen[bytes]:
        command = (*prefix, sys.executable, "-m", "tests.ranks", *imports)
        forked = None if prefix else TEMPLATES.fork(Origin.of(command, environment), (control.fileno(), 1, 2))
        if isinstance(forked, ForkedProcess):
            remove_scratch(forked.scratch)
            return forked
        with contextlib.closing(forked) if forked else contextlib.nullcontext() as offer:
            template = ("--template", *map(str, offer.descriptors)) if offer else ()
            return subprocess.Popen(
                [*command, "--control", str(control.fileno()), *template],
                cwd=_ROOT,
                env=environment,
                pass_fds=[control.fileno(), *(offer.descriptors if offer else ())],
            )


class RankGroup:
    """Run ``size`` processes as the ranks of one job; a context manager.

    After a failed case, the next case gets new processes.

    Args:
        size: the number of ranks.
        hosts: the host key of each rank; by default, all ranks share one.
        imports: modules to import at the start, so that no case pays for them.
        collective_timeout: seconds after which a rank that waits for the others fails.
        connect: whether to call ``init()`` before the first case.
        server_host: the address of the rendezvous.
        places: for each rank, its own address and the prefix of its command, such as ``ip netns exec``.
        **settings: fields of ``Config``.
    """

    def __init__(
        self,
        size: int,
        *,
        hosts: tuple[str, ...] | None = None,
        imports: tuple[str, ...] = (),
        collective_timeout: float = _COLLECTIVE_SECONDS,
        connect: bool = True,
        server_host: str = "127.0.0.1",
        places: tuple[tuple[str, tuple[str, ...]], ...] = (),
        **settings: Any,
    ) -> None:
        self.size = size
        self._hosts = hosts or ("one",) * size
        self._config = Config(**{"collective_timeout": collective_timeout, "start_timeout": _START_SECONDS} | settings)
        self._server_host = server_host
        self._places = places
        self._imports = imports
        self._connect = connect
        self._environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._starters: list[_Starter] = []
        self._pids: list[int] = []
        self._links: list[Connection] = []
        self._open()

    def run(self, case: Callable[..., Any], *arguments: Any, seconds: float = CASE_SECONDS) -> list[Any]:
        """Return the value of ``case(*arguments)`` of every rank in rank order; fail the test if a rank fails."""
        outcomes = self.outcomes(case, *arguments, seconds=seconds)
        bad = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome.failure or outcome.died}
        if bad:
            self._reopen()
            shown = "\n".join(f"rank {rank}: {outcome.failure or 'the process died'}" for rank, outcome in bad.items())
            raise AssertionError(f"{case.__name__} failed on ranks {sorted(bad)}:\n{shown}")
        return [outcome.value for outcome in outcomes]

    def outcomes(self, case: Callable[..., Any], *arguments: Any, seconds: float = CASE_SECONDS) -> list[Outcome]:
        """Return the outcome of ``case(*arguments)`` on every rank."""
        module = sys.modules[case.__module__]
        cloudpickle.register_pickle_by_value(module)
        try:
            content = cloudpickle.dumps((case, arguments))
        finally:
            cloudpickle.unregister_pickle_by_value(module)
        for link in self._links:
            link.send_bytes(content)
        outcomes = self._receive(Deadline.after(seconds))
        late = sorted(set(range(self.size)) - outcomes.keys())
        if late:
            for rank in late:
                os.kill(self._pids[rank], signal.SIGUSR1)  # prints its stacks
            self._reopen()
            raise AssertionError(f"{case.__name__}: ranks {late} did not answer in time; their stacks are on stderr")
        return [outcomes[rank] for rank in range(self.size)]

    @property
    def port(self) -> int:
        """Return the port of the rendezvous."""
        return self._server.port

    def pids(self) -> list[int]:
        return list(self._pids)

    def kill(self, rank: int) -> None:
        """Kill one rank with ``kill -9`` and wait for its end."""
        process = os.pidfd_open(self._pids[rank])
        try:
            signal.pidfd_send_signal(process, signal.SIGKILL)
            wait([process], timeout=_END_SECONDS)
        finally:
            os.close(process)

    def close(self) -> None:
        """End the processes: close their links, then use force if that is not enough."""
        for link in self._links:
            link.close()
        deadline = Deadline.after(_END_SECONDS)
        for starter in self._starters:
            starter.close(deadline, self._pids)
        self._links, self._starters, self._pids = [], [], []
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        token = secrets.token_bytes(16)
        self._server = RendezvousServer(token, self._server_host, encrypt=self._config.encrypt)
        places = self._places or (("127.0.0.1", ()),) * self.size
        try:
            starts = [(1, prefix) for _, prefix in places] if self._places else [(self.size, ())]
            for start in starts:
                self._starters.append(_Starter(self._imports, self._environment, self._links, *start))
            for world, host, (bind_host, _), link in zip(
                layout(self._hosts), self._hosts, places, self._links, strict=True
            ):
                address = ((self._server_host, self._server.port),)
                context = LaunchContext(world, address, token, host_key=host, bind_host=bind_host, config=self._config)
                link.send_bytes(cloudpickle.dumps((context, self._connect)))
            started = self._receive(Deadline.after(_START_SECONDS))
            assert len(started) == self.size, f"of {self.size} ranks, only {sorted(started)} started in time"
            self._pids = [started[rank].value for rank in range(self.size)]
        except BaseException:
            self.close()
            raise

    def _reopen(self) -> None:
        """Restart the ranks after a case that may have left them in different states."""
        self.close()
        self._open()

    def _receive(self, deadline: Deadline) -> dict[int, Outcome]:
        """Return the next outcomes by rank, without those that are late."""
        missing = {link: rank for rank, link in enumerate(self._links)}
        outcomes: dict[int, Outcome] = {}
        while missing:
            ready = wait(list(missing), timeout=deadline.remaining())
            if not ready:
                return outcomes
            for link in ready:
                outcomes[missing.pop(link)] = _answer(link)
        return outcomes


def _answer(link: Connection) -> Outcome:
    try:
        return cloudpickle.loads(link.recv_bytes())
    except (EOFError, ConnectionResetError):
        return Outcome(died=True)


def _serve(link: Connection) -> None:
    """Run a rank: start, then run cases until the link closes."""
    context, connect = cloudpickle.loads(link.recv_bytes())
    session.set_launch_context(context)
    if connect:
        session.init()
    link.send_bytes(cloudpickle.dumps(Outcome(os.getpid())))
    try:
        while True:
            case, arguments = cloudpickle.loads(link.recv_bytes())
            link.send_bytes(cloudpickle.dumps(_outcome(case, arguments)))
    except EOFError:
        session.shutdown()


def _outcome(case: Callable[..., Any], arguments: tuple[Any, ...]) -> Outcome:
    faulthandler.dump_traceback_later(_STACKS_SECONDS)
    try:
        return Outcome(value=case(*arguments))
    except BaseException:  # noqa: BLE001  any error of a case is its outcome
        return Outcome(failure=traceback.format_exc())
    finally:
        faulthandler.cancel_dump_traceback_later()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("imports", nargs="*")
    parser.add_argument("--control", type=int, required=True)
    parser.add_argument("--template", type=int, nargs=2)
    options = parser.parse_args()
    faulthandler.register(signal.SIGUSR1)
    known_threads = native_threads()
    with gc_paused_for_import():
        for module in options.imports:
            __import__(module)
    control = options.control
    if options.template is not None:
        listener, owner = options.template
        offer = Offer(socket.socket(fileno=listener), owner)
        torch = sys.modules.get("torch")
        seed = torch.initial_seed() if torch else None
        control = split_off_template(offer, _WARM_SECONDS, [control], known_threads) or control
        export({SCRATCH: None})
        if torch:
            torch.default_generator.manual_seed(seed)  # as in a new process
    _fork_ranks(control)


def _fork_ranks(control: int) -> None:
    """Fork one rank per link that arrives through ``control``, and wait for their ends."""
    with socket.socket(fileno=control) as starter:
        _, links, _, _ = socket.recv_fds(starter, 16, _MAX_RANKS)
        for link in links:
            if os.fork() == 0:
                starter.close()
                for other in links:
                    if other != link:
                        os.close(other)
                if numpy := sys.modules.get("numpy"):
                    numpy.random.seed()
                with Connection(link) as parent:
                    _serve(parent)
                sys.stdout.flush()
                os._exit(0)  # the end of a Python with a framework takes longer than most cases
        for link in links:
            os.close(link)
        for _ in links:
            os.wait()


if __name__ == "__main__":
    from tests import ranks  # outcomes must be of the class that the parent imports

    ranks.main()
    end_process(0)  # at once: Python would first free all objects of the frameworks
