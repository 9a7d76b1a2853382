"""Functions that run other functions in threads."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

__all__ = ["execute_function_multithreaded", "in_thread", "on_event"]

T = TypeVar("T")


def execute_function_multithreaded(
    fn: Callable[..., T],
    args_list: Sequence[Sequence[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, T] | None:
    """Call ``fn`` once for each entry of ``args_list``, in threads.

    Args:
        fn: the function.
        args_list: the arguments of each call.
        block_until_all_done: whether to wait for all calls; otherwise, they end with the process at the latest.
        max_concurrent_executions: the largest number of threads.

    Returns:
        The results by index in ``args_list``; None without ``block_until_all_done``.

    Raises:
        RuntimeError: a call raised an error.
    """
    remaining = deque(enumerate(args_list))
    results: dict[int, T] = {}

    def call() -> None:
        while True:
            try:
                index, args = remaining.popleft()
            except IndexError:
                return
            results[index] = fn(*args)

    threads = [
        in_thread(call, name=f"call-{number}", daemon=not block_until_all_done)
        for number in range(min(max_concurrent_executions, len(args_list)))
    ]
    if not block_until_all_done:
        return None
    for thread in threads:
        thread.join()
    if len(results) < len(args_list):
        raise RuntimeError(f"{len(args_list) - len(results)} of {len(args_list)} calls failed. See their errors above.")
    return results


def in_thread(
    target: Callable[..., object],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start a thread that calls ``target``, and return it.

    Args:
        target: the function.
        args: its arguments.
        name: the thread's name.
        daemon: whether the process may exit while the thread is running.
        silent: whether to ignore exceptions that the function raises.

    Raises:
        ValueError: ``args`` is not a tuple.
    """
    _require_tuple(args)

    def run() -> None:
        with contextlib.suppress(Exception) if silent else contextlib.nullcontext():
            target(*args)

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    thread.start()
    return thread


def on_event(  # noqa: PLR0917  the arguments are Horovod's
    event: threading.Event,
    func: Callable[..., object],
    args: tuple[Any, ...] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start a thread that calls ``func`` once an event is set, and return it.

    Args:
        event: the event.
        func: the function.
        args: its arguments.
        stop: another event, which ends the thread without a call.
        check_stop_interval_s: seconds within which the thread notices ``stop``.
        daemon: see ``in_thread``.
        silent: see ``in_thread``.

    Raises:
        ValueError: there is no event, ``args`` is not a tuple, or the thread is not a daemon and cannot be stopped.
    """
    if event is None:
        raise ValueError("event must be a threading.Event, got None.")
    if stop is None and not daemon:
        raise ValueError("A thread with daemon=False must have an event that stops it. Pass stop.")
    _require_tuple(args)

    def wait_and_call() -> None:
        while not event.wait(None if stop is None else check_stop_interval_s):
            if stop is not None and stop.is_set():
                return
        if stop is None or not stop.is_set():
            func(*args)

    return in_thread(wait_and_call, daemon=daemon, silent=silent)


def _require_tuple(args: object) -> None:
    if not isinstance(args, tuple):
        raise ValueError(  # noqa: TRY004  Horovod's error
            f"args must be a tuple, but is a {type(args).__name__}. Pass (value,) for one argument."
        )
