"""Work in a thread of its own, and what comes of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")


def in_background(act: Callable[[], T], name: str, spark: SparkSession | None = None) -> Future[T]:
    """Call ``act`` in a daemon thread; with a session, the caller's Spark properties hold there, too.

    The future is to be waited for, not the thread: a ``Thread.join`` that Ctrl-C breaks off takes its thread for ended
    from then on.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:  # noqa: BLE001 - whoever waits raises it
            future.set_exception(error)

    if spark is None:
        thread = threading.Thread(target=run)
    else:
        from pyspark import InheritableThread  # noqa: PLC0415 - importing this module needs no Spark

        thread = InheritableThread(target=run, session=spark)
    thread.name = name
    thread.daemon = True
    thread.start()
    return future
