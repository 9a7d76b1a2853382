"""Run the programs of tests, in a separate process with its own SparkContext or in the session of the tests."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[1]


def run_script(
    command: Sequence[str | Path], folder: Path, seconds: float, *, stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program that imports sparkhvd; its current folder, which also gets Spark's files, is ``folder``."""
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


def run_in_session(script: Path, arguments: Sequence[str], folder: Path, session: SparkSession) -> str:
    """Run a program in this process, with ``session`` in place of its own session, and return its output.

    Starting Spark and importing the frameworks takes most of a small program's time.
    """
    printed = io.StringIO()
    logger = logging.getLogger("sparkhvd")
    level = logger.level
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [str(script), *arguments])
        patch.setattr(type(session.builder), "getOrCreate", lambda _builder: session)
        patch.setattr(type(session), "stop", lambda _session: None)
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as exited:
            if exited.code:
                raise AssertionError(printed.getvalue()) from exited
        finally:
            logger.setLevel(level)  # a program may change it
    return printed.getvalue()


def print_results(results: dict[str, Any]) -> None:
    """Print a script's results for ``results_of``."""
    print("RESULTS " + json.dumps(results), flush=True)


def results_of(completed: subprocess.CompletedProcess[str], more: str = "") -> dict[str, Any]:
    """Return a script's results; if there are none, fail with all of its output and ``more``."""
    line = re.search(r"^RESULTS (\{.*\})$", completed.stdout, re.MULTILINE)
    assert line, f"{completed.stdout}{completed.stderr}{more}"
    results: dict[str, Any] = json.loads(line[1])
    return results
