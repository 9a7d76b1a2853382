"""``horovod.run``: runs a function on this machine or on hosts, without Spark."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sparkhvd
from sparkhvd.compat.horovod import ELASTIC
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
    use_gloo: bool | None = None,  # noqa: ARG001
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    network_interfaces: Sequence[str] | None = None,
) -> list[Any]:
    """Run ``func`` in ``num_proc`` processes and return its results, ordered by rank; ``sparkhvd.run`` does it.

    ``disable_cache`` has no effect: there is no cache of checks.

    Raises:
        ValueError: arguments contradict each other.
        NotImplementedError: the job would be elastic, or started by mpirun without Spark.
    """
    elastic = (min_num_proc, max_num_proc, min_np, max_np, slots, reset_limit, cooldown_range)
    if any(value is not None for value in elastic):
        raise NotImplementedError(ELASTIC)
    if use_mpi or mpi_args:
        raise NotImplementedError(
            "horovod.run does not start mpirun here. Leave out use_mpi and mpi_args, or run `horovodrun --mpi`."
        )
    if hosts is not None and hostfile is not None:
        raise ValueError("hosts and hostfile are both set. Pass one of them.")
    if np is not None:
        warnings.warn("np is deprecated; pass num_proc.", DeprecationWarning, stacklevel=2)
        num_proc = np if num_proc == 1 else num_proc
    everywhere = parse_hostfile(Path(hostfile).read_text()) if hostfile else parse_hosts(hosts) if hosts else ()
    remote = [host for host in everywhere if host.name not in _THIS_HOST]
    if everywhere:
        take_slots(everywhere, num_proc)  # refuses more ranks than slots
    nics = network_interface.split(",") if network_interface else network_interfaces
    return sparkhvd.run(
        func,
        args,
        kwargs,
        num_proc,
        start_timeout,
        verbose=2 if verbose else 1,
        nics=nics if remote else None,
        executable=executable,
        launcher="ssh" if remote else "local",
        hosts=",".join(host.text for host in everywhere) if remote else None,
        ssh_port=ssh_port if remote else None,
        ssh_identity_file=ssh_identity_file if remote else None,
        output_filename=output_filename,
    )
