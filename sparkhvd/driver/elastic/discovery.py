"""Discovery of slots: once per second, calls a function or runs a script that lists the hosts."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import selectors
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from sparkhvd._util.addresses import is_ipv6
from sparkhvd._util.counts import is_count
from sparkhvd.deadline import Deadline
from sparkhvd.driver.arguments import split_arguments
from sparkhvd.driver.elastic.workers import DiscoveryFailed, Offered
from sparkhvd.driver.hosts import check_name, parse_hosts
from sparkhvd.errors import ConfigError, LaunchError
from sparkhvd.task.worker.exit import child_ends_within

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 1.0
SCRIPT_SECONDS = 10.0
_WITH_SLOTS = re.compile(r".*:\d+")
_MAX_SHOWN = 300
_MAX_OUTPUT, _CHUNK_BYTES = 2**20, 2**16


class Discovery(Protocol):
    """Finds out which hosts offer slots now."""

    def find(self) -> Mapping[str, int]:
        """Return the number of slots by host.

        Raises:
            Exception: the hosts are unknown at this time.
        """

    def cancel(self) -> None:
        """Make a ``find`` in progress end soon."""


class DiscoveryFunction:
    """Calls a function of the user."""

    def __init__(self, function: Callable[[], Mapping[str, int]]) -> None:
        self._function = function

    def find(self) -> Mapping[str, int]:
        """Return the number of slots by host."""
        slots_by_host = self._function()
        if not isinstance(slots_by_host, Mapping):
            raise ConfigError(
                f"discovery must return a dict of slots by host, like {{'host1': 2}}, got {slots_by_host!r}."
            )
        for host, slots in slots_by_host.items():
            if not isinstance(host, str) or not is_count(slots, 0):
                raise ConfigError(f"discovery must return numbers of slots by host, got {host!r}: {slots!r}.")
            check_name(host)
        return {host: int(slots) for host, slots in slots_by_host.items()}

    def cancel(self) -> None:
        """Do nothing: a function cannot be interrupted."""


class DiscoveryScript:
    """Runs a script that prints one ``host`` or ``host:slots`` per line.

    Args:
        command: the script and its arguments, in shell syntax.
        default_slots: the number of slots of a host for which the script prints no number.
        seconds: the time after which a running script is killed.

    Raises:
        ConfigError: the script cannot be executed.
    """

    def __init__(self, command: str, default_slots: int = 1, seconds: float = SCRIPT_SECONDS) -> None:
        self._command = split_arguments("host_discovery_script", command)
        self._default_slots = default_slots
        self._seconds = seconds
        self._lock = threading.Lock()  # guards the fields below
        self._process: subprocess.Popen[bytes] | None = None
        self._cancelled = False
        if not self._command or shutil.which(self._command[0]) is None:
            raise ConfigError(f"The host discovery script {command!r} is not an executable file. Check chmod +x.")

    def find(self) -> Mapping[str, int]:
        """Run the script and return the number of slots by host.

        Raises:
            LaunchError: the script failed, took too long, or printed too much or an invalid line.
        """
        with self._lock:
            if self._cancelled:
                return {}
            self._process = process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        with process:
            try:
                stdout, stderr = _outputs(process, self._seconds)
            finally:
                with self._lock:
                    self._process = None
                self._kill(process)  # also ends its child processes
        if process.returncode != 0:
            raise LaunchError(
                f"The host discovery script ended with exit code {process.returncode}: "
                f"{stderr.strip()[-_MAX_SHOWN:].removesuffix('.') or 'it wrote nothing to stderr'}. "
                "Run it on this host to find the cause; it must print one host per line and exit with 0."
            )
        return parse_discovered(stdout, self._default_slots)

    def cancel(self) -> None:
        """Kill the script if it runs."""
        with self._lock:
            self._cancelled = True
            if self._process is not None:
                self._kill(self._process)

    @staticmethod
    def _kill(process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _outputs(process: subprocess.Popen[bytes], seconds: float) -> tuple[str, str]:
    """Return what a script has written to stdout and stderr until its end.

    Raises:
        LaunchError: the script does not end in time, or writes too much.
    """
    deadline = Deadline.after(seconds)
    is_late = LaunchError(
        f"The host discovery script did not end within {seconds:g} s and was killed. It runs once per second: let it "
        "print hosts that another program finds, or limit the time of its requests."
    )
    outputs = {stream.fileno(): bytearray() for stream in (process.stdout, process.stderr) if stream is not None}
    with selectors.DefaultSelector() as selector:
        for number in outputs:
            selector.register(number, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(deadline.remaining())
            if deadline.expired():
                raise is_late
            for key, _ in ready:
                if not (chunk := os.read(key.fd, _CHUNK_BYTES)):
                    selector.unregister(key.fd)
                outputs[key.fd] += chunk
            if sum(map(len, outputs.values())) > _MAX_OUTPUT:
                raise LaunchError(
                    f"The host discovery script wrote more than {_MAX_OUTPUT:,} bytes and was killed. It must print "
                    "only one 'host' or 'host:slots' per line."
                )
    if not child_ends_within(process.pid, deadline.remaining()):  # its group may still have processes to kill
        raise is_late
    stdout, stderr = (output.decode(errors="replace") for output in outputs.values())
    return stdout, stderr


def parse_discovered(text: str, default_slots: int) -> dict[str, int]:
    """Return the slots by host that a script has printed.

    Raises:
        LaunchError: a line is not ``host`` or ``host:slots``.
    """
    slots_by_host: dict[str, int] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        has_slots = _WITH_SLOTS.fullmatch(line) is not None and not is_ipv6(line)
        try:
            hosts = parse_hosts(line)
        except ConfigError:
            hosts = ()
        if len(hosts) != 1:
            raise LaunchError(
                f"The host discovery script printed the line {line[:_MAX_SHOWN]!r}; expected 'host' or 'host:slots'."
            )
        slots_by_host[hosts[0].name] = hosts[0].slots if has_slots else default_slots
    return slots_by_host


class DiscoveryThread:
    """Calls ``discovery.find`` every ``interval`` seconds and passes changes to ``report``, until ``close``."""

    def __init__(
        self,
        discovery: Discovery,
        report: Callable[[Offered | DiscoveryFailed], None],
        interval: float = INTERVAL_SECONDS,
    ) -> None:
        self._discovery = discovery
        self._report = report
        self._interval = interval
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sparkhvd-elastic-discovery", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the discovery. A function of the user that still runs is not interrupted."""
        self._stopping.set()
        self._discovery.cancel()
        self._thread.join(INTERVAL_SECONDS)

    def _run(self) -> None:
        last_offered: dict[str, int] | None = None
        last_failure = ""
        while not self._stopping.is_set():
            try:
                offered = dict(self._discovery.find())
            except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
                why = f"{type(error).__name__}: {error}" if not isinstance(error, LaunchError) else str(error)
                if not self._stopping.is_set() and why != last_failure:
                    first = last_offered is None
                    what = "The hosts of the job cannot be determined" if first else "The discovery of hosts failed"
                    self._report(DiscoveryFailed(f"{what}: {why}", first))
                last_failure = why
            else:
                last_failure = ""
                if not self._stopping.is_set() and offered != last_offered:
                    last_offered = offered
                    self._report(Offered(offered))
            self._stopping.wait(self._interval)
