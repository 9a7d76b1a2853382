from __future__ import annotations

import os
import subprocess
import sys

import torch

from sparkhvd.estimators.identity import described
from sparkhvd.estimators.policies import Checkpoints

SCRIPT = """
import json, torch
from sparkhvd.estimators.identity import described
model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
words = lambda columns: {name for name in columns if name in {"a", "b", "c", "d"}}
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
found = json.dumps(described([model, optimizer, words, torch.nn.functional.mse_loss]))
"""


def test_another_process_describes_the_same_in_the_same_words():
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", f"{SCRIPT}print(found)"]
    there = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout
    here = {"__name__": "__main__"}
    exec(SCRIPT, here)
    assert there.strip() == here["found"]
    assert "Adam" in there


def test_what_matters_is_seen():
    linear = described(torch.nn.Linear(2, 3))
    torch.manual_seed(9)
    assert described(torch.nn.Linear(2, 3)) == linear, "weights drawn anew are no other run"
    assert described(torch.nn.Linear(2, 4)) != linear
    model = torch.nn.Linear(2, 3)
    slow, fast = (torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.1, 0.2))
    assert described(slow) != described(fast)
    assert described(lambda a: a + 1) != described(lambda a: a + 2)
    assert described(Checkpoints(keep=2)) != described(Checkpoints())
