from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import pytest

from sparkhvd.comm import session
from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.config import Config
from sparkhvd.deadline import Deadline
from sparkhvd.errors import DeadlineExceededError
from sparkhvd.task.ray.commands import EXECUTE, LEAVE, RUN, CommandChannel, run_commands

TOKEN = b"secret of this test" * 2


@pytest.fixture
def launch_context(monkeypatch):
    monkeypatch.setattr(session, "launch_context", lambda: LaunchContext(token=TOKEN))


def result_of(channel: CommandChannel, command: bytes, fn: object, *args: object) -> object:
    result = channel.execute(command + cloudpickle.dumps((fn, args, {})), Deadline.after(30))
    return pickle.loads(pickle.dumps(result))  # like Ray, which pickles results


@pytest.mark.usefixtures("launch_context")
def test_a_rank_runs_commands_until_it_leaves():
    channel = CommandChannel(TOKEN, 0)
    with ThreadPoolExecutor(1) as pool:
        rank = pool.submit(run_commands, list, ([1],), {})
        assert result_of(channel, RUN, max, 3, 5) == 5
        assert result_of(channel, EXECUTE, list.append, 2) is None
        assert result_of(channel, EXECUTE, list.copy) == [1, 2]
        assert channel.execute(LEAVE, Deadline.after(30)) is None
        assert rank.result() is None
    channel.close()


@pytest.mark.usefixtures("launch_context")
def test_a_result_that_cannot_be_pickled_fails_the_rank_and_ends_the_wait():
    channel = CommandChannel(TOKEN, 0)
    with ThreadPoolExecutor(1) as pool:
        rank = pool.submit(run_commands, None, (), {})
        with pytest.raises(ConnectionResetError, match="The other side closed the connection"):
            result_of(channel, RUN, threading.Lock)
        with pytest.raises(TypeError, match="fn returned a lock that cannot be pickled"):
            rank.result()
    channel.close()


def test_a_rank_that_never_connects_ends_the_wait():
    channel = CommandChannel(TOKEN, 1)
    with pytest.raises(OSError, match="has not connected"):
        channel.execute(LEAVE, Deadline.after(0.01))
    channel.close()
    with pytest.raises(OSError, match="has not connected"):
        channel.execute(LEAVE, Deadline.after(60))


def test_a_rank_whose_actor_does_not_answer_waits_until_start_timeout(monkeypatch):
    context = LaunchContext(token=TOKEN, config=Config(start_timeout=0.05))
    monkeypatch.setattr(session, "launch_context", lambda: context)
    channel = CommandChannel(TOKEN, 0)  # it listens, but accepts nobody
    with pytest.raises(DeadlineExceededError, match="before the deadline"):
        run_commands(None, (), {})
    channel.close()
    with pytest.raises(ConnectionResetError, match="Connection refused"):
        run_commands(None, (), {})
