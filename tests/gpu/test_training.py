"""Estimators and Lightning's Trainer on real devices, without Spark: the rows are Parquet files."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from sparkhvd import KerasEstimator, LightningEstimator, SparkBackend, Store, TorchEstimator
from sparkhvd.data.schema.data_schema import ColumnSpec, DataSchema
from sparkhvd.estimators.plugin import Inference
from sparkhvd.estimators.torch import TorchCallback
from sparkhvd.estimators.torch.plugin import PLUGIN
from tests.gpu.devices import needs_gpu, take_device
from tests.ranks import RankGroup

pytestmark = [needs_gpu, pytest.mark.timeout(300)]

RANKS = 2
WAYS = ("staged", "nccl")


class OnDevice(TorchCallback):
    """Prepares the rank for NCCL, and fails the fit of a rank that does not train on a GPU."""

    def on_train_begin(self, run):
        take_device()

    def on_epoch_end(self, run, epoch, logs):
        devices = {parameter.device.type for parameter in run.model.parameters()}
        assert devices == {"cuda"}, f"rank {run.rank} trains on {devices}"


@pytest.fixture(scope="module", autouse=True)
def frameworks():
    """Initialize CUDA before the leak check: its files stay open in this process."""
    torch.zeros(1, device="cuda")
    import lightning.pytorch  # noqa: F401, PLC0415


@pytest.fixture(scope="module")
def keras():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "torch")
        keras = pytest.importorskip("keras")
        if keras.config.backend() != "torch":
            pytest.skip("this process has loaded Keras with another backend")
        keras.ops.matmul(torch.ones(2, 2, device="cuda"), torch.ones(2, 2, device="cuda"))
        yield keras


@pytest.fixture
def rows(tmp_path):
    x = np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)
    y = (x @ [1.0, -2.0, 3.0, 0.5]).astype(np.float32)
    parquet.write_table(
        pa.table({"x": pa.FixedSizeListArray.from_arrays(x.ravel(), 4), "y": y}), tmp_path / "rows.parquet"
    )
    return tmp_path / "rows.parquet"


def options(way, use_gpu):
    env = {"SPARKHVD_GPU_OPERATIONS": way, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return {
        "backend": SparkBackend(RANKS, launcher="local", env=env),
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 16,
        "epochs": 3,
        "random_seed": 1,
        "verbose": 0,
        "use_gpu": use_gpu,
    }


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def fit_torch(rows, way, use_gpu, model=None, **more):
    model = model or network()
    estimator = TorchEstimator(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loss=torch.nn.functional.mse_loss,
        callbacks=[OnDevice()] if use_gpu else [],
        **{**options(way, use_gpu), **more},
    )
    return estimator.fit_on_parquet(path=str(rows))


@pytest.mark.parametrize("way", WAYS)
def test_an_estimator_for_pytorch_trains_as_on_cpus(rows, way):
    expected, found = fit_torch(rows, way, False), fit_torch(rows, way, True)
    assert found.history[-1]["train"]["loss"] < found.history[0]["train"]["loss"] / 1.2
    for one, other in zip(found.getModel().parameters(), expected.getModel().parameters(), strict=True):
        assert one.device.type == "cpu"
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_a_resumed_run_continues_the_random_numbers_of_the_device(rows, tmp_path):
    def fit(run_id, epochs):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))
        store = Store.create(str(tmp_path / "store"))
        return fit_torch(rows, "staged", True, model=model, store=store, run_id=run_id, epochs=epochs)

    whole = fit("whole", 4)
    fit("in parts", 2)
    continued = fit("in parts", 4)
    assert len(continued.history) == 4
    for one, other in zip(continued.getModel().parameters(), whole.getModel().parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("way", WAYS)
def test_an_estimator_for_lightning_trains_as_on_cpus(rows, way):
    import lightning.pytorch as lightning  # noqa: PLC0415  (it is slow)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = network()

        def forward(self, x):
            return self.layers(x)

        def setup(self, stage):
            from tests.gpu.devices import take_device  # noqa: PLC0415

            if self.trainer.strategy.root_device.type == "cuda":
                take_device()

        def training_step(self, batch, _index):
            loss = torch.nn.functional.mse_loss(self(batch["x"]).reshape(-1), batch["y"].reshape(-1).float())
            self.log("seen", loss, on_step=False, on_epoch=True, sync_dist=True)
            self.log("on_device", float(loss.is_cuda), on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    def fit(use_gpu):
        return LightningEstimator(model=Module(), **options(way, use_gpu)).fit_on_parquet(path=str(rows))

    expected, found = fit(False), fit(True)
    assert "'on_device': 1.0" in str(found.history)
    assert "'on_device': 0.0" in str(expected.history)
    for one, other in zip(found.getModel().parameters(), expected.getModel().parameters(), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_an_estimator_for_keras_on_pytorch_trains_as_on_cpus(rows, way, keras):
    class Prepared(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            from tests.gpu.devices import take_device  # noqa: PLC0415

            take_device()

        def on_epoch_end(self, epoch, logs=None):
            devices = {variable.value.device.type for variable in self.model.trainable_variables}
            assert devices == {"cuda"}, devices

    def fit(use_gpu):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)])
        callbacks = [Prepared()] if use_gpu else []
        optimizer = keras.optimizers.Adam(0.01)
        estimator = KerasEstimator(
            model=model, optimizer=optimizer, loss="mse", callbacks=callbacks, **options(way, use_gpu)
        )
        return estimator.fit_on_parquet(path=str(rows))

    expected, found = fit(False), fit(True)
    for one, other in zip(found.getModel().get_weights(), expected.getModel().get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def test_a_model_predicts_on_its_device(tmp_path):
    def halved(model, x):
        assert {part.device.type for part in (x, *model.parameters())} == {"cuda"}
        return model(x) / 2

    model = network()
    schema = DataSchema(
        (ColumnSpec("x", "float32", (4,), "feature", "array"), ColumnSpec("y", "float32", (), "label", "scalar"))
    )
    PLUGIN.export({"model": model}, schema, tmp_path)
    x = np.random.default_rng(1).normal(size=(100, 4)).astype(np.float32)
    with torch.no_grad():
        expected = model(torch.from_numpy(x)).numpy()
    (found,) = PLUGIN.predictor(tmp_path, Inference(0, None)).predict({"x": x})
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    (found,) = PLUGIN.predictor(tmp_path, Inference(0, halved)).predict({"x": x})
    np.testing.assert_allclose(found, expected / 2, rtol=1e-4, atol=1e-5)


def train_with_trainer():
    import lightning.pytorch as lightning  # noqa: PLC0415
    from lightning.fabric.plugins.environments import LightningEnvironment  # noqa: PLC0415

    take_device()

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = network()

        def training_step(self, batch, _index):
            assert batch.is_cuda
            assert batch.device.index == torch.cuda.current_device()
            loss = self.layers(batch).square().mean()
            self.log("loss", loss, on_epoch=True, sync_dist=True, prog_bar=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.utils.data.DataLoader(torch.randn(64, 4, generator=torch.Generator().manual_seed(5)), batch_size=8)
    module = Module()
    trainer = lightning.Trainer(
        strategy="sparkhvd",
        accelerator="gpu",
        devices=1,
        precision="16-mixed",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[LightningEnvironment()],
    )
    trainer.fit(module, data)
    return float(trainer.callback_metrics["loss_epoch"]), [
        values.detach().cpu().numpy() for values in module.parameters()
    ]


@pytest.mark.parametrize("way", WAYS)
def test_lightnings_trainer_trains_on_devices(way):
    with RankGroup(RANKS, imports=("sparkhvd.lightning",), gpu_operations=way, collective_timeout=60.0) as group:
        (loss, weights), (other_loss, others) = group.run(train_with_trainer)
        assert loss == other_loss
        for one, other in zip(weights, others, strict=True):
            np.testing.assert_array_equal(one, other)
