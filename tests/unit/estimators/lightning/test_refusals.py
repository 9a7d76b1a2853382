"""The models and parameters that LightningEstimator refuses, and its messages."""

from __future__ import annotations

import re

import pytest
import torch

from sparkhvd.comm import session
from sparkhvd.estimators.params.named_inputs import NamedInput
from sparkhvd.estimators.params.policies import Checkpoints, EarlyStopping
from tests.unit.estimators.arrays import Hooks
from tests.unit.estimators.lightning.networks import (
    DATA,
    module,
    network,
    source,
    trainer_of,
)


def lazy(**hooks):
    model = type("Lazy", (type(module()),), hooks)()
    model.layers = torch.nn.LazyLinear(3)
    return model


def creating_layers_in(hook):
    """Return a module that creates its layers in a hook before the training."""

    def create(model, *_):
        model.layers = model.layers or network()

    model = created_by_hook(create, hook)
    model.layers = None
    return model


def created_by_hook(create, hook="configure_optimizers"):
    return type("Creating", (type(module()),), {hook: create})()


def lbfgs_with_schedule(model):
    optimizer = torch.optim.LBFGS(model.parameters())
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


def with_swalr(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return [optimizer], [{"scheduler": torch.optim.swa_utils.SWALR(optimizer, 0.05), "interval": "epoch"}]


def with_swalr_on_a_rank(model):
    assert model.trainer.max_epochs, "the driver cannot call this function"
    return with_swalr(model)


def iterating():
    class Iterating(type(module())):
        def training_step(self, dataloader_iter):
            return super().training_step(*next(dataloader_iter)[:2])

    return Iterating()


# Modules that are refused, or only look as if they should be.
ADAPTED = {
    "lazy": lazy,
    "lazy until setup": lambda: lazy(setup=lambda model, stage: model.layers(torch.zeros(2, 6))),
    "complex": lambda: module().to(torch.complex64),
    "lbfgs": lambda: created_by_hook(lbfgs_with_schedule),
    "swalr": lambda: created_by_hook(with_swalr),
    "iterating": iterating,
    "configured": lambda: creating_layers_in("configure_model"),
    "set up": lambda: creating_layers_in("setup"),
    "configured by a trainer": lambda: created_by_hook(lambda model: model.trainer.world_size, "configure_model"),
    "needs a trainer": lambda: created_by_hook(lambda model: model.trainer.estimated_stepping_batches),
}


def refused(more):
    from sparkhvd.errors import SparkHvdError  # noqa: PLC0415
    from sparkhvd.estimators.lightning.plugin import PLUGIN  # noqa: PLC0415

    names = ("optimizer", "input_shapes", "label_shapes", "trainer_args", "logger", "data_module", "loss", "callbacks")
    if more.get("model") == "no optimizer":
        import lightning.pytorch as lightning  # noqa: PLC0415

        more = {"model": type("Unfinished", (lightning.LightningModule,), {"training_step": len})()}
    if more.get("model") in ADAPTED:
        more = {**more, "model": ADAPTED[more["model"]]()}
    if more.get("model") == "plain":
        model, loss = network(), torch.nn.functional.cross_entropy
        of = network() if "another" in more else model
        optimizer = (torch.optim.LBFGS if "closure" in more else torch.optim.SGD)(of.parameters(), lr=0.1)
        more = {"optimizer": optimizer, **more, "model": model, "loss": loss}
    if more.get("callbacks") == "best":
        from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: PLC0415

        more = {"callbacks": [ModelCheckpoint(monitor="val_loss")], "checkpoints": Checkpoints(best="loss")}
    if more.get("callbacks") == "batch size":
        from lightning.pytorch.callbacks import BatchSizeFinder  # noqa: PLC0415

        more = {"callbacks": [type("Finder", (BatchSizeFinder,), {})()]}
    if more.get("callbacks") == "learning rate":
        from lightning.pytorch.callbacks import LearningRateMonitor  # noqa: PLC0415

        more = {**more, "callbacks": [LearningRateMonitor()]}
    if more.get("trainer_args") == "async":
        from lightning.pytorch.plugins.io import AsyncCheckpointIO  # noqa: PLC0415

        more = {"trainer_args": {"plugins": [AsyncCheckpointIO()]}}
    own = {"batch_format": "dict", "label_cols": ("y",), "checkpoints": Checkpoints()}
    params = {**dict.fromkeys(names), "model": module(), **own}
    try:
        return PLUGIN.check({**params, **more}, DATA, None)
    except SparkHvdError as error:
        return str(error)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"loss": torch.nn.functional.cross_entropy}, "loss is only for plain modules"),
        ({"model": torch.nn.Linear(6, 3)}, "plain Linear, which needs optimizer="),
        ({"trainer_args": {"max_epochs": 3}}, "use its parameter epochs"),
        (
            {"trainer_args": {"limit_train_batches": 8}, "backend": "local", "min_num_proc": 1},
            "Use train_steps_per_epoch",
        ),
        (
            {"trainer_args": {"limit_train_batches": 0.5}, "backend": "local", "max_num_proc": 4},
            "Use train_steps_per_epoch",
        ),
        ({"trainer_args": {"max_epoch": 3}}, "'max_epoch', which Lightning's Trainer does not take"),
        ({"trainer_args": {"enable_checkpointing": False}}, "use its parameter checkpoints"),
        ({"callbacks": "best"}, "Both checkpoints=Checkpoints(best='loss') and ModelCheckpoint(monitor='val_loss')"),
        ({"callbacks": [print]}, "is not a callback"),
        ({"callbacks": "batch size"}, "a Finder, but the estimator's batches have the size that its"),
        ({"callbacks": "learning rate"}, "a LearningRateMonitor, which needs a logger. Pass one, such as"),
        ({"callbacks": "learning rate", "logger": True}, [(3,)]),
        ({"logger": 3}, "logger holds a int, which is not a logger of lightning.pytorch"),
        (
            {"inputs": {"x": NamedInput(("x",))}},
            "a LightningModule receives its columns in the form that batch_format sets",
        ),
        (
            {"model": "plain", "inputs": {"z": NamedInput(("x",))}},
            "inputs has the key 'z', but the model's inputs are ['input']",
        ),
        ({"input_shapes": [(2, 3)]}, "called with [2, 2, 3] from x"),
        ({"label_cols": ("y",)}, [(3,)]),
        ({"model": "plain", "closure": True}, "LBFGS decides from the loss of its own rank"),
        ({"model": "lbfgs"}, "LBFGS decides from the loss of its own rank how many evaluations a step takes"),
        ({"model": "swalr", "scale_lr": True}, "cannot scale the learning rates that SWALR was created with. Scale"),
        ({"model": "swalr"}, [(3,)]),
        ({"model": "iterating"}, "training_step of Iterating takes a dataloader_iter, from which it fetches batches"),
        ({"model": "needs a trainer"}, [(3,)]),
        ({"model": "configured"}, [(3,)]),
        ({"model": "configured by a trainer"}, "so it must not use self.trainer"),
        ({"model": "set up"}, "Layers that setup() creates are missing here; create them in configure_model()."),
        ({"trainer_args": "async"}, "the plugin AsyncCheckpointIO, which writes checkpoints in the background"),
        ({"model": "lazy"}, "parameters ['layers.weight', 'layers.bias'] have no shape and no values yet. Call the"),
        ({"model": "lazy until setup"}, [(3,)]),
        ({"model": "complex"}, "parameters ['layers.0.weight', 'layers.0.bias', 'layers.2.weight', 'layers.2.bias'] a"),
        ({"model": "plain", "optimizer": 3}, "optimizer is a int; pass an instance such as torch.optim.Adam("),
        ({"model": "plain", "another": True}, "parameters that the model does not have (the first has shape [16, 6])"),
        ({"model": "plain", "early_stopping": EarlyStopping("loos")}, "Did you mean 'loss'?"),
        ({"model": "no optimizer"}, "Unfinished has no configure_optimizers, which Lightning needs for training"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_unsupported_parameters_are_refused_on_the_driver(group, more, message):
    found = group.run(refused, more)[0]
    assert message == found or (isinstance(message, str) and message in found)


def error_of_scaled_swalr():
    from sparkhvd.errors import ParamError  # noqa: PLC0415

    trainer = trainer_of(created_by_hook(with_swalr_on_a_rank), how={"scale_lr": True})
    with pytest.raises(ParamError) as error:
        trainer.fit(source([(4, 4)], session.current().world.rank), None, Hooks())
    return str(error.value)


def test_the_ranks_refuse_a_schedule_that_the_driver_cannot_create(group):
    assert "cannot scale the learning rates that SWALR was created with" in group.run(error_of_scaled_swalr)[0]


def particular(raises):
    """Check a module whose forward pass rejects rows of zeros: it looks up ids from 1, or checks its input."""

    class Particular(type(module())):
        def __init__(self):
            super().__init__()
            self.words = torch.nn.Embedding(9, 3)

        def forward(self, x):
            if raises is not None and not x.all():
                raise raises("no id is 0")
            return self.words(x.long() - 1).mean(dim=1)

    return refused({"model": Particular()})


@pytest.mark.parametrize("raises", [None, ValueError, AssertionError, RuntimeError, KeyError])
def test_a_module_that_fails_only_on_rows_of_zeros_is_not_refused(group, raises):
    assert group.run(particular, raises)[0] == []


def error_of_wrong_batch_format(batch_format, kind):
    import lightning.pytorch as lightning  # noqa: PLC0415

    from sparkhvd.errors import DataError  # noqa: PLC0415

    class Misreading(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def training_step(self, batch, batch_idx):
            if kind == "own":
                raise KeyError("x")
            x, y = batch if kind == "unpacked" else (batch["x"], batch["z"])
            return torch.nn.functional.cross_entropy(self(x), y)

    try:
        trainer = trainer_of(Misreading(), batch_format=batch_format)
        trainer.fit(source([(4, 4)], session.current().world.rank), None, Hooks())
    except DataError as error:
        return str(error)
    except KeyError:
        return "own"


@pytest.mark.parametrize(
    ("batch_format", "kind", "message"),
    [
        ("dict", "unpacked", "(?s)must be Tensor, not str \\(line .* with the keys 'x', 'y'. .*batch_format='tuple'"),
        ("dict", "by name", "KeyError: 'z' .* with the keys 'x', 'y'"),
        ("tuple", "by name", "tuple of features and labels"),
        ("dict", "own", "own"),
    ],
)
def test_an_error_from_the_wrong_batch_format_comes_with_a_hint(group, batch_format, kind, message):
    assert re.search(message, group.run(error_of_wrong_batch_format, batch_format, kind)[0])
