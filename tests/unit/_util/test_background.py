from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import Future

import pytest

from sparkhvd._util.background import in_threads, is_done_within, is_set_within

# Another thread receives the signal, so that the signal does not interrupt the main thread's wait. A signal that
# arrives just before a wait has the same effect.
_CTRL_C = """
import os, signal, threading, time
from concurrent.futures import Future
from sparkhvd._util.background import is_done_within, is_set_within

signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Thread(target=time.sleep, args=(20,), daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
try:
    {wait}
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("wait", ["is_set_within(threading.Event())", "is_done_within(Future())"])
def test_ctrl_c_ends_a_wait_that_the_signal_did_not_interrupt(wait):
    script = _CTRL_C.replace("{wait}", wait)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "interrupted\n", done.stderr


def test_a_wait_returns_whether_its_condition_was_met():
    event, future = threading.Event(), Future[int]()
    assert not is_set_within(event, 0.0)
    assert not is_done_within(future, 0.6)
    threading.Timer(0.1, event.set).start()
    threading.Timer(0.1, future.set_result, [1]).start()
    assert is_set_within(event)
    assert is_done_within(future)
    assert is_set_within(event, 0.0)


def test_threads_return_the_results_of_all_items_in_order_or_the_error():
    assert in_threads(lambda number: number * 2, range(20), 3, "double") == list(range(0, 40, 2))
    assert in_threads(lambda number: number, [], 3, "none") == []
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda number: 1 / number, [1, 0, 2], 2, "divide")


def test_threads_can_be_used_after_the_main_thread_has_ended():
    script = """
import threading
from sparkhvd._util.background import in_threads
def run():
    threading.main_thread().join()
    print(in_threads(abs, [-1, -2], 2, "abs"))
threading.Thread(target=run).start()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "[1, 2]\n", done.stderr
