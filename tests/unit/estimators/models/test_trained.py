from __future__ import annotations

import pytest
import torch
from pyspark.sql.types import DoubleType, LongType, StructField, StructType

from sparkhvd import TorchModel
from sparkhvd.errors import ModelOutputError, ParamError
from sparkhvd.store import LocalStore

AGE = StructType([StructField("age", DoubleType())])
ID = StructType([StructField("id", LongType())])


class IdsFromOne(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(5, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids.flatten() - 1)


class Adults(torch.nn.Module):
    def forward(self, age: torch.Tensor) -> torch.Tensor:
        if bool((age < 18).any()):
            raise ValueError("a minor")
        return age


def test_a_model_is_saved_at_the_url_of_a_store(tmp_path):
    TorchModel.from_model(torch.nn.Linear(1, 1), AGE, feature_cols=["age"], store=f"file://{tmp_path}")
    assert LocalStore(str(tmp_path)).list("runs")
    with pytest.raises(ParamError, match=r"store must be a Store or a URL such as .*, got int"):
        TorchModel.from_model(torch.nn.Linear(1, 1), AGE, feature_cols=["age"], store=3)


def test_a_schema_is_enough_to_wrap_a_model_that_rejects_zeros():
    model = TorchModel.from_model(IdsFromOne(), ID, feature_cols=["id"])
    assert repr(model) == "TorchModel(feature_columns=['id'])"
    assert model.output_columns()[0].vector


def test_the_error_of_a_model_that_needs_real_values_asks_for_rows():
    with pytest.raises(ModelOutputError, match=r"a minor .*pass a DataFrame with real rows") as caught:
        TorchModel.from_model(Adults(), AGE, feature_cols=["age"])
    assert isinstance(caught.value.__cause__, ValueError)
