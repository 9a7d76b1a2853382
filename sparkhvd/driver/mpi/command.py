"""The command line of ``mpirun``."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Container, Mapping, Sequence
from itertools import pairwise

from sparkhvd.driver.mpi.service import MpiHost
from sparkhvd.errors import LaunchError
from sparkhvd.task.mpi.job import RANK_COMMAND
from sparkhvd.task.worker.import_path import python_module

_VERSION_SECONDS = 20.0
# Open MPI 4 reports its name as OpenRTE if its program is not called mpirun.
_OPEN_MPI = re.compile(r"\((?:Open MPI|OpenRTE)\) v?((\d+)\S*)")
_AGENT = "sparkhvd.driver.mpi.remote_shell"
_LAST_VERSION_WITH_ORTED = 4
# The prefix of the environment variables that set Open MPI's parameters.
_VARIABLE = "OMPI_MCA_"
# Open MPI's components. These use TCP and shared memory: openib and ofi search for faster networks, and ofi ends a rank
# whose network disappears. shmem/posix, which is not the default, first tests whether it could run, and leaves a file
# behind in /dev/shm if the process is killed meanwhile.
COMPONENTS = {"pml": "ob1", "btl": "^openib,ofi", "shmem": "mmap"}


def find_mpirun(*, with_orted: bool = True) -> str:
    """Return the path of Open MPI's ``mpirun`` on this machine.

    If ``mpirun`` belongs to another MPI, return the path of ``mpirun.openmpi``: Debian's name for it next to MPICH.

    Args:
        with_orted: whether this ``mpirun`` must start hosts with ``orted``, as Open MPI does up to version 4.

    Raises:
        LaunchError: ``mpirun`` is missing, belongs to another MPI, or has a version without ``orted``.
    """
    path = shutil.which("mpirun")
    if path is None:
        raise LaunchError(
            "mpirun was not found on the driver's PATH. Install Open MPI 4 on the driver and on every node (Debian: "
            f"openmpi-bin), or {_without_mpi(with_orted)}."
        )
    version = _version_of(path)
    if _OPEN_MPI.search(version) is None and (other := shutil.which("mpirun.openmpi")) is not None:
        path, version = other, _version_of(other)
    number = _OPEN_MPI.search(version)
    if number is None:
        first = next(iter(version.splitlines()), "")
        raise LaunchError(
            f"{path} is not Open MPI's: --version prints {first!r}. Put Open MPI's mpirun first on the PATH, or "
            f"{_without_mpi(with_orted)}."
        )
    if with_orted and int(number[2]) > _LAST_VERSION_WITH_ORTED:
        raise LaunchError(
            f"{path} belongs to Open MPI {number[1]}, which starts hosts with prted. The mpi launcher needs "
            "the orted of Open MPI 4: install version 4.1 and put it first on the PATH of driver and executors, or use "
            "launcher='barrier', which needs no MPI."
        )
    return path


def _version_of(mpirun: str) -> str:
    try:
        output = subprocess.run(
            [mpirun, "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(
            f"{mpirun} --version failed: {error}. Run it on the driver's host to find the cause."
        ) from error
    return output.stdout or output.stderr


def _without_mpi(on_spark: bool) -> str:
    return "use launcher='barrier', which needs no MPI" if on_spark else "leave out --mpi"


def parameters_of(arguments: Sequence[str], environment: Mapping[str, str]) -> set[str]:
    """Return the names of Open MPI's parameters that are set in the arguments of ``mpirun`` or in the environment."""
    by_variables = {name.removeprefix(_VARIABLE) for name in environment if name.startswith(_VARIABLE)}
    return by_variables | {name for word, name in pairwise(arguments) if word.lstrip("-") in {"mca", "gmca"}}


def interface_parameters(interfaces: str, preset: Container[str]) -> dict[str, str]:
    """Return the parameters that restrict Open MPI's own connections to the given interfaces or networks.

    Args:
        interfaces: interfaces or networks, separated by commas.
        preset: names of parameters that are already set. Open MPI rejects an include list together with an exclude
            list, so an existing list of either kind takes precedence.
    """
    return {
        f"{component}_tcp_if_include": interfaces
        for component in ("oob", "btl")
        if not any(f"{component}_tcp_if_{which}" in preset for which in ("include", "exclude"))
    }


def network_parameter(interface: str, network: str) -> str:
    """Return ``network`` for Open MPI's parameters, which accept no IPv6 networks: for those, return ``interface``."""
    return interface if ":" in network else network


def mpirun_settings(hosts: Sequence[MpiHost], networks: Sequence[str], preset: Container[str]) -> dict[str, str]:
    """Return parameters of Open MPI as variables for ``mpirun``, which the user's arguments can override.

    Args:
        hosts: the hosts of the job.
        networks: networks or interfaces that connect the tasks and the driver; Open MPI uses the same ones.
        preset: names of the parameters that the user has set.
    """
    settings = {
        "plm": "rsh",
        # Without the tree, mpirun itself starts every orted. An attached orted keeps its agent alive until it ends.
        "plm_rsh_no_tree_spawn": "true",
        "orte_leave_session_attached": "true",
        # An attached agent counts as starting until it ends, so this limit must allow all agents at once.
        "plm_rsh_num_concurrent": str(max(128, len(hosts))),
        **interface_parameters(",".join(dict.fromkeys(networks)), preset),
    }
    return {f"{_VARIABLE}{name}": value for name, value in settings.items()}


def agent_setting(script: str) -> dict[str, str]:
    """Return the variable that makes ``mpirun`` start hosts with the shell script at a path without spaces.

    Open MPI splits the command at spaces and knows no quotes.
    """
    return {f"{_VARIABLE}plm_rsh_agent": f"/bin/sh {script}"}


def agent_script() -> str:
    """Return the script of the remote shell, which is a program of this Python."""
    return f'exec {shlex.join(python_module("", _AGENT))} "$@"\n'


def mpirun_defaults() -> dict[str, str]:
    """Return sparkhvd's defaults for Open MPI's parameters, as variables that the user's environment overrides."""
    return {f"{_VARIABLE}{name}": value for name, value in COMPONENTS.items()}


def mpirun_arguments(hosts: Sequence[MpiHost], extra: Sequence[str], root: bool) -> list[str]:
    """Return the arguments that make ``mpirun`` start one rank per task.

    Args:
        hosts: the hosts in the order of their ranks.
        extra: further arguments from the user.
        root: whether this process runs as root.
    """
    return [
        *(["--allow-run-as-root"] if root else []),
        *("-np", str(sum(len(host.tasks) for host in hosts))),
        *("-H", ",".join(f"{host.name}:{len(host.tasks)}" for host in hosts)),
        *("--bind-to", "none", "--map-by", "slot"),
        *extra,
        *RANK_COMMAND,
    ]


def is_root() -> bool:
    return os.geteuid() == 0
