"""Settings that a program changes in its environment after its launch, as programs for Horovod do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sparkhvd
from tests.launch.changed_settings import change_settings
from tests.launch.test_sparkhvdrun import sparkhvdrun
from tests.scripts import ROOT

PROGRAM = Path(__file__).with_name("changed_settings.py")
EXPECTED = [(5, 33.0, "own.json"), (1024, 33.0, "own.json"), (1024, 33.0, "")]


@pytest.fixture(autouse=True)
def _settings_of_the_launch(monkeypatch):
    monkeypatch.setenv("HOROVOD_CACHE_CAPACITY", "9")
    monkeypatch.setenv("SPARKHVD_STALL_CHECK_SECONDS", "33")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.parametrize("elastic", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_init_of_a_program_reads_settings_that_the_program_has_changed(tmp_path, elastic):
    flags = ("-np", 2, *(("--min-np", 2) if elastic else ()))
    done = sparkhvdrun(*flags, "--timeline-filename", tmp_path / "launch.json", sys.executable, PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"<stdout>:(\[.*\])", done.stdout)
    assert [[tuple(one) for one in json.loads(text)] for text in found] == [EXPECTED] * 2
    assert "sum1" in (tmp_path / "own.json").read_text()
    assert not (tmp_path / "launch.json").exists()


@pytest.mark.parametrize("run", [pytest.param(sparkhvd.run, marks=pytest.mark.soak), sparkhvd.run_elastic])
def test_init_of_a_function_reads_settings_that_the_function_has_changed(tmp_path, run):
    assert run(change_settings, (str(tmp_path),), num_proc=2, launcher="local", verbose=0) == [EXPECTED] * 2
    assert "sum1" in (tmp_path / "own.json").read_text()


def test_a_wrapper_of_the_program_can_set_its_settings(tmp_path):
    code = "from sparkhvd.comm import session; session.init(); print(session.current()._context.config.cache_capacity)"
    done = sparkhvdrun("-np", 1, "env", "HOROVOD_CACHE_CAPACITY=6", sys.executable, "-c", code)
    assert done.stdout.split(":")[-1].strip() == "6", done.stderr


def test_a_change_that_would_break_the_jobs_encryption_is_refused():
    code = "import os; os.environ['SPARKHVD_ENCRYPT'] = '1'; from sparkhvd.comm import session; session.init()"
    done: subprocess.CompletedProcess[str] = sparkhvdrun("-np", 2, sys.executable, "-c", code)
    assert done.returncode == 1
    assert "SPARKHVD_ENCRYPT has changed since the job was launched" in done.stderr
