from __future__ import annotations

import threading
from contextlib import contextmanager

import numpy as np
import pytest

from sparkhvd.errors import ParamError
from sparkhvd.estimators.reports import EpochRecord
from sparkhvd.estimators.training import epoch_callback
from sparkhvd.estimators.training.epoch_callback import CallbackAddress, CallbackClient, CallbackServer, EpochCalls


def record(epoch):
    return EpochRecord(epoch, {"loss": 1.0 / (epoch + 1)}, {"loss": 2.0}, 10.0, 0.1, {})


def history(epochs):
    return [record(epoch) for epoch in range(epochs)]


def serving(calls, **more):
    return CallbackServer(calls, "127.0.0.1", ["127.0.0.1"], **{"encrypt": False, **more})


@pytest.mark.parametrize("encrypt", [False, True])
def test_the_function_gets_every_epoch_once_and_ends_the_training(encrypt):
    seen = []

    def function(epoch, values):
        seen.append((epoch, values))
        return epoch == 2

    calls = EpochCalls(function)
    with serving(calls, encrypt=encrypt) as server, CallbackClient(server.address) as client:
        assert not client.report(history(1))
        assert not client.report(history(2))
        with CallbackClient(server.address) as successor:  # a new rank 0 of an elastic fit
            assert not successor.report(history(2))
            assert successor.report(history(3))
            assert not successor.report(history(4))
    assert [epoch for epoch, _ in seen] == [0, 1, 2, 3]
    assert seen[1][1] == {"loss": 0.5, "val_loss": 2.0}


def test_a_call_has_the_context_of_the_server():
    events = []

    @contextmanager
    def during_calls():
        events.append("begin")
        yield
        events.append("end")

    calls = EpochCalls(lambda *_: events.append("call"))
    with serving(calls, during_calls=during_calls) as server, CallbackClient(server.address) as client:
        client.report(history(1))
    assert events == ["begin", "call", "end"]


def test_a_request_to_end_in_an_epoch_that_a_killed_rank_reported_is_not_forgotten():
    with serving(EpochCalls(lambda epoch, _: epoch == 1)) as server:
        with CallbackClient(server.address) as killed:
            assert killed.report(history(2))
        with CallbackClient(server.address) as successor:
            assert successor.report(history(2))


@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt])
def test_an_error_of_the_function_ends_rank_0_and_is_kept_for_fit(kind):
    def function(_epoch, _values):
        raise kind("no such metric")

    calls = EpochCalls(function)
    complaint = pytest.raises(ParamError, match=f"epoch_callback raised {kind.__name__}: .*no such metric")
    with serving(calls) as server, CallbackClient(server.address) as client, complaint:
        client.report(history(1))
    assert isinstance(calls.error, kind)


def test_the_training_continues_while_the_driver_is_unreachable_and_reports_the_epochs_later(monkeypatch, caplog):
    monkeypatch.setattr(epoch_callback, "_CONNECT_SECONDS", 0.5)
    seen = []
    calls = EpochCalls(lambda epoch, _: seen.append(epoch))
    with serving(calls) as server:
        address = server.address
    with CallbackClient(address) as client:
        assert not client.report(history(1))
        assert not client.report(history(2))
    assert caplog.text.count("Rank 0 cannot reach the driver. Further epochs are reported when") == 1
    calls.call(history(2))
    assert seen == [0, 1]


def test_the_training_stops_waiting_for_a_function_that_takes_too_long(monkeypatch, caplog):
    stuck = threading.Event()
    monkeypatch.setattr(epoch_callback, "_ANSWER_SECONDS", 0.3)
    with (
        serving(EpochCalls(lambda _epoch, _values: stuck.wait(5))) as server,
        CallbackClient(server.address) as client,
    ):
        assert not client.report(history(1))
        assert "epoch_callback did not return within 0.3 s" in caplog.text
        stuck.set()


@pytest.mark.parametrize(
    ("answer", "ends"), [(True, True), (np.True_, True), (False, False), (None, False), (0.5, False), ("no", False)]
)
def test_only_true_ends_the_training(answer, ends):
    assert EpochCalls(lambda *_: answer).call(history(1)) is ends


def test_an_unauthenticated_client_calls_nothing():
    calls = EpochCalls(lambda *_: pytest.fail("was called"))
    with serving(calls) as server:
        forged = CallbackAddress(server.address.addresses, b"x" * 32, encrypt=False)
        with CallbackClient(forged) as client:
            assert not client.report(history(1))
