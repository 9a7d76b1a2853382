from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from sparkhvd.driver.user_code import payload
from sparkhvd.driver.user_code.importable import importable_nowhere
from sparkhvd.driver.user_code.payload import pickle_call
from sparkhvd.driver.user_code.user_modules import is_installed
from sparkhvd.errors import LaunchError


def factor() -> int:
    return 7


def times_factor(value: int) -> int:
    return value * factor()


def test_a_function_of_a_module_outside_any_package_is_sent_with_its_code(tmp_path):
    (tmp_path / "call").write_bytes(pickle_call(times_factor, (6,), {}, importable_nowhere))
    program = "import cloudpickle, sys; f, a, k = cloudpickle.load(open(sys.argv[1], 'rb')); sys.exit(f(*a, **k))"
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path / "call")], check=False).returncode == 42


def test_installed_modules_are_recognized():
    assert is_installed(Path(np.__file__))
    assert is_installed(Path(threading.__file__))
    assert not is_installed(Path(__file__))


def test_an_object_that_cannot_be_pickled_is_named_with_a_remedy():
    with pytest.raises(LaunchError, match=r"times_factor and its arguments cannot be sent .*lock.* inside fn"):
        pickle_call(times_factor, (threading.Lock(),), {})


def test_a_payload_above_the_cap_is_refused(monkeypatch):
    monkeypatch.setattr(payload, "PAYLOAD_CAP_BYTES", 1000)
    with pytest.raises(LaunchError, match=r"more than the limit of 1,000\..*Store"):
        pickle_call(times_factor, (bytes(1001),), {})
