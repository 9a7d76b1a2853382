from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import VectorAssembler

from sparkhvd import Store, TorchEstimator, TorchModel
from sparkhvd.errors import ParamError, StoreError
from sparkhvd.estimators.keras import KerasModel
from sparkhvd.estimators.models import pyfunc, retained_files
from sparkhvd.store import LocalStore

pytestmark = pytest.mark.spark


def half_error(output, label, reduction="mean"):
    """Compute a loss that no installed package defines."""
    each = (output - label) ** 2 / 2
    return each.mean() if reduction == "mean" else each


@pytest.fixture(scope="module")
def rows(spark):
    return spark.range(40).selectExpr("id / 40.0D AS a", "id % 3 / 3.0D AS b", "id / 20.0D AS y", "1 + id % 2 AS w")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    torch.manual_seed(2)
    model = torch.nn.Linear(2, 1)
    estimator = TorchEstimator(
        num_proc=1,
        store=Store.create(str(tmp_path_factory.mktemp("store"))),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5),
        loss=half_error,
        feature_cols=["v"],
        label_cols=["y"],
        sample_weight_col="w",
        batch_size=8,
        random_seed=3,
        verbose=0,
    )
    return Pipeline(stages=[VectorAssembler(inputCols=["a", "b"], outputCol="v"), estimator])


@pytest.fixture(scope="module")
def trained(pipeline, rows):
    return pipeline.fit(rows)


def test_a_loaded_pipeline_model_predicts_the_same(trained, rows, tmp_path):
    trained.write().overwrite().save(str(tmp_path / "pipeline"))
    loaded = PipelineModel.load(str(tmp_path / "pipeline"))
    model = loaded.stages[-1]
    assert type(model) is TorchModel
    assert model.uid == trained.stages[-1].uid
    assert model.getHistory() == trained.stages[-1].getHistory()
    mine = [row["y__output"] for row in trained.transform(rows).select("y__output").collect()]
    theirs = [row["y__output"] for row in loaded.transform(rows).select("y__output").collect()]
    assert mine == theirs


def test_the_native_file_is_beside_the_metadata(trained, tmp_path):
    trained.stages[-1].save(str(tmp_path / "model"))
    weights = torch.load(tmp_path / "model" / "model" / "state_dict.pt", weights_only=True)
    assert torch.equal(weights["weight"], trained.stages[-1].getModel().weight)
    (line,) = (tmp_path / "model" / "metadata" / "part-00000").read_text().splitlines()
    assert json.loads(line)["class"].endswith("TorchModel")


def test_a_loaded_estimator_equals_the_saved_one(pipeline, rows, tmp_path):
    pipeline.save(str(tmp_path / "pipeline"))
    loaded = Pipeline.load(str(tmp_path / "pipeline")).getStages()[-1]
    estimator = pipeline.getStages()[-1]
    assert loaded.uid == estimator.uid
    assert loaded.getStore().url == estimator.getStore().url
    for name in ("feature_cols", "label_cols", "sample_weight_col", "batch_size", "random_seed", "num_proc"):
        assert loaded.getOrDefault(name) == estimator.getOrDefault(name), name
    assert loaded.getLoss()(torch.ones(2), torch.zeros(2)) == 0.5, "the loss travels with its code"
    model, optimizer = loaded.getModel(), loaded.getOptimizer()
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == set(map(id, model.parameters()))
    np.testing.assert_array_equal(model.weight.detach(), estimator.getModel().weight.detach())


def test_a_loaded_pipeline_model_can_overwrite_its_own_folder(trained, tmp_path, monkeypatch):
    """Overwrite small and large files, also in a Store whose files cannot be mapped; Spark removes the folder first.

    Even after the removal, the model can be written for MLflow and returned.
    """
    path, wanted = str(tmp_path / "pipeline"), trained.stages[-1].getModel().weight
    trained.save(path)
    for small, remote in ((retained_files._SMALL_BYTES, False), (1, False), (1, True)):
        with monkeypatch.context() as patch:
            patch.setattr(retained_files, "_SMALL_BYTES", small)
            if remote:
                patch.setattr(LocalStore, "arrow", lambda *_: (None, ""))
            loaded = PipelineModel.load(path)
        shutil.rmtree(path)
        assert torch.equal(loaded.stages[-1].getModel().weight, wanted)
        (folder := tmp_path / f"{small} {remote}").mkdir()
        pyfunc.write_folder(loaded.stages[-1], folder)
        assert torch.equal(torch.load(folder / "model" / "state_dict.pt", weights_only=True)["weight"], wanted)
        for _ in range(2):
            loaded.write().overwrite().save(path)
            assert torch.equal(PipelineModel.load(path).stages[-1].getModel().weight, wanted)
        assert torch.equal(loaded.stages[-1].getModel().weight, wanted)
    monkeypatch.setattr(retained_files, "_SMALL_BYTES", 1)
    weights = next(Path(path).rglob("state_dict.pt"))
    again = PipelineModel.load(path)
    weights.write_bytes(b"")
    with pytest.raises(StoreError, match=r"state_dict\.pt has been changed in place since the model was loaded"):
        again.stages[-1].save(str(tmp_path / "other"))


class Lock:
    """A function that cannot be pickled."""

    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, model, inputs):
        return model(*inputs)


def test_existing_files_are_kept_and_foreign_ones_named(pipeline, trained, tmp_path):
    path = str(tmp_path / "model")
    trained.stages[-1].save(path)
    with pytest.raises(StoreError, match=r"already exists.*overwrite"):
        trained.stages[-1].save(path)
    with pytest.raises(ParamError, match="cannot be pickled"):
        TorchModel(trained.stages[-1].trained, prediction_fn=Lock()).write().overwrite().save(path)
    loaded = TorchModel.load(path).setOutputCols(["better"])
    loaded.write().overwrite().save(path)  # overwrites the files that it reads itself
    assert torch.equal(TorchModel.load(path).getModel().weight, trained.stages[-1].getModel().weight)
    assert TorchModel.load(path).getOutputCols() == loaded.getOutputCols() == ["better"]
    assert torch.equal(loaded.getModel().weight, trained.stages[-1].getModel().weight)
    assert [one.name for one in tmp_path.iterdir()] == ["model"]
    with pytest.raises(ParamError, match="holds a TorchModel, not a KerasModel"):
        KerasModel.load(path)
    with pytest.raises(StoreError, match="holds no saved TorchModel"):
        TorchModel.load(str(tmp_path / "nothing"))
