"""Rows in a Store, and an estimator that trains on them, for the tests of ``prepare_data``."""

from __future__ import annotations

import numpy as np
import torch

from sparkhvd import TorchEstimator, prepare_data
from sparkhvd.data import ParquetSource
from sparkhvd.world import World


def rows_of(data, split="train"):
    batches = list(ParquetSource(data.store, data.manifest, split, World(), 64, seed=0, shuffle=False).epoch(0))
    return {name: np.concatenate([batch.columns[name] for batch in batches]) for name in data.schema.names()}


def datasets_in(store):
    return sorted({path.split("/")[1] for path in store.list("datasets")})


def prepared_anew(df, store, **more):
    with prepare_data(1, store, df, ["y"], **more) as data:
        return not data.reused


def estimator(store, **more):
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    params = {
        "num_proc": 2,
        "store": store,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-4),
        "loss": torch.nn.functional.mse_loss,
        "feature_cols": ["x", "z"],
        "label_cols": ["y"],
        "batch_size": 8,
        "random_seed": 3,
        "verbose": 0,
    }
    return TorchEstimator(**{**params, **more})


def parameters(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.getModel().parameters()]).tolist()
