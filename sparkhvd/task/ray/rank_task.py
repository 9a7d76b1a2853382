"""The Ray actor of one rank: it starts the worker process, supervises it and reports to the driver."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import ray

from sparkhvd._util.addresses import address_to_bind
from sparkhvd.comm.connect.rendezvous import RendezvousServer
from sparkhvd.config import visible_devices
from sparkhvd.deadline import Deadline
from sparkhvd.errors import LaunchError, RankFailedError, SparkHvdError
from sparkhvd.rpc.interfaces import candidates
from sparkhvd.rpc.protection import require_encryption
from sparkhvd.rpc.registration import TaskOffer
from sparkhvd.task.devices import device_kind, write_device_map
from sparkhvd.task.host.host_hash import host_hash
from sparkhvd.task.host.messages import HostDone, HostLost, HostReady
from sparkhvd.task.host.ranks import run_ranks
from sparkhvd.task.host.versions import local_versions
from sparkhvd.task.job import Job
from sparkhvd.task.rank import JobPlan, worker_spec
from sparkhvd.task.ray.cleanup import Cleanup
from sparkhvd.task.ray.commands import CommandChannel, PickledResult
from sparkhvd.task.ray.messages import Node, RankPart, RankPhase
from sparkhvd.task.ray.outbox import Outbox
from sparkhvd.task.supervision import Outcome
from sparkhvd.task.worker.output import HandlerLog
from sparkhvd.task.worker.process import WorkerProcess, not_started, spawn_worker
from sparkhvd.task.worker.threads import thread_defaults

# Each group has a thread of its own. Ray starts the methods of a group in the order of their calls.
CONCURRENCY_GROUPS = {"messages": 1, "commands": 1}
# How long a call of ``messages`` waits for the first message.
_FETCH_SECONDS = 60.0
# How long to wait for the supervision to end once the rank has ended or ``end`` was called.
_END_SECONDS = 15.0


class RankTask:
    """One rank. The driver calls ``node``, ``prepare``, ``start`` and ``end``, and polls ``messages``."""

    def __init__(self) -> None:
        self._outbox = Outbox()
        self._stack = ExitStack()
        self._ended = threading.Event()
        self._outcome: Outcome | None = None  # written before _ended is set
        self._thread: threading.Thread | None = None
        self._channel: CommandChannel | None = None

    def node(self) -> Node:
        """Return the node of this actor. The result also shows that the actor runs."""
        return Node(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())

    def prepare(self, job: Job, part: RankPart) -> HostReady | HostLost:
        """Start the worker process, and return how to reach its rank."""
        try:
            return self._prepare(job, part)
        except (SparkHvdError, OSError) as error:
            return HostLost(str(error))

    def _prepare(self, job: Job, part: RankPart) -> HostReady:
        self._job, self._part = job, part
        self._deadline = Deadline.after(job.start_timeout)
        host = part.nodes[part.index]
        if job.config.encrypt:
            require_encryption(host)
        address = candidates(job.nics, host, part.nodes)[0].address if job.nics else address_to_bind(host, part.nodes)
        port = 0
        if part.index == 0:
            server = RendezvousServer(part.token, address, encrypt=job.config.encrypt)
            self._stack.callback(server.close)
            port = server.port
        self._log = HandlerLog(self._outbox.put, job.num_proc)
        try:
            spawned = spawn_worker(dict(job.env), thread_defaults(part.cpus), job.preload, job.executable)
        except OSError as error:
            raise LaunchError(f"A rank {not_started(job.executable, str(error.strerror))}.") from error
        self._worker = WorkerProcess(spawned, self._log)
        self._stack.callback(self._worker.close)
        self._stack.callback(Cleanup(self._worker.pid, spawned.scratch).close)
        self._stack.callback(self._worker.close)  # runs first: the worker must end before Cleanup.close
        context = ray.get_runtime_context()
        # Ray's GPU ids are names from the CUDA_VISIBLE_DEVICES with which the node was started.
        devices = tuple(context.get_accelerator_ids().get("GPU", ()))
        offer = TaskOffer(
            part.index,
            host_hash(context.get_node_id()),
            host,
            address,
            devices,
            device_kind(devices, visible_devices()),
            local_versions(job.versions),
        )
        return HostReady((offer,), port)

    def start(self, plan: JobPlan) -> None:
        """Send the rank its spec, and supervise it in the background."""
        slot = next(slot for slot in plan.slots if slot.offer.task_index == self._part.index)
        rank = slot.world.rank
        self._log.rank = rank
        self._worker.output.start()
        if rank == 0:
            write_device_map(plan.slots, self._log)
        if self._part.takes_commands:
            self._channel = CommandChannel(self._part.token, rank)
        self._worker.send(worker_spec(self._job, plan, slot))
        self._thread = threading.Thread(target=self._supervise, args=(plan, rank), name="sparkhvd-rank", daemon=True)
        self._thread.start()

    def _supervise(self, plan: JobPlan, rank: int) -> None:
        def report_phase(_: int, phase: str) -> None:
            self._outbox.put(RankPhase(phase))

        end: HostDone | HostLost
        try:
            contents = run_ranks(plan, {rank: self._worker}, self._deadline, parent=0, report_phase=report_phase)
            content = contents[rank]
            self._outcome = content if isinstance(content, Outcome) else None
            end = HostDone(contents)
        except (SparkHvdError, OSError) as error:
            end = HostLost(str(error))
        self._ended.set()
        if self._channel is not None:
            self._channel.close()
        self._outbox.put(end)

    @ray.method(concurrency_group="messages")  # type: ignore[untyped-decorator]
    def messages(self) -> list[object]:
        """Return the messages of the rank since the last call; wait for at least one, but not longer than a minute."""
        return self._outbox.take(Deadline.after(_FETCH_SECONDS))

    @ray.method(concurrency_group="commands")  # type: ignore[untyped-decorator]
    def execute(self, command: bytes) -> PickledResult | None:
        """Let the rank run a command of a ``RayExecutor``, and return the result.

        Raises:
            RankFailedError: this rank or another one failed.
            LaunchError: the rank has ended for another reason.
        """
        if self._channel is None:
            raise LaunchError("This rank takes no commands.")
        try:
            return self._channel.execute(command, self._deadline)
        except (SparkHvdError, OSError) as error:
            self._ended.wait(_END_SECONDS)
            raise self._failure(error) from None

    def _failure(self, error: Exception) -> LaunchError:
        failure = self._outcome.failure if self._outcome is not None else None
        advice = "Call start() of the RayExecutor again."
        if failure is None:
            return LaunchError(f"The rank of this actor has ended ({str(error).rstrip('.')}). {advice}")
        trace = f"\n\nTraceback of rank {failure.rank}:\n{failure.traceback}" if failure.traceback else ""
        message = f"{failure.sentence().removesuffix('.')}. {advice}{trace}"
        return RankFailedError(message, rank=failure.rank, host=failure.host, remote_traceback=failure.traceback)

    def end(self) -> None:
        """End the rank if it still runs, and close everything."""
        self._outbox.close()
        if self._channel is not None:
            self._channel.close()
        self._stack.close()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)
