from __future__ import annotations

import subprocess
import sys

_LIMITED = """
import resource, sys
from sparkhvd._util.processes.file_descriptors import allow_files
from sparkhvd.errors import ConfigError

resource.setrlimit(resource.RLIMIT_NOFILE, (100, 1000))
try:
    allow_files(int(sys.argv[1]), int(sys.argv[2]), "A test")
    print(resource.getrlimit(resource.RLIMIT_NOFILE))
except ConfigError as error:
    print(error)
"""


def _limited(least: int, most: int) -> str:
    command = [sys.executable, "-c", _LIMITED, str(least), str(most)]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()


def test_the_soft_limit_is_raised_as_far_as_necessary_and_permitted():
    assert _limited(1, 2) == "(100, 1000)"
    assert _limited(500, 2000) == "(1000, 1000)", "only files that will certainly be opened count"


def test_more_files_than_the_hard_limit_permits_are_refused():
    refused = _limited(990, 2000)
    assert refused.startswith("A test needs 1")
    assert "but this process may have 1000 (ulimit -Hn). Raise the hard limit" in refused
