"""The workers of an elastic job on one host without Spark: ``python -m sparkhvd.task.elastic.host``.

The driver starts this process through ssh, through Slurm or directly, like the host processes of jobs with a fixed
number of ranks. The process ends when its stdin closes. It also ends when the driver's host becomes unreachable,
because ssh alone may take hours to notice that.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
from contextlib import ExitStack, suppress
from dataclasses import replace

from sparkhvd._util.addresses import address_to_bind, is_loopback, outgoing_address, with_port
from sparkhvd.config import ssh_client_address
from sparkhvd.deadline import Deadline
from sparkhvd.errors import LaunchError, SparkHvdError
from sparkhvd.rpc.client import Client, connect
from sparkhvd.rpc.interfaces import candidates
from sparkhvd.rpc.messages import EndLease, Message, NextCommand, TaskStatus
from sparkhvd.rpc.protection import require_encryption
from sparkhvd.rpc.registration import TaskOffer
from sparkhvd.task.elastic.commands import DriverLost, carry_out_commands
from sparkhvd.task.elastic.worker import End, RunningWorkers, WorkerLocation
from sparkhvd.task.host.host_hash import host_hash
from sparkhvd.task.host.launcher_connection import LauncherConnection, apply_setup
from sparkhvd.task.host.messages import ElasticHostJob, HostLost, HostReady
from sparkhvd.task.host.versions import local_versions
from sparkhvd.task.supervision import JOB_SECONDS
from sparkhvd.task.worker.exit import keep_ended_children
from sparkhvd.task.worker.output import HandlerLog

# How long the driver may take to accept a connection at one of its addresses.
_REACH_SECONDS = 3.0
# How long workers may take to end after the job, while their exit handlers run, and after the loss of the driver.
END_SECONDS = 20.0
_LOST_SECONDS = 5.0


def main() -> int:
    """Take part in one job; return 0 once the launcher has ended it."""
    keep_ended_children()
    launcher = LauncherConnection()
    job = launcher.receive()
    if not isinstance(job, ElasticHostJob):
        raise TypeError(f"The launcher sent {type(job).__name__} instead of an ElasticHostJob.")
    client_address = ssh_client_address() if job.uses_ssh else ""
    apply_setup(job.setup)
    try:
        lost = _take_part(job, launcher, client_address)
    except (SparkHvdError, OSError) as error:
        launcher.send(HostLost(str(error)))
        return 1
    if lost is not None:
        sys.stderr.write(f"Host {job.host} cannot reach the driver's host any more: {lost.why}\n")
        return 1
    return 0


def _take_part(job: ElasticHostJob, launcher: LauncherConnection, client_address: str) -> DriverLost | None:
    """Carry out the launcher's commands; return None when it has ended the job, or the loss of the driver."""
    if job.job.config.encrypt:
        require_encryption(job.host)
    commands: queue.SimpleQueue[Message | DriverLost] = queue.SimpleQueue()
    with ExitStack() as stack:
        client, driver = _connect(job, client_address)
        stack.callback(client.close)
        client.send(TaskStatus(0, -1, job.host, job.number), Deadline.after(_REACH_SECONDS))
        location = WorkerLocation(host_hash(job.host), job.host, _own_address(job, driver))
        port = job.membership.addresses[0][1]
        workers = RunningWorkers(
            job.job,
            replace(job.membership, addresses=((driver, port),)),
            max(1, len(os.sched_getaffinity(0)) // job.slots),
            lambda: HandlerLog(launcher.send, job.job.num_proc),
            lambda end: _report(launcher, end),
        )
        offer = TaskOffer(
            0, location.host_key, location.host, location.bind_host, versions=local_versions(job.job.versions)
        )
        launcher.send(HostReady((offer,), 0))
        # Both threads are daemons, which end with this process.
        threading.Thread(target=_receive, args=(launcher, commands), name="sparkhvd-commands", daemon=True).start()
        threading.Thread(target=_watch, args=(client, commands), name="sparkhvd-driver-watch", daemon=True).start()
        lost = carry_out_commands(workers, location, commands)
        workers.close(END_SECONDS if lost is None else _LOST_SECONDS)
        return lost


def _connect(job: ElasticHostJob, client_address: str) -> tuple[Client, str]:
    """Return a connection to the driver, and the first of the driver's addresses that answers.

    Raises:
        LaunchError: the driver does not answer at any address.
    """
    port = job.job.driver_addresses[0][1]
    known_hosts = [host for host, _ in job.job.driver_addresses]
    problems = []
    for host in dict.fromkeys([client_address, *known_hosts] if client_address else known_hosts):
        try:
            # The core retries an address at which nothing listens yet. Here, another address may be the right one.
            socket.create_connection((host, port), _REACH_SECONDS).close()
            deadline = Deadline.after(_REACH_SECONDS)
            client = connect([(host, port)], job.job.secret, deadline, encrypt=job.job.config.encrypt)
        except (SparkHvdError, OSError) as error:
            problems.append(f"{with_port(host, port)}: {error}")
        else:
            return client, host
    raise LaunchError(
        f"{job.host} cannot connect to the driver, which elastic jobs need; tried {'; '.join(problems)}. Open the TCP "
        "ports of the driver's host to the hosts of the job."
    )


def _own_address(job: ElasticHostJob, driver: str) -> str:
    """Return the address at which the other hosts reach this host best."""
    if job.job.nics:
        return candidates(job.job.nics, job.host, [])[0].address
    address = address_to_bind(job.host, [driver])
    return outgoing_address(driver) if is_loopback(address) else address  # some hosts map their own name to loopback


def _report(launcher: LauncherConnection, end: End) -> None:
    with suppress(OSError):  # the main thread notices the launcher's end by itself
        launcher.send(end)


def _receive(launcher: LauncherConnection, commands: queue.SimpleQueue[Message | DriverLost]) -> None:
    try:
        while True:
            command = launcher.receive()
            if isinstance(command, Message):
                commands.put(command)
    except (EOFError, OSError):
        commands.put(EndLease())


def _watch(client: Client, commands: queue.SimpleQueue[Message | DriverLost]) -> None:
    try:
        client.ask(
            NextCommand(0, 0), Deadline.after(JOB_SECONDS)
        )  # the driver never answers, so this ends only with the connection
    except OSError as error:
        commands.put(DriverLost(str(error)))


if __name__ == "__main__":
    sys.exit(main())
