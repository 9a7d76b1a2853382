"""The ported script of the documentation is the old one with the lines changed that the page shows, and runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.scripts import run_script

_PAGE = (Path(__file__).parents[2] / "docs" / "horovod" / "port.md").read_text()


@pytest.mark.spark
@pytest.mark.cluster
def test_the_script_for_horovod_runs_after_the_changes_of_the_page(tmp_path: Path) -> None:
    (before,) = re.findall(r'^```py title="before.py"\n(.*?)^```$', _PAGE, re.MULTILINE | re.DOTALL)
    after = before
    for change in re.findall(r"^```diff\n(.*?)^```$", _PAGE, re.MULTILINE | re.DOTALL):
        removed, added = ("".join(re.findall(rf"^[{sign}](.*\n)", change, re.MULTILINE)) for sign in ("-", "+"))
        assert removed in after
        after = after.replace(removed, added)
    assert "horovod" not in after
    (tmp_path / "after.py").write_text(after)
    done = run_script([sys.executable, "after.py"], tmp_path, 200)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^\[(\d)\]<stdout>:epoch 10: 0\.\d+$", done.stdout, re.MULTILINE) == ["0"]
