"""``horovod.run``: runs a function on this machine or on other hosts without Spark, also as an elastic job."""

from __future__ import annotations

import socket
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sparkhvd
from sparkhvd.driver.hosts import parse_hostfile, parse_hosts, take_slots

__all__ = ["run"]

_THIS_HOST = frozenset({"localhost", "127.0.0.1", "::1", socket.gethostname()})


def run(  # noqa: PLR0917  the arguments are Horovod's
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Any = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,  # noqa: ARG001
    output_filename: str | None = None,
    verbose: bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    network_interfaces: Sequence[str] | None = None,
) -> list[Any]:
    """Run ``func`` in ``num_proc`` processes and return its results, ordered by rank.

    ``sparkhvd.run`` runs the function. With ``min_num_proc`` or ``max_num_proc``, ``sparkhvd.run_elastic`` runs it on
    the slots of the hosts. ``disable_cache`` has no effect: there is no cache of checks.

    Raises:
        ValueError: arguments contradict each other.
        NotImplementedError: the arguments request mpirun, or hosts that a script prints.
    """
    if slots is not None:
        raise NotImplementedError(
            "slots is for hosts that a script prints, which horovod.run cannot take. Pass hosts='host1:2,host2:2', or "
            "run `horovodrun --host-discovery-script`."
        )
    min_ranks = min_np if min_num_proc is None else min_num_proc
    max_ranks = max_np if max_num_proc is None else max_num_proc
    is_elastic = min_ranks is not None or max_ranks is not None
    if not is_elastic and (reset_limit is not None or cooldown_range is not None):
        raise ValueError("reset_limit and cooldown_range are for elastic jobs. Set min_num_proc or max_num_proc, too.")
    if use_gloo and use_mpi:
        raise ValueError("use_gloo and use_mpi are both set. Leave both out.")
    if use_mpi or mpi_args:
        raise NotImplementedError(
            "horovod.run does not start mpirun here. Leave out use_mpi and mpi_args, or run `horovodrun --mpi`."
        )
    if hosts is not None and hostfile is not None:
        raise ValueError("hosts and hostfile are both set. Pass one of them.")
    if np is not None:
        warnings.warn("np is deprecated; pass num_proc.", DeprecationWarning, stacklevel=2)
        num_proc = np if num_proc == 1 else num_proc
    all_hosts = parse_hostfile(Path(hostfile).read_text()) if hostfile else parse_hosts(hosts) if hosts else ()
    remote = [host for host in all_hosts if host.name not in _THIS_HOST]
    num_proc = max(num_proc, min_ranks or 1)
    if all_hosts:
        take_slots(all_hosts, num_proc)  # refuses more ranks than slots
    if is_elastic and all_hosts and not remote:
        max_ranks = min(max_ranks or sys.maxsize, sum(host.slots for host in all_hosts))
    nics = network_interface.split(",") if network_interface else network_interfaces
    launch_options: dict[str, Any] = {
        "verbose": 2 if verbose else 1,
        "nics": nics if remote else None,
        "executable": executable,
        "launcher": "ssh" if remote else "local",
        "hosts": ",".join(host.text for host in all_hosts) if remote else None,
        "ssh_port": ssh_port if remote else None,
        "ssh_identity_file": ssh_identity_file if remote else None,
        "output_filename": output_filename,
    }
    if not is_elastic:
        return sparkhvd.run(func, args, kwargs, num_proc, start_timeout, **launch_options)
    elastic_options = {"reset_limit": reset_limit, "cooldown_range": cooldown_range}
    return sparkhvd.run_elastic(
        func, args, kwargs, num_proc, min_ranks, max_ranks, start_timeout, **elastic_options, **launch_options
    )
