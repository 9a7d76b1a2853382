from __future__ import annotations

import json

import numpy as np
import pandas
import pytest
import torch
from pyspark.ml.tuning import ParamGridBuilder

import sparkhvd.torch as hvd
from sparkhvd.errors import ParamError
from sparkhvd.estimators.lightning import LightningEstimator
from sparkhvd.estimators.params.backend import in_training_terms
from sparkhvd.estimators.params.declarations import Declarations, Declared, declared
from sparkhvd.estimators.params.params import EstimatorParams, ModelParams, positive_integer
from sparkhvd.estimators.params.policies import Checkpoints, EarlyStopping
from sparkhvd.estimators.torch import TorchEstimator
from sparkhvd.store import Store


class Engine(Declarations):
    size: Declared[int] = declared("How large.", positive_integer, default=3)
    top_speed: Declared[float | None] = declared("How fast.", default=None, accessor="Speed")


def test_one_declaration_defines_keyword_setter_getter_doc_and_default():
    assert Engine().getSize() == 3
    assert Engine(size=4).getSize() == 4
    assert Engine().setSize(5).setSpeed(1.5).getSpeed() == 1.5
    assert Engine(size=4).explainParam("size") == "size: How large. (default: 3, current: 4)"


def test_every_parameter_of_the_estimator_has_a_setter_that_returns_self_and_a_getter():
    estimator = TorchEstimator()
    assert len(estimator.declarations) > 20
    for name in estimator.declarations:
        accessor = "".join(word.capitalize() for word in name.split("_"))
        value = getattr(estimator, f"get{accessor}")()
        assert getattr(estimator, f"set{accessor}")(value) is estimator
        assert getattr(estimator, f"get{accessor}")() == value


def test_horovods_setters_have_their_names():
    estimator = TorchEstimator().setNumProc(2).setFeatureCols(["a"]).setBackwardPassesPerStep(3).setRunId("mine")
    assert (estimator.getNumProc(), estimator.getBackwardPassesPerStep(), estimator.getRunId()) == (2, 3, "mine")
    assert estimator.getFeatureCols() == ("a",)


def test_an_unknown_keyword_is_refused_with_the_nearest_names():
    with pytest.raises(TypeError, match=r"TorchEstimator has no parameter 'batchsize'\. Did you mean batch_size"):
        TorchEstimator(batchsize=3)
    with pytest.raises(TypeError, match=r"Engine has no parameter 'xyzzy'\. It takes size, top_speed\."):
        Engine(xyzzy=3)


def test_arguments_without_a_keyword_are_refused():
    with pytest.raises(
        TypeError, match=r"TorchEstimator takes its parameters by keyword, as in .*, but got 2 positional arguments"
    ):
        TorchEstimator(2, torch.nn.Linear(1, 1))  # type: ignore[misc]


def test_a_pandas_table_is_refused_with_the_conversion_to_spark():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    given = {"model": model, "optimizer": optimizer, "loss": torch.nn.MSELoss()}
    with pytest.raises(ParamError, match=r"fit takes a Spark DataFrame, not a pandas\.DataFrame; spark\.createData"):
        TorchEstimator(**given, feature_cols=["x"], label_cols=["y"]).fit(pandas.DataFrame({"x": [1.0], "y": [2.0]}))


@pytest.mark.parametrize(
    ("message", "ending"),
    [
        ("raised KeyError: 'x' (in fn, after init()).\n\nTraceback (in fn)", "'x' (in training).\n\nTraceback (in fn)"),
        ("was killed (in fn).", "was killed (in training)."),
        ("was killed (after fn ended).", "(after training ended)."),
    ],
)
def test_the_phase_of_a_failing_rank_is_described_in_terms_of_training(message, ending):
    assert in_training_terms(f"Rank 1 on host a {message}").endswith(ending)


def test_none_means_the_default():
    assert EstimatorParams(batch_size=None).getBatchSize() == 32
    assert EstimatorParams(batch_size=7).setBatchSize(None).getBatchSize() == 32
    assert EstimatorParams(epochs=5).copy({}).setEpochs(None).getEpochs() == 1


def test_a_parameter_map_is_checked_and_does_not_change_the_original():
    estimator = EstimatorParams(epochs=2)
    assert estimator.copy({estimator.epochs: 9}).getEpochs() == 9
    assert estimator.getEpochs() == 2
    with pytest.raises(ParamError, match="epochs=0 must be a whole number of at least 1"):
        estimator.copy({estimator.epochs: 0})


def test_two_estimators_do_not_share_values():
    first, second = EstimatorParams(batch_size=1), EstimatorParams(batch_size=2)
    assert (first.getBatchSize(), second.getBatchSize()) == (1, 2)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_proc", 0, "num_proc=0 must be a whole number of at least 1"),
        ("num_proc", True, "num_proc=True must be a whole number"),
        ("batch_size", 2.5, r"batch_size=2\.5 must be a whole number"),
        ("random_seed", -1, "random_seed=-1 must be a whole number of at least 0"),
        ("shuffle", 1, "shuffle=1 must be True or False"),
        ("run_id", "", "run_id='' must be a non-empty string"),
        ("feature_cols", "a", r"feature_cols='a' must be a list of column names, such as \['a'\]"),
        ("label_cols", ["a", "a"], r"label_cols=\['a', 'a'\] names the column 'a' more than once"),
        ("validation", 1.0, r"validation=1\.0 must be a number within 0 <= x < 1"),
        ("validation", 1, "validation=1 must be a number within"),
        ("gradient_compression", 3, r"gradient_compression=3 must be one of 'none', 'fp16', 'bf16', or an object with"),
        ("store", 7, r"store must be a Store or a URL such as 'file:///some/folder', got int"),
    ],
)
def test_an_invalid_value_is_refused_with_its_name(name, value, message):
    with pytest.raises(ParamError, match=message):
        EstimatorParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("loss_weights", [1, "2"], r"loss_weights=\[1, '2'\] must be a list of numbers"),
        ("input_shapes", [1, 2], r"input_shapes=\[1, 2\] must be a list with one shape per column"),
        ("input_shapes", [[2, -1]], r"input_shapes has the shape \[2, -1\], .* at least 1\. Only the first may be -1"),
        ("torch_compile", "max-autotune", "torch_compile='max-autotune' must be True, False, or a dict of arguments"),
        ("label_shapes", [[0]], r"label_shapes has the shape \[0\], but sizes must be at least 1"),
    ],
)
def test_an_invalid_value_of_a_torch_parameter_is_refused(name, value, message):
    with pytest.raises(ParamError, match=message):
        TorchEstimator(**{name: value})


@pytest.mark.parametrize("estimator", [TorchEstimator, LightningEstimator])
def test_a_module_of_torch_compile_is_trained_and_returned_with_the_names_of_the_module_itself(estimator):
    from lightning.pytorch import LightningModule  # noqa: PLC0415

    module = torch.nn.Linear(2, 1) if estimator is TorchEstimator else LightningModule()
    compiled = torch.compile(module, backend="eager")
    assert estimator(model=compiled).getModel() is module
    assert estimator(model=module).setModel(compiled).getModel() is module


def test_a_compressor_object_is_a_compression():
    for given in ("bf16", hvd.Compression.fp16):
        assert EstimatorParams(gradient_compression=given).getGradientCompression() is given


def test_horovods_lightning_parameters_name_their_replacement():
    with pytest.raises(ParamError, match=r"profiler has no meaning in LightningEstimator: .* trainer_args="):
        LightningEstimator(profiler="simple")
    with pytest.raises(ParamError, match=r"backward_passes_per_step has .* trainer_args=.'accumulate_grad_batches'"):
        LightningEstimator(backward_passes_per_step=2)


def test_the_repr_of_an_estimator_hides_secrets(tmp_path):
    estimator = EstimatorParams(
        feature_cols=[f"x{i}" for i in range(8)], backend_env={"TOKEN": "secret"}, store=str(tmp_path), epochs=3
    )
    text = repr(estimator)
    assert "feature_cols=['x0', 'x1', 'x2', 'x3', 'x4', 'x5', ...]" in text
    assert f"store={estimator.getStore().url}" in text
    assert "epochs=3" in text
    for shown in (text, estimator.explainParams(), str(estimator.getBackendEnv())):
        assert "secret" not in shown
    assert estimator.explainParam("backend_env").endswith("(default: None, current: {TOKEN: values not shown})")
    assert estimator.explainParam(EstimatorParams.feature_cols).count("x7") == 1
    assert estimator.getBackendEnv() == {"TOKEN": "secret"}


def test_a_store_may_be_passed_as_a_url(tmp_path):
    estimator = EstimatorParams(store=f"file://{tmp_path}")
    assert isinstance(estimator.getStore(), Store)
    assert estimator.getStore().url.endswith(str(tmp_path))


def test_a_store_and_a_validation_column_are_accepted(tmp_path):
    store = Store.create(str(tmp_path))
    estimator = EstimatorParams(store=store, validation="held_out")
    assert estimator.getStore() is store
    assert estimator.getValidation() == "held_out"


def test_the_declared_defaults_of_a_model_are_horovods():
    assert ModelParams(label_columns=["y"]).getLabelColumns() == ("y",)
    assert ModelParams().getInferenceBatchSize() == 1024


@pytest.mark.parametrize("kind", [TorchEstimator, LightningEstimator])
def test_a_grid_may_take_parameters_from_the_class(kind):
    grid = ParamGridBuilder().addGrid(kind.batch_size, [4, np.int64(8)]).baseOn({kind.epochs: 3}).build()
    copies = [kind(batch_size=2).copy(each) for each in grid]
    assert [(each.getBatchSize(), each.getEpochs()) for each in copies] == [(4, 3), (8, 3)]
    assert copies[1].getOrDefault(kind.batch_size) == 8
    assert TorchEstimator().copy({Engine.size: 4}).values() == TorchEstimator().values()


def test_numpys_numbers_and_lists_are_accepted_like_pythons():
    params = {
        "validation": np.float32(0.25),
        "batch_size": np.int16(4),
        "shuffle": np.bool_(False),
        "loss_weights": np.array([0.25, 0.75], np.float32),
        "label_shapes": np.array([[2, 3]]),
        "feature_cols": np.array(["a", "b"]),
        "clip_grad_norm": np.float64(2.0),
        "fill": {"a": np.float32(0.5)},
    }
    estimator = TorchEstimator(**params)
    values = estimator.values()
    assert {name: values[name] for name in params} == {
        "validation": 0.25,
        "batch_size": 4,
        "shuffle": False,
        "loss_weights": (0.25, 0.75),
        "label_shapes": ((2, 3),),
        "feature_cols": ("a", "b"),
        "clip_grad_norm": 2.0,
        "fill": {"a": 0.5},
    }
    json.dumps({name: values[name] for name in params})
    assert repr(EarlyStopping(patience=np.int64(3), min_delta=np.float32(0.5))) == repr(
        EarlyStopping("val_loss", 3, 0.5)
    )
    assert repr(Checkpoints(keep=np.int64(2), every_steps=np.int32(7))) == repr(Checkpoints(keep=2, every_steps=7))


def test_a_validation_fraction_may_be_an_integer():
    assert TorchEstimator(validation=0).getValidation() == 0.0
    for wrong in (1, True, -0.1, np.float32("nan")):
        with pytest.raises(ParamError, match=r"must be a number within 0 <= x < 1"):
            TorchEstimator(validation=wrong)
