"""The membership of one worker in an elastic job: how it learns its rank in each generation.

The driver serves the membership server, a key-value store whose keys are set once:

- ``worker/<worker>/report/<n>``: the n-th report of a worker;
- ``worker/<worker>/assignment/<generation>``: the worker's rank in the generation after ``<generation>``;
- ``generation/<generation>/notice``: set when the members of a generation should leave it at their next commit, and
  after each loss;
- ``generation/<generation>/loss``: set to the reason when a generation has lost a member; its collectives cannot end.

The driver deletes the keys of a worker when it assigns the worker's next rank: the worker is waiting for the rank then,
so all its reports have arrived. The driver deletes the keys of a generation when it forms the next generation, because
all members have left the earlier one by then.

Each generation has a rendezvous of its own, with a secret that is derived from the job's secret.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, replace

from sparkhvd.comm.connect.generation_watch import GenerationWatch
from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.comm.connect.rendezvous import RendezvousClient
from sparkhvd.config import export
from sparkhvd.deadline import Deadline
from sparkhvd.errors import AuthenticationError, HorovodInternalError, LaunchError
from sparkhvd.world import World

# A worker may wait for weeks for a slot, or for a suspended driver. The end of the driver ends the wait.
_WAIT_SECONDS = 400 * 86400.0

# The errors of a worker whose generation has lost a member. A member or a rendezvous that ends during the handshake of
# a new connection looks like one that does not know the secret. The membership server has already shown that the
# worker knows it.
LOST_CONNECTIONS = (HorovodInternalError, AuthenticationError)

WAITING = "waiting"
CONNECTED = "connected"
SYNCED = "synced"
FINISHED = "finished"
PUBLISHED = "published"


@dataclass(frozen=True)
class Report:
    """A report of a worker to the driver.

    Attributes:
        kind: ``WAITING`` for the next generation, ``CONNECTED`` once it has reached all ranks of a generation with
            hosts that could not reach each other before, ``SYNCED`` once it has the job's state, ``FINISHED`` when the
            training has ended on all ranks, ``PUBLISHED`` when a commit is in the job's Store.
        generation: the worker's latest generation; 0 if it has had none.
        commit: the number of its newest commit; -1 if it has no state of the job.
        reason: why the worker has left the generation; empty if the driver asked it to leave.
        path: the path of the published commit.
    """

    kind: str
    generation: int
    commit: int = -1
    reason: str = ""
    path: str = ""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, content: bytes) -> Report:
        return cls(**json.loads(content))


@dataclass(frozen=True)
class Assignment:
    """The rank of a worker in a generation.

    Attributes:
        generation: the number of the generation.
        world: the rank's position.
        port: the port of the generation's rendezvous, on the hosts of the membership server.
        host_key: equal for ranks that may share memory.
        bind_host: the address at which the other ranks reach this one best.
        published: the path of the newest commit in the job's Store that the driver knows; empty without one.
        answer_timeout: see ``LaunchContext``.
    """

    generation: int
    world: World
    port: int
    host_key: str
    bind_host: str
    published: str = ""
    answer_timeout: float | None = None

    def to_json(self) -> bytes:
        return json.dumps({**asdict(self), "world": astuple(self.world)}).encode()

    @classmethod
    def from_json(cls, content: bytes) -> Assignment:
        fields = json.loads(content)
        fields["world"] = World(*fields["world"])
        return cls(**fields)


def worker_keys(worker: int) -> str:
    """Return the prefix of all keys of a worker."""
    return f"worker/{worker}/"


def report_key(worker: int, number: int) -> str:
    return f"{worker_keys(worker)}report/{number}"


def assignment_key(worker: int, generation: int) -> str:
    return f"{worker_keys(worker)}assignment/{generation}"


def generation_keys(generation: int) -> str:
    """Return the prefix of all keys of a generation."""
    return f"generation/{generation}/"


def notice_key(generation: int) -> str:
    return f"{generation_keys(generation)}notice"


def loss_key(generation: int) -> str:
    return f"{generation_keys(generation)}loss"


def token_of(secret: bytes, generation: int) -> bytes:
    """Return the secret of a generation, derived from the job's."""
    return hmac.new(secret, f"sparkhvd generation {generation}".encode(), hashlib.sha256).digest()


def scope_of(generation: int) -> str:
    """Return the scope of a generation's ranks in their rendezvous."""
    return f"generation-{generation}"


def unreachable_key(generation: int, rank: int) -> str:
    """Return the key in a generation's rendezvous where a rank lists the ranks that it could not reach."""
    return f"{scope_of(generation)}/unreachable/{rank}"  # ConnectMesh in the core sets it


class Membership:
    """One worker's membership; used by one thread at a time.

    Attributes:
        generation: the number of the current or latest generation; 0 before the first.
        commit: the number of the newest commit; -1 while this worker does not have the state of the job.
        reason: why this worker left the latest generation; empty if the driver asked it to leave.
        newest_published: the path of the newest commit in the job's Store that the driver knows; empty without one.
    """

    def __init__(self, context: LaunchContext) -> None:
        if context.membership is None:
            raise LaunchError("This rank does not belong to an elastic job.")
        self._context = context
        self._address = context.membership
        self._client: RendezvousClient | None = None
        self._watch: GenerationWatch | None = None  # of the current or latest generation
        self._reports = 0
        self._has_finished = False
        self.generation = 0
        self.commit = -1
        self.reason = ""
        self.newest_published = ""

    def next_generation(self) -> LaunchContext:
        """Wait for the next generation that includes this worker, and return its launch context."""
        self._report(WAITING, self.reason)
        key = assignment_key(self._address.worker, self.generation)
        assignment = Assignment.from_json(self._connected_client().get(key, Deadline.after(_WAIT_SECONDS)))
        self.generation, self.reason = assignment.generation, ""
        self.newest_published = assignment.published
        export(_variables(assignment.world))
        rendezvous = tuple((host, assignment.port) for host, _ in self._address.addresses)
        return replace(
            self._context,
            world=assignment.world,
            rendezvous=rendezvous if assignment.world.size > 1 else (),
            token=token_of(self._address.token, assignment.generation),
            host_key=assignment.host_key,
            bind_host=assignment.bind_host,
            answer_timeout=assignment.answer_timeout,
        )

    def connected(self) -> None:
        """Report that this worker has reached all ranks of the generation, so no host needs to be left out."""
        self._report(CONNECTED)

    def synced(self) -> None:
        """Report that this worker has the job's state."""
        self._report(SYNCED)

    def published(self, path: str) -> None:
        """Report that the newest commit is in the job's Store, at this path."""
        self._report(PUBLISHED, path=path)

    def finished(self) -> None:
        """Report that the training has ended on all ranks, which from now on stay together."""
        self._has_finished = True
        self._report(FINISHED)

    def is_notified(self) -> bool:
        """Return whether the members of the watched generation should leave it; nothing waits for the driver."""
        return not self._has_finished and self._watch is not None and self._watch.is_notified

    def watch(self, abort: Callable[[str], None]) -> GenerationWatch:
        """Watch this generation until the caller closes the result.

        Args:
            abort: called with the reason, from another thread, once the driver has lost a member of this generation.
        """
        self._watch = GenerationWatch(self._connect(), notice_key(self.generation), loss_key(self.generation), abort)
        return self._watch

    def close(self) -> None:
        """Disconnect from the membership server."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _report(self, kind: str, reason: str = "", path: str = "") -> None:
        report = Report(kind, self.generation, self.commit, reason, path)
        key = report_key(self._address.worker, self._reports)
        self._connected_client().set(key, report.to_json(), Deadline.after(_WAIT_SECONDS))
        self._reports += 1

    def _connected_client(self) -> RendezvousClient:
        if self._client is None:
            self._client = self._connect()
        return self._client

    def _connect(self) -> RendezvousClient:
        config = self._context.config
        deadline = Deadline.after(config.start_timeout)
        return RendezvousClient(self._address.addresses, self._address.token, deadline, encrypt=config.encrypt)


def _variables(world: World) -> dict[str, str | None]:
    """Return the environment variables of a rank, for scripts and libraries that read them."""
    names = {
        f"{owner}_{name.upper()}": str(value)
        for owner in ("SPARKHVD", "HOROVOD")
        for name, value in asdict(world).items()
    }
    return {**names, "LOCAL_RANK": str(world.local_rank)}
