from __future__ import annotations

import os
import subprocess
import sys

# A process of its own, as the doctor uses the Spark session of the process that runs it.
DOCTOR = [sys.executable, "-c", "from sparkhvd.cli.main import main; raise SystemExit(main())", "doctor"]


def test_the_doctor_names_a_java_home_without_a_java(tmp_path):
    environment = {**os.environ, "JAVA_HOME": str(tmp_path)}
    done = subprocess.run(
        [*DOCTOR, "--master", "local[1]"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert f"JAVA_HOME is '{tmp_path}', but there is no program bin/java in that folder" in done.stderr
