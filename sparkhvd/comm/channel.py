"""A channel: one engine of the core, which connects a rank to the other ranks of a group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

from sparkhvd import _core
from sparkhvd._util.counts import counted
from sparkhvd._util.processes.file_descriptors import allow_files
from sparkhvd.comm import nccl
from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.comm.connect.rendezvous import RendezvousClient
from sparkhvd.comm.connect.routes import addresses_to_offer
from sparkhvd.comm.failures import translated
from sparkhvd.comm.handle import Handle, PendingOperation, Waits
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.comm.stall.stragglers import INIT, straggler_error, warning_of_stragglers
from sparkhvd.config import Config, variable_of
from sparkhvd.deadline import Deadline
from sparkhvd.errors import ConfigError, DeadlineExceededError

T = TypeVar("T")


# Open files per peer, once all links are in use: the link; for a peer on this host the link, one file that watches the
# peer and two that report the end of its process. A process set of ranks that share memory needs none.
_FILES_PER_LINK, _FILES_PER_NEIGHBOR = 1, 4

# If ranks differed in one of these settings, they would wait for each other or misread each other's messages.
_COMMON_SETTINGS = (
    "fusion_threshold",
    "cache_capacity",
    "hierarchical_allreduce",
    "hierarchical_allgather",
    "link_gbits",
    "link_latency_us",
)


def _counters() -> defaultdict[str, Iterator[int]]:
    return defaultdict(count)


@dataclass(frozen=True, slots=True)
class Channel:
    """The engine that connects some ranks, and its data.

    Attributes:
        engine: the engine, which numbers its ranks 0, 1, 2...
        ranks: the same ranks, by their numbers in the job.
        waits: the waiting times of its handles.
        on_devices: whether it accepts memory of CUDA devices.
        suggestion: logged at the first CUDA tensor that is staged.
    """

    engine: _core.Engine
    ranks: tuple[int, ...]
    waits: Waits
    on_devices: bool = False
    suggestion: nccl.Suggestion = field(default_factory=nccl.Suggestion, repr=False)
    counts: defaultdict[str, Iterator[int]] = field(default_factory=_counters, repr=False)  # unnamed operations by kind
    names: WeakKeyDictionary[object, str] = field(default_factory=WeakKeyDictionary, repr=False)  # see ``name_of``

    @property
    def size(self) -> int:
        """Return the number of ranks that it connects."""
        return len(self.ranks)

    def named(self, kind: str, name: str | None) -> str:
        """Return ``name``, or an automatically numbered name if it is None."""
        if name is None:
            return f"{kind}.noname.{next(self.counts[kind])}"
        if not isinstance(name, str):
            raise ConfigError(f"The name of a collective must be a string, got {name!r}.")
        if not name.isascii():
            try:
                name.encode()
            except UnicodeEncodeError:
                raise ConfigError(f"The name of a collective must be valid Unicode, got {name!a:.300}.") from None
        return name

    def name_of(self, owner: object, kind: str) -> str:
        """Return the name of the operations of an object, such as a layer, which is numbered at its first use.

        The name stays the same, so the response cache recognizes the operations. The ranks of each channel number the
        objects in the same order, also if some of the ranks have used the objects in earlier channels.
        """
        if owner not in self.names:
            self.names[owner] = self.named(kind, None)
        return self.names[owner]

    def renumber(self) -> None:
        """Number unnamed operations from 0 again."""
        self.counts.clear()
        self.names.clear()

    def engine_rank_of(self, rank: int) -> int:
        """Return the engine's number of a rank of the job.

        Raises:
            ConfigError: the rank is not in this channel.
        """
        if rank in self.ranks:
            return self.ranks.index(rank)
        consecutive = f"in 0..{self.size - 1}" if self.size > 1 else "0, the only rank"
        expected = consecutive if self.ranks[-1] < self.size else f"one of {list(self.ranks)}"
        raise ConfigError(f"The root rank must be {expected}; got {rank!r}.")

    def handle(self, name: str, operation: PendingOperation, finish: Callable[[], T] | None = None) -> Handle[T]:
        """Return the handle of a submitted operation; ``finish`` makes its result if it has one."""
        return Handle(name, operation, self.waits, None, finish)


class HasChannels(Protocol):
    """The part of a communicator that collectives use."""

    def channel(self, process_set: ProcessSet | None = None) -> Channel:
        """Return the channel to the ranks of ``process_set``, by default to all ranks."""
        ...


def connect_rendezvous(context: LaunchContext, deadline: Deadline) -> RendezvousClient | None:
    """Return a client of the job's rendezvous server; None for a job of one rank.

    Raises:
        ConfigError: the context of a larger job has no address.
    """
    if context.world.size == 1:
        return None
    if not context.rendezvous:
        raise ConfigError(
            f"Rank {context.world.rank} of {context.world.size} has no rendezvous address; the launcher must pass one."
        )
    return RendezvousClient(context.rendezvous, context.token, deadline, encrypt=context.config.encrypt)


def processor_core_of(context: LaunchContext) -> int | None:
    """Return the processor core that this rank's engines run on; None leaves the choice to the kernel.

    Raises:
        ConfigError: cores are listed, but none for this rank.
    """
    cores, world = context.config.thread_affinity, context.world
    if not cores:
        return None
    if world.local_rank < len(cores):
        return cores[world.local_rank]
    raise ConfigError(
        f"SPARKHVD_THREAD_AFFINITY lists {counted(len(cores), 'core')} {list(cores)}, but this host has "
        f"{counted(world.local_size, 'rank')}. List one core for each local rank."
    )


def _autotune(config: Config) -> _core.Autotune:
    return _core.Autotune(
        config.autotune_log,
        config.autotune_warmup_samples,
        config.autotune_steps_per_sample,
        config.autotune_max_samples,
    )


def open_channel(
    context: LaunchContext,
    ranks: tuple[int, ...],
    rendezvous: RendezvousClient | None,
    deadline: Deadline,
    *,
    scope: str,
    label: str = "",
    parent: tuple[Channel, str] | None = None,
    tuned: bool = False,
    device_libraries: _core.DeviceLibraries | None = None,
) -> Channel:
    """Connect ``ranks``, which include this rank; collective among them.

    Args:
        context: this rank's position in the job.
        ranks: the ranks, ascending.
        rendezvous: the rendezvous of the ranks.
        deadline: the end of all attempts to connect.
        scope: distinguishes the channels of a job; equal on all ranks.
        label: names the channel in error messages.
        parent: for a process set, the channel of all ranks, whose timeline and shared memory the new channel uses, and
            the label of the new channel in the timeline.
        tuned: whether the configuration's autotuning applies to this channel.
        device_libraries: for CUDA tensors, the same for all channels of a process; None stages them.
    """
    config = context.config
    peers = len(ranks) - 1
    allow_files(_FILES_PER_LINK * peers, _FILES_PER_NEIGHBOR * peers, f"A connection to {counted(peers, 'other rank')}")
    prefix = f"{scope}/address/"  # ConnectMesh in the core uses the same keys
    try:
        with warning_of_stragglers(rendezvous, context, prefix, ranks, label or INIT), translated():
            offered = addresses_to_offer(context.bind_host, config.network_interfaces, _core.local_addresses())
            engine = _core.Engine(
                ranks.index(context.world.rank),
                len(ranks),
                rendezvous=None if rendezvous is None or len(ranks) == 1 else rendezvous.core,
                token=context.token,
                scope=scope,
                label=label,
                host_key=context.host_key,
                bind_hosts=offered,
                shared_memory=config.shared_memory,
                encrypt=config.encrypt,
                common_settings={variable_of(name): _setting_text(getattr(config, name)) for name in _COMMON_SETTINGS},
                host_timeout=config.host_timeout or _core.SILENT_LINK_SECONDS,
                answer_timeout=context.answer_timeout,
                link_gbits=config.link_gbits,
                link_latency_us=config.link_latency_us,
                fusion_threshold=config.fusion_threshold,
                cache_capacity=config.cache_capacity,
                collective_timeout_s=config.collective_timeout,
                timeout_s=deadline.remaining(),
                hierarchical_allreduce=config.hierarchical_allreduce,
                hierarchical_allgather=config.hierarchical_allgather,
                processor_core=processor_core_of(context),
                parent=None if parent is None else parent[0].engine,
                parent_ranks=ranks,
                timeline_label="" if parent is None else parent[1],
                autotune=_autotune(config) if tuned and config.autotune else None,
                device_libraries=device_libraries,
                shares_device=bool(label),
            )
    except DeadlineExceededError as error:
        if rendezvous is None:
            raise
        raise straggler_error(rendezvous, context, prefix, ranks, label or INIT) or error from None
    suggestion = nccl.Suggestion(config.gpu_operations == "automatic" and engine.rank == 0 and not label)
    return Channel(engine, ranks, Waits(config.collective_timeout), device_libraries is not None, suggestion)


def _setting_text(value: object) -> str:
    """Return the value of a setting in an error message."""
    return "the default" if value is None else str(int(value)) if isinstance(value, bool) else str(value)
