from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sparkhvd.cli.main import main

# A separate process, because the doctor uses the Spark session of its process.
DOCTOR = [sys.executable, "-c", "from sparkhvd.cli.main import main; raise SystemExit(main())", "doctor"]


def test_the_doctor_names_a_java_home_without_a_java(tmp_path):
    environment = {**os.environ, "JAVA_HOME": str(tmp_path)}
    done = subprocess.run(
        [*DOCTOR, "--master", "local[1]"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert f"JAVA_HOME is '{tmp_path}', but there is no program bin/java in that folder" in done.stderr


@pytest.mark.parametrize("setting", ["=x", " =x", "x"])
def test_the_doctor_refuses_a_setting_without_a_name(setting, capsys):
    assert main(["doctor", "--master", "local[1]", "--conf", setting]) == 1
    assert f"--conf must be NAME=VALUE, like spark.executor.cores=4, got {setting!r}." in capsys.readouterr().err


def test_the_doctor_takes_any_number_of_seconds():
    arguments = ["--master", "local[1]", "-np", "1", "--timeout", "1e300"]
    done = subprocess.run([*DOCTOR, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "sparkhvd preflight: ready" in done.stdout
