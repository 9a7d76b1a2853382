"""The compiled core (``core/``), as seen from Python.

Only ``sparkhvd.comm``, ``sparkhvd.rpc`` and ``sparkhvd.data.read.shuffle`` import this module.

All waits release the GIL. Every failure is a ``CoreError`` whose ``args`` are ``(code, message)``. The code is one of
``invalid_argument``, ``mismatch``, ``timeout``, ``aborted``, ``peer_lost``, ``io``, ``authentication``, ``shut_down``
and ``internal``. The importing modules translate the codes into the types of ``sparkhvd.errors``. The attribute
``errno`` is the errno value of the failed system call, or 0.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

# The number of the CUDA device that holds the buffers, and the address of the stream whose work makes them ready.
OnDevice = tuple[int, int] | None

# One tensor of a group: name, source address, target address (ignored by an allgather), shape, dtype, keep_alive.
Tensor = tuple[str, int, int, Sequence[int], str, object]

class CoreError(Exception):
    errno: int

def local_addresses() -> list[tuple[str, str, bool]]:
    """Return interface name, numeric address and is_loopback for every address of this host's active interfaces."""

class RowOrder:
    """The rows to deliver and their order: ``places`` (int64) are indices into ``rows`` rows, each at most once."""

    def __init__(self, places: NDArray[np.int64], rows: int) -> None: ...
    def pick(
        self, columns: Sequence[tuple[Sequence[NDArray[np.generic]], NDArray[np.generic]]], row_bytes: int
    ) -> None:
        """Copy the rows of every column, from its parts into its target, in this order.

        A row has ``row_bytes`` bytes. Arrays must be C-contiguous and must not hold Python objects, and the parts of
        all columns must split the rows alike. For rows of 1, 2, 4 or 8 bytes, four columns take less time together
        than one by one. Several threads may pick at once.
        """

MAX_MESSAGE_BYTES: int
SILENT_RENDEZVOUS_SECONDS: float
"""The longest silence of a host on a link of the rendezvous or of messages."""

def check_encryption() -> None:
    """Fail with ``invalid_argument`` if this host has no OpenSSL."""

class FrameConnection:
    """One authenticated connection for frames. The static methods create it. Any thread may wake or close it.

    Every frame is authenticated, and also encrypted if the acceptor decides so. If the acceptor encrypts and this host
    has no OpenSSL, the static methods fail with ``invalid_argument``.
    """

    @staticmethod
    def connect(
        addresses: Sequence[tuple[str, int]], token: bytes, timeout_s: float, encrypt: bool = False
    ) -> FrameConnection:
        """Connect to the first server at ``addresses`` that answers and knows ``token``.

        With ``encrypt``, fail with ``authentication`` if the server does not encrypt.
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
        """Return the next frame. Fail with ``peer_lost`` once the connection has ended."""

    def set_ack_timeout(self, seconds: float) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...

class MessageServer:
    """A server of connections for frames, on one thread. It serves from construction until ``close()``.

    The constructor fails with ``io`` if it cannot bind the address, and with ``invalid_argument`` if ``encrypt`` is set
    and this host has no OpenSSL. A connection ends if its peer's host does not respond for ``host_timeout`` seconds.
    """

    def __init__(self, token: bytes, host: str, port: int, encrypt: bool, name: str, host_timeout: float) -> None: ...
    @property
    def port(self) -> int: ...
    def next(self, timeout_s: float) -> tuple[int, bytes | None, str, str, int] | None:
        """Return the next event, or None if there is none in time. Fail with ``shut_down`` once the server is closed.

        An event is ``(connection, message, code, text, errno)``. ``message`` is None if the connection has ended.
        The last three values then describe its end. Connection 0 means that this process has no descriptor left for a
        new connection, which is reported once.
        """

    def send(self, connection: int, message: bytes) -> None: ...
    def resume(self, connection: int, idle_seconds: float) -> None:
        """Read the next message of a connection. The connection ends with ``timeout`` if no message begins in time."""

    def drop(self, connection: int) -> None: ...
    def close(self, seconds: float) -> None:
        """End all connections. For up to ``seconds``, messages that have arrived are still handled and answered."""

class RendezvousServer:
    """A key-value server for clients that know ``token``. It serves from construction until ``close()``.

    With ``encrypt``, all messages are encrypted, and the constructor fails with ``io`` if this host has no OpenSSL.
    """

    def __init__(self, token: bytes, host: str = "127.0.0.1", port: int = 0, encrypt: bool = False) -> None: ...
    @property
    def port(self) -> int: ...
    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str, timeout_s: float) -> bytes: ...
    @property
    def requests(self) -> int:
        """Return the number of requests that clients have sent."""

    def erase(self, prefix: str) -> int:
        """Delete all keys that begin with ``prefix``, and return their number."""

    def close(self) -> None: ...

class RendezvousClient:
    """A client of a ``RendezvousServer``. Both sides prove that they know ``token`` before they parse anything else.

    The constructor dials all ``addresses``, each a moment after the previous one, and keeps the first server that
    answers. With ``encrypt``, it fails with ``authentication`` if the server does not encrypt. Thread-safe.
    """

    def __init__(
        self, addresses: Sequence[tuple[str, int]], token: bytes, timeout_s: float, encrypt: bool = False
    ) -> None: ...
    def set(self, key: str, value: bytes, timeout_s: float) -> None: ...
    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait until ``key`` is set, and return its value. Fail with ``peer_lost`` if the server ends."""

    def get_all(self, prefix: str, first: int, end: int, timeout_s: float) -> list[bytes]:
        """Wait until the keys ``prefix`` + n are set for ``first`` <= n < ``end``, and return their values in order."""

    def missing(self, prefix: str, first: int, end: int, timeout_s: float) -> list[int]:
        """Return the numbers n whose keys (see ``get_all``) are not set, without waiting for the keys."""

    def close(self) -> None: ...

class Operation:
    """One submitted collective. Keeps its buffers alive until it is done and this object is dropped."""

    def done(self) -> bool: ...
    def wait(self, timeout_s: float) -> float:
        """Wait for the result, and return the seconds that this took. It may be called again.

        Fail with the operation's error, or with ``timeout`` and the tensor's name.
        """

    def output(self) -> memoryview:
        """Return the data of all ranks, after ``wait`` for an allgather or alltoall.

        This object owns the memory. The format is ``B``.
        """

    def rows(self) -> list[int]:
        """Return the rows of ``output`` by rank, after ``wait``. For a join, return only the last rank to join."""

    def let_wait(self, stream: int) -> None:
        """After ``wait``, make later work on the CUDA stream see the result. Do nothing for host memory.

        Fail if the engine has failed, because the operation may then have failed on the device.
        """

    def completed_on_device(self) -> bool:
        """After ``wait``, return whether the device has also completed the operation; True for host memory.

        Fail like ``let_wait``.
        """

    def move_output(self, target: int, stream: int) -> None:
        """Copy the result to device memory in stream order, after ``wait`` for an allgather or alltoall on a device.

        Works once. ``output`` is always empty for such an operation.
        """

class DeviceLibraries:
    """The loaded CUDA driver and NCCL, for collectives in the memory of CUDA devices."""

    def __init__(self, cuda: str, nccl: str) -> None: ...

def nccl_version(path: str) -> int:
    """Return the version of the NCCL at ``path``, such as 22907. Fail with ``io`` if NCCL is missing or too old."""

SHARE_DEVICE_NAME: str
"""The name of a barrier: after it, other engines use the devices of this engine's ranks, too."""
SILENT_LINK_SECONDS: float
"""The longest silence of a host on a link between ranks, unless the job sets another limit."""

class Autotune:
    """How an engine searches for its fastest settings. Rank 0 writes every sample to ``log`` if ``log`` is set."""

    def __init__(self, log: str, warmup_samples: int, steps_per_sample: int, max_samples: int) -> None: ...

class Engine:
    """One rank of a job. It owns the links to its peers and one thread that negotiates and runs collectives.

    The constructor is collective: it connects to every peer, or fails after ``timeout_s``.

    ``rendezvous`` may be None only if ``size`` is 1. ``scope`` prefixes the rendezvous keys of this engine, so that a
    job can connect its ranks more than once. ``label`` prefixes the messages of failed operations. Ranks with the same
    ``host_key`` try to share memory. ``bind_hosts`` are the local addresses that this rank's sockets bind and publish,
    the preferred address first. Ranks that differ in a value of ``common_settings`` do not connect. A peer whose host
    does not respond for ``host_timeout`` seconds is lost. If ``answer_timeout`` is set, the constructor fails once it
    has dialed a peer for so many seconds that does not answer at all; see ``answer_limit`` in core/transport/mesh.h.

    The following parameters must be equal on all ranks. ``encrypt`` encrypts the TCP links and needs OpenSSL on all
    hosts. ``link_gbits`` and ``link_latency_us`` are the costs by which algorithms between hosts are chosen.
    ``hierarchical_allreduce`` and ``hierarchical_allgather`` set whether these operations use shared memory when the
    ranks are on several hosts.

    ``processor_core`` is the core for the engine's thread; None allows any core. ``autotune`` tunes
    ``fusion_threshold`` and ``hierarchical_allreduce`` if they are None, and the sizes at which algorithms in shared
    memory change. ``device_libraries`` (the same object for all engines of a process) allows buffers in the memory of
    CUDA devices. ``shares_device`` states that other engines use the same devices, so that all engines launch their
    collectives in one order. The engine records into the timeline of ``parent``, where the names of its tensors begin
    with ``timeline_label``. ``parent_ranks`` are the parent's numbers of its ranks: if these share memory, the links of
    the engine are memory, too.
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
        host_timeout: float = 30.0,
        answer_timeout: float | None = None,
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
        parent: Engine | None = None,
        parent_ranks: Sequence[int] = ...,
        timeline_label: str = "",
    ) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    # Buffers are addresses of contiguous memory. The Operation holds a reference to `keep_alive`. `dtype` is one of
    # bool, uint8, int8, uint16, int16, int32, int64, float16, bfloat16, float32 and float64. `op` is one of sum,
    # average, min, max, product and adasum. `source` and `target` may be the same address. Each rank's value is
    # multiplied by `prescale` before the reduction, and the result by `postscale` after it. `prescale` may differ among
    # ranks and from call to call, even for a cached operation. Name, shape, dtype, op and `postscale` must be equal on
    # all ranks.
    # With `with_waiter`, the operation may begin only once a thread waits for it, and may then run on that thread.
    # `device` requires an engine with DeviceLibraries. It means that the buffers are in the memory of that device. Such
    # an operation is done once its work is enqueued on the device. `let_wait` makes a stream wait for the work. The
    # caller applies both factors to device memory, and the engine only compares `postscale`.
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
    # Divides the first dimension among the ranks. If it does not divide evenly, the first ranks get one row more.
    # `target` receives this rank's part and must not overlap `source`.
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
    # `splits` holds the number of rows of the first dimension for each rank.
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
    # The tensors of a group run together. If the ranks disagree about one tensor, all tensors of the group fail.
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
        """Contribute nothing to the operations of other ranks until all ranks have joined.

        ``device`` is this rank's device for operations in device memory.
        """

    def has_direct_calls(self) -> bool:
        """Return whether ``allreduce_now`` works: all ranks must share memory."""

    def allreduce_now(self, source: NDArray[np.generic], target: NDArray[np.generic], op: str) -> None:
        """Reduce on the calling thread without negotiation. Every rank must make the same calls in the same order.

        The arrays must be contiguous and of a dtype that the buffer protocol supports. Fail with ``mismatch`` on all
        ranks if their calls differ. Any other failure ends the engine, and so does an interruption. Invalid arguments
        fail with ``invalid_argument`` before the call begins.
        """

    def tuning(self) -> dict[str, int]:
        """Return the settings in force on all ranks, and in ``searching`` whether they may still change (1 or 0).

        The settings are ``fusion_threshold``, ``small_allreduce``, ``allreduce_chunk`` and ``hierarchical_allreduce``.
        """

    def close_copies(self) -> None:
        """Close a forked child's copies of the links. Do nothing in the rank's own process.

        A forked child may call no other method.
        """

    def counters(self) -> dict[str, int]:
        """Return monotonic counts by name.

        The counts are ``operations``, ``bytes``, ``cycles``, ``cache_hits``, ``fused_buffers``, ``hierarchical``
        (allreduces, allgathers and broadcasts that used shared memory inside hosts and links between them) and
        ``on_device``. ``negotiation_us`` and ``collective_us`` are the engine's time by phase. ``fusion_copy_us`` is
        the part of ``collective_us`` for copies. ``queue_us`` is a sum over operations. Every kind that has run has
        its own counts, such as ``allreduce.operations`` and ``allreduce.bytes``.
        """

    def pending(self) -> list[tuple[str, float]]:
        """Return the submitted operations that are not done, as ``("allreduce 'grad/7'", seconds)``, oldest first."""

    def start_timeline(self, path: str, recording: str, mark_cycles: bool) -> None:
        """Record into ``path``, together with the other ranks of this host that pass the same ``recording``."""

    def stop_timeline(self) -> None:
        """Write the rest of the recording and end it. Do nothing if no recording is running."""

    def local_ranks(self) -> list[int]:
        """Return this rank and the ranks that share memory with it. Return only this rank if sharing failed."""

    def host_ranks(self) -> list[int]:
        """Return the ranks with the same ``host_key`` as this rank, including this rank."""

    def abort(self, why: str) -> None:
        """End every pending and future operation, here and on all peers, with the code ``aborted`` and ``why``."""

    def shutdown(self, timeout_s: float) -> None:
        """Leave the job. Pending operations fail with ``shut_down``; peers that need this rank get ``peer_lost``."""
