"""What no training can do is said by every estimator before any job, by the name of the parameter."""

from __future__ import annotations

import pytest

from sparkhvd import Store
from sparkhvd.errors import ParamError
from tests.spark.trainings import ROWS, estimator

pytestmark = [
    pytest.mark.spark,
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec.*"),  # within Lightning 2.6 with torch 2.13
]

COMMON = (
    ({"callbacks": 5}, "callbacks=5 must be a list"),
    ({"callbacks": [3]}, "callbacks holds a int"),
    ({"metrics": 5}, "metrics=5 must be a list, or a dict by name"),
    ({"gradient_compression": 3}, "gradient_compression=3 must be one of 'none', 'fp16', 'bf16', or an object with"),
    ({"gradient_compression": "zip"}, "gradient_compression='zip' does not exist; there are 'none', 'fp16', 'bf16'"),
    ({"output_types": ["bogus"]}, "'y__output' is to have the type 'bogus', which is none: there are 'auto', 'vector'"),
    ({"output_types": ["date"]}, "'y__output' is to have the type 'date', but no output becomes a date"),
    ({"output_types": ["bogus"], "transformation_fn": dict}, "'y__output' is to have the type 'bogus', which is none"),
    ({"optimizer": 3}, "optimizer"),
)
BY_FRAMEWORK = {
    "torch": (
        ({"train_minibatch_fn": lambda model: model}, "train_minibatch_fn cannot be called with"),
        ({"loss": None, "loss_constructors": [lambda other: other]}, "loss_constructors: <lambda>.other. cannot be"),
    ),
    "lightning": (({"logger": 3}, "logger holds a int"),),
    "keras": (({"checkpoint_callback": 3}, "checkpoint_callback=3"),),
}


@pytest.mark.parametrize(
    ("framework", "case"),
    [(name, case) for name, cases in BY_FRAMEWORK.items() for case in (*COMMON, *cases)],
    ids=lambda value: value if isinstance(value, str) else "-".join(value[0]),
)
def test_it_is_refused_before_any_job(spark, tmp_path, monkeypatch, framework, case):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torchinductor"))
    frame, jobs = spark.range(40).selectExpr(*ROWS), spark.sparkContext.statusTracker().getJobIdsForGroup
    made, before = estimator(framework, Store.create(str(tmp_path / "store")), checkpoints=None), jobs()
    given, said = case
    with pytest.raises(ParamError, match=said):
        made.setParams(**given).fit(frame)
    assert jobs() == before
