"""The shell scripts in tools/ that read what others write."""

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
