"""The shell scripts in tools/ that parse the output of other programs."""

from __future__ import annotations

import subprocess
from pathlib import Path

_TOOLS = Path(__file__).parents[2] / "tools"
_OF_PIP = """\
Obtaining file:///clone
  Installing build dependencies: started
Collecting torch==2.13.0 (from -c tools/constraints.txt (line 1))
  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (29 kB)
Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (887.9 MB)
Downloading nvidia_big-13.1-py3-none-manylinux_2_27_x86_64.whl (1.2 GB)
Downloading rich-14.0.0-py3-none-any.whl (243 kB)
Downloading scipy-1.15.0-cp311-cp311-manylinux_2_17_x86_64.whl (37.7 MB)
Building wheels for collected packages: sparkhvd
  Building editable for sparkhvd (pyproject.toml): started
  Building editable for sparkhvd (pyproject.toml): finished with status 'done'
Installing collected packages: torch, scipy
Successfully installed scipy-1.15.0 torch-2.13.0
"""


def test_the_long_steps_of_pip_are_shown():
    done = subprocess.run([_TOOLS / "pip-progress"], input=_OF_PIP, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "  downloading torch (887.9 MB)",
        "  downloading nvidia_big (1.2 GB)",
        "  compiling sparkhvd's core",
        "  unpacking the packages",
    ]
    assert not done.stderr


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
