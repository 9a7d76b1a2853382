from __future__ import annotations

import pickle
import re
from collections.abc import Iterator

import pytest

from sparkhvd.comm import session
from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.comm.elastic.loop import run
from sparkhvd.comm.elastic.state import ObjectState, State
from sparkhvd.errors import (
    ConfigError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    NotInitializedError,
    PeerLostError,
)


@pytest.fixture
def job_of_one() -> Iterator[None]:
    session.set_launch_context(LaunchContext())
    session.init()
    yield
    session.shutdown()


@pytest.mark.usefixtures("job_of_one")
def test_values_are_attributes_that_return_to_the_last_commit():
    state = ObjectState(epoch=1, seen=[1])
    state.epoch = 2
    state.seen.append(2)
    state.commit()
    state.epoch = 3
    state.seen.append(3)
    state.restore()
    assert (state.epoch, state.seen) == (2, [1, 2])
    state.seen.append(4)
    state.restore()
    assert state.seen == [1, 2], "the saved copy is not the live one"


@pytest.mark.parametrize("name", ["commit", "sync", "register_reset_callbacks"])
def test_a_value_with_the_name_of_a_method_is_refused(name):
    with pytest.raises(ConfigError, match=rf"{name!r}: ObjectState\.{name}\(\) is a method"):
        ObjectState(**{"epoch": 0, name: 1})


@pytest.mark.parametrize("name", ["_values", "_saved", "_reset_callbacks", "_current_values"])
def test_a_value_cannot_replace_what_the_state_uses_itself(name):
    reason = (
        "ObjectState._current_values() is a method"
        if name == "_current_values"
        else "ObjectState uses this name itself"
    )
    with pytest.raises(ConfigError, match=re.escape(f"named {name!r}: {reason}. Choose another name.")):
        ObjectState(**{"epoch": 0, name: 1})
    assert ObjectState(_epoch=2)._epoch == 2


def test_a_value_that_cannot_be_copied_is_named():
    with pytest.raises(ConfigError, match=r"The value 'rows' .* cannot pickle 'generator' object\. It is a generator;"):
        ObjectState(epoch=0, rows=(row for row in ()))


def test_a_value_cannot_have_the_name_of_a_property():
    class Own(ObjectState):
        progress = property(lambda state: state.epoch / 10)

    with pytest.raises(ConfigError, match=r"named 'progress': Own\.progress is a property\. Choose another name\."):
        Own(progress=1)


@pytest.mark.usefixtures("job_of_one")
def test_sync_sends_live_values_and_saves_them():
    state = ObjectState(epoch=1)
    state.epoch = 5
    state.sync()
    state.epoch = 6
    state.restore()
    assert state.epoch == 5


def test_reset_calls_reset_and_the_callbacks_in_order():
    calls = []

    class Own(State):
        def reset(self) -> None:
            calls.append("reset")

    state = Own()
    state.register_reset_callbacks([lambda: calls.append(1), lambda: calls.append(2)])
    state.register_reset_callbacks([lambda: calls.append(3)])
    state.on_reset()
    assert calls == ["reset", 1, 2, 3]
    Own().on_reset()
    assert calls[4:] == ["reset"], "another state has no callbacks"


@pytest.mark.parametrize("name", ["save", "restore", "sync"])
def test_a_state_without_a_needed_method_names_it(name):
    class Own(State):
        pass

    with pytest.raises(NotImplementedError, match=rf"^Own must define {name}\(\)\.$"):
        getattr(Own(), name)()


def test_arguments_of_horovods_states_are_accepted():
    assert ObjectState(bcast_object=print, get_rank=print, epoch=4).epoch == 4


@pytest.mark.usefixtures("job_of_one")
def test_outside_an_elastic_job_the_function_runs_once_with_a_synchronized_state():
    @run
    def train(state, more, *, last):
        state.epoch += more
        state.commit()
        return state.epoch, last

    assert train(ObjectState(epoch=1), 2, last="end") == (3, "end")
    assert train.__name__ == "train"


@pytest.mark.parametrize("error", [PeerLostError("lost"), HostsUpdatedInterrupt(), ValueError("no luck")])
@pytest.mark.usefixtures("job_of_one")
def test_outside_an_elastic_job_every_error_is_raised(error):
    @run
    def train(state):
        raise error

    with pytest.raises(type(error)) as caught:
        train(ObjectState())
    assert caught.value is error


def test_an_elastic_run_without_init_is_an_error():
    assert not session.is_initialized()
    with pytest.raises(NotInitializedError, match=r"call hvd\.init\(\)"):
        run(print)(ObjectState())


def test_the_exceptions_have_horovods_meanings():
    assert HostsUpdatedInterrupt().skip_sync is False
    assert HostsUpdatedInterrupt(True).skip_sync is True
    assert HostsUpdatedInterrupt(skip_sync=True).skip_sync is True
    assert pickle.loads(pickle.dumps(HostsUpdatedInterrupt(skip_sync=True))).skip_sync is True
    assert issubclass(PeerLostError, HorovodInternalError)
    assert not issubclass(HostsUpdatedInterrupt, HorovodInternalError)


def test_the_last_commit_can_be_dumped_and_loaded_into_another_state():
    state = ObjectState(epoch=1, seen=[1])
    state.epoch = 2
    state.save()
    state.epoch = 3
    other = ObjectState(epoch=0, seen=[])
    other.load_commit(state.dump_commit())
    assert (other.epoch, other.seen) == (2, [1])
    other.epoch = 9
    other.restore()
    assert other.epoch == 2


def test_a_state_that_saves_more_than_it_dumps_is_refused():
    class Saves(ObjectState):
        def save(self):
            super().save()

    class Dumps(Saves):
        def dump_commit(self):
            return b"mine"

    with pytest.raises(ConfigError, match=r"Saves overrides save\(\), so it must also define dump_commit\(\)"):
        Saves(epoch=0).dump_commit()
    assert Dumps(epoch=0).dump_commit() == b"mine"
    with pytest.raises(ConfigError, match=r"State must define dump_commit\(\) and load_commit\(\) so that"):
        State().dump_commit()
