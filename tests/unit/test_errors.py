from __future__ import annotations

import inspect
import pickle

import pytest

from sparkhvd import errors

_TYPES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)]


@pytest.mark.parametrize("kind", _TYPES)
def test_every_error_is_a_sparkhvd_error(kind: type[Exception]) -> None:
    assert issubclass(kind, errors.SparkHvdError)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.NotInitializedError, ValueError),
        (errors.DeadlineExceededError, TimeoutError),
        (errors.StartTimeoutError, TimeoutError),
        (errors.AuthenticationError, ConnectionError),
        (errors.CollectiveError, RuntimeError),
        (errors.RankFailedError, RuntimeError),
        (errors.StoreError, OSError),
        (errors.SchemaError, ValueError),
        (errors.ModelOutputError, ValueError),
    ],
)
def test_errors_can_be_caught_as_their_builtin_types(kind: type, builtin: type) -> None:
    assert issubclass(kind, builtin)


def test_failed_rank_carries_rank_host_traceback_and_stderr() -> None:
    error = errors.RankFailedError("it failed", rank=2, host="node7", remote_traceback="Traceback", stderr_tail="tail")
    assert str(error) == "it failed"
    assert (error.rank, error.host, error.remote_traceback, error.stderr_tail) == (2, "node7", "Traceback", "tail")


@pytest.mark.parametrize("kind", [kind for kind in _TYPES if kind is not errors.RankFailedError])
def test_error_survives_pickling(kind: type[Exception]) -> None:
    copy = pickle.loads(pickle.dumps(kind("what and where")))
    assert type(copy) is kind
    assert str(copy) == "what and where"


def test_failed_rank_survives_pickling_with_all_fields() -> None:
    error = errors.RankFailedError("it failed", rank=2, host="node7", remote_traceback="Traceback", stderr_tail="tail")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == "it failed"
    assert vars(copy) == vars(error)
