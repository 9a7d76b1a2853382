"""Models of special kinds through fit, transform, save and load, on both data paths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.nn.utils import parametrizations

from sparkhvd import Store, TorchEstimator
from sparkhvd.estimators.torch import TorchModel

pytestmark = pytest.mark.spark


class IdsFromOne(torch.nn.Module):
    """Takes ids from 1 to 40, normalizes by batches, and has a parametrized layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = torch.nn.Embedding(40, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.last = parametrizations.weight_norm(torch.nn.Linear(4, 2))

    def forward(self, ids):
        if int(ids.min()) < 1:
            raise ValueError("ids begin with 1")
        return self.last(self.norm(self.embedding(ids.reshape(-1) - 1)))


@pytest.mark.parametrize("data", ["direct", "store"])
def test_a_parametrized_model_that_rejects_zeros_validates_the_returned_model(spark, tmp_path, data):
    df = spark.range(1, 41).selectExpr("id", "CAST(id % 2 AS INT) AS y", "id % 5 = 0 AS held_out").repartition(2)
    model = IdsFromOne()
    estimator = TorchEstimator(
        num_proc=2,
        store=Store.create(str(tmp_path / "store")),
        data=data,
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        loss=functional.cross_entropy,
        feature_cols=["id"],
        label_cols=["y"],
        validation="held_out",
        batch_size=np.int64(40),
        random_seed=3,
        verbose=0,
    )
    trained = estimator.fit(df, {TorchEstimator.epochs: 2})
    assert len(trained.getHistory()) == 2
    held_out = df.where("held_out").toPandas()
    ids, labels = torch.from_numpy(held_out["id"].to_numpy()), torch.from_numpy(held_out["y"].to_numpy()).long()
    with torch.no_grad():
        outputs = trained.getModel()(ids)
    assert trained.getHistory()[-1]["validation"]["loss"] == pytest.approx(
        functional.cross_entropy(outputs, labels).item(), rel=1e-5
    )
    trained.write().overwrite().save(str(tmp_path / "saved"))
    again = TorchModel.load(str(tmp_path / "saved"))
    rows = again.transform(df.where("held_out")).orderBy("id").collect()
    found = np.array([row["y__output"].toArray() for row in rows])
    assert np.allclose(found, outputs[ids.argsort()].numpy(), atol=1e-6)
