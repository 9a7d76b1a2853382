"""The progress bar in a real terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

_ROWS_AND_COLUMNS = (24, 100)
# The lines that the launcher passes to the driver's side for one rank.
_TRAINING = """
import json, sys
from sparkhvd.estimators.training.logs.progress import ProgressOutput, is_interactive

assert is_interactive()
output = ProgressOutput("a run")
for step in range(1, 5):
    output.write("[0]<stdout>:\\x01" + json.dumps({"done": step, "all": 4}) + "\\n")
    if step == 2:
        output.write("[0]<stdout>:epoch 1/2\\n")
output.close()
print("afterwards")
"""


_FIT = """
import logging, torch
from pyspark.sql import SparkSession
from sparkhvd import TorchEstimator

spark = (
    SparkSession.builder.master("local[1]")
    .config("spark.ui.enabled", "false")
    .config("spark.ui.showConsoleProgress", "false")
    .getOrCreate()
)
model = torch.nn.Linear(1, 1)
TorchEstimator(
    num_proc=1,
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    loss=torch.nn.functional.mse_loss,
    feature_cols=["x"],
    label_cols=["y"],
    batch_size=10,
    epochs=3,
    verbose=1,
).fit(spark.range(40).selectExpr("id / 40.0D AS x", "id / 20.0D AS y"))
spark.stop()
print("fitted")
"""


def _in_a_terminal(code: str) -> str:
    """Return the output of a program to a terminal."""
    ours, its = pty.openpty()
    try:
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", *_ROWS_AND_COLUMNS, 0, 0))
        with subprocess.Popen([sys.executable, "-c", code], stdout=its, stderr=subprocess.PIPE) as run:
            os.close(its)
            shown = b""
            while part := _read(ours):
                shown += part
            assert run.wait(60) == 0, run.stderr.read().decode()
    finally:
        os.close(ours)
    return shown.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux raises this error once the other end is closed
        return b""


def test_a_bar_in_a_terminal_ends_full_on_its_own_line():
    shown = _in_a_terminal(_TRAINING)
    assert "\x01" not in shown
    # Only the text after the last carriage return of each line stays visible.
    lines = [[part for part in line.split("\r") if part.strip()][-1:] for line in shown.split("\n")]
    epoch, bar, afterwards = [line[0] for line in lines if line]
    assert epoch == "[0]<stdout>:epoch 1/2"
    assert re.match(r"a run: 100%\|█+\| 4/4 \[", bar)
    assert afterwards == "afterwards"


def test_output_to_a_file_is_not_interactive(tmp_path):
    code = "from sparkhvd.estimators.training.logs.progress import is_interactive; print(is_interactive())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.spark
def test_a_fit_with_one_rank_draws_a_bar_in_a_terminal():
    shown = _in_a_terminal(_FIT)
    assert "a run" not in shown
    (bar,) = re.findall(r"\r(torch-[^\r\n]*100%\|█+\| 12/12 \[[^\r\n]*)\r?\n", shown)
    assert shown.rstrip().endswith("fitted"), bar
