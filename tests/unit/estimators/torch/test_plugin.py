from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from torch.nn import functional

from sparkhvd.data.schema.data_schema import ColumnSpec, DataSchema
from sparkhvd.errors import ModelOutputError, ParamError
from sparkhvd.estimators.lightning.plugin import PLUGIN as LIGHTNING
from sparkhvd.estimators.params.policies import Checkpoints
from sparkhvd.estimators.plugin import TrainSpec
from sparkhvd.estimators.torch.plugin import PLUGIN
from sparkhvd.world import World


def columns(width=None, label_dtype="int64"):
    kind = "scalar" if width == () else "array"
    return DataSchema(
        (
            ColumnSpec("x", "float64", width, "feature", kind),
            ColumnSpec("y", label_dtype, (), "label", "scalar"),
        )
    )


def params(model, loss=functional.cross_entropy, **more):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {"model": model, "optimizer": optimizer, "loss": loss, "feature_cols": ("x",), "label_cols": ("y",)}
    return {**found, **more}


class Fickle(torch.nn.Module):
    """A model whose forward pass changes its state."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return functional.dropout(self.norm(self.layer(x)), training=self.training)


class WithObjects(torch.nn.Linear):
    def get_extra_state(self):
        return {"steps": 3, "schedule": threading.Thread}

    def set_extra_state(self, state):
        pass


def test_state_that_a_checkpoint_could_not_restore_is_refused():
    with pytest.raises(ParamError, match=r"state \(_extra_state: see get_extra_state\) holds threading\.Thread"):
        PLUGIN.check(params(WithObjects(3, 4)), columns((3,)), None)


def test_the_check_returns_the_shape_of_one_row_of_every_output():
    found = PLUGIN.check(params(torch.nn.Linear(3, 4)), columns((3,)), {"x": np.zeros((2, 3)), "y": np.zeros(2, int)})
    assert found == [(4,)]


def test_synthetic_rows_are_used_when_all_shapes_are_known():
    model = torch.nn.Linear(1, 4)
    assert PLUGIN.check(params(model), columns(()), None) == [(4,)]


def test_without_rows_and_with_unknown_shapes_the_check_returns_no_output_shapes():
    assert PLUGIN.check(params(torch.nn.Linear(3, 4)), columns(None), None) == []


class IdsFromOne(torch.nn.Module):
    """Fails for an id of 0, in a way that depends on ``kind``."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.embedding = torch.nn.Embedding(5, 4)

    def forward(self, ids):
        if self.kind == "raises" and int(ids.min()) < 1:
            raise ValueError("ids begin with 1")
        if self.kind == "asserts":
            assert (ids > 0).all()
        return self.embedding((ids - 1).abs() if self.kind == "loss" else ids - 1).reshape(len(ids), 4)


def refuses_nothing(output, label):
    if (label == 0).any():
        raise ValueError("a label of 0")
    return functional.cross_entropy(output, label)


OF_LIGHTNING = ("callbacks", "logger", "trainer_args", "input_shapes", "label_shapes", "data_module")


def checked(plugin, kind, rows):
    model_params = params(IdsFromOne(kind), refuses_nothing if kind == "loss" else functional.cross_entropy)
    if plugin is LIGHTNING:
        model_params = {
            **dict.fromkeys(OF_LIGHTNING),
            "batch_format": "dict",
            "checkpoints": Checkpoints(),
            **model_params,
        }
    ids = DataSchema((ColumnSpec("x", "int64", (), "feature", "scalar"), *columns(()).of("label")))
    return plugin.check(model_params, ids, rows)


@pytest.mark.parametrize("plugin", [PLUGIN, LIGHTNING], ids=["torch", "lightning"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("looks up", "index out of range"),
        ("raises", "ids begin with 1"),
        ("asserts", "AssertionError"),
        ("loss", "a label of 0"),
    ],
)
def test_failures_on_synthetic_rows_are_ignored_but_not_on_real_rows(plugin, kind, message):
    assert checked(plugin, kind, None) == ([(4,)] if kind == "loss" else [])
    assert checked(plugin, kind, {"x": np.array([1, 5]), "y": np.array([3, 1])}) == [(4,)]
    with pytest.raises(ModelOutputError, match=message):
        checked(plugin, kind, {"x": np.array([0, 5]), "y": np.array([0, 1])})


def test_one_row_is_enough_for_the_check():
    rows = {"x": np.zeros((1, 3)), "y": np.zeros(1, int)}
    assert PLUGIN.check(params(torch.nn.Linear(3, 4)), columns((3,)), rows) == [(4,)]


def test_the_check_changes_neither_the_model_nor_the_random_numbers():
    model = Fickle()
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seed = torch.random.get_rng_state()
    PLUGIN.check(params(model), columns((3,)), {"x": np.ones((2, 3)), "y": np.zeros(2, int)})
    assert model.calls == 0
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(seed, torch.random.get_rng_state())


def test_a_model_that_cannot_take_the_columns_is_refused_with_the_names_and_shapes():
    with pytest.raises(
        ModelOutputError, match=r"columns \(x: float64\[3\]\)\. It was called with input 0 of shape \[2, 3\]"
    ):
        PLUGIN.check(params(torch.nn.Linear(5, 2)), columns((3,)), {"x": np.zeros((2, 3)), "y": np.zeros(2, int)})


def test_an_output_that_loses_the_rows_is_refused():
    model = torch.nn.Sequential(torch.nn.Flatten(0))
    model.add_module("last", torch.nn.Linear(6, 3))
    with pytest.raises(ModelOutputError, match=r"Output 0 of the model has shape \[3\] for 2 rows"):
        PLUGIN.check(params(model), columns((3,)), {"x": np.zeros((2, 3)), "y": np.zeros(2, int)})


def test_an_output_that_is_not_a_tensor_is_refused():
    class Named(torch.nn.Linear):
        def forward(self, x):
            return {"one": super().forward(x), "other": x}

    with pytest.raises(ModelOutputError, match=r"returned dict with the fields \['one', 'other'\]"):
        PLUGIN.check(params(Named(3, 2)), columns((3,)), {"x": np.zeros((2, 3)), "y": np.zeros(2, int)})


class Auxiliary(torch.nn.Module):
    """Has a second output in training mode, like Inception."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x):
        return (self.layer(x), self.layer(x) / 2) if self.training else self.layer(x)


def test_extra_outputs_in_training_mode_are_refused_without_train_minibatch_fn():
    rows = {"x": np.zeros((2, 3)), "y": np.zeros(2, int)}
    with pytest.raises(
        ModelOutputError,
        match=r"In training mode the model returns 2 .* combine all outputs into one loss .* train_minibatch",
    ):
        PLUGIN.check(params(Auxiliary()), columns((3,)), rows)
    assert PLUGIN.check(params(Auxiliary(), train_minibatch_fn=print), columns((3,)), rows) == [(2,)]


def test_objects_of_the_wrong_kind_are_refused():
    model = torch.nn.Linear(3, 2)
    with pytest.raises(ParamError, match=r"model is a str; it must be a torch\.nn\.Module"):
        PLUGIN.check({**params(model), "model": "net"}, columns((3,)), None)
    with pytest.raises(ParamError, match="optimizer is a type; pass an instance"):
        PLUGIN.check({**params(model), "optimizer": torch.optim.SGD}, columns((3,)), None)


def test_an_optimizer_of_another_model_is_refused():
    other = torch.optim.SGD(torch.nn.Linear(7, 1).parameters(), lr=0.1)
    with pytest.raises(ParamError, match=r"optimizer holds 2 parameters that the model does not have .* \[1, 7\]"):
        PLUGIN.check({**params(torch.nn.Linear(3, 2)), "optimizer": other}, columns((3,)), None)


def test_lazy_parameters_are_refused():
    model = torch.nn.Sequential(torch.nn.LazyLinear(2))
    with pytest.raises(ParamError, match=r"parameters \['0\.weight', '0\.bias'\] have no shape and no values yet"):
        PLUGIN.check(params(model), columns((3,)), None)
    model(torch.zeros(2, 3))
    assert PLUGIN.check(params(model), columns((3,)), None) == [(2,)]
    model.append(torch.nn.LazyBatchNorm1d(affine=False))
    with pytest.raises(ParamError, match=r"parameters \['1\.running_mean', '1\.running_var'\] have no shape"):
        PLUGIN.check(params(model), columns((3,)), None)


class LazyLoss(torch.nn.Module):
    """Weights the outputs before it compares them; each rank would draw other weights."""

    def __init__(self):
        super().__init__()
        self.weighting = torch.nn.LazyLinear(2)

    def forward(self, output, label):
        return functional.cross_entropy(self.weighting(output), label)


@pytest.mark.parametrize("name", ["loss", "loss_constructors"])
def test_lazy_parameters_of_a_loss_are_refused(name):
    losses = {"loss": None, name: LazyLoss() if name == "loss" else LazyLoss}
    with pytest.raises(ParamError, match=r"\['weighting\.weight', 'weighting\.bias'\] of the loss LazyLoss have no"):
        PLUGIN.check(params(torch.nn.Linear(3, 2), **losses), columns((3,)), None)


def test_complex_parameters_are_refused():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2, dtype=torch.complex64))
    with pytest.raises(ParamError, match=r"\['0\.weight', '0\.bias'\] are complex, and ranks exchange only real"):
        PLUGIN.check(params(model), columns((3,)), None)


@pytest.mark.parametrize("plugin", [PLUGIN, LIGHTNING], ids=["torch", "lightning"])
def test_different_parameters_that_share_memory_are_refused(plugin):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    model[1].weight.data = model[0].weight.data
    names = ("callbacks", "logger", "trainer_args", "input_shapes", "label_shapes", "data_module")
    values = {**dict.fromkeys(names), "batch_format": "dict", "checkpoints": Checkpoints()}
    with pytest.raises(ParamError, match=r"'0\.weight' and '1\.weight' are different objects that share their memory"):
        plugin.check({**values, **params(model)}, columns((3,)), None)
    model[1].weight = model[0].weight
    assert plugin.check({**values, **params(model)}, columns((3,)), None) == [(2,)]


class WithViewsOfAWeight(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("all", self.weight.data)
        self.register_buffer("row", self.weight.data[1], persistent=False)
        self.bits = self.weight.data.view(torch.int32)


def test_tensors_that_share_memory_share_it_on_the_ranks():
    model = WithViewsOfAWeight()
    data = columns((3,))
    spec = TrainSpec(data, 1, batch_size=1, val_batch_size=1, seed=0, scale_lr=False)
    arrived = PLUGIN.trainer(PLUGIN.pack({**params(model), "schema": data}), spec, World())._model
    with torch.no_grad():
        arrived.weight.fill_(2.0)
        arrived.weight[1, 2] = 0.0
    assert torch.equal(arrived.all, arrived.weight)
    assert arrived.row.tolist() == [2.0, 2.0, 0.0]
    assert arrived.bits[1, 2] == 0
    assert 2.0 not in model.weight


def test_a_model_that_cannot_be_pickled_is_refused():
    model = torch.nn.Linear(3, 2)
    model.lock = threading.Lock()
    with pytest.raises(ParamError, match="cannot be pickled for the ranks"):
        PLUGIN.check(params(model), columns((3,)), None)


def test_the_unpickled_optimizer_has_the_parameters_of_the_model_and_its_state():
    model = torch.nn.Linear(3, 2)
    packed = params(model)
    optimizer = packed["optimizer"] = torch.optim.Adam(model.parameters(), lr=0.5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    data = columns((3,))
    spec = TrainSpec(data, 1, batch_size=1, val_batch_size=1, seed=0, scale_lr=False)
    trainer = PLUGIN.trainer(PLUGIN.pack({**packed, "schema": data}), spec, World())
    arrived, arrived_optimizer = trainer._model, trainer._plain_optimizer
    assert arrived is not model
    assert [id(p) for p in arrived_optimizer.param_groups[0]["params"]] == [id(p) for p in arrived.parameters()]
    assert torch.equal(arrived_optimizer.state[arrived.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_the_mapping_names_every_column_input_and_output():
    assert PLUGIN.mapping(params(torch.nn.Linear(1, 2)), columns(())) == (
        "input 0 is x as rows x [1] (float32); output 0 is y"
    )


def test_a_rank_does_not_import_pyspark():
    code = (
        "import sys, sparkhvd.estimators.torch.plugin, sparkhvd.estimators.training.worker; "
        "print([name for name in ('pyspark', 'pandas') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.strip() == "[]"
