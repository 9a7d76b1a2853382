"""The shell scripts in tools/ that parse the output of other programs."""

from __future__ import annotations

import subprocess
from pathlib import Path

_TOOLS = Path(__file__).parents[2] / "tools"


def _pythons(*versions: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [_TOOLS / "pythons", *versions]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=variables)


def test_the_pythons_of_a_build_are_those_of_the_variable_on_path_or_from_pyenv(tmp_path: Path) -> None:
    def program(path: str) -> str:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("#!/bin/sh\n")
        file.chmod(0o755)
        return str(file)

    program("path/python3.11")
    of_pyenv = program("pyenv/versions/3.13.0/bin/python")
    machine = {"PATH": f"{tmp_path}/path", "PYENV_ROOT": f"{tmp_path}/pyenv"}
    assert _pythons(**machine).stdout.splitlines() == ["python3.11", of_pyenv]
    assert _pythons("3.12", **machine).stdout == ""
    assert _pythons("3.13", **machine, PYTHONS="python3.11").stdout == f"{of_pyenv}\n"
    assert _pythons(**machine, PYTHONS=of_pyenv).stdout == f"{of_pyenv}\n"
    refused = _pythons(**machine, PYTHONS="python3.11 python3.13")
    assert refused.returncode == 1
    assert refused.stderr == "PYTHONS names python3.13, which does not run.\n"


def test_the_gpu_suite_is_skipped_with_a_message_if_nvidia_smi_shows_no_gpu(tmp_path: Path) -> None:
    no_gpu = tmp_path / "nvidia-smi"
    no_gpu.write_text("#!/bin/sh\necho 'No devices were found' >&2\nexit 6\n")
    no_gpu.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    skipped = subprocess.run([_TOOLS / "test-gpu"], capture_output=True, text=True, check=True, env=environment)
    assert skipped.stdout == "GPU suite: skipped, because nvidia-smi shows no GPU on this machine.\n"
