"""``sparkhvdrun``: runs a program once per rank, without Spark."""

from __future__ import annotations

import argparse
import logging
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from sparkhvd._util.addresses import is_ipv6
from sparkhvd._util.counts import counted
from sparkhvd.cli.check_build import check_build
from sparkhvd.cli.flags import FOR_ELASTIC, MPI_ARGS, STARTS_ELASTIC, parser
from sparkhvd.cli.settings import notices, read_file, variables
from sparkhvd.config import batch_variables, environment_for_hosts, export, from_environment, variable_of
from sparkhvd.driver.arguments import RunOptions, check_counts, check_options, split_arguments
from sparkhvd.driver.batch_systems import find_allocation
from sparkhvd.driver.elastic.discovery import Discovery, DiscoveryScript
from sparkhvd.driver.elastic.run import DEFAULT_COMMIT_INTERVAL, ElasticOptions, run_elastic_with
from sparkhvd.driver.host_process import SrunOptions, SshOptions, is_this_machine
from sparkhvd.driver.hosts import Host, parse_hostfile, parse_hosts, take_slots
from sparkhvd.driver.launcher import LaunchRequest
from sparkhvd.driver.mpi.command import COMPONENTS, find_mpirun, interface_parameters, is_root, parameters_of
from sparkhvd.driver.run import run_with
from sparkhvd.errors import ConfigError, SparkHvdError
from sparkhvd.store import Store
from sparkhvd.task.worker.command import run_command
from sparkhvd.task.worker.exit import keep_ended_children

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The time that mpirun may take to end its ranks.
_MPIRUN_SECONDS = 10
_OPEN_MPI_PREFIXES = ("OMPI_", "ORTE_", "PMIX_", "PRTE_")
# Ends mpirun when its own stdin is closed, even by the death of this process.
_END_WITH_STDIN = (
    'cat; kill -TERM "$0"; n=0; while kill -0 "$0" && [ $n -lt "$1" ]; do sleep 1; n=$((n+1)); done; kill -KILL "-$0"'
)


class EndedBySignal(KeyboardInterrupt):
    """A signal ends this program; ``number`` is the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number


@contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Raise ``EndedBySignal`` on SIGINT, SIGTERM and SIGHUP within this block.

    SIGINT is handled even if it was ignored at the start: a shell starts background jobs that way, and Python then
    installs no handler. An ignored SIGHUP stays ignored, because the user asked for it (``nohup``).
    """

    def end(number: int, _frame: FrameType | None) -> None:
        raise EndedBySignal(number)

    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    previous = {number: signal.signal(number, end) for number in _ENDING_SIGNALS if number not in ignored}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program of the command line; return the exit code, which is 0 if all ranks succeeded.

    A signal that ends this program ends the ranks, too; the exit code is then 128 plus its number.
    """
    keep_ended_children()
    command_line = parser()
    flags = command_line.parse(arguments)
    if flags.check_build:
        sys.stdout.write(check_build() + "\n")
        return 0
    command = flags.command[1:] if flags.command[:1] == ["--"] else flags.command
    if not command:
        command_line.error("missing the program to run, for example: sparkhvdrun -np 2 python train.py")
    logging.basicConfig(stream=sys.stderr, format="sparkhvdrun: %(message)s")
    try:
        with _ending_on_signals():
            return _run_command_line(flags, command)
    except SparkHvdError as error:
        sys.stderr.write(f"sparkhvdrun: {error}\n")
        return 1
    except EndedBySignal as ended:
        return 128 + ended.number


def _run_command_line(flags: argparse.Namespace, command: Sequence[str]) -> int:
    file = read_file(flags.config_file)
    settings = variables(flags, file)
    flags.mpi_args = flags.mpi_args or str(file.get(MPI_ARGS[0], {}).get(MPI_ARGS[1]) or "")
    hosts, access = _hosts(flags)
    if not hosts and flags.timeline_filename and not Path(flags.timeline_filename).absolute().parent.is_dir():
        raise ConfigError(f"--timeline-filename {flags.timeline_filename}: its folder does not exist. Create it first.")
    by_mpi = flags.mpi or (file.get("controller", {}).get("name") == "mpi" and not flags.gloo)
    elastic = _elastic(flags, hosts, access)
    if elastic is not None and by_mpi:
        raise ConfigError("mpirun cannot start an elastic job, whose ranks come and go. Leave out --mpi.")
    launcher = "mpi" if by_mpi else elastic.launcher if elastic is not None else "ssh" if hosts else "local"
    on_hosts = bool(hosts) or flags.host_discovery_script is not None
    for line in notices(flags, settings, launcher, on_hosts=on_hosts):
        sys.stderr.write(f"sparkhvdrun: {line}\n")
    if by_mpi and flags.start_timeout is not None:  # for hvd.init(); mpirun itself has no such limit
        settings[variable_of("start_timeout")] = str(flags.start_timeout)
    if by_mpi and flags.nics:  # for the collectives; mpirun's parameters configure Open MPI's own connections
        settings[variable_of("network_interfaces")] = ",".join(flags.nics)
    export(settings)
    options = RunOptions(
        start_timeout=flags.start_timeout,
        nics=tuple(flags.nics) if launcher == "ssh" else (),
        verbose=2 if flags.verbose else 1,
        prefix_output_with_timestamp=flags.prefix_output_with_timestamp,
        output_filename=flags.output_filename,
    )
    if by_mpi:
        check_counts(flags.num_proc)
        check_options(options, launcher)
        from_environment()  # rejects settings that the ranks could not read
        return _run_by_mpi(flags, hosts, command)
    for flag in ("mpi_args", "binding_args"):
        if getattr(flags, flag):
            raise ConfigError(f"--{flag.replace('_', '-')} is for mpirun. Pass --mpi, too.")
    if elastic is not None:
        run_elastic_with(elastic, options, run_command, (tuple(command),))
        return 0
    request = LaunchRequest(num_proc=flags.num_proc, hosts=hosts, access=access)
    run_with(request, launcher, options, run_command, (tuple(command),))
    return 0


def _elastic(
    flags: argparse.Namespace, hosts: tuple[Host, ...], access: SshOptions | SrunOptions
) -> ElasticOptions | None:
    """Return the options of an elastic job; None for other jobs."""
    passed = [flag for name, flag in FOR_ELASTIC.items() if getattr(flags, name) is not None]
    if not passed:
        return None
    if all(getattr(flags, name) is None for name in STARTS_ELASTIC):
        raise ConfigError(f"{passed[0]} is for elastic jobs. Pass --min-np or --host-discovery-script, too.")
    slots = 1 if flags.slots_per_host is None else flags.slots_per_host
    if slots < 1:
        raise ConfigError(f"--slots-per-host must be at least 1, got {slots}.")
    discovery: Discovery | None = None
    if flags.host_discovery_script is not None:
        if flags.hosts is not None or flags.hostfile is not None:
            raise ConfigError("--host-discovery-script and a list of hosts contradict each other. Pass one of them.")
        discovery, hosts = DiscoveryScript(flags.host_discovery_script, slots), ()
    return ElasticOptions(
        num_proc=flags.num_proc,
        min_num_proc=flags.min_num_proc,
        max_num_proc=flags.max_num_proc,
        elastic_timeout=flags.elastic_timeout,
        reset_limit=flags.reset_limit,
        cooldown_range=None if flags.cooldown_range is None else tuple(flags.cooldown_range),
        max_restarts=flags.max_restarts,
        store=None if flags.store is None else Store.create(flags.store),
        commit_interval=DEFAULT_COMMIT_INTERVAL if flags.commit_interval is None else flags.commit_interval,
        discovery=discovery,
        launcher="ssh" if hosts or discovery is not None else "local",
        hosts=hosts,
        access=access,
    )


def _hosts(flags: argparse.Namespace) -> tuple[tuple[Host, ...], SshOptions | SrunOptions]:
    """Return the hosts to use, and how to reach them; no hosts if only this machine is used."""
    ssh = SshOptions(flags.ssh_port, flags.ssh_identity_file)
    if flags.hostfile is not None:
        try:
            return parse_hostfile(Path(flags.hostfile).read_text("utf-8")), ssh
        except OSError as error:
            raise ConfigError(f"--hostfile {flags.hostfile} cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"--hostfile {flags.hostfile} is not a text file in UTF-8: {error}.") from error
    if flags.hosts is not None:
        return parse_hosts(flags.hosts), ssh
    variables = batch_variables()
    allocation = find_allocation(variables)
    own_name = variables.get("SLURMD_NODENAME")  # may be shorter than the host name
    if allocation is None:
        return (), ssh
    if all(host.name == own_name or is_this_machine(host.name) for host in allocation.hosts):
        if flags.num_proc is None and all(getattr(flags, name) is None for name in STARTS_ELASTIC):
            flags.num_proc = sum(host.slots for host in allocation.hosts)
            sys.stderr.write(f"sparkhvdrun: {allocation.job} has {counted(flags.num_proc, 'task')} on this machine\n")
        return (), ssh
    shown = ",".join(host.text for host in allocation.hosts)
    sys.stderr.write(f"sparkhvdrun: {allocation.job} has the hosts {shown}\n")
    if allocation.slurm_id is None or ssh != SshOptions():
        return allocation.hosts, ssh
    return allocation.hosts, SrunOptions(allocation.slurm_id)


def _run_by_mpi(flags: argparse.Namespace, hosts: tuple[Host, ...], command: Sequence[str]) -> int:
    """Run the program with ``mpirun`` alone: it starts the ranks, and ``hvd.init()`` gets their ranks from MPI."""
    line = [find_mpirun(with_orted=False), *mpirun_words(flags, hosts, environment_for_hosts(), is_root()), *command]
    if flags.verbose:
        sys.stderr.write(f"sparkhvdrun: {shlex.join(line)}\n")
    # mpirun gets its own session. So a signal reaches it only once, through this process, and mpirun can end its
    # ranks.
    with subprocess.Popen(line, start_new_session=True) as mpirun:
        try:
            with _ended_with_this_process(mpirun):
                return mpirun.wait()
        finally:
            if mpirun.poll() is None:
                _end_mpirun(mpirun)


@contextmanager
def _ended_with_this_process(mpirun: subprocess.Popen[bytes]) -> Iterator[None]:
    """End ``mpirun`` and its ranks even if this process is killed within this block."""
    with subprocess.Popen(
        ["/bin/sh", "-c", _END_WITH_STDIN, str(mpirun.pid), str(_MPIRUN_SECONDS)],
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as watcher:
        try:
            yield
        finally:
            watcher.kill()


def _end_mpirun(mpirun: subprocess.Popen[bytes]) -> None:
    mpirun.terminate()
    try:
        mpirun.wait(_MPIRUN_SECONDS)
    except subprocess.TimeoutExpired:
        mpirun.kill()


def mpirun_words(
    flags: argparse.Namespace, hosts: tuple[Host, ...], environment: Mapping[str, str], root: bool
) -> list[str]:
    """Return the arguments of ``mpirun`` for these flags.

    Args:
        flags: flags of the command line.
        hosts: the hosts to use; empty means this machine.
        environment: variables that the ranks get on all hosts; Open MPI forwards its own variables itself.
        root: whether this process runs as root.
    """
    used_hosts = take_slots(hosts, flags.num_proc) if hosts else ()
    count = sum(host.slots for host in used_hosts) or flags.num_proc
    ssh = [f"-p {flags.ssh_port}"] if flags.ssh_port is not None else []
    if flags.ssh_identity_file is not None:
        if " " in flags.ssh_identity_file:
            raise ConfigError(
                f"--ssh-identity-file={flags.ssh_identity_file!r} contains a space, at which mpirun would split it. "
                "Pass the path of a link without spaces, or leave out --mpi."
            )
        ssh.append(f"-i {flags.ssh_identity_file}")
    mpi_arguments = split_arguments("--mpi-args", flags.mpi_args)
    interfaces = (
        interface_parameters(",".join(flags.nics), parameters_of(mpi_arguments, environment)) if flags.nics else {}
    )
    names = [name for name in environment if not name.startswith(_OPEN_MPI_PREFIXES)]
    if addresses := [host.name for host in used_hosts if is_ipv6(host.name)]:
        raise ConfigError(
            f"mpirun takes no IPv6 address for a host, got {addresses[0]}. Give the host a name (/etc/hosts), or leave "
            "out --mpi."
        )
    host_list = ",".join(host.text for host in used_hosts) or f"{socket.gethostname()}:{count}"
    return [
        *(["--allow-run-as-root"] if root else []),
        *(["-np", str(count), "-H", host_list] if count is not None else []),
        *(split_arguments("--binding-args", flags.binding_args) or ["--bind-to", "none", "--map-by", "slot"]),
        *(word for name, value in COMPONENTS.items() for word in ("-mca", name, value)),
        *(["-mca", "plm_rsh_args", " ".join(ssh)] if ssh else []),
        *(word for name, value in interfaces.items() for word in ("-mca", name, value)),
        # "nojobid" omits the subfolder for the job, as the other launchers do.
        *(["--output-filename", f"{flags.output_filename}:nojobid"] if flags.output_filename else []),
        *(["--timestamp-output"] if flags.prefix_output_with_timestamp else []),
        "--tag-output",
        *(word for name in names for word in ("-x", name)),
        *mpi_arguments,
    ]


if __name__ == "__main__":
    sys.exit(main())
