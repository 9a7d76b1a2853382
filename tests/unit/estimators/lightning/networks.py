"""Modules and rows for the tests of LightningEstimator."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import torch

from sparkhvd.comm import session
from sparkhvd.data import ColumnSpec, DataSchema
from tests.unit.estimators.arrays import partition_rows, schema, spec
from tests.unit.estimators.torch.networks import PreciseMomentum

SIZE = 2
DATA = schema(x=("feature", "float64", (6,), "array"), y=("label", "int64", (), "scalar"))

WEIGHTED = DataSchema((*DATA.columns, ColumnSpec("w", "float64", (), "weight", "scalar")))

# The number of rows of every rank in each step of an epoch.
EVEN = [(4, 4)] * 12
SOME_EMPTY = [(5, 0), (3, 7), (4, 4), (3, 2), (1, 6), (6, 1), (4, 0)]

# By kind of module: hyperparameters that a checkpoint cannot contain if it is opened safely.
HYPERPARAMETERS = {"with objects": {"loss": torch.nn.CrossEntropyLoss()}}


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def normalizing():
    torch.manual_seed(3)
    # The gradient of a bias would consist of rounding errors, which Adam magnifies.
    layers = [torch.nn.Linear(6, 16, bias=False), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 3)]
    return torch.nn.Sequential(*layers).double()


def rows(count):
    random = np.random.default_rng(5)
    x = random.normal(size=(count, 6))
    weights = random.uniform(0.1, 2.0, count)
    return {"x": x, "w": weights, "y": (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0)}


def source(sizes, rank, data=DATA):
    """Return ``rank``'s part of the rows of all steps."""
    columns = rows(sum(map(sum, sizes)))
    return partition_rows({name: values for name, values in columns.items() if name in data.names()}, sizes, rank, data)


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()


def scheduled(optimizer, kind):
    if kind == "composed":
        parts = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for rate in (lambda _: 1.0, lambda _: 0.5)]
        return [optimizer], [torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])]
    if not kind.startswith("plateau"):
        return optimizer
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5, factor=0.3)
    monitor = "twice" if kind.endswith("on twice") else "val_loss"
    by_step = {"interval": "step", "frequency": 3, "strict": False} if "by step" in kind else {}
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": monitor, **by_step}}


def optimized(parameters, kind):
    if kind == "precise":
        return PreciseMomentum(parameters, lr=0.05)
    optimizer = torch.optim.Adam(parameters, lr=np.float64(0.02))  # like a value of numpy.logspace
    return scheduled(optimizer, kind)


def disturbed(trained, output):
    """Return the output changed by values that hooks have set before the step."""
    if trained.hparams["kind"] != "dropping":
        return output
    return torch.nn.functional.dropout(output, trained.dropped) + trained.average


def step_by_hand(trained, loss, index):
    trained.manual_backward(loss)
    if trained.hparams["kind"] == "by hand with old gradients":
        trained.optimizers().step()
        for parameter in trained.parameters():
            parameter.grad.mul_(0.5)
    elif trained.hparams["kind"] == "by hand" or index % 3 == 2:
        trained.optimizers().step()
        trained.optimizers().zero_grad()


def module(kind="simple", flavour="lightning.pytorch"):
    from torchmetrics.classification import MulticlassAccuracy  # noqa: PLC0415

    lightning = import_module(flavour)

    class Simple(lightning.LightningModule):
        def __init__(self, kind="simple"):
            super().__init__()
            self.save_hyperparameters()
            self.save_hyperparameters(HYPERPARAMETERS.get(kind, {}))
            self.layers = normalizing() if kind == "normalizing" else network()
            self.register_buffer("average", torch.zeros(3))
            self.register_buffer("scale", torch.ones(()))
            self.register_buffer("brief", torch.zeros(1), persistent=False)
            self.accuracy = MulticlassAccuracy(3, average="micro")
            self.automatic_optimization = not kind.startswith("by hand")

        def forward(self, x):
            return self.layers(x) * self.scale

        def on_train_start(self):
            self.dropped = None

        def on_train_epoch_start(self):
            self.dropped = torch.rand(()).item() / 2 if self.hparams["kind"] == "dropping" else 0.2

        def on_train_batch_end(self, *_):
            self.average = 0.9 * self.average + 0.1 * self.layers[-1].bias.detach()
            self.brief += 1

        def training_step(self, batch, index):
            x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
            output = self(x)
            loss = torch.nn.functional.cross_entropy(disturbed(self, output), y, reduction="none")
            loss = (loss * batch["w"]).mean() if kind == "weighted" else loss.mean()
            self.accuracy(output, y)
            self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
            self.log("twice", 2 * loss, on_step=True, on_epoch=True)
            if not self.automatic_optimization:
                step_by_hand(self, loss, index)
            return loss

        def validation_step(self, batch, _index):
            loss = torch.nn.functional.cross_entropy(self(batch["x"]), batch["y"])
            self.log("val_loss", loss)
            return loss

        def configure_optimizers(self):
            return optimized(self.parameters(), self.hparams["kind"])

    return Simple(kind)


def rated(*callbacks):
    """Return a module whose ``lr`` is its learning rate, so that a LearningRateFinder can set it."""

    class Rated(type(module())):
        lr = 0.02

        def configure_callbacks(self):
            return list(callbacks)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), self.lr)

    return Rated()


def trainer_of(model, epochs=1, how=None, data=DATA, **more):
    from sparkhvd.estimators.lightning.plugin import PLUGIN  # noqa: PLC0415

    names = ("optimizer", "input_shapes", "label_shapes", "trainer_args", "logger", "data_module", "loss", "callbacks")
    params = {**dict.fromkeys(names), "model": model, "batch_format": "dict", "label_cols": ("y",), "schema": data}
    return PLUGIN.trainer(PLUGIN.pack({**params, **more}), spec(data, epochs, **(how or {})), session.current().world)
