"""``horovod.run``: runs a function on this machine or on other hosts without Spark, also as an elastic job."""

from __future__ import annotations

import socket
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sparkhvd
from sparkhvd.driver.elastic.discovery import DiscoveryScript
from sparkhvd.driver.hosts import Host, parse_hostfile, parse_hosts, take_slots

__all__ = ["run"]

_THIS_HOST = frozenset({"localhost", "127.0.0.1", "::1", socket.gethostname()})


class _HorovodArgs(SimpleNamespace):
    """The arguments of ``horovod.runner.launch._run``, which programs set by name.

    They have the names of the arguments of ``run`` or of the flags of ``horovodrun``, with underscores.
    """

    def __init__(self) -> None:
        super().__init__(num_proc=1, command=None, run_func=None)


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
    min_ranks = min_np if min_num_proc is None else min_num_proc
    max_ranks = max_np if max_num_proc is None else max_num_proc
    is_elastic = not (host_discovery_script is None and min_ranks is None and max_ranks is None)
    _check_elastic_arguments(
        is_elastic=is_elastic,
        has_script=host_discovery_script is not None,
        slots=slots,
        changes=(reset_limit, cooldown_range),
    )
    _check_launcher(use_gloo=use_gloo, use_mpi=use_mpi, mpi_args=mpi_args)
    _check_one_source(hosts=hosts, hostfile=hostfile, host_discovery_script=host_discovery_script)
    discovery = None if host_discovery_script is None else DiscoveryScript(host_discovery_script, slots or 1)
    if np is not None:
        warnings.warn("np is deprecated; pass num_proc.", DeprecationWarning, stacklevel=2)
        num_proc = np if num_proc == 1 else num_proc
    num_proc = max(num_proc, min_ranks or 1)
    listed_hosts = _listed_hosts(hosts, hostfile)
    if listed_hosts:
        take_slots(listed_hosts, num_proc)  # refuses more ranks than slots
    uses_ssh = discovery is not None or not _are_here(listed_hosts)
    launch_options: dict[str, Any] = {
        "verbose": 2 if verbose else 1,
        "executable": executable,
        "output_filename": output_filename,
        "launcher": "local",
    }
    if uses_ssh:
        launch_options |= {
            "launcher": "ssh",
            "hosts": ",".join(host.text for host in listed_hosts) or None,
            "nics": network_interface.split(",") if network_interface else network_interfaces,
            "ssh_port": ssh_port,
            "ssh_identity_file": ssh_identity_file,
        }
    if not is_elastic:
        return sparkhvd.run(func, args, kwargs, num_proc, start_timeout, **launch_options)
    if not uses_ssh:
        max_ranks = _within_slots(max_ranks, listed_hosts)
    elastic_options = {"reset_limit": reset_limit, "cooldown_range": cooldown_range, "discovery": discovery}
    return sparkhvd.run_elastic(
        func, args, kwargs, num_proc, min_ranks, max_ranks, start_timeout, **elastic_options, **launch_options
    )


def _check_elastic_arguments(*, is_elastic: bool, has_script: bool, slots: int | None, changes: Sequence[Any]) -> None:
    """Check that arguments of elastic jobs are passed only for elastic jobs."""
    if slots is not None and not has_script:
        raise ValueError("slots is for hosts that a script prints. Set host_discovery_script, too.")
    if not is_elastic and any(argument is not None for argument in changes):
        raise ValueError("reset_limit and cooldown_range are for elastic jobs. Set min_num_proc or max_num_proc, too.")


def _check_launcher(*, use_gloo: bool | None, use_mpi: bool | None, mpi_args: str | None) -> None:
    if use_gloo and use_mpi:
        raise ValueError("use_gloo and use_mpi are both set. Leave both out.")
    if use_mpi or mpi_args:
        raise NotImplementedError(
            "horovod.run does not start mpirun here. Leave out use_mpi and mpi_args, or run `horovodrun --mpi`."
        )


def _check_one_source(**sources: str | None) -> None:
    """Check that at most one argument says where the ranks run."""
    if len(names := [name for name, value in sources.items() if value is not None]) > 1:
        raise ValueError(f"{' and '.join(names)} are both set. Pass one of them.")


def _listed_hosts(hosts: str | None, hostfile: str | None) -> tuple[Host, ...]:
    if hostfile:
        return parse_hostfile(Path(hostfile).read_text())
    return parse_hosts(hosts) if hosts else ()


def _are_here(hosts: Sequence[Host]) -> bool:
    """Return whether all hosts are names of this machine."""
    return all(host.name in _THIS_HOST for host in hosts)


def _within_slots(max_ranks: int | None, hosts: Sequence[Host]) -> int | None:
    """Return the largest number of ranks, at most one per slot of the listed hosts."""
    if not hosts:
        return max_ranks
    return min(max_ranks or sys.maxsize, sum(host.slots for host in hosts))
