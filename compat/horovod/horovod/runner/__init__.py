"""``horovod.run``: runs a function on this machine or on other hosts without Spark, also as an elastic job."""

from __future__ import annotations

import socket
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sparkhvd
from sparkhvd.driver.elastic.discovery import DiscoveryScript
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
    host_discovery_script: str | None = None,
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
    network_interfaces: Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Run ``func`` in ``num_proc`` processes and return its results, ordered by rank.

    ``sparkhvd.run`` runs the function. With ``min_num_proc``, ``max_num_proc`` or ``host_discovery_script``,
    ``sparkhvd.run_elastic`` runs it on the slots of the hosts. ``disable_cache`` has no effect: there is no cache of
    checks.

    Raises:
        ValueError: arguments contradict each other.
        NotImplementedError: the arguments request mpirun.
    """
    if slots is not None and host_discovery_script is None:
        raise ValueError("slots is for hosts that a script prints. Set host_discovery_script, too.")
    discovery = None if host_discovery_script is None else DiscoveryScript(host_discovery_script, slots or 1)
    min_ranks = min_np if min_num_proc is None else min_num_proc
    max_ranks = max_np if max_num_proc is None else max_num_proc
    is_elastic = discovery is not None or min_ranks is not None or max_ranks is not None
    if not is_elastic and (reset_limit is not None or cooldown_range is not None):
        raise ValueError("reset_limit and cooldown_range are for elastic jobs. Set min_num_proc or max_num_proc, too.")
    if use_gloo and use_mpi:
        raise ValueError("use_gloo and use_mpi are both set. Leave both out.")
    if use_mpi or mpi_args:
        raise NotImplementedError(
            "horovod.run does not start mpirun here. Leave out use_mpi and mpi_args, or run `horovodrun --mpi`."
        )
    sources = {"hosts": hosts, "hostfile": hostfile, "host_discovery_script": host_discovery_script}
    if len(names := [name for name, value in sources.items() if value is not None]) > 1:
        raise ValueError(f"{' and '.join(names)} are both set. Pass one of them.")
    if np is not None:
        warnings.warn("np is deprecated; pass num_proc.", DeprecationWarning, stacklevel=2)
        num_proc = np if num_proc == 1 else num_proc
    all_hosts = parse_hostfile(Path(hostfile).read_text()) if hostfile else parse_hosts(hosts) if hosts else ()
    on_hosts = discovery is not None or any(host.name not in _THIS_HOST for host in all_hosts)
    num_proc = max(num_proc, min_ranks or 1)
    if all_hosts:
        take_slots(all_hosts, num_proc)  # refuses more ranks than slots
    if is_elastic and all_hosts and not on_hosts:
        max_ranks = min(max_ranks or sys.maxsize, sum(host.slots for host in all_hosts))
    nics = network_interface.split(",") if network_interface else network_interfaces
    launch_options: dict[str, Any] = {
        "verbose": 2 if verbose else 1,
        "nics": nics if on_hosts else None,
        "executable": executable,
        "launcher": "ssh" if on_hosts else "local",
        "hosts": ",".join(host.text for host in all_hosts) if on_hosts and all_hosts else None,
        "ssh_port": ssh_port if on_hosts else None,
        "ssh_identity_file": ssh_identity_file if on_hosts else None,
        "output_filename": output_filename,
    }
    if not is_elastic:
        return sparkhvd.run(func, args, kwargs, num_proc, start_timeout, **launch_options)
    elastic_options = {"reset_limit": reset_limit, "cooldown_range": cooldown_range, "discovery": discovery}
    return sparkhvd.run_elastic(
        func, args, kwargs, num_proc, min_ranks, max_ranks, start_timeout, **elastic_options, **launch_options
    )
