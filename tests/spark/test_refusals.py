"""Every estimator refuses impossible trainings before any job, and names the parameter."""

from __future__ import annotations

import pytest
import torch

from sparkhvd import Store
from sparkhvd.driver.user_code.importable import importable_on
from sparkhvd.driver.user_code.user_modules import loaded_user_modules
from sparkhvd.errors import ParamError, SchemaError
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
    ({"gradient_compression": "zip"}, "gradient_compression='zip' must be one of 'none', 'fp16', 'bf16'"),
    ({"output_types": ["bogus"]}, "'y__output' has the unknown type 'bogus'; expected one of 'auto', 'vector'"),
    ({"output_types": ["date"]}, "'y__output' has the type 'date', but an output cannot be a date"),
    ({"output_types": ["bogus"], "transformation_fn": dict}, "'y__output' has the unknown type 'bogus'"),
    ({"optimizer": 3}, r"^(optimizer is a int; pass|KerasEstimator needs optimizer:) an instance such as "),
    (
        {"output_cols": ["Y"]},
        "The DataFrame already has a column 'Y', the name that transform would give to the model's output",
    ),
    (
        {"label_cols": ["b"], "feature_cols": ["a", "b__output"]},
        "already has a column 'b__output', the name that transform",
    ),
)
BY_FRAMEWORK = {
    "torch": (
        ({"train_minibatch_fn": lambda model: model}, "train_minibatch_fn cannot be called with"),
        ({"loss": None, "loss_constructors": [lambda other: other]}, "loss_constructors: <lambda>.other. cannot be"),
    ),
    "lightning": (({"logger": 3}, "logger holds a int"),),
    "keras": (({"checkpoint_callback": 3}, "checkpoint_callback=3"),),
}


@pytest.fixture(scope="module", autouse=True)
def _asked_about_modules(spark):
    """Ask executors which modules they can import before the cases: each session runs that job only once."""
    importable_on(spark, {module.name: module.digest for module in loaded_user_modules()})


@pytest.mark.parametrize(
    ("framework", "case"),
    [(name, case) for name, cases in BY_FRAMEWORK.items() for case in (*COMMON, *cases)],
    ids=lambda value: value if isinstance(value, str) else "-".join(value[0]),
)
def test_a_hot_start_is_refused_before_any_job(spark, tmp_path, monkeypatch, framework, case):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torchinductor"))
    frame, jobs = (
        spark.range(40).selectExpr(*ROWS, "a AS b__output"),
        spark.sparkContext.statusTracker().getJobIdsForGroup,
    )
    made, before = estimator(framework, Store.create(str(tmp_path / "store")), checkpoints=None), jobs()
    given, message = case
    with pytest.raises((ParamError, SchemaError), match=message):
        made.setParams(**given).fit(frame)
    assert jobs() == before


def another(framework, width):
    """Return a model with another width, and its optimizer."""
    if framework == "keras":
        import keras  # noqa: PLC0415

        layers = [keras.layers.Dense(width, "tanh"), keras.layers.Dropout(0.1), keras.layers.Dense(1)]
        return {"model": keras.Sequential([keras.Input((2,)), *layers]), "optimizer": keras.optimizers.Adam(0.03)}
    model = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Dropout(0.1), torch.nn.Linear(width, 1))
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.03)}


def kept(store: Store) -> list[str]:
    """Return the content of a Store, without the leases of runs in training."""
    return sorted(path for path in store.list("") if "/holders/" not in path)


@pytest.mark.parametrize("framework", ["torch", pytest.param("lightning", marks=pytest.mark.soak), "keras"])
def test_a_run_is_not_resumed_with_another_model(spark, tmp_path, monkeypatch, framework):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torchinductor"))
    frame, store = spark.range(40).selectExpr(*ROWS), Store.create(str(tmp_path / "store"))
    params = {"num_proc": 1, "backend": "local", "epochs": 1, "run_id": "once", "checkpoints": None}
    params |= {"loss": torch.nn.functional.mse_loss} if framework == "lightning" else {}  # of plain modules
    estimator(framework, store, **params).setParams(**another(framework, 16)).fit(frame)
    written = kept(store)
    other = estimator(framework, store, **{**params, "epochs": 2}).setParams(**another(framework, 32))
    message = (
        r"Run 'once' cannot resume from its checkpoint file:.*epoch-00000-by-\d+, which belongs to another model: its "
    )
    with pytest.raises(
        ParamError,
        match=message + r"weight '0.*' has the shape .*16.*, but this fit's model has .*32.* \(and 2 more .* differ",
    ):
        other.fit(frame)
    assert kept(store) == written
    same = another(framework, 16)
    if framework == "keras":
        import keras  # noqa: PLC0415

        other.setParams(model=same["model"], optimizer=keras.optimizers.SGD())
    else:
        other.setParams(model=same["model"], optimizer=torch.optim.SGD(same["model"].parameters(), lr=0.1))
    with pytest.raises(ParamError, match="its optimizer is Adam, but this fit has SGD"):
        other.fit(frame)
    assert len(other.setParams(**another(framework, 16)).fit(frame).getHistory()) == 2
