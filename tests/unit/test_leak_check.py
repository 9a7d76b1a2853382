"""The leak check of the test suite, applied to suites of one test each."""

from __future__ import annotations

import mmap
import os
import signal
import uuid
from pathlib import Path

import pytest

_CONFTEST = Path(__file__).parents[1] / "conftest.py"

_LEAKS = {
    "thread leaked-by-test": """
        threading.Thread(target=threading.Event().wait, name="leaked-by-test", daemon=True).start()
    """,
    "process": """
        subprocess.Popen(["sleep", "30"])
        import gc; gc.disable()
    """,
    "ended, but its parent has not waited for it": """
        global child
        child = subprocess.Popen(["true"])
    """,
    "process orphan": """
        # The parent ends at once, so that only the mark in its environment identifies the child.
        subprocess.run(["sh", "-c", "sleep 30 & exit 0"], check=True, stdout=subprocess.DEVNULL)
    """,
    "file descriptor /etc/hostname": """
        os.open("/etc/hostname", os.O_RDONLY)
    """,
    "file descriptor socket": """
        global listener
        listener = socket.create_server(("127.0.0.1", 0))
    """,
    "file descriptor anon_inode:*eventfd*": """
        import hdfs_native  # whose own are allowed where it is used
        os.eventfd(0)
    """,
    "shared memory {name}": """
        open("/dev/shm/{name}", "w").close()
    """,
    "temporary file left": """
        open(os.path.join(tempfile.mkdtemp(prefix="left"), "file"), "w").close()
    """,
    "environment variable SPARKHVD_LEFT_BEHIND": """
        os.environ["SPARKHVD_LEFT_BEHIND"] = "1"
    """,
    "environment variable HOME": """
        del os.environ["HOME"]
    """,
}

_CLEAN = """
    thread = threading.Thread(target=event.wait, args=(0.2,), daemon=True)
    thread.start()  # is over soon after the test
    subprocess.run(["true"], check=True)
    with socket.create_server(("127.0.0.1", 0)), tempfile.TemporaryDirectory():
        pass
    os.environ["SPARKHVD_LEFT_BEHIND"] = "1"
    del os.environ["SPARKHVD_LEFT_BEHIND"]
"""

_HEADER = """
import os, socket, subprocess, tempfile, threading
import pytest

event = threading.Event()
"""


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("SPARKHVD_TEST_LEAK_GRACE", "0.6")
    pytester.makeconftest(_CONFTEST.read_text())
    return pytester


@pytest.mark.parametrize("what", _LEAKS)
def test_leak_check_fails_a_test_with_a_leak(inner: pytest.Pytester, what: str) -> None:
    name = f"left-{uuid.uuid4().hex}"
    body = _LEAKS[what].replace("{name}", name)
    inner.makepyfile(f"{_HEADER}\ndef test_it():{body}\ndef test_next():\n    pass\n")
    try:
        result = _run(inner)
    finally:
        Path("/dev/shm", name).unlink(missing_ok=True)
    result.assert_outcomes(passed=2, errors=1)
    shown = {"process orphan": "process * (sleep 30)", "process": "process * (sleep 30)"}.get(what, what)
    result.stdout.fnmatch_lines(["*The test left behind:*", f"*{shown.replace('{name}', name)}*"])


def test_leak_check_passes_a_test_that_cleans_up(inner: pytest.Pytester) -> None:
    inner.makepyfile(f"{_HEADER}\ndef test_it():{_CLEAN}")
    _run(inner).assert_outcomes(passed=1)


def test_leak_check_allows_resources_of_a_fixture_with_a_wider_scope(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        f"""{_HEADER}
@pytest.fixture(scope="module")
def server():
    child = subprocess.Popen(["sleep", "30"])
    listener = socket.create_server(("127.0.0.1", 0))
    yield listener
    listener.close()
    child.kill()
    child.wait()

def test_it(server):
    assert server.fileno() >= 0
"""
    )
    _run(inner).assert_outcomes(passed=1)


def test_leak_check_ignores_the_shared_memory_of_other_processes(inner: pytest.Pytester) -> None:
    segment = Path("/dev/shm", f"of-others-{uuid.uuid4().hex}")
    inner.makepyfile(f"def test_it():\n    import os\n    os.rename('{segment}', '{segment}-later')\n")
    try:
        with segment.open("wb+") as file:
            file.truncate(mmap.PAGESIZE)
            with mmap.mmap(file.fileno(), mmap.PAGESIZE):
                _run(inner).assert_outcomes(passed=1)
    finally:
        Path(f"{segment}-later").unlink()


def _run(inner: pytest.Pytester) -> pytest.RunResult:
    """Run in a separate process, and end the processes that the leaking test has left."""
    result = inner.runpytest_subprocess("-p", "no:cacheprovider", timeout=60)
    _kill_processes_in(inner.path)
    return result


def _kill_processes_in(folder: Path) -> None:
    for entry in Path("/proc").iterdir():
        try:
            ours = entry.name.isdigit() and int(entry.name) != os.getpid()
            if ours and (entry / "cwd").readlink() == folder:
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:  # the process has ended meanwhile
            continue
