from __future__ import annotations

import array
import collections
import enum
import functools
import importlib
import json
import os
import random
import subprocess
import sys
import threading
import types
import warnings
from dataclasses import dataclass

import keras
import numpy as np
import pandas as pd
import pytest
import torch
from pyspark.sql import Row
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR
from torchmetrics import MeanAbsoluteError, MeanSquaredError

from sparkhvd.errors import ParamError
from sparkhvd.estimators.params.policies import Checkpoints
from sparkhvd.estimators.runs import canonical
from sparkhvd.estimators.runs.canonical import canonical_form
from sparkhvd.estimators.torch.schedule import LRSchedule

SCRIPT = """
import functools, json, re, torch
from sparkhvd.estimators.runs.canonical import canonical_form
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
found = json.dumps(canonical_form(parts))
"""


def test_the_canonical_form_is_the_same_in_another_process():
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", f"{SCRIPT}print(found)"]
    there = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout
    here = {"__name__": "__main__"}
    exec(SCRIPT, here)
    assert there.strip() == here["found"]
    assert "Adam" in there
    assert " at 0x" not in there


def test_a_keras_model_on_pytorch_has_one_form_in_every_process():
    script = (
        "import json, keras; from sparkhvd.estimators.runs.canonical import canonical_form; "
        "model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)]); model.compile('adam', 'mse'); "
        "print(json.dumps(canonical_form(model)))"
    )
    environment = os.environ | {"KERAS_BACKEND": "torch", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    one, other = (
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout
        for _ in range(2)
    )
    assert one == other
    assert "Dense" in one


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


class Distance(Plain):
    def __call__(self, one, other):
        return (one - other) * self.number


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
    "called functions": (lambda: HELPERS["one"]["loss"], lambda: HELPERS["two"]["loss"]),
    "code": (lambda: lambda a: a + 1, lambda: lambda a: a + 2),
    "names of arguments": (lambda: lambda a, b: (a, b), lambda: lambda b, a: (b, a)),
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
    "closures of forward": (lambda: cells(1), lambda: cells(2)),
    "shapes": (lambda: torch.nn.Linear(2, 3), lambda: torch.nn.Linear(2, 4)),
    "trainable parameters": (lambda: torch.nn.Linear(2, 3), lambda: torch.nn.Linear(2, 3).requires_grad_(False)),
    "numbers of optimizers": (
        lambda: torch.optim.SGD(torch.nn.Linear(2, 3).parameters(), lr=0.1),
        lambda: torch.optim.SGD(torch.nn.Linear(2, 3).parameters(), lr=0.2),
    ),
    "fields": (lambda: Own(closure(1)), lambda: Own(closure(2))),
    "attributes": (lambda: Plain(1), lambda: Plain(2)),
    "policies": (Checkpoints, lambda: Checkpoints(keep=2)),
    "layers of Keras": (lambda: keras_model(0.1), lambda: keras_model(0.2)),
    "Lambda layers": (lambda: keras_model(factor=2), lambda: keras_model(factor=3)),
    "names from the user": (lambda: keras_model(name="a"), lambda: keras_model(name="b")),
    "states of optimizers": (lambda: torch_optimizer(0), lambda: torch_optimizer(1)),
    "contents of states": (lambda: torch_optimizer(1), lambda: torch_optimizer(2)),
    "states of Keras optimizers": (lambda: keras_optimizer(0), lambda: keras_optimizer(1)),
    "contents of Keras states": (lambda: keras_optimizer(1), lambda: keras_optimizer(2)),
    "optimizers of Keras": (lambda: keras.optimizers.Adam(0.1), lambda: keras.optimizers.Adam(0.2)),
    "activations of Transformers": (
        lambda: torch.nn.TransformerDecoderLayer(4, 2, 8, activation="relu"),
        lambda: torch.nn.TransformerDecoderLayer(4, 2, 8, activation="gelu"),
    ),
    "functions of installed losses": (
        lambda: torch.nn.TripletMarginWithDistanceLoss(distance_function=closure(1)),
        lambda: torch.nn.TripletMarginWithDistanceLoss(distance_function=closure(2)),
    ),
    "objects in installed losses": (
        lambda: torch.nn.TripletMarginWithDistanceLoss(distance_function=Distance(1)),
        lambda: torch.nn.TripletMarginWithDistanceLoss(distance_function=Distance(2)),
    ),
    "operators of torchmetrics": (
        lambda: MeanSquaredError() + MeanAbsoluteError(),
        lambda: MeanSquaredError() * MeanAbsoluteError(),
    ),
    "adapted words": (lambda: adapted(["a", "b"]), lambda: adapted(["a", "c"])),
    "adapted integers": (lambda: adapted([5, 6]), lambda: adapted([5, 7])),
    "adapted weights of words": (
        lambda: adapted(["a", "b", "b"], output_mode="tf_idf"),
        lambda: adapted(["a", "b"], output_mode="tf_idf"),
    ),
    "order of keys": (lambda: {"a": 1, "b": 2}, lambda: {"b": 2, "a": 1}),  # code may iterate over the dictionary
    "types of keys": (lambda: {1: "a"}, lambda: {"1": "a"}),
    "masks": (lambda: masked([0, 1, 0]), lambda: masked([0, 0, 1])),
    "masked and plain arrays": (lambda: masked([0, 0, 0]), lambda: np.arange(3.0)),
    "classes of arrays": (lambda: np.ones((2, 2)), lambda: np.ones((2, 2)).view(np.recarray)),
    "types of scalars": (lambda: np.float32(0.5), lambda: np.float16(0.5)),
    "types of arrays without dimensions": (lambda: np.array(1, np.int8), lambda: np.array(1, np.int64)),
    "names of fields": (lambda: np.zeros(2, [("a", "f4")]), lambda: np.zeros(2, [("b", "f4")])),
    "indices of pandas": (lambda: pd.Series([1.0, 2.0], ["a", "b"]), lambda: pd.Series([1.0, 2.0], ["b", "a"])),
    "columns of pandas": (lambda: pd.DataFrame({"a": [1.0]}), lambda: pd.DataFrame({"b": [1.0]})),
    "tuples and lists": (lambda: closure((0, 1)), lambda: closure([0, 1])),
    "lengths of queues": (lambda: collections.deque([1], 2), lambda: collections.deque([1], 3)),
    "types of compact arrays": (lambda: array.array("f", [1.0]), lambda: array.array("d", [1.0])),
    "counters": (lambda: closure({"a": 1}), lambda: closure(collections.Counter({"a": 1}))),
    "kinds of variadic arguments": (lambda: lambda *a: len(a), lambda: lambda **a: len(a)),
    "objects with slots": (lambda: Slotted(1), lambda: Slotted(2)),
    "data classes with slots": (lambda: SlottedData(1), lambda: SlottedData(2)),
    "seeds of NumPy": (lambda: np.random.default_rng(1), lambda: np.random.default_rng(2)),
    "seeds of Python": (lambda: random.Random(1), lambda: random.Random(2)),
    "seeds of PyTorch": (
        lambda: torch.Generator().manual_seed(1),
        lambda: torch.Generator().manual_seed(2),
    ),
    "attributes of parameters": (lambda: torch.nn.Linear(2, 3), lambda: with_mark(torch.nn.Linear(2, 3))),
    "layers in evaluation mode": (lambda: normalized(fixed=False), lambda: normalized(fixed=True)),
    "modes of losses": (lambda: with_mode(True), lambda: with_mode(False)),
    "other states of optimizers": (lambda: with_state({"step": 1}), lambda: with_state({"step": 5})),
    "gradients of tensors": (lambda: torch.ones(2), lambda: torch.ones(2, requires_grad=True)),
    "classes of tensors": (lambda: torch.ones(2, requires_grad=True), lambda: torch.nn.Parameter(torch.ones(2))),
    "attributes of tensors": (lambda: torch.ones(2), lambda: with_scale(torch.ones(2))),
    "fields of rows": (lambda: Row(mean=0.0, deviation=1.0), lambda: Row(deviation=0.0, mean=1.0)),
    "lists with slots": (lambda: SlottedList(1), lambda: SlottedList(2)),
    "parametrizations": (lambda: parametrized(2), lambda: parametrized(3)),
    "keys of parameter groups": (lambda: grouped(False), lambda: grouped(True)),
    "sets of losses": (lambda: with_attribute({1, 2}), lambda: with_attribute({1, 3})),
    "types in losses": (lambda: with_attribute(torch.float32), lambda: with_attribute(torch.float64)),
    "arrays in losses": (lambda: with_attribute(np.zeros(2)), lambda: with_attribute(np.ones(2))),
    "referenced layers": (lambda: with_reference(0), lambda: with_reference(1)),
    "referenced weights": (lambda: with_reference(0, "bias"), lambda: with_reference(1, "bias")),
    "weights that Keras excludes": (lambda: excluding(0), lambda: excluding(1)),
    "weights that a compiled Keras model excludes": (
        lambda: excluding(0, compiled=True),
        lambda: excluding(1, compiled=True),
    ),
    "weights that an inner Keras optimizer excludes": (
        lambda: excluding(0, scaled=True),
        lambda: excluding(1, scaled=True),
    ),
    "referenced Keras layers": (lambda: with_keras_reference(0), lambda: with_keras_reference(1)),
    "scripted modules": (lambda: scripted(torch.nn.ReLU()), lambda: scripted(torch.nn.Tanh())),
    "attributes of scripted modules": (lambda: scripted(Times(2)), lambda: scripted(Times(3))),
    "functions of scripted modules": (lambda: scripted(Calling(doubled)), lambda: scripted(Calling(tripled))),
    "constants of traced modules": (lambda: traced(2), lambda: traced(3)),
    "options of hooks": (lambda: hooked(always_call=True), lambda: hooked(always_call=False)),
    "defaults of own optimizers": (lambda: OwnSGD(1), lambda: OwnSGD(2)),
    "compiled methods": (lambda: compiled_method(1), lambda: compiled_method(2)),
    "compiled functions": (lambda: with_compiler(closure(1)), lambda: with_compiler(closure(2))),
    "flags": (lambda: Flags.ONE, lambda: Flags.TWO),
    "conjugate tensors": (lambda: torch.tensor([1j]), lambda: torch.tensor([1j]).conj()),
    "imaginary parts": (lambda: torch.tensor([1 + 1j]).imag, lambda: torch.tensor([1 + 2j]).imag),
    "weights of optimizers": (lambda: optimizing(0), lambda: optimizing(1)),
    "weights of Keras losses": (lambda: compiled(loss_weights=[1.0]), lambda: compiled(loss_weights=[2.0])),
    "weighted metrics of Keras": (
        lambda: compiled(weighted_metrics=["mse"]),
        lambda: compiled(weighted_metrics=["mae"]),
    ),
    "regularizers": (lambda: dense(kernel_regularizer="l1"), lambda: dense(kernel_regularizer="l2")),
    "constraints": (
        lambda: dense(kernel_constraint=keras.constraints.MaxNorm(1)),
        lambda: dense(kernel_constraint=keras.constraints.MaxNorm(2)),
    ),
    "dtype policies": (lambda: dense(dtype="float32"), lambda: dense(dtype="mixed_float16")),
}


class Flags(enum.Flag):
    ONE = 1
    TWO = 2


class OwnSGD(torch.optim.SGD):
    def __init__(self, number):
        super().__init__(torch.nn.Linear(2, 3).parameters(), lr=0.1)
        self.defaults["number"] = number


def hooked(**options):
    module = torch.nn.Linear(2, 3)
    module.register_forward_hook(closure(1), **options)
    return module


def with_compiler(function):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch's compiler uses torch.jit
        return torch.compile(function)


def compiled_method(number):
    class Compiled:
        @with_compiler
        def compute(self, value):
            return value * number

    return Compiled()


class Slotted:
    __slots__ = ("number",)

    def __init__(self, number):
        self.number = number


class Times(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, weight):
        return weight * self.factor


@dataclass(frozen=True, slots=True)
class SlottedData:
    number: int


def masked(mask):
    return np.ma.array(np.arange(3.0), mask=mask)


def with_mark(module):
    module.weight.no_decay = True
    return module


def with_compilers_mark(module):
    module.weight._dynamo_static_input_type = "unguarded"  # as torch.compile does
    return module


def normalized(*, fixed):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    model[1].train(not fixed)
    return model


def parametrized(factor):
    module = torch.nn.Linear(2, 3)
    torch.nn.utils.parametrize.register_parametrization(module, "weight", Times(factor))
    return module


def grouped(flag):
    return torch.optim.SGD([{"params": torch.nn.Linear(2, 3).parameters(), "is_head": flag}], lr=0.1)


def with_attribute(value):
    loss = torch.nn.MSELoss()
    loss.reduction_of = value
    return loss


def with_reference(index, name=None):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    part = model[index] if name is None else getattr(model[index], name)
    return [model, lambda output, label: (output - label).mean() + part]


def scripted(activation):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch's torch.jit
        return torch.jit.script(torch.nn.Sequential(torch.nn.Linear(2, 2), activation))


def traced(factor):
    module = Times(1)
    module.factor = torch.tensor(float(factor))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(module, torch.ones(1, 2))


def doubled(rows: torch.Tensor) -> torch.Tensor:
    return rows * 2


def tripled(rows: torch.Tensor) -> torch.Tensor:
    return rows * 3


class Calling(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, rows):
        return self.function(rows)


class SlottedList(list):
    __slots__ = ("number",)

    def __init__(self, number):
        self.number = number


def with_mode(training):
    return torch.nn.Dropout(0.1).train(training)


def with_state(state):
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 3).parameters(), lr=0.1)
    optimizer.state.update(state)
    return optimizer


def with_scale(tensor):
    tensor.scale = 2
    return tensor


def optimizing(index):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    return [model, torch.optim.SGD(model[index].parameters(), lr=0.1)]


def with_keras_reference(index):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(2)])
    layer = model.layers[index]
    return [model, lambda label, output: (output - label) ** 2 + layer.bias[0]]


def excluding(index, *, compiled=False, scaled=False):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(2)])
    optimizer = keras.optimizers.AdamW(0.1)
    optimizer.exclude_from_weight_decay(var_list=[model.layers[index].kernel])
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    if compiled:
        model.compile(optimizer, "mse")
    return model if compiled else [model, optimizer]


def compiled(**options):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile("sgd", ["mse"], **options)
    return model


def dense(**options):
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, **options)])


SCHEDULE = """
class C(keras.optimizers.schedules.LearningRateSchedule):
  def __call__(self, step):
    return @
  def get_config(self):
    return {}
made = keras.optimizers.SGD(C())
"""
WRITTEN = {
    "tensors of classes": ("class C(Linear):\n  scale = torch.tensor(@)\nmade = C(2, 3)", "1.0", "2.0"),
    "functions of C in classes": ("class C(Linear):\n  act = staticmethod(torch.@)\nmade = C(2, 3)", "relu", "tanh"),
    "partials of classes": ("class C:\n  act = functools.partial(max, @)\nmade = C()", "1", "2"),
    "classes in classes": ("class C:\n  class D:\n    x = @\nmade = C()", "1", "2"),
    "enums": ("class C(enum.Enum):\n  A = @\ndef made():\n  return C.A.value", "0.1", "0.2"),
    "attributes of enums": ("class C(enum.IntEnum):\n  A = 1\n  def f(self):\n    return @\nmade = C.A", "1", "2"),
    "methods of numbers": ("class C(float):\n  def __call__(self, x):\n    return x * @\nmade = C(1)", "1", "2"),
    "attributes of numbers": ("class C(float):\n  pass\nmade = C(1)\nmade.x = @", "1", "2"),
    "methods of sets": ("class C(set):\n  def f(self):\n    return @\nmade = C()", "1", "2"),
    "methods of arrays": ("class C(np.ndarray):\n  x = @\nmade = np.zeros(2).view(C)", "1", "2"),
    "attributes of arrays": ("class C(np.ndarray):\n  pass\nmade = np.zeros(2).view(C)\nmade.x = @", "1", "2"),
    "cached functions": (
        "def f():\n  return @\ncached = functools.lru_cache(f)\ndef made():\n  return cached()",
        "1",
        "2",
    ),
    "methods of lists": ("class C(list):\n  def f(self):\n    return @\nmade = C()", "1", "2"),
    "attributes of functions": ("def made():\n  return made.factor\nmade.factor = @", "1", "2"),
    "attributes of lists": ("class C(list):\n  pass\nmade = C()\nmade.x = @", "1", "2"),
    "methods of named tuples": ("class C(typing.NamedTuple):\n  x: int\n  y = @\nmade = C(1)", "1", "2"),
    "metaclasses": ("class M(type):\n  x = @\nclass C(metaclass=M):\n  pass\nmade = C()", "1", "2"),
    "defaults of dictionaries": ("made = collections.defaultdict(lambda: @)", "1", "2"),
    "code without a module": ("space = {}\nexec('def f(): return @', space)\nmade = space['f']", "1", "2"),
    "private attributes of modules": ("made = Linear(2, 3)\nmade._act = torch.@", "relu", "tanh"),
    "hooks": ("made = Linear(2, 3)\nmade.register_forward_hook(lambda *a: a[2] * @)", "1", "2"),
    "buffers in the memory of a weight": (
        "made = Linear(3, 3)\nmade.register_buffer('start', made.weight.data@)",
        "",
        ".clone()",
    ),
    "hooks of gradients": ("made = Linear(2, 3)\nmade.weight.register_hook(lambda g: g * @)", "1", "2"),
    "hooks of the backward pass": ("made = Linear(2, 3)\nmade.register_full_backward_hook(lambda *a: @)", "1", "2"),
    "hooks of optimizers": (
        "made = torch.optim.SGD(Linear(2, 3).parameters())\nmade.register_step_post_hook(lambda *a: @)",
        "1",
        "2",
    ),
    "attributes of optimizers": (
        "made = torch.optim.SGD(Linear(2, 3).parameters())\nmade.factor = @",
        "1",
        "2",
    ),
    "attributes of optimizers that end like hooks": (
        "made = torch.optim.SGD(Linear(2, 3).parameters())\nmade.my_hooks = [@]",
        "1",
        "2",
    ),
    "operators of classes": ("class C:\n  __call__ = @\nmade = C()", "abs", "round"),
    "partial operators of classes": (
        "class C:\n  def f(self, x):\n    return x\n  __call__ = functools.partialmethod(f, @)\nmade = C()",
        "1",
        "2",
    ),
    "private attributes of optimizers": (
        "class C(torch.optim.SGD):\n  pass\nmade = C(Linear(2, 3).parameters())\nmade._factor = @",
        "1",
        "2",
    ),
    "activations of Keras": ("def f(x):\n  return x * @\nmade = keras.layers.Dense(3, activation=f)", "1", "2"),
    "activations of layers": (
        "def f(x):\n  return x * @\nmade = keras.Sequential([keras.layers.Dense(3, activation=f, name='d')], name='s')",
        "1",
        "2",
    ),
    "schedules of Keras": (
        SCHEDULE,
        "0.1",
        "0.2",
    ),
}


def written(code):
    space = {"__name__": "own", "torch": torch, "Linear": torch.nn.Linear, "keras": keras}
    exec(f"import collections, enum, functools, typing, numpy as np\n{code}", space)
    return space["made"]


@pytest.mark.parametrize("case", WRITTEN)
def test_user_code_counts_at_any_depth(case):
    code, one, other = WRITTEN[case]
    found = [canonical_form(written(code.replace("@", text))) for text in (one, one, other)]
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_methods_count_with_the_module_names_that_they_use(monkeypatch):
    def made(factor):
        helpers = types.ModuleType("own_helpers")
        helpers.__file__ = "/own_helpers.py"
        exec(f"def first(a):\n  return a\ndef second(a):\n  return a * {factor}", helpers.__dict__)
        monkeypatch.setitem(sys.modules, "own_helpers", helpers)
        code = (
            "import own_helpers as h\nclass C:\n  def a(s):\n    return h.first(s)\n  def b(s):\n    return h.second(s)"
        )
        return canonical_form(written(f"{code}\nmade = C()"))

    assert made(1) == made(1)
    assert made(1) != made(2)


def test_a_function_counts_with_the_modules_that_it_imports_at_call_time(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package/__init__.py").touch()
    (tmp_path / "own_package/part.py").write_text("from own_deep import factor\n")
    code = "def made():\n  from own_package import part\n  return part.factor"

    def with_factor(factor):
        (tmp_path / "own_deep.py").write_text(f"factor = {factor}\n")
        importlib.invalidate_caches()
        return canonical_form(written(code))

    assert with_factor(1) == with_factor(1)
    assert with_factor(1) != with_factor(2)


def test_class_attributes_without_a_canonical_form_do_not_count():
    code = "import threading\nclass C:\n  lock = threading.Lock()\n  factor = @\nmade = C()"
    assert canonical_form(written(code.replace("@", "1"))) == canonical_form(written(code.replace("@", "1")))
    assert canonical_form(written(code.replace("@", "1"))) != canonical_form(written(code.replace("@", "2")))


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
def test_equal_objects_have_equal_forms_and_relevant_differences_count(case):
    one, other = PAIRS[case]
    torch.manual_seed(1)
    described_once = canonical_form(one())
    torch.manual_seed(2)  # newly drawn weights do not make another run
    assert canonical_form(one()) == described_once
    assert canonical_form(other()) != described_once


MODULE = """
from torch.nn.functional import {name} as measure
import {module} as helpers
FACTOR = {factor}
def loss(output, label):
    return helpers.inner(output) * measure(output, label) * FACTOR[0]
def late(output, label):
    import {module}
    return {module}.inner(output)
"""


def test_the_module_names_that_a_function_uses_count(tmp_path, monkeypatch):
    """Check aliases of installed functions, tensors of the module, functions of user modules, and inner imports."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for number in (1, 2):
        (tmp_path / f"own_helpers_{number}.py").write_text(f"def inner(a):\n    return a * {number}\n")

    def made(name="mse_loss", module="own_helpers_1", factor="torch.ones(2)", function="loss"):
        space = {"__name__": "own", "torch": torch}
        exec(MODULE.format(name=name, module=module, factor=factor), space)
        return canonical_form(space[function])

    first = made()
    assert made() == first
    assert made(name="l1_loss") != first
    assert made(factor="torch.zeros(2)") != first
    late = made(function="late")
    (tmp_path / "own_helpers_1.py").write_text("def inner(a):\n    return a * 3\n")
    importlib.invalidate_caches()
    assert made(function="late") != late
    importlib.reload(sys.modules["own_helpers_1"])
    assert made() != first


def test_the_weights_of_a_model_count_on_request():
    def made(kind, seed):
        torch.manual_seed(seed)
        keras.utils.set_random_seed(seed)
        return kind()

    for kind in (lambda: torch.nn.Linear(2, 3), keras_model):
        assert canonical_form(made(kind, 1), weights=True) == canonical_form(made(kind, 1), weights=True)
        assert canonical_form(made(kind, 1), weights=True) != canonical_form(made(kind, 2), weights=True)
        assert canonical_form(made(kind, 1)) == canonical_form(made(kind, 2))


def adapted(values, **arguments):
    kind = keras.layers.StringLookup if isinstance(values[0], str) else keras.layers.IntegerLookup
    lookup = kind(**arguments)
    lookup.adapt(np.array(values)[:, None])
    return lookup


SAME = {
    "used pandas objects": (lambda: pd.Series([1.0, 2.0], ["a", "b"]), lambda series: series["a"]),
    "used pandas frames": (lambda: pd.DataFrame({"a": [1.0]}, ["x"]), lambda frame: (frame["a"], frame.loc["x"])),
    "compiled weights": (lambda: torch.nn.Linear(2, 3), with_compilers_mark),
    "used flags": (lambda: Flags.ONE, lambda flag: flag | Flags.TWO),
    "used caches": (lambda: functools.lru_cache(closure(1)), lambda cached: cached(2, 1)),
    "used dispatchers": (lambda: functools.singledispatch(lambda value: value), lambda dispatch: dispatch(1)),
}


@pytest.mark.parametrize("case", SAME)
def test_the_use_of_an_object_does_not_change_its_form(case):
    make, use = SAME[case]
    fresh, used = make(), make()
    use(used)
    assert canonical_form(used) == canonical_form(fresh)


def test_equal_values_have_equal_forms():
    values = np.arange(6.0).reshape(2, 3)
    assert canonical_form(np.asfortranarray(values)) == canonical_form(values)
    assert canonical_form(("a", "b")) == canonical_form(["a", "b"])
    pair = (1, 2)
    assert canonical_form([pair, pair]) == canonical_form([pair, tuple([1, 2])])  # noqa: C409  (an equal copy)


def test_the_order_of_attributes_does_not_count():
    one, other = Plain(1), Plain(1)
    one.first, one.second = 1, 2
    other.second, other.first = 2, 1
    assert canonical_form(one) == canonical_form(other)


def test_a_number_of_a_users_class_may_refer_to_itself():
    class Rate(float):
        pass

    rate = Rate(1.0)
    rate.base = rate
    assert canonical_form([rate, Rate(1.0)]) != canonical_form([rate, Rate(2.0)])


def test_a_tuple_of_a_users_class_may_refer_to_itself():
    class Pair(tuple):
        pass

    def made(number):
        pair = Pair((1, number))
        pair.base = pair
        return canonical_form([pair])

    assert made(1) == made(1)
    assert made(1) != made(2)


class Bounded(collections.abc.Sequence):
    """A sequence with a method that has the name of an attribute of queues."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]

    def maxlen(self):
        return len(self.items)


def test_a_method_of_a_sequence_is_not_mistaken_for_an_attribute_of_queues():
    def digest(*items):
        return json.dumps(canonical_form(Bounded(items)))

    assert digest(1) == digest(1)
    assert digest(1) != digest(2)


def test_a_large_set_needs_no_copy_per_word(monkeypatch):
    words = {f"word {index}" for index in range(100)}
    expected = canonical_form(words)
    monkeypatch.setattr(canonical.CanonicalForm, "_copy", lambda _: pytest.fail("copied"))
    assert canonical_form(words) == expected
    assert canonical_form(words) != canonical_form(words - {"word 1"})


def test_a_set_may_contain_an_object_that_refers_to_it():
    def made(number):
        node = Plain(number)
        node.neighbours = {node, Plain(3)}
        return canonical_form(node)

    assert made(1) == made(1)
    assert made(1) != made(2)


def test_a_layer_with_a_vocabulary_of_its_own_is_described():
    class Dictionary(keras.layers.Layer):
        def get_vocabulary(self, language):
            return [language]

    assert canonical_form(Dictionary(name="one")) == canonical_form(Dictionary(name="one"))


def test_an_object_that_holds_itself_is_described():
    module = torch.nn.Linear(2, 3)
    module.compute = functools.partial(closure(1), module)
    assert canonical_form(module) == canonical_form(module)


def test_objects_without_a_canonical_form_are_refused():
    with pytest.raises(
        ParamError, match=r"loss holds a _thread.lock, whose content cannot be determined.*a run_id instead"
    ):
        canonical_form(closure(threading.Lock()), "loss")

    class Silent(keras.layers.Layer):
        def __init__(self, made_of):
            super().__init__()

    with pytest.raises(ParamError, match=r"Silent in model cannot be determined: it has no get_config"):
        canonical_form(Silent(object()), "model")


def test_a_tensor_without_content_is_refused():
    with pytest.raises(ParamError, match=r"loss holds a torch.Tensor, whose content cannot be determined.*a run_id"):
        canonical_form(closure(torch.ones(2, device="meta")), "loss")


def test_only_a_training_sets_the_mode_of_the_model():
    train, evaluate = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3).eval()
    assert canonical_form(train, "model") == canonical_form(evaluate, "model")
    assert canonical_form(train, "loss") != canonical_form(evaluate, "loss")


def test_a_module_of_the_user_counts_with_its_file_if_it_is_passed_on(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "own_settings.py"

    def made(factor, code):
        file.write_text(f"FACTOR = {factor}\n")
        importlib.invalidate_caches()
        return canonical_form(written(f"import own_settings\n{code}"))

    passed = "def scaled(settings, a):\n  return a * settings.FACTOR\ndef made(a):\n  return scaled(own_settings, a)"
    kept = "class C:\n  def __init__(self):\n    self.settings = own_settings\nmade = C()"
    for code in (passed, kept):
        assert made(1, code) == made(1, code)
        assert made(1, code) != made(2, code)


def test_a_function_may_use_the_operations_of_keras():
    space = {"__name__": "own", "ops": keras.ops}
    exec("def loss(label, output):\n  return ops.mean(label - output)", space)
    assert canonical_form(space["loss"]) == canonical_form(space["loss"])


def test_the_settings_of_keras_count_for_its_models():
    before, epsilon = canonical_form(keras_model()), keras.config.epsilon()
    keras.config.set_epsilon(0.5)
    try:
        assert canonical_form(keras_model()) != before
    finally:
        keras.config.set_epsilon(epsilon)
    assert canonical_form(keras_model()) == before
