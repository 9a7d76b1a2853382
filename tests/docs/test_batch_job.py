"""The programs on the page about batch jobs run one after the other by spark-submit, as the page describes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from tests.scripts import run_script

_PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "batch-job.md").read_text()
_FILES = dict(re.findall(r'^```python title="([^"]+)"\n(.*?)^```$', _PAGE, re.MULTILINE | re.DOTALL))
_COMMANDS = re.findall(r'^\$ spark-submit --master "local\[2\]" (.+)$', _PAGE, re.MULTILINE)


def _submit(arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    command = [submit, "--master", "local[2]", "--conf", "spark.ui.enabled=false", *arguments.split()]
    return run_script(command, folder, 200, PYSPARK_DRIVER_PYTHON=sys.executable)


@pytest.mark.spark
@pytest.mark.cluster
@pytest.mark.usefixtures("warm_ranks")
def test_a_second_program_trains_on_the_rows_that_the_first_prepared(tmp_path: Path) -> None:
    for name, text in _FILES.items():
        (tmp_path / name).write_text(text)
    prepare, train = _COMMANDS
    prepared = _submit(prepare, tmp_path)
    assert re.search(r"^\S+: \d+ rows to train on, \d+ held out$", prepared.stdout, re.MULTILINE), prepared.stderr
    trained = _submit(train, tmp_path)
    assert "trained for 3 epochs" in trained.stdout, trained.stderr
    assert (tmp_path / "parcels-model").is_dir()
