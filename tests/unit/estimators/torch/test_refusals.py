"""The driver refuses fits that would fail on the ranks."""

from __future__ import annotations

import keras
import lightning.pytorch as lightning
import pytest
import torch

from sparkhvd._util.frameworks import estimator_hint
from sparkhvd.comm import session
from sparkhvd.errors import ParamError
from sparkhvd.estimators.lightning import plugin as lightning_plugin
from sparkhvd.estimators.params.policies import Checkpoints, EarlyStopping
from sparkhvd.estimators.torch import LRSchedule, TorchEstimator
from sparkhvd.estimators.torch.plugin import PLUGIN
from tests.unit.estimators.arrays import schema

DATA = schema(x=("feature", "float64", (6,), "array"), y=("label", "int64", (), "scalar"))
StepLR = torch.optim.lr_scheduler.StepLR


def refused(match, *, optimizer=None, **params):
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer(model)
    given = {"model": model, "optimizer": optimizer, "loss": torch.nn.CrossEntropyLoss(), "label_cols": ("y",)}
    given |= {name: value(optimizer) if name == "lr_scheduler" else value for name, value in params.items()}
    with pytest.raises(ParamError, match=match):
        PLUGIN.check(given, DATA, None)


class Rebuilt(torch.nn.Linear):
    """A layer whose pickle has only the values of its parameters."""

    def __reduce__(self):
        return _rebuild, (self.in_features, self.out_features, self.state_dict())


def _rebuild(inputs, outputs, state):
    layer = Rebuilt(inputs, outputs)
    layer.load_state_dict(state)
    return layer


@pytest.mark.parametrize("plugin", [PLUGIN, lightning_plugin.PLUGIN])
def test_a_model_that_loses_its_parameters_in_a_pickle_is_refused(plugin):
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), Rebuilt(6, 3))
    params = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "label_cols": ("y",)}
    params |= {"loss": torch.nn.CrossEntropyLoss(), "batch_format": "numpy", "logger": None}
    params["checkpoints"] = Checkpoints()
    with pytest.raises(ParamError, match=r"Pickling the model creates new parameters.* Look at Rebuilt"):
        plugin.check(params, DATA, None)


@pytest.mark.parametrize("kind", ["OneCycleLR", "SWALR"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("function", [False, True])
def test_a_schedule_with_absolute_rates_cannot_be_scaled(inside, function, kind):
    def cycle(optimizer):
        if kind == "SWALR":
            one = torch.optim.swa_utils.SWALR(optimizer, 0.1)
        else:
            one = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
        return torch.optim.lr_scheduler.ChainedScheduler([one], optimizer) if inside else one

    schedule = (lambda _: LRSchedule(cycle)) if function else (lambda optimizer: LRSchedule(cycle(optimizer)))
    refused(f"cannot scale the learning rates that {kind} was created with", lr_scheduler=schedule, scale_lr=True)


@pytest.mark.parametrize(
    ("kind", "arguments", "monitor"),
    [
        ("CosineAnnealingLR", {"T_max": 10, "eta_min": 0.01}, None),
        ("ReduceLROnPlateau", {"min_lr": [0.01]}, "loss"),
    ],
)
def test_a_minimum_that_may_depend_on_the_scaled_rate_cannot_be_scaled(kind, arguments, monitor):
    def bounded(optimizer):
        return getattr(torch.optim.lr_scheduler, kind)(optimizer, **arguments)

    message = f"cannot scale the learning rates that {kind} was created with"
    refused(message, lr_scheduler=lambda _: LRSchedule(bounded, monitor=monitor), scale_lr=True)


def test_a_number_is_not_a_schedule():
    with pytest.raises(ParamError, match="LRSchedule"):
        TorchEstimator(lr_scheduler=0.1)


@pytest.mark.parametrize("more", [{}, {"monitor": "loss", "every": "step"}])
def test_a_schedule_by_a_metric_needs_a_metric_and_whole_epochs(more):
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    refused(r"LRSchedule\(scheduler, monitor='val_loss'\)", lr_scheduler=lambda _: LRSchedule(plateau, **more))
    refused(
        "for ReduceLROnPlateau; StepLR", lr_scheduler=lambda _: LRSchedule(lambda made: StepLR(made, 1), monitor="loss")
    )


def test_a_schedule_whose_function_needs_a_rank_is_not_checked_on_the_driver():
    def needs_rank(optimizer):
        return StepLR(optimizer, session.current().world.size)

    model = torch.nn.Linear(6, 3)
    params = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": torch.nn.CrossEntropyLoss(),
        "label_cols": ("y",),
    }
    assert PLUGIN.check({**params, "lr_scheduler": LRSchedule(needs_rank)}, DATA, None) == [(3,)]


@pytest.mark.parametrize(
    ("params", "match"),
    [
        (
            {"early_stopping": EarlyStopping("val_accurracy")},
            r"early_stopping monitors 'val_accurracy'.*'val_accuracy'",
        ),
        ({"checkpoints": Checkpoints(best="acuracy")}, r"checkpoints monitors 'acuracy'.*Did you mean 'accuracy'"),
        (
            {"lr_scheduler": lambda _: LRSchedule(torch.optim.lr_scheduler.ReduceLROnPlateau, monitor="val_los")},
            r"lr_scheduler monitors 'val_los', .*Did you mean 'val_loss'",
        ),
    ],
)
def test_a_metric_that_is_not_measured_cannot_be_monitored(params, match):
    refused(match, metrics={"accuracy": lambda output, label: (output.argmax(dim=1) == label).float().mean()}, **params)


def test_an_optimizer_that_needs_a_closure_is_refused():
    refused(
        "LBFGS decides from the loss of its own rank", optimizer=lambda model: torch.optim.LBFGS(model.parameters())
    )


@pytest.mark.parametrize(
    ("wrap", "name"), [(lambda module: module, "The model"), (torch.nn.Sequential, "The model contains '0', which")]
)
def test_a_module_of_torch_export_is_refused(wrap, name):
    module = torch.export.export(torch.nn.Linear(3, 2), (torch.zeros(2, 3),)).module()
    refused(rf"^{name} comes from ExportedProgram.module\(\).*Pass the module that was exported", model=wrap(module))


class Foreign(keras.layers.Layer):
    """A user's subclass of a Keras class."""


class Module(lightning.LightningModule):
    """A user's subclass of a Lightning class."""


@pytest.mark.parametrize(
    ("given", "own", "sentence"),
    [
        (keras.optimizers.Adam(), ("torch",), " Use KerasEstimator for Keras objects."),
        (keras.losses.mean_squared_error, ("torch",), " Use KerasEstimator for Keras objects."),
        (Foreign(), ("torch",), " Use KerasEstimator for Keras objects."),
        (Module(), ("keras",), " Use LightningEstimator for Lightning objects."),
        (torch.nn.functional.mse_loss, ("keras",), " Use TorchEstimator for PyTorch objects."),
        (torch.nn.Linear(1, 1), ("torch",), ""),
        (len, ("torch",), ""),
        ("adam", ("torch",), ""),
    ],
)
def test_objects_of_another_framework_are_refused_with_the_name_of_its_estimator(given, own, sentence):
    assert estimator_hint(given, own) == sentence


def test_keras_objects_are_refused_with_the_name_of_its_estimator():
    to_keras = "Use KerasEstimator for Keras objects"
    refused(rf"is a Sequential; it must be a torch.nn.Module\. {to_keras}", model=keras.Sequential())
    refused(rf"optimizer is a Adam; .*{to_keras}", optimizer=lambda _: keras.optimizers.Adam())
    refused(
        rf"The loss MeanSquaredError does not compute with PyTorch tensors\. {to_keras}",
        loss=keras.losses.MeanSquaredError(),
    )
    with pytest.raises(ParamError, match=rf"must be a LightningModule or a torch.nn.Module\. {to_keras}"):
        lightning_plugin._check_types({"model": keras.Sequential()})
