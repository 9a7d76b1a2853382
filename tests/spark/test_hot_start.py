"""A fit of one epoch, continued by a fit from its model and optimizer, equals one fit of two epochs."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from sparkhvd import LightningEstimator, TorchEstimator
from sparkhvd.errors import ParamError, RankFailedError
from tests.spark import trainings

pytestmark = [
    pytest.mark.spark,
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec.*"),  # within Lightning 2.6 with torch 2.13
]


@pytest.fixture(scope="module")
def df(spark):
    return spark.range(60).selectExpr("id / 60.0D AS a", "id % 7 / 7.0D AS b", "a * 2 - b AS y").coalesce(2)


def layers():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def decay(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def module():
    """Return a module with a schedule of the learning rate, and two parameter groups."""
    import lightning.pytorch as lightning  # noqa: PLC0415  (it is slow, and other tests do without it)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = layers()
            self.optimizer_class = torch.optim.Adam

        def forward(self, x):
            return self.layers(x)

        def training_step(self, batch, _index):
            assert self.training
            assert self.layers.training, "Lightning trains a module in the mode that it finds"
            x, y = batch
            return functional.mse_loss(self(x)[:, 0], y.reshape(-1))

        def configure_optimizers(self):
            groups = [{"params": self.layers[0].parameters()}, {"params": self.layers[2].parameters(), "lr": 0.01}]
            optimizer = self.optimizer_class(groups, lr=0.03)
            return {"optimizer": optimizer, "lr_scheduler": decay(optimizer)}

    return Module()


def estimator(kind, **more):
    params = {
        "num_proc": 2,
        "feature_cols": ["a", "b"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 1,
        "random_seed": 3,
        "shuffle": False,
        "verbose": 0,
    }
    if kind == "LightningModule":
        return LightningEstimator(**{"model": module(), "batch_format": "tuple", **params, **more})
    if "model" not in more:
        model = layers()
        more |= {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.03)}
    if kind == "plain module":
        return LightningEstimator(loss=functional.mse_loss, **{**params, **more})
    return TorchEstimator(loss=functional.mse_loss, lr_scheduler=decay, **{**params, **more})


@pytest.mark.parametrize(
    "kind",
    ["torch", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("LightningModule", "plain module"))],
)
def test_a_fit_from_a_fitted_model_continues_its_training(df, kind):
    whole = estimator(kind, epochs=2, scale_lr=True).fit(df)
    first = estimator(kind, scale_lr=True).fit(df)
    model, optimizer = first.getModelAndOptimizer()
    assert not model.training
    second = estimator(kind, model=model, optimizer=optimizer, scale_lr=True).fit(df)
    assert trainings.weights(kind, second) == trainings.weights(kind, whole) != trainings.weights(kind, first)
    ours, theirs = second.getOptimizer(), whole.getOptimizer()
    assert [group["lr"] for group in ours.param_groups] == [group["lr"] for group in theirs.param_groups]
    moments = [[state["exp_avg"].tolist() for state in each.state.values()] for each in (ours, theirs)]
    assert moments[0] == moments[1]
    assert len(moments[0]) == 4


def test_optimizers_that_do_not_fit_the_module_are_refused(df):
    model = module()
    other = torch.optim.Adam(layers().parameters())
    with pytest.raises(ParamError, match="optimizer holds 4 parameters that the model does not have"):
        estimator("LightningModule", model=model, optimizer=other).fit(df)
    with pytest.raises(ParamError, match="optimizer is a list; a plain module takes one"):
        estimator("plain module", model=layers(), optimizer=[other]).fit(df)
    of_another_kind = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RankFailedError, match=r"holds SGD \(4 parameters\), but configure_optimizers creates Adam \(4"):
        estimator("LightningModule", num_proc=1, model=model, optimizer=of_another_kind).fit(df)
