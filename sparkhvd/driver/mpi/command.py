"""The command line of ``mpirun``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Container, Mapping, Sequence
from itertools import pairwise

from sparkhvd.driver.mpi.service import MpiHost
from sparkhvd.errors import LaunchError
from sparkhvd.task.mpi.job import RANK_COMMAND

_VERSION_SECONDS = 20.0
_AGENT = "sparkhvd.driver.mpi.remote_shell"
_LAST_WITH_ORTED = 4
# A parameter as a variable.
_VARIABLE = "OMPI_MCA_"


def find_mpirun(*, with_orted: bool = True) -> str:
    """The path of Open MPI's ``mpirun`` on this machine.

    Args:
        with_orted: whether it has to start hosts by ``orted``, as Open MPI does up to version 4.

    Raises:
        LaunchError: there is none, or it is another MPI's, or of a version that starts hosts otherwise.
    """
    path = shutil.which("mpirun")
    if path is None:
        raise LaunchError(
            "mpirun was not found on the driver's PATH. Install Open MPI 4 on the driver and on every node (Debian: "
            "openmpi-bin), or use launcher='barrier', which needs no MPI."
        )
    try:
        said = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} --version did not work: {error}.") from error
    if "Open MPI" not in said.stdout:
        first = next(iter((said.stdout + said.stderr).splitlines()), "nothing")
        raise LaunchError(f"{path} is not Open MPI's; it calls itself {first!r}. The mpi launcher needs Open MPI 4.")
    version = re.search(r"Open MPI\) v?(\d+)\S*", said.stdout)
    if with_orted and version is not None and int(version[1]) > _LAST_WITH_ORTED:
        raise LaunchError(
            f"{path} is of {version[0].replace(')', '')}, which starts the hosts by prted. The mpi launcher needs the "
            "orted of Open MPI 4: install version 4.1 and put it first on the PATH of driver and executors, or use "
            "launcher='barrier', which needs no MPI."
        )
    return path


def parameters_of(arguments: Sequence[str], environment: Mapping[str, str]) -> set[str]:
    """The names of Open MPI's parameters that arguments of ``mpirun`` or variables set."""
    by_variables = {name.removeprefix(_VARIABLE) for name in environment if name.startswith(_VARIABLE)}
    return by_variables | {name for word, name in pairwise(arguments) if word.lstrip("-") in {"mca", "gmca"}}


def interface_parameters(interfaces: str, given: Container[str]) -> dict[str, str]:
    """The parameters that keep Open MPI's own connections to some interfaces or networks.

    Args:
        interfaces: with commas between them.
        given: names of parameters that are set already. Open MPI refuses a list of what to use beside one of what
            not to use, so where it has got either, that one holds.
    """
    return {
        f"{component}_tcp_if_include": interfaces
        for component in ("oob", "btl")
        if not any(f"{component}_tcp_if_{which}" in given for which in ("include", "exclude"))
    }


def network_parameter(interface: str, network: str) -> str:
    """Return how Open MPI's parameters name the network of an address: it reads networks of IPv4 only."""
    return interface if ":" in network else network


def mpirun_settings(hosts: Sequence[MpiHost], networks: Sequence[str], given: Container[str]) -> dict[str, str]:
    """Parameters of Open MPI for ``mpirun``'s environment, where the user's arguments can still change them.

    Args:
        hosts: of the job.
        networks: networks or interfaces over which tasks and driver reach each other, for Open MPI's connections.
        given: names of the parameters that the user has set.
    """
    settings = {
        "plm": "rsh",
        "plm_rsh_agent": f"{sys.executable} -m {_AGENT}",
        # Without the tree every orted is started from here; attached, so that the agent lives as long as it does.
        "plm_rsh_no_tree_spawn": "true",
        "orte_leave_session_attached": "true",
        # An attached agent counts as starting; all have to be there at the same time.
        "plm_rsh_num_concurrent": str(max(128, len(hosts))),
        **interface_parameters(",".join(dict.fromkeys(networks)), given),
    }
    return {f"{_VARIABLE}{name}": value for name, value in settings.items()}


def mpirun_defaults() -> dict[str, str]:
    """Parameters of Open MPI that hold where the user's environment says nothing."""
    return {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^openib"}


def mpirun_arguments(hosts: Sequence[MpiHost], extra: Sequence[str], root: bool) -> list[str]:
    """The arguments that make ``mpirun`` start one rank per task.

    Args:
        hosts: in the order of their ranks.
        extra: the user's arguments.
        root: whether this runs as root.
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
