"""The compiled core (``core/``), as seen from Python.

Only ``sparkhvd.comm``, ``sparkhvd.rpc`` and ``sparkhvd.data.read.shuffle`` import it.

All waits release the GIL. Every failure is a ``CoreError`` whose ``args`` are ``(code, message)`` with ``code`` one of
``invalid_argument``, ``mismatch``, ``timeout``, ``aborted``, ``peer_lost``, ``io``, ``authentication``, ``shut_down``,
``internal``; its importers translate these into the types of ``sparkhvd.errors``. ``errno`` is that of the failed
system call, or 0.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

# The number of the CUDA device that holds the buffers, and the address of the stream whose work makes them ready.
OnDevice = tuple[int, int] | None

# One tensor of a group: name, address of the source, of the target (unused by an allgather), shape, dtype, keep_alive.
Tensor = tuple[str, int, int, Sequence[int], str, object]

class CoreError(Exception):
    errno: int

def local_addresses() -> list[tuple[str, str, bool]]:
    """Return interface, numeric address and whether it is a loopback, of every address of this host that is up."""

class RowOrder:
    """The order of rows: their indices, ``places`` (int64), among ``rows`` rows, each at most once."""

    def __init__(self, places: NDArray[np.int64], rows: int) -> None: ...
    def pick(
        self, columns: Sequence[tuple[Sequence[NDArray[np.generic]], NDArray[np.generic]]], row_bytes: int
    ) -> None:
        """Copy rows of ``row_bytes`` in this order: of every column, from its parts into its target.

        Arrays are C-contiguous, without Python objects, and the parts of all columns split the rows alike. Four
        columns of up to 8 bytes take less time together than one by one. Several threads may pick at once.
        """

MAX_MESSAGE_BYTES: int

def check_encryption() -> None:
    """Raise ``invalid_argument`` where OpenSSL is missing."""

class FrameConnection:
    """One authenticated connection for frames; made by a static method. Any thread may wake or close it.

    Every frame is authenticated, and also encrypted if the acceptor decides so. ``invalid_argument``: the acceptor
    encrypts, but OpenSSL is missing here.
    """

    @staticmethod
    def connect(
        addresses: Sequence[tuple[str, int]], token: bytes, timeout_s: float, encrypt: bool = False
    ) -> FrameConnection:
        """Connect to the first of ``addresses`` that answers and knows ``token``.

        With ``encrypt`` a server that does not encrypt is refused with ``authentication``.
        """

    @staticmethod
    def connect_unix(name: str, token: bytes, timeout_s: float) -> FrameConnection:
        """Connect to a socket in the abstract namespace."""

    @staticmethod
    def accept(socket: int, token: bytes, timeout_s: float) -> FrameConnection:
        """Run the acceptor's side of the handshake over a duplicate of a connected socket."""

    def fileno(self) -> int: ...
    def send(self, payload: bytes, timeout_s: float) -> None: ...
    def receive(self, timeout_s: float) -> bytes:
        """Return the next frame; ``peer_lost`` when the connection has ended."""

    def set_ack_timeout(self, seconds: float) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...

class MessageServer:
    """Server of connections for frames, on one thread; serves from construction until ``close()``.

    ``io`` where the address cannot be bound; ``invalid_argument`` if it is to encrypt and OpenSSL is missing.
    """

    def __init__(self, token: bytes, host: str, port: int, encrypt: bool, name: str) -> None: ...
    @property
    def port(self) -> int: ...
    def next(self, timeout_s: float) -> tuple[int, bytes | None, str, str, int] | None:
        """Return the next event, or None; ``shut_down`` once the server is closed.

        An event is a connection and its message, or None and the code, the text and the errno of the connection's end.
        Connection 0 stands for the whole process, which has no descriptor left; this is reported once.
        """

    def send(self, connection: int, message: bytes) -> None: ...
    def resume(self, connection: int, idle_seconds: float) -> None:
        """Read the next message of a connection, which ends with ``timeout`` if none begins in time."""

    def drop(self, connection: int) -> None: ...
    def close(self, seconds: float) -> None:
        """End all connections. Messages that have arrived are handled and answered for up to ``seconds``."""

class RendezvousServer:
    """Key-value server that speaks only to holders of ``token``; serves from construction until ``close()``.

    With ``encrypt`` all messages are encrypted; ``io`` where OpenSSL is missing.
    """

    def __init__(self, token: bytes, host: str = "127.0.0.1", port: int = 0, encrypt: bool = False) -> None: ...
    @property
    def port(self) -> int: ...
    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str, timeout_s: float) -> bytes: ...
    @property
    def requests(self) -> int:
        """The number of requests that clients have sent."""

    def erase(self, prefix: str) -> int:
        """Delete all keys that begin with ``prefix``, and return their number."""

    def close(self) -> None: ...

class RendezvousClient:
    """Connection to a ``RendezvousServer``; both sides prove that they know ``token`` before parsing anything else.

    ``addresses`` are tried in order until one answers. Safe for use from several threads. With ``encrypt`` a server
    that does not encrypt is refused with ``authentication``.
    """

    def __init__(
        self, addresses: Sequence[tuple[str, int]], token: bytes, timeout_s: float, encrypt: bool = False
    ) -> None: ...
    def set(self, key: str, value: bytes, timeout_s: float) -> None: ...
    def get(self, key: str, timeout_s: float) -> bytes:
        """Return the value of ``key``, waiting until it is set; ``peer_lost`` when the server ends."""

    def get_all(self, prefix: str, first: int, end: int, timeout_s: float) -> list[bytes]:
        """Return the values of the keys ``prefix`` + number for ``first`` <= number < ``end``, once all are set."""

    def missing(self, prefix: str, first: int, end: int, timeout_s: float) -> list[int]:
        """Return those of the numbers whose keys are not set, without waiting for them."""

    def close(self) -> None: ...

class Operation:
    """One submitted collective. Keeps its buffers alive until it is done and dropped."""

    def done(self) -> bool: ...
    def wait(self, timeout_s: float) -> None:
        """Wait for the result; raises the operation's error, or ``timeout`` naming the tensor. May be called again."""

    def output(self) -> memoryview:
        """Allgather and alltoall, after ``wait``: the data of all ranks (owned by this object), format ``B``."""

    def rows(self) -> list[int]:
        """After ``wait``: the rows of ``output`` by rank. Join: only the number of the last rank to join."""

    def let_wait(self, stream: int) -> None:
        """After ``wait``: make later work on the CUDA stream see the result; does nothing for memory of the host.

        Raises the failure of the engine if it has ended: the operation may still have failed on the device.
        """

    def carried_out(self) -> bool:
        """After ``wait``: whether the device has done it; True for memory of the host. Raises like ``let_wait``."""

    def move_output(self, target: int, stream: int) -> None:
        """Allgather and alltoall on a device, after ``wait``: copy the result into its memory, in order of the stream.

        ``output`` is empty then. Works once.
        """

class DeviceLibraries:
    """CUDA's driver and NCCL, loaded, with which collectives work on the memory of CUDA devices."""

    def __init__(self, cuda: str, nccl: str) -> None: ...

def nccl_version(path: str) -> int:
    """Return the version of the NCCL at ``path``, such as 22907; fails with ``io`` where it is missing or too old."""

SHARE_DEVICE_NAME: str
"""The name of the barrier after which other engines use the devices of an engine's ranks, too."""

class Autotune:
    """How an engine searches for its fastest settings; rank 0 writes every sample into ``log`` unless that is empty."""

    def __init__(self, log: str, warmup_samples: int, steps_per_sample: int, max_samples: int) -> None: ...

class Engine:
    """One rank of a job: owns the links to its peers and one thread that negotiates and runs collectives.

    ``rendezvous`` is None only for ``size == 1``. ``host_key`` is equal for ranks that may share memory; whether they
    do is decided by trying. ``bind_hosts`` are the local addresses that this rank's sockets bind and offer, the
    preferred one first. ``encrypt`` (equal on all ranks) encrypts the TCP links; it needs OpenSSL on all hosts.
    Ranks that differ in a value of ``common_settings`` do not connect. ``link_gbits`` and ``link_latency_us`` (equal on
    all ranks) are the costs by which algorithms between hosts are chosen.
    ``scope`` prefixes this engine's rendezvous keys, so that a job can connect its ranks more than once; ``label``
    prefixes the messages of failed operations. ``hierarchical_allreduce`` and ``hierarchical_allgather``
    (equal on all ranks) say whether these use shared memory where the ranks are on several hosts.
    ``processor_core`` is the core that the engine's thread runs on, any by default. ``autotune`` tunes
    ``fusion_threshold`` and ``hierarchical_allreduce`` where they are None, and the switch points of shared memory.
    ``device_libraries`` (the same object for all engines of a process) lets it take memory of CUDA devices;
    ``shares_device`` says that other engines use these devices, too, so all launch in one order.
    This engine shares the timeline of ``recorded_with``, where its tensors carry ``timeline_label``.
    Construction connects to every peer within ``timeout_s`` and is collective.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        rendezvous: RendezvousClient | None = None,
        token: bytes = b"",
        scope: str = "",
        label: str = "",
        host_key: str = "",
        bind_hosts: Sequence[str] = ...,
        shared_memory: bool = True,
        encrypt: bool = False,
        common_settings: Mapping[str, str] = ...,
        link_gbits: float = 25.0,
        link_latency_us: float = 30.0,
        fusion_threshold: int | None = None,
        cache_capacity: int = 1024,
        collective_timeout_s: float = 1800.0,
        timeout_s: float = 60.0,
        hierarchical_allreduce: bool | None = None,
        hierarchical_allgather: bool = True,
        processor_core: int | None = None,
        autotune: Autotune | None = None,
        device_libraries: DeviceLibraries | None = None,
        shares_device: bool = False,
        recorded_with: Engine | None = None,
        timeline_label: str = "",
    ) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    # Buffers are addresses of contiguous memory; `keep_alive` is held by the Operation. `dtype` is one of bool, uint8,
    # int8, int16, int32, int64, float16, bfloat16, float32, float64; `op` one of sum, average, min, max, product.
    # `source` and `target` may be the same address. A rank's value is multiplied by `prescale` before the reduction and
    # the result by `postscale` after it; `prescale` is each rank's own (it may differ among ranks and from call to call
    # without costing a cache hit), the rest must agree. `with_waiter`: the operation may begin only once a thread waits
    # for it, and then runs on that thread. With a `device`, for engines with DeviceLibraries, the buffers
    # are in its memory, and an operation is done once its work is enqueued there: `let_wait` orders a stream behind it.
    # There the caller scales; the factors are only compared.
    def allreduce(
        self,
        name: str,
        source: int,
        target: int,
        shape: tuple[int, ...],
        dtype: str,
        op: str = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        keep_alive: object = None,
        with_waiter: bool = False,
        device: OnDevice = None,
    ) -> Operation: ...
    # The first dimension is divided among the ranks, the first ones get one more; `target` receives this rank's part
    # and must not overlap `source`.
    def reducescatter(
        self,
        name: str,
        source: int,
        target: int,
        shape: tuple[int, ...],
        dtype: str,
        op: str = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        keep_alive: object = None,
        with_waiter: bool = False,
        device: OnDevice = None,
    ) -> Operation: ...
    def allgather(
        self,
        name: str,
        source: int,
        shape: Sequence[int],
        dtype: str,
        keep_alive: object = None,
        with_waiter: bool = False,
        device: OnDevice = None,
    ) -> Operation: ...
    # `splits` says how many rows of the first dimension go to each rank.
    def alltoall(
        self,
        name: str,
        source: int,
        shape: Sequence[int],
        splits: Sequence[int],
        dtype: str,
        keep_alive: object = None,
        with_waiter: bool = False,
        device: OnDevice = None,
    ) -> Operation: ...
    def broadcast(
        self,
        name: str,
        source: int,
        target: int,
        shape: Sequence[int],
        dtype: str,
        root: int,
        keep_alive: object = None,
        with_waiter: bool = False,
        device: OnDevice = None,
    ) -> Operation: ...
    # Groups: all tensors run together, or all fail where the ranks disagree about one.
    def grouped_allreduce(
        self,
        group: str,
        tensors: Sequence[Tensor],
        op: str = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        with_waiter: bool = False,
        device: OnDevice = None,
    ) -> list[Operation]: ...
    def grouped_reducescatter(
        self,
        group: str,
        tensors: Sequence[Tensor],
        op: str = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        with_waiter: bool = False,
        device: OnDevice = None,
    ) -> list[Operation]: ...
    def grouped_allgather(
        self, group: str, tensors: Sequence[Tensor], with_waiter: bool = False, device: OnDevice = None
    ) -> list[Operation]: ...
    def barrier(self, name: str, with_waiter: bool = False) -> Operation: ...
    def join(self, with_waiter: bool = False, device: OnDevice = None) -> Operation:
        """Contribute nothing to the others' operations until all have joined; on ``device`` to those on devices."""

    def has_direct_calls(self) -> bool:
        """Return whether ``allreduce_now`` works: all ranks share memory."""

    def allreduce_now(self, source: NDArray[np.generic], target: NDArray[np.generic], op: str) -> None:
        """Reduce on the calling thread without negotiation; every rank must make the same calls in the same order.

        Contiguous arrays of a dtype that the buffer protocol supports. Fails with ``mismatch`` on all ranks when their
        calls differ; any other failure, an interruption included, ends the engine.
        """

    def tuning(self) -> dict[str, int]:
        """``fusion_threshold``, ``small_allreduce``, ``allreduce_chunk``, ``hierarchical_allreduce``, ``searching``."""

    def close_copies(self) -> None:
        """In a forked child, where every other method fails: close the child's copies of the links."""

    def counters(self) -> dict[str, int]:
        """Monotonic counts by name.

        ``operations``, ``bytes``, ``cycles``, ``cache_hits``, ``fused_buffers``, ``hierarchical`` (allreduces and
        allgathers that went through the memory of several hosts), ``on_device``; the engine's time by phase,
        ``negotiation_us`` and ``collective_us`` (``fusion_copy_us`` of it for copies); ``queue_us`` summed over
        operations; and ``allreduce.operations``, ``allreduce.bytes`` and so on for every kind that has run.
        """

    def pending(self) -> list[tuple[str, float]]:
        """Return the submitted operations that are not done, as ``("allreduce 'grad/7'", seconds)``, oldest first."""

    def start_timeline(self, path: str, recording: str, mark_cycles: bool) -> None:
        """Record into ``path``, with the other ranks of this host that pass the same ``recording``."""

    def stop_timeline(self) -> None:
        """Write the rest of the recording; does nothing when none is running."""

    def local_ranks(self) -> list[int]:
        """Return the ranks that this one shares memory with, itself included; only itself where sharing failed."""

    def host_ranks(self) -> list[int]:
        """Return the ranks with this one's ``host_key``, itself included."""

    def abort(self, why: str) -> None:
        """End every pending and future operation here and on all peers with ``aborted: why``."""

    def shutdown(self, timeout_s: float) -> None:
        """Leave the job: pending operations fail with ``shut_down``; peers that need this rank get ``peer_lost``."""
