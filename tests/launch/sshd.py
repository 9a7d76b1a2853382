"""Real ssh servers with their own keys and configuration, and a program ``ssh`` that uses them."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.launch.elastic_training import lives
from tests.launch.hosts import Host
from tests.launch.hosts import hosts as namespaces
from tests.waiting import wait_for

SSHD = Path("/usr/sbin/sshd")


def why_not() -> str:
    """Return the reason why this machine has no ssh server, or an empty string if it has one."""
    missing = not SSHD.exists() or shutil.which("ssh") is None
    return "openssh-server and openssh-client are not installed" if missing else ""


def make_keys(folder: Path) -> Path:
    """Create the keys of servers and user, and return that of the user."""
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "authorized_keys").write_text((folder / "user_key.pub").read_text())
    return folder / "user_key"


def make_client(folder: Path, addresses: Mapping[str, str]) -> Path:
    """Create a program ``ssh`` that knows the servers' key, and return its folder.

    Args:
        folder: the folder of the keys.
        addresses: the addresses of the hosts, by the names that ssh resolves.
    """
    (folder / "known_hosts").write_text(f"server {(folder / 'host_key.pub').read_text()}")
    names = "".join(f"Host {name}\n  HostName {address}\n" for name, address in addresses.items())
    everywhere = (
        f"Host *\n  HostKeyAlias server\n  UserKnownHostsFile {folder}/known_hosts\n  User {getpass.getuser()}\n"
    )
    (folder / "config").write_text(names + everywhere)
    program = folder / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
    program.chmod(0o755)
    return program.parent


@contextmanager
def running_sshd(
    folder: Path, address: str, port: int, prefix: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server; ``prefix`` are the first words of its command."""
    Path("/run/sshd").mkdir(exist_ok=True)
    settings = {
        "Port": port,
        "ListenAddress": address,
        "HostKey": folder / "host_key",
        "AuthorizedKeysFile": folder / "authorized_keys",
        "PidFile": "none",
        "StrictModes": "no",
        "PasswordAuthentication": "no",
        "PermitRootLogin": "yes",
        "UsePAM": "no",
    }
    file = folder / f"sshd_config_{address}"
    file.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    server = subprocess.Popen([*prefix, SSHD, "-D", "-e", "-f", file], stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: _answers(address, port))
        yield
    finally:
        server.terminate()
        server.wait(30)


@dataclass(frozen=True)
class SshHosts:
    """Hosts that are reached over ssh.

    Attributes:
        hosts: network namespaces, each with an ssh server at port 22.
        key: the user's key.
        path: a ``PATH`` with the program ``ssh`` that knows the servers.
    """

    hosts: tuple[Host, ...]
    key: str
    path: str

    @property
    def listed(self) -> str:
        return ",".join(host.address for host in self.hosts)

    def at(self, address: str) -> Host:
        return next(host for host in self.hosts if host.address == address)


@contextmanager
def hosts_behind_ssh(folder: Path, count: int) -> Iterator[SshHosts]:
    """Make network namespaces with ssh servers."""
    with namespaces(count) as (_, hosts), ExitStack() as stack:
        key, path = make_keys(folder), make_client(folder, {})
        for host in hosts:
            prefix = ["ip", "netns", "exec", host.namespace]
            stack.enter_context(running_sshd(folder, host.address, 22, prefix))
        yield SshHosts(hosts, str(key), f"{path}:{os.environ['PATH']}")


def programs(host: Host) -> list[int]:
    """Return the processes on a host except those of its ssh server."""
    listed = subprocess.run(["ip", "netns", "pids", host.namespace], check=True, capture_output=True, text=True)
    return [int(pid) for pid in listed.stdout.split() if lives(int(pid)) and not _is_of_sshd(int(pid))]


def _is_of_sshd(pid: int) -> bool:
    try:
        return "sshd" in psutil.Process(pid).name()
    except psutil.NoSuchProcess:
        return True


def _answers(address: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0
