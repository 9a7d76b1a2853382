"""Ports of this machine."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable
from typing import Any

import psutil


def free_port() -> int:
    """Return a port on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening_ports(pids: Iterable[int]) -> list[int]:
    """Return the TCP ports on which these processes listen; a process that has ended has none."""
    ports = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            connections: list[Any] = psutil.Process(pid).net_connections("tcp")
            ports += [connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN]
    return ports
