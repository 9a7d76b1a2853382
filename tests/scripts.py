"""Scripts that tests run in a separate process, and their results: a process can hold only one SparkContext."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def run_script(
    command: Sequence[str | Path], folder: Path, seconds: float, *, stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program that imports sparkhvd in ``folder``, where Spark leaves its files."""
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        command,
        input=stdin,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SPARK_LOCAL_DIRS": str(folder), **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def tell(found: dict[str, Any]) -> None:
    """Print a script's results for ``found_by``."""
    print("FOUND " + json.dumps(found), flush=True)


def found_by(done: subprocess.CompletedProcess[str], more: str = "") -> dict[str, Any]:
    """Return a script's results; if there are none, fail with all of its output and ``more``."""
    said = re.search(r"^FOUND (\{.*\})$", done.stdout, re.MULTILINE)
    assert said, f"{done.stdout}{done.stderr}{more}"
    found: dict[str, Any] = json.loads(said[1])
    return found
