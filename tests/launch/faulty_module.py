"""Imported by ranks before they register: the first importing rank fails as the environment says."""

from __future__ import annotations

import os
from pathlib import Path

from tests.launch.misbehaviour import go_wrong, note_pid

_FOLDER = Path(os.environ["FAULT_FOLDER"])
note_pid(_FOLDER)
try:
    (_FOLDER / "first").touch(exist_ok=False)
except FileExistsError:
    pass
else:
    if os.environ["FAULT"] == "executor killed":  # every time
        (_FOLDER / "first").unlink()
    if os.environ["FAULT"] != "wrong secret":  # the task has the wrong secret
        go_wrong(os.environ["FAULT"], _FOLDER)
