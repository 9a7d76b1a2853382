"""The error messages for names of Horovod that sparkhvd lacks or has in other modules."""

from __future__ import annotations

import importlib

import pytest

import sparkhvd

_ELASTIC_MESSAGE = (
    r"Elastic training is not available under this name\. sparkhvd\.run_elastic\(\) and sparkhvdrun start elastic "
    r"jobs: see docs/how-to/elastic\.md\. An interrupted fit resumes from its checkpoints.*docs/how-to/resume\.md"
)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("np", r"run\(\) takes no argument 'np'\. Did you mean num_proc\?"),
        ("network_interfaces", r"Did you mean nics\?"),
        ("lancher", r"Did you mean launcher\?"),
        ("zzz", r"run\(\) takes no argument 'zzz'\.$"),
        ("min_np", r"^run\(\) takes no argument 'min_np'\. Pass min_num_proc to sparkhvd\.run_elastic\(\): see docs/"),
        ("max_num_proc", r"Pass max_num_proc to sparkhvd\.run_elastic\(\)"),
    ],
)
def test_the_error_for_an_unknown_argument_of_run_suggests_the_right_one(name, words):
    with pytest.raises(TypeError, match=words):
        sparkhvd.run(print, **{name: 2})


def test_an_elastic_name_raises_an_error_that_names_the_alternative():
    with pytest.raises(AttributeError, match=_ELASTIC_MESSAGE):
        _ = importlib.import_module("sparkhvd.torch").run_elastic


@pytest.mark.parametrize("module", ["sparkhvd.spark", "sparkhvd.spark.torch", "sparkhvd.spark.common.store"])
def test_an_import_of_sparkhvd_spark_raises_an_error_with_the_right_import(module):
    with pytest.raises(ImportError, match=r"from sparkhvd import run, TorchEstimator.*docs/horovod/index\.md"):
        importlib.import_module(module)


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        (
            "sparkhvd.torch",
            "alreduce",
            r"^module 'sparkhvd\.torch' has no attribute 'alreduce'\. Did you mean 'allreduce'\?$",
        ),
        ("sparkhvd.torch", "zzz", r"^module 'sparkhvd\.torch' has no attribute 'zzz'\.$"),
        ("sparkhvd", "KerasEstimater", r"Did you mean 'KerasEstimator'\?"),
        (
            "sparkhvd.keras",
            "KerasEstimator",
            r"^KerasEstimator comes from sparkhvd itself: from sparkhvd import KerasEst",
        ),
        ("sparkhvd.lightning", "LightningModel", r"^LightningModel comes from sparkhvd itself"),
    ],
)
def test_the_error_for_an_unknown_name_suggests_the_nearest_name_or_its_module(module, name, words):
    with pytest.raises(AttributeError, match=words):
        getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("fn", [None, 3])
def test_an_object_that_is_not_callable_is_refused(fn):
    with pytest.raises(TypeError, match=r"^fn must be a function, got (None|3)\. Pass it without calling it"):
        sparkhvd.run(fn, num_proc=2, launcher="local")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"args": 5}, r"args=5 must be a tuple of arguments for fn, like args=\(5,\)"),
        ({"args": "ab"}, r"like args=\('ab',\)"),
        ({"kwargs": [1]}, r"kwargs=\[1\] must be a dict"),
    ],
)
def test_arguments_of_the_wrong_type_are_refused_with_an_example(arguments, message):
    with pytest.raises(TypeError, match=message):
        sparkhvd.run(print, num_proc=1, launcher="local", **arguments)
