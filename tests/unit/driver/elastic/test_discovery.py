from __future__ import annotations

import queue
import threading
import time
from pathlib import Path

import psutil
import pytest

from sparkhvd.driver.elastic.discovery import (
    DiscoveryFunction,
    DiscoveryScript,
    DiscoveryThread,
    parse_discovered,
)
from sparkhvd.driver.elastic.workers import DiscoveryFailed, Offered
from sparkhvd.errors import ConfigError, LaunchError
from tests.waiting import wait_for


def script(folder: Path, body: str) -> str:
    path = folder / "discover.sh"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_lines_are_hosts_with_or_without_slots():
    text = "host1:2\n\n  host2 \n[fd00::5]:3\n[fd00::6]\n"
    assert parse_discovered(text, 4) == {"host1": 2, "host2": 4, "fd00::5": 3, "fd00::6": 4}
    assert parse_discovered("\n", 1) == {}


@pytest.mark.parametrize("line", ["host:0", "host:x", "a,b", "no host", "<html>", "host:1:2"])
def test_a_line_in_another_form_is_an_error_that_quotes_it(line):
    with pytest.raises(LaunchError, match="printed the line ") as caught:
        parse_discovered(f"good:1\n{line}\n", 1)
    assert repr(line) in str(caught.value)


def test_a_script_may_have_arguments(tmp_path):
    assert DiscoveryScript(f"{script(tmp_path, 'echo $1:2')} there", 1).find() == {"there": 2}


def test_a_failing_script_is_an_error_with_its_exit_code_and_stderr(tmp_path):
    with pytest.raises(LaunchError, match=r"ended with exit code 3: no permission\. Run it on this host"):
        DiscoveryScript(script(tmp_path, "echo no permission >&2; exit 3")).find()


def test_a_hanging_script_is_killed_with_its_child_processes(tmp_path):
    hanging = DiscoveryScript(script(tmp_path, f"sleep 600 & echo $! > {tmp_path}/pid; wait"), seconds=0.5)
    with pytest.raises(
        LaunchError, match=r"did not end within 0\.5 s and was killed\. It runs once per second: let it"
    ):
        hanging.find()
    wait_for(lambda: not psutil.pid_exists(int((tmp_path / "pid").read_text())))


@pytest.mark.parametrize("body", ["yes", "yes >&2"])
def test_a_script_that_writes_without_end_is_killed(tmp_path, body):
    with pytest.raises(LaunchError, match=r"wrote more than 1,048,576 bytes and was killed\. It must print"):
        DiscoveryScript(script(tmp_path, body)).find()


def test_a_script_that_closes_its_output_and_hangs_is_killed(tmp_path):
    with pytest.raises(LaunchError, match=r"did not end within 0\.5 s and was killed"):
        DiscoveryScript(script(tmp_path, "exec >&- 2>&-; sleep 600"), seconds=0.5).find()


@pytest.mark.parametrize("command", ["", "/does/not/exist"])
def test_a_script_that_cannot_be_executed_is_rejected(command):
    with pytest.raises(ConfigError, match="is not an executable file"):
        DiscoveryScript(command)


@pytest.mark.parametrize("found", [None, [("a", 1)], {"a": "1"}, {"a": -1}, {1: 1}, {"a": True}])
def test_a_function_must_return_slots_by_host(found):
    with pytest.raises(ConfigError, match="discovery must return"):
        DiscoveryFunction(lambda: found).find()


@pytest.mark.parametrize("host", ["-oProxyCommand=reboot", "two words", ""])
def test_a_function_must_return_names_of_hosts(host):
    with pytest.raises(ConfigError, match="is not a valid host name"):
        DiscoveryFunction(lambda: {host: 1}).find()


class Scripted:
    """Returns or raises one value after the other, and then always the last one."""

    def __init__(self, *values) -> None:
        self.values = list(values)
        self.cancelled = False

    def find(self):
        value = self.values.pop(0) if len(self.values) > 1 else self.values[0]
        if isinstance(value, BaseException):
            raise value
        return value

    def cancel(self) -> None:
        self.cancelled = True


def test_changes_are_reported_and_failures_keep_the_last_slots():
    inbox = queue.SimpleQueue()
    bad = LaunchError("out of order")
    thread = DiscoveryThread(Scripted({"a": 1}, {"a": 1}, bad, bad, {"a": 1}, {"a": 2}), inbox.put, 0.01)
    events = [inbox.get(timeout=60) for _ in range(3)]
    thread.close()
    assert events == [
        Offered({"a": 1}),
        DiscoveryFailed("The discovery of hosts failed: out of order", False),
        Offered({"a": 2}),
    ]
    assert inbox.empty()


def test_a_failure_before_the_first_slots_is_marked():
    inbox = queue.SimpleQueue()
    thread = DiscoveryThread(Scripted(OSError("no network"), {"a": 1}), inbox.put, 0.01)
    events = [inbox.get(timeout=60) for _ in range(2)]
    thread.close()
    assert events == [
        DiscoveryFailed("The hosts of the job cannot be determined: OSError: no network", True),
        Offered({"a": 1}),
    ]


def test_a_function_that_calls_sys_exit_has_failed():
    inbox = queue.SimpleQueue()
    thread = DiscoveryThread(Scripted({"a": 1}, SystemExit(3), {"a": 2}), inbox.put, 0.01)
    events = [inbox.get(timeout=60) for _ in range(3)]
    thread.close()
    assert events == [
        Offered({"a": 1}),
        DiscoveryFailed("The discovery of hosts failed: SystemExit: 3", False),
        Offered({"a": 2}),
    ]


def test_closing_ends_a_running_script(tmp_path):
    thread = DiscoveryThread(
        DiscoveryScript(script(tmp_path, f"touch {tmp_path}/runs; sleep 600")), queue.SimpleQueue().put
    )
    wait_for((tmp_path / "runs").exists)
    began = time.monotonic()
    thread.close()
    assert time.monotonic() - began < 100
    assert not any(one.name == "sparkhvd-elastic-discovery" for one in threading.enumerate())
