"""The command line of ``mpirun``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from sparkhvd.driver.mpi.service import MpiHost
from sparkhvd.errors import LaunchError
from sparkhvd.task.mpi.job import RANK_COMMAND

_VERSION_SECONDS = 20.0
_AGENT = "sparkhvd.driver.rsh"


def find_mpirun() -> str:
    """The path of Open MPI's ``mpirun`` on this machine.

    Raises:
        LaunchError: there is none, or it is another MPI's.
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
    return path


def mpirun_settings(hosts: Sequence[MpiHost], networks: Sequence[str]) -> dict[str, str]:
    """Parameters of Open MPI for ``mpirun``'s environment, where the user's arguments can still change them.

    Args:
        hosts: of the job.
        networks: those in which tasks and driver reach each other; Open MPI's own connections keep to them.
    """
    included = ",".join(dict.fromkeys(networks))
    settings = {
        "plm": "rsh",
        "plm_rsh_agent": f"{sys.executable} -m {_AGENT}",
        # Without the tree every orted is started from here; attached, so that the agent lives as long as it does.
        "plm_rsh_no_tree_spawn": "true",
        "orte_leave_session_attached": "true",
        # An attached agent counts as starting; all have to be there at the same time.
        "plm_rsh_num_concurrent": str(max(128, len(hosts))),
        "oob_tcp_if_include": included,
        "btl_tcp_if_include": included,
    }
    return {f"OMPI_MCA_{name}": value for name, value in settings.items()}


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
