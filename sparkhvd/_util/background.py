"""Background threads, futures of their results, and waits that Ctrl-C interrupts."""

from __future__ import annotations

import ctypes
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")
Item = TypeVar("Item")

# A signal just before the main thread begins to wait is only noticed at the end of that wait, so each wait is short.
_POLL_SECONDS = 0.5


def in_background(act: Callable[[], T], name: str) -> Future[T]:
    """Call ``act`` in a daemon thread; ``sparkhvd.compat.spark.inheriting(spark, act)`` keeps the Spark properties.

    Wait for the future, not for the thread: once Ctrl-C has interrupted a ``Thread.join``, Python considers the thread
    ended.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:  # noqa: BLE001 - raised again where the result is awaited
            future.set_exception(error)

    # Without ``daemon`` here, threading would look up the current thread. The lookup would give a thread of Arrow a
    # name that it keeps.
    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def in_threads(act: Callable[[Item], T], items: Sequence[Item], limit: int, name: str) -> list[T]:
    """Call ``act`` for all items in up to ``limit`` threads, and return the results in the order of the items.

    After an error, no further calls begin, and the error is raised once those in progress have ended. Unlike a
    ``ThreadPoolExecutor``, this also works after the main thread has ended.
    """
    results: dict[int, T] = {}
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(items)):
        waiting.put(index)
    ending = threading.Event()

    def run() -> None:
        while not ending.is_set():
            try:
                index = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                results[index] = act(items[index])
            except BaseException:
                ending.set()
                raise

    try:
        threads = [in_background(run, f"{name}-{number}") for number in range(min(limit, len(items)))]
        for thread in threads:
            is_done_within(thread)
        for thread in threads:
            thread.result()
    finally:
        ending.set()  # Ctrl-C may have interrupted the wait
    return [results[index] for index in range(len(items))]


def raise_in_thread(thread: int, error: type[BaseException]) -> None:
    """Raise ``error`` in a running thread once it executes Python code, as Ctrl-C does in the main thread.

    Args:
        thread: the thread's ``threading.get_ident()``.
        error: the exception's class, which needs no arguments.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def is_set_within(event: threading.Event, seconds: float = math.inf) -> bool:
    """Wait for ``event`` and return whether it was set in time."""
    return _occurs_within(event.wait, seconds)


def is_done_within(future: Future[T], seconds: float = math.inf) -> bool:
    """Wait for the end of ``future`` and return whether it came in time."""
    return _occurs_within(lambda pause: bool(wait([future], pause).done), seconds)


def _occurs_within(wait_for: Callable[[float], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not wait_for(max(0.0, min(_POLL_SECONDS, end - time.monotonic()))):
        if time.monotonic() >= end:
            return False
    return True
