"""The exceptions that sparkhvd raises on purpose.

Each message says what happened, where, and the next step. All types derive from ``SparkHvdError``, and also from the
built-in exception that users would expect in their place.
"""

from __future__ import annotations

from functools import partial


class SparkHvdError(Exception):
    """The base class of these exceptions."""


class ConfigError(SparkHvdError, ValueError):
    """A setting (argument or environment variable) has a value that cannot work."""


class UnsupportedError(ConfigError, NotImplementedError):
    """Each setting is valid, but sparkhvd does not support the combination."""


class NotInitializedError(SparkHvdError, ValueError):
    """A collective or a rank was requested before ``init()`` or after ``shutdown()``."""


class HorovodInternalError(SparkHvdError, RuntimeError):
    """Horovod's name for a failed collective, for programs that catch it; never raised itself."""


class HostsUpdatedInterrupt(SparkHvdError, RuntimeError):  # noqa: N818  the name is Horovod's
    """The slots of an elastic job have changed; ``hvd.elastic.run`` handles it.

    Args:
        args: a message, or Horovod's ``skip_sync``.
        skip_sync: whether the ranks may continue without synchronization; sparkhvd always synchronizes them.
    """

    def __init__(self, *args: object, skip_sync: bool = False) -> None:
        super().__init__(*args)
        self.skip_sync = skip_sync or args[:1] == (True,)


class DeadlineExceededError(HorovodInternalError, TimeoutError):
    """A wait ended at its deadline; the message names what was waited for."""


class AuthenticationError(SparkHvdError, ConnectionError):
    """A peer could not prove that it knows the job's secret."""


class CollectiveError(HorovodInternalError):
    """A collective operation failed; raised on every rank that takes part."""


class MismatchError(CollectiveError):
    """Ranks submitted the same tensor name with different shapes, dtypes, operations or roots."""


class PeerLostError(CollectiveError):
    """Another rank was lost, left early or aborted while this rank needed it."""


class LaunchError(SparkHvdError, RuntimeError):
    """The processes of a job could not be started or did not finish."""


class SlotsError(LaunchError):
    """More ranks were requested than the cluster has slots."""


class StartTimeoutError(LaunchError, TimeoutError):
    """The ranks did not start within ``start_timeout``."""


class RankFailedError(LaunchError):
    """A rank raised, exited or was killed.

    Attributes:
        rank: the first rank that failed.
        host: the host that it ran on.
        remote_traceback: its Python traceback, empty when the process ended without one.
        stderr_tail: the last lines of its stderr that had arrived when the job ended.
    """

    def __init__(
        self, message: str, *, rank: int, host: str, remote_traceback: str = "", stderr_tail: str = ""
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.remote_traceback = remote_traceback
        self.stderr_tail = stderr_tail

    def __reduce__(self) -> tuple[object, ...]:
        # An exception is rebuilt from its positional arguments alone, which is not enough here.
        return partial(type(self), rank=self.rank, host=self.host), self.args, vars(self)


class StoreError(SparkHvdError, OSError):
    """A Store could not read or write a path."""


class DataError(SparkHvdError, ValueError):
    """The rows of a DataFrame or a prepared dataset cannot be trained on."""


class SchemaError(DataError):
    """A column is missing or has a type or shape that cannot be used."""


class ParamError(SparkHvdError, ValueError):
    """A parameter of an estimator, model, search or elastic fit is missing or invalid, or contradicts another."""


class ModelOutputError(ParamError):
    """The model's output does not fit the labels or the loss."""


class SearchError(SparkHvdError, RuntimeError):
    """A search has no single result: no trial completed, it was interrupted, or several trials are the best."""
