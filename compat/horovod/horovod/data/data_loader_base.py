"""The base class of loaders, and a mixin that reads ahead in a thread."""

from __future__ import annotations

from collections.abc import Iterator
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]

_POLL_SECONDS = 0.1  # how long a thread that waits for room takes to notice that it should end


class BaseDataLoader:
    """A loader of batches. A subclass defines ``__len__`` and ``_iterate``, and may define ``_process_batch``."""

    def __len__(self) -> int:
        """Return the number of batches."""
        raise NotImplementedError(f"{type(self).__name__} must define __len__().")

    def _iterate(self) -> Iterator[Any]:
        raise NotImplementedError(f"{type(self).__name__} must define _iterate().")

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of one epoch."""
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        return batch


class AsyncDataLoaderMixin:
    """Reads batches ahead; put it before a ``BaseDataLoader`` among the base classes.

    The thread begins with the first iteration. After an epoch it goes on with the next one, until
    ``close_async_loader()``.

    Args:
        async_loader_queue_size: the number of batches to read ahead; 0 reads without a thread.
        debug_data_loader: has no effect.
        args: for the next base class.
        kwargs: the same.
    """

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        super().__init__(*args, **kwargs)
        self._batches: Queue[tuple[str, Any]] = Queue(async_loader_queue_size)
        self._closed = Event()
        self._reader: Thread | None = None

    def close_async_loader(self) -> None:
        """End the thread. A loader that has not been iterated over has none."""
        self._closed.set()
        if self._reader is not None:
            self._reader.join()

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of one epoch."""
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()  # type: ignore[misc]  # of BaseDataLoader
            return
        if self._reader is None:
            self._reader = Thread(target=self._read, name="horovod-data-loader", daemon=True)
            self._reader.start()
        while (entry := self._next_entry()) is not None:
            kind, content = entry
            if kind == "error":
                self._reader = None  # it has ended; the next iteration starts another
                raise content
            if kind == "end":
                return
            yield self._process_batch(content)  # type: ignore[attr-defined]

    def _next_entry(self) -> tuple[str, Any] | None:
        """Return the next entry of the thread; None once the loader is closed."""
        while not self._closed.is_set():
            try:
                return self._batches.get(timeout=_POLL_SECONDS)
            except Empty:
                continue
        return None

    def _read(self) -> None:
        try:
            while not self._closed.is_set():
                for batch in self._iterate():  # type: ignore[attr-defined]
                    if not self._put("batch", batch):
                        return
                self._put("end", None)
        except Exception as error:  # noqa: BLE001  raised by the iteration
            self._put("error", error)

    def _put(self, kind: str, content: Any) -> bool:
        """Wait for room for an entry; return False once the loader is closed."""
        while not self._closed.is_set():
            try:
                self._batches.put((kind, content), timeout=_POLL_SECONDS)
            except Full:
                continue
            return True
        return False
