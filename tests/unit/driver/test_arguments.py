"""Invalid arguments are refused before any work."""

from __future__ import annotations

import io
import logging

import numpy as np
import pytest

import sparkhvd
from sparkhvd.driver.elastic.run import ElasticOptions, check_limits
from sparkhvd.driver.run import launch_request
from sparkhvd.errors import ConfigError

GPUS_MESSAGE = "gpus_per_task must be a positive integer or a fraction between 0 and 1 (Spark accepts no other amounts)"


class FailingStream:
    def write(self, text):
        raise RuntimeError("no more paper")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_proc": -1}, "num_proc must be an integer of at least 1, got -1. Leave it out to use all slots."),
        ({"num_proc": True}, "num_proc must be an integer of at least 1, got True."),
        ({"start_timeout": -5}, "start_timeout must be a positive number of seconds, got -5."),
        ({"start_timeout": "soon"}, "start_timeout must be a positive number of seconds, got 'soon'."),
        ({"start_timeout": float("nan")}, "start_timeout must be a positive number of seconds, got nan."),
        ({"launcher": "barrier", "gpus_per_task": 0}, f"{GPUS_MESSAGE}, got 0."),
        ({"launcher": "barrier", "gpus_per_task": -1}, f"{GPUS_MESSAGE}, got -1."),
        ({"launcher": "barrier", "gpus_per_task": 1.5}, f"{GPUS_MESSAGE}, got 1.5."),
        ({"launcher": "barrier", "gpus_per_task": "all"}, f"{GPUS_MESSAGE}, got 'all'."),
        ({"launcher": "barrier", "cpus_per_task": 0}, "cpus_per_task must be an integer of at least 1, got 0."),
        ({"env": ["A=1"]}, "env must be a mapping of names to values, like env={'NAME': 'value'}, got the type list."),
        ({"env": {"A": 1}}, "env['A'] has a value of type int"),
        ({"env": {1: "A"}}, "env has the name 1 of type int"),
        ({"env": {"A=B": "1"}}, "env['A=B'] is not a valid environment variable: a name must not be empty or"),
        ({"env": {"A": "x\0"}}, "env['A'] is not a valid environment variable"),
        ({"env": {"A": "x" * 131_070}}, "env['A'] has 131,072 bytes with its name, more than Linux's limit of 131,071"),
        ({"launcher": "mpi", "env": {"PATH": None}}, "env={'PATH': None} removes PATH, but Open MPI starts no rank"),
        ({"verbose": "x"}, "verbose must be 0, 1 or 2, got 'x'."),
        ({"nics": "eth0"}, "nics must be a list of names, got the string 'eth0'. Pass ['eth0']."),
        ({"preload": "torch"}, "preload must be a list of names, got the string 'torch'."),
        ({"executable": "/no/python"}, "executable='/no/python' is not a program on this machine"),
        ({"launcher": "ssh", "hosts": ["a:1"]}, "hosts must be one string like 'host1:2,host2:2', got ['a:1']."),
        ({"launcher": "mpi", "extra_mpi_args": "'x"}, """extra_mpi_args="'x" is not valid shell syntax"""),
        ({"stdout": "out.txt"}, "stdout='out.txt' does not accept text: 'str' object has no attribute 'write'"),
        ({"stderr": io.BytesIO()}, "does not accept text: a bytes-like object is required"),
        (
            {"stdout": FailingStream()},
            "does not accept text: no more paper. Pass an open text file or sparkhvd.LogFiles",
        ),
        ({"output_filename": "/proc/kept"}, "'/proc/kept' is not a folder in which files can be created: No"),
        ({"output_filename": "/dev/null"}, "'/dev/null' is not a folder in which files can be created: File"),
    ],
)
def test_an_invalid_argument_is_refused(arguments, words):
    with pytest.raises(ConfigError) as caught:
        sparkhvd.run(print, **{"num_proc": 1, "launcher": "local", **arguments})
    assert words in str(caught.value)


def test_a_closed_file_is_refused(tmp_path):
    with (tmp_path / "out").open("w") as file:
        pass
    with pytest.raises(ConfigError, match="does not accept text: I/O operation on closed file"):
        sparkhvd.run(print, num_proc=1, launcher="local", stdout=file)


def test_nics_have_no_effect_on_one_machine(caplog):
    with caplog.at_level(logging.WARNING, logger="sparkhvd"):
        assert sparkhvd.run(len, ("four",), num_proc=1, launcher="local", nics=["bogus0"]) == [4]
    assert "nics=['bogus0'] has no effect: all ranks run on this machine." in caplog.text


@pytest.mark.parametrize("dtype", [np.int64, np.uint8])
def test_counts_may_be_integers_of_numpy(dtype):
    name, request = launch_request(num_proc=dtype(2), cpus_per_task=dtype(3))
    assert (name, request.num_proc, request.resources.cpus) == ("barrier", 2, 3)
    assert type(request.num_proc) is type(request.resources.cpus) is int  # py4j accepts only Python's own types


def test_limits_of_elastic_jobs_may_be_integers_of_numpy():
    elastic = ElasticOptions(np.int64(2), np.int32(1), np.uint8(200), reset_limit=np.int64(3))
    limits, _ = check_limits(elastic, 60.0)
    assert (limits.num_proc, limits.min_size, limits.max_size, limits.reset_limit) == (2, 1, 200, 3)
    assert {type(limits.num_proc), type(limits.min_size), type(limits.max_size), type(limits.reset_limit)} == {int}


@pytest.mark.parametrize("value", [np.int64(0), np.bool_(True), 2.0, np.float64(2)])
def test_values_other_than_positive_integers_are_refused_as_counts(value):
    with pytest.raises(ConfigError, match="num_proc must be an integer of at least 1, got"):
        launch_request(num_proc=value)
    with pytest.raises(ConfigError, match="num_proc must be an integer of at least 1, got"):
        check_limits(ElasticOptions(value), 60.0)
