"""``epoch_callback``: a function that the driver calls after every epoch, with the averaged metrics.

Rank 0 sends the records of its epochs to the driver and waits for the answer, so that the function can end the training
before the next epoch. A new rank 0 of an elastic fit, or of a resumed run, also sends the earlier epochs. The driver
calls the function once per epoch.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from sparkhvd._util.closable import Closable
from sparkhvd.deadline import Deadline
from sparkhvd.errors import ParamError
from sparkhvd.estimators.params.policies import metric_values
from sparkhvd.estimators.reports import EpochRecord
from sparkhvd.estimators.training.logs.history import record_from_json
from sparkhvd.rpc.client import Client, connect
from sparkhvd.rpc.messages import EpochsAnswered, EpochsEnded, Message, Rejected
from sparkhvd.rpc.server import Server

logger = logging.getLogger(__name__)

EpochCallback = Callable[[int, Mapping[str, float]], object]

_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 600.0


@dataclass(frozen=True)
class CallbackAddress:
    """How rank 0 reaches the driver.

    Attributes:
        addresses: the addresses of the driver's server, the preferred one first.
        secret: proves to the server that the rank belongs to this fit.
        encrypt: whether the connection is encrypted.
    """

    addresses: tuple[tuple[str, int], ...]
    secret: bytes
    encrypt: bool


def requests_end(answer: object) -> bool:
    """Return whether a callback's answer ends the training: only True does, so a returned loss does not."""
    return isinstance(answer, bool | np.bool_) and bool(answer)


class EpochCalls:
    """Calls ``epoch_callback`` once for every epoch.

    Args:
        function: gets the number of an epoch, from 0, and its metrics by name. It ends the training by returning True.
            None means that there is no callback.

    Attributes:
        error: the last exception of the function, or None.
    """

    def __init__(self, function: EpochCallback | None) -> None:
        self._function = function
        self._lock = threading.Lock()  # held while the function runs; guards the two attributes below
        self._answers: dict[int, bool] = {}  # by epoch
        self.error: BaseException | None = None

    def call(self, records: Iterable[EpochRecord]) -> bool:
        """Call the function for new epochs; return whether it ended the training after any of ``records``."""
        ends = False
        with self._lock:
            try:
                for record in records:
                    ends = self._answer(record) or ends
            except BaseException as error:
                self.error = error
                raise
        return ends

    def _answer(self, record: EpochRecord) -> bool:
        if self._function is None:
            return False
        if record.epoch not in self._answers:
            self._answers[record.epoch] = requests_end(self._function(record.epoch, metric_values(record)))
        return self._answers[record.epoch]


class CallbackServer(Closable):
    """Calls ``epoch_callback`` for the epochs that rank 0 reports, until ``close()``.

    Args:
        calls: the calls.
        bind: the local address that the server binds.
        hosts: the addresses at which ranks may reach this driver.
        encrypt: whether connections are encrypted.
        during_calls: returns the context of a call.

    Attributes:
        address: how rank 0 reaches the server.
    """

    def __init__(
        self,
        calls: EpochCalls,
        bind: str,
        hosts: Sequence[str],
        *,
        encrypt: bool,
        during_calls: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._calls = calls
        self._during_calls = during_calls
        secret = secrets.token_bytes(32)
        self._server = Server(secret, self, bind, name="sparkhvd-epochs", encrypt=encrypt)
        self.address = CallbackAddress(tuple((host, self._server.port) for host in hosts), secret, encrypt)

    def handle(self, message: Message) -> Message | None:
        """Call the function for the epochs of a message; see ``sparkhvd.rpc.server.Handler``."""
        if not isinstance(message, EpochsEnded):
            return None
        try:
            with self._during_calls():
                return EpochsAnswered(self._calls.call(map(record_from_json, json.loads(message.content))))
        except BaseException as error:  # noqa: BLE001 - the function is the user's, and rank 0 waits for the answer
            return Rejected(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        self._server.close()


class CallbackClient(Closable):
    """Reports epochs to a ``CallbackServer``, on rank 0."""

    def __init__(self, address: CallbackAddress) -> None:
        self._address = address
        self._client: Client | None = None
        self._sent = 0
        self._failed = False

    def report(self, history: Sequence[EpochRecord]) -> bool:
        """Report the epochs of the history that were not reported yet; return whether the training ends.

        If the driver cannot be reached, a warning is logged and the training continues.

        Raises:
            ParamError: the function raised an exception.
        """
        if self._failed:
            return False
        content = json.dumps([record.to_json() for record in history[self._sent :]]).encode()
        reason = "Rank 0 cannot reach the driver"
        try:
            client = self._connected()
            reason = f"epoch_callback did not return within {_ANSWER_SECONDS:g} s, or the driver was lost"
            answer = client.ask(EpochsEnded(content), Deadline.after(_ANSWER_SECONDS))
        except OSError as error:
            self._failed = True
            self.close()  # a late answer must not be mistaken for the answer to the next report
            logger.warning("%s. Further epochs are reported when the training has ended. (%s)", reason, error)
            return False
        if isinstance(answer, Rejected):
            raise ParamError(f"epoch_callback raised {answer.reason}")
        self._sent = len(history)
        return isinstance(answer, EpochsAnswered) and answer.ends

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _connected(self) -> Client:
        if self._client is None:
            address = self._address
            deadline = Deadline.after(_CONNECT_SECONDS)
            self._client = connect(address.addresses, address.secret, deadline, encrypt=address.encrypt)
        return self._client
