"""The documentation's ported script runs, and differs from the old script in the lines that the page shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.scripts import run_in_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PAGE = (Path(__file__).parents[2] / "docs" / "horovod" / "port.md").read_text()


@pytest.mark.spark
@pytest.mark.usefixtures("warm_ranks")
def test_the_script_for_horovod_runs_after_the_changes_of_the_page(spark: SparkSession, tmp_path: Path) -> None:
    (before,) = re.findall(r'^```py title="before.py"\n(.*?)^```$', _PAGE, re.MULTILINE | re.DOTALL)
    after = before
    for change in re.findall(r"^```diff\n(.*?)^```$", _PAGE, re.MULTILINE | re.DOTALL):
        removed, added = ("".join(re.findall(rf"^[{sign}](.*\n)", change, re.MULTILINE)) for sign in ("-", "+"))
        assert removed in after
        after = after.replace(removed, added)
    assert "horovod" not in after
    (tmp_path / "after.py").write_text(after)
    shown = run_in_session(tmp_path / "after.py", [], tmp_path, spark)
    assert re.findall(r"^\[(\d)\]<stdout>:epoch 10: 0\.\d+$", shown, re.MULTILINE) == ["0"]
