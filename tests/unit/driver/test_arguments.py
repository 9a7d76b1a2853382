"""Arguments that cannot work are refused before any work."""

from __future__ import annotations

import io
import logging

import pytest

import sparkhvd
from sparkhvd.errors import ConfigError


class Endless:
    def write(self, text):
        raise RuntimeError("no more paper")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_proc": -1}, "num_proc=-1 is not a number of processes; give 1 or more, or leave it out"),
        ({"num_proc": True}, "num_proc=True is not a number of processes"),
        ({"start_timeout": -5}, "start_timeout=-5 is not above 0 seconds"),
        ({"start_timeout": "soon"}, "start_timeout='soon' is not above 0 seconds"),
        ({"start_timeout": float("nan")}, "start_timeout=nan is not above 0 seconds"),
        ({"launcher": "barrier", "gpus_per_task": 0}, "gpus_per_task=0 is no amount that Spark takes"),
        ({"launcher": "barrier", "gpus_per_task": -1}, "gpus_per_task=-1 is no amount that Spark takes"),
        ({"launcher": "barrier", "gpus_per_task": 1.5}, "gpus_per_task=1.5 is no amount that Spark takes"),
        ({"launcher": "barrier", "gpus_per_task": "all"}, "gpus_per_task='all' is no amount that Spark takes"),
        ({"launcher": "barrier", "cpus_per_task": 0}, "cpus_per_task=0 is not a number of cores; give 1 or more"),
        ({"env": ["A=1"]}, "env is of type list; give names and values, like env={'NAME': 'value'}"),
        ({"env": {"A": 1}}, "env['A'] has a value of type int"),
        ({"env": {"A=B": "1"}}, "env['A=B'] cannot be in an environment: a name is not empty and has no '='"),
        ({"env": {"A": "x\0"}}, "env['A'] cannot be in an environment"),
        ({"verbose": "x"}, "verbose='x' is not 0, 1 or 2"),
        ({"nics": "eth0"}, "nics='eth0' is one text; give a list of names, like ['eth0']"),
        ({"preload": "torch"}, "preload='torch' is one text; give a list of names"),
        ({"executable": "/no/python"}, "executable='/no/python' is no program on this machine"),
        ({"launcher": "ssh", "hosts": ["a:1"]}, "hosts=['a:1'] is not one text like 'host1:2,host2:2'"),
        ({"launcher": "mpi", "extra_mpi_args": "'x"}, """extra_mpi_args="'x" cannot be read as a shell would"""),
        ({"stdout": "out.txt"}, "stdout='out.txt' takes no text: 'str' object has no attribute 'write'"),
        ({"stderr": io.BytesIO()}, "takes no text: a bytes-like object is required"),
        ({"stdout": Endless()}, "takes no text: no more paper. Give an open text file, or sparkhvd.LogFiles"),
        ({"output_filename": "/proc/kept"}, "output_filename='/proc/kept': no files can be made in that folder: No"),
        ({"output_filename": "/dev/null"}, "output_filename='/dev/null': no files can be made in that folder: File"),
    ],
)
def test_what_cannot_work_is_refused(arguments, words):
    with pytest.raises(ConfigError) as caught:
        sparkhvd.run(print, **{"num_proc": 1, "launcher": "local", **arguments})
    assert words in str(caught.value)


def test_a_closed_file_is_refused(tmp_path):
    with (tmp_path / "out").open("w") as file:
        pass
    with pytest.raises(ConfigError, match="takes no text: I/O operation on closed file"):
        sparkhvd.run(print, num_proc=1, launcher="local", stdout=file)


def test_networks_are_of_no_use_on_one_machine(caplog):
    with caplog.at_level(logging.WARNING, logger="sparkhvd"):
        assert sparkhvd.run(len, ("four",), num_proc=1, launcher="local", nics=["bogus0"]) == [4]
    assert "nics=['bogus0'] has no effect: all ranks run on this machine." in caplog.text
