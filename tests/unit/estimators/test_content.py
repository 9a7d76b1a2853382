from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from dataclasses import dataclass

import keras
import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR

from sparkhvd.errors import ParamError
from sparkhvd.estimators.content import described
from sparkhvd.estimators.policies import Checkpoints
from sparkhvd.estimators.torch.schedule import LRSchedule

SCRIPT = """
import functools, json, re, torch
from sparkhvd.estimators.content import described
from sparkhvd.estimators.torch.schedule import LRSchedule

class Net(torch.nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.words, self.pattern, self.rate = {"a", "b", "c"}, re.compile("a+"), rate
        self.linear = torch.nn.Linear(2, 3)

    def forward(self, rows):
        return self.linear(rows) * self.rate

def weighted(weight, names={"a", "b", "c"}):
    return lambda output, label: (weight * (output - label)).mean()

model = torch.nn.Sequential(Net(0.5), torch.nn.Dropout(0.1), torch.nn.ReLU())
words = lambda columns: {name for name in columns if name in {"a", "b", "c", "d"}}
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
schedule = LRSchedule(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3))
parts = [model, optimizer, words, torch.nn.functional.mse_loss, weighted(torch.ones(3)), weighted, schedule, torch.relu,
         functools.partial(weighted, 2.0), LRSchedule(torch.optim.lr_scheduler.StepLR(optimizer, 3)),
         torch.nn.CrossEntropyLoss(weight=torch.ones(3)), {"b": 1, "a": ({1, 2, 3}, b"x", torch.float64, 1j)}]
found = json.dumps(described(parts))
"""


def test_another_process_describes_the_same_in_the_same_words():
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", f"{SCRIPT}print(found)"]
    there = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout
    here = {"__name__": "__main__"}
    exec(SCRIPT, here)
    assert there.strip() == here["found"]
    assert "Adam" in there
    assert " at 0x" not in there


def closure(value, default=1, *, named=2):
    return lambda output, label, factor=default, *, other=named: value * factor * other * (output - label)


HELPERS = {name: {"__name__": "own", "torch": torch} for name in ("one", "two")}
for number, places in enumerate(HELPERS.values()):
    exec(f"def inner(a):\n  return a + {number}\ndef loss(a):\n  return inner(a)", places)


class Doubled(torch.nn.Linear):
    factor = 2

    def forward(self, rows):
        return super().forward(rows) * self.factor


class Tripled(Doubled):
    factor = 3


@dataclass(frozen=True)
class Own:
    function: object
    number: int = 1


class Plain:
    def __init__(self, number):
        self.number = number


def cells(number):
    class Net(torch.nn.Linear):
        def forward(self, rows):
            return super().forward(rows) + number

    return Net(2, 3)


PAIRS = {
    "values of closures": (lambda: closure(1), lambda: closure(2)),
    "defaults": (lambda: closure(1, 2), lambda: closure(1, 3)),
    "defaults by keyword": (lambda: closure(1, named=2), lambda: closure(1, named=3)),
    "tensors of closures": (lambda: closure(torch.ones(3)), lambda: closure(torch.arange(3.0))),
    "arrays of closures": (lambda: closure(np.ones(3)), lambda: closure(np.arange(3.0))),
    "functions that are called": (lambda: HELPERS["one"]["loss"], lambda: HELPERS["two"]["loss"]),
    "code": (lambda: lambda a: a + 1, lambda: lambda a: a + 2),
    "arguments of partial": (
        lambda: functools.partial(functional.huber_loss, delta=1.0),
        lambda: functools.partial(functional.huber_loss, delta=2.0),
    ),
    "methods": (lambda: closure(1).__call__, lambda: closure(2).__call__),
    "arguments of losses": (torch.nn.HuberLoss, lambda: torch.nn.HuberLoss(delta=50)),
    "buffers of losses": (
        lambda: torch.nn.CrossEntropyLoss(weight=torch.ones(2)),
        lambda: torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0])),
    ),
    "smoothing": (torch.nn.CrossEntropyLoss, lambda: torch.nn.CrossEntropyLoss(label_smoothing=0.3)),
    "losses of Keras": (lambda: keras.losses.Huber(delta=1), lambda: keras.losses.Huber(delta=9)),
    "schedules": (
        lambda: LRSchedule(lambda optimizer: StepLR(optimizer, 1)),
        lambda: LRSchedule(lambda optimizer: StepLR(optimizer, 2)),
    ),
    "dropout": (lambda: torch.nn.Dropout(0.1), lambda: torch.nn.Dropout(0.2)),
    "forward": (lambda: Doubled(2, 3), lambda: torch.nn.Linear(2, 3)),
    "attributes of classes": (lambda: Doubled(2, 3), lambda: Tripled(2, 3)),
    "what forward holds": (lambda: cells(1), lambda: cells(2)),
    "shapes": (lambda: torch.nn.Linear(2, 3), lambda: torch.nn.Linear(2, 4)),
    "what is trained": (lambda: torch.nn.Linear(2, 3), lambda: torch.nn.Linear(2, 3).requires_grad_(False)),
    "numbers of optimizers": (
        lambda: torch.optim.SGD(torch.nn.Linear(2, 3).parameters(), lr=0.1),
        lambda: torch.optim.SGD(torch.nn.Linear(2, 3).parameters(), lr=0.2),
    ),
    "fields": (lambda: Own(closure(1)), lambda: Own(closure(2))),
    "attributes": (lambda: Plain(1), lambda: Plain(2)),
    "policies": (Checkpoints, lambda: Checkpoints(keep=2)),
    "layers of Keras": (lambda: keras_model(0.1), lambda: keras_model(0.2)),
    "Lambda layers": (lambda: keras_model(factor=2), lambda: keras_model(factor=3)),
    "names that the user gave": (lambda: keras_model(name="a"), lambda: keras_model(name="b")),
    "states of optimizers": (lambda: torch_optimizer(0), lambda: torch_optimizer(1)),
    "what states hold": (lambda: torch_optimizer(1), lambda: torch_optimizer(2)),
    "states of Keras optimizers": (lambda: keras_optimizer(0), lambda: keras_optimizer(1)),
    "what Keras states hold": (lambda: keras_optimizer(1), lambda: keras_optimizer(2)),
    "optimizers of Keras": (lambda: keras.optimizers.Adam(0.1), lambda: keras.optimizers.Adam(0.2)),
}


def torch_optimizer(steps):
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.Adam(model.parameters())
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    for _ in range(steps):
        optimizer.step()
    return optimizer


def keras_optimizer(steps):
    optimizer, weight = keras.optimizers.Adam(0.1), keras.Variable([1.0, 2.0])
    optimizer.build([weight])
    for _ in range(steps):
        optimizer.apply([keras.ops.ones(2)])
    return optimizer


def keras_model(rate=0.1, factor=2, name=None):
    inputs = keras.Input((2,), name=name)
    hidden = keras.layers.Dense(3, activation="relu")(inputs)
    hidden = keras.layers.Dropout(rate)(keras.layers.Dense(3)(hidden))
    outputs = keras.layers.Lambda(lambda rows: rows * factor)(hidden)
    model = keras.Model(inputs, keras.layers.Dense(1)(outputs))
    model.compile("sgd", keras.losses.Huber(delta=2))
    return model


@pytest.mark.parametrize("case", PAIRS)
def test_what_matters_is_seen_and_the_same_made_twice_is_the_same(case):
    one, other = PAIRS[case]
    torch.manual_seed(1)
    described_once = described(one())
    torch.manual_seed(2)  # weights drawn anew are no other run
    assert described(one()) == described_once
    assert described(other()) != described_once


def test_an_object_that_holds_itself_is_described():
    module = torch.nn.Linear(2, 3)
    module.compute = functools.partial(closure(1), module)
    assert described(module) == described(module)


def test_what_cannot_be_told_is_refused():
    with pytest.raises(ParamError, match=r"loss holds a _thread.lock, of which cannot be told what.*a run_id instead"):
        described(closure(threading.Lock()), "loss")

    class Silent(keras.layers.Layer):
        def __init__(self, made_of):
            super().__init__()

    with pytest.raises(ParamError, match=r"Silent in model cannot be told.*it has no get_config"):
        described(Silent(object()), "model")
