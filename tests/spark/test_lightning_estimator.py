"""``LightningEstimator`` through Spark: the properties of a fit that is continued."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.functions import vector_to_array

from sparkhvd import LightningEstimator, LightningModel, Store
from sparkhvd.errors import ParamError

pytestmark = [
    pytest.mark.spark,
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec.*"),  # within Lightning 2.6 with torch 2.13
]

ROWS = 200


@pytest.fixture(scope="module")
def frame(spark):
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 3))
    data = [([float(v) for v in row], int(row[0] > row[1])) for row in x]
    return spark.createDataFrame(data, "x array<double>, y int").repartition(3)


@pytest.fixture(scope="module")
def to_predict(frame):
    """Return the rows in one partition, so that only one of Spark's Python workers imports Lightning."""
    return frame.coalesce(1)


def module():
    import lightning.pytorch as lightning  # noqa: PLC0415  (it is slow, and other tests do without it)

    class Classifier(lightning.LightningModule):
        def __init__(self, width=8):
            super().__init__()
            self.save_hyperparameters()
            torch.manual_seed(1)
            self.layers = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Tanh(), torch.nn.Linear(width, 2))

        def forward(self, x):
            return self.layers(x)

        def training_step(self, batch, _index):
            x, y = batch
            loss = torch.nn.functional.cross_entropy(self(x), y)
            self.log("accuracy", (self(x).argmax(1) == y).float().mean(), on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch, _index):
            self.log("val_loss", torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.05)

    return Classifier()


@pytest.fixture(scope="module")
def fitted(frame, tmp_path_factory):
    """Return the model of three epochs, the last one trained by a resumed fit with another launcher."""
    estimator = LightningEstimator(
        num_proc=2,
        store=Store.create(str(tmp_path_factory.mktemp("a store"))),
        model=module(),
        feature_cols=["x"],
        label_cols=["y"],
        batch_format="tuple",
        validation=0.2,
        batch_size=16,
        epochs=2,
        run_id="a-run",
        random_seed=5,
        trainer_args={"gradient_clip_val": 5.0},
        verbose=0,
    )
    estimator.fit(frame)
    return estimator.setEpochs(3).setBackend("local").fit(frame)


def test_a_resumed_run_has_one_history_of_all_epochs(fitted):
    history = fitted.getHistory()
    assert [record["epoch"] for record in history] == [0, 1, 2]
    losses = [record["train"]["loss"] for record in history]
    assert losses[2] < losses[1] < losses[0]
    assert all(0 < record["train"]["all_metrics"][0]["accuracy"] <= 1 for record in history)
    assert all(record["validation"]["loss"] > 0 for record in history)


def test_transform_equals_the_module_and_its_checkpoint(fitted, to_predict, tmp_path):
    rows = fitted.transform(to_predict).select("x", vector_to_array("y__output").alias("scores")).collect()
    x = torch.tensor([row["x"] for row in rows])
    fitted.save_checkpoint(str(tmp_path / "trained.ckpt"))
    again = type(module()).load_from_checkpoint(tmp_path / "trained.ckpt").eval()
    with torch.no_grad():
        wanted, by_checkpoint = fitted.getModel()(x), again(x)
    assert torch.equal(wanted, by_checkpoint)
    assert np.allclose([row["scores"] for row in rows], wanted.numpy(), rtol=1e-6, atol=1e-7)


def test_a_saved_model_predicts_the_same_inside_a_pipeline(fitted, to_predict, tmp_path):
    path = str(tmp_path / "saved")
    Pipeline(stages=[fitted]).fit(to_predict).write().overwrite().save(path)
    again = PipelineModel.load(path).stages[0]
    assert isinstance(again, LightningModel)
    assert again.getHistory() == fitted.getHistory()
    assert again.transform(to_predict).collect() == fitted.transform(to_predict).collect()


def test_describe_shows_the_columns_and_the_modules_outputs(frame, capsys):
    LightningEstimator(num_proc=2, model=module(), feature_cols=["x"], label_cols=["y"]).describe(frame)
    text = capsys.readouterr().out
    assert "input 0 is x" in text
    assert "output 0 is y" in text


class Sides(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, left, right):
        return self.layer(torch.cat([left, right], dim=1))


def test_a_plain_module_gets_columns_by_the_names_of_its_inputs(spark):
    torch.manual_seed(1)
    columns, model = ("id / 40.0D AS a", "id % 7 AS b", "id % 3 AS c", "a + 1 AS y"), Sides()
    rows = spark.range(40, numPartitions=1).selectExpr(*columns)
    estimator = LightningEstimator(
        num_proc=2,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss=torch.nn.functional.mse_loss,
        inputs={"right": ["c", "a"], "left": {"columns": "b", "shape": [1]}},
        label_cols=["y"],
        verbose=0,
    )
    fitted = estimator.fit(rows)
    predictions = fitted.transform(rows).collect()
    table = torch.tensor([[row["b"], row["c"], row["a"]] for row in predictions], dtype=torch.float32)
    with torch.no_grad():
        wanted = fitted.getModel()(table[:, :1], table[:, 1:])[:, 0]
    assert not torch.equal(fitted.getModel().layer.weight, model.layer.weight)
    assert np.allclose([row["y__output"] for row in predictions], wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": 4}, "trainer_args has 'devices', which the estimator sets"),
        ({"barebones": True}, "trainer_args has barebones=True, which turns off the callbacks"),
    ],
)
def test_trainer_args_that_conflict_with_the_estimator_are_refused(frame, arguments, message):
    estimator = LightningEstimator(
        num_proc=2, model=module(), feature_cols=["x"], label_cols=["y"], trainer_args=arguments
    )
    with pytest.raises(ParamError, match=message):
        estimator.fit(frame)
