"""The progress bar of a fit in a terminal or a notebook.

Rank 0 writes lines that start with a control character. On the driver, ``ProgressOutput`` removes these lines from the
ranks' output and moves the bar. Without tqdm there is one line per epoch and no bar.
"""

from __future__ import annotations

import io
import json
import re
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from sparkhvd.data.read.batches import Batch, BatchSource
from sparkhvd.data.read.prefetch import StopSignal

if TYPE_CHECKING:
    from sparkhvd.data.schema.data_schema import DataSchema

_MARKER = "\x01"
_LINE = re.compile(r"\[0\]<stdout>:" + _MARKER + r"(\{.*\})\n")
_REPORT_INTERVAL_SECONDS = 0.5


@dataclass
class ReportingSource:
    """The batches of ``source``; reports progress to stdout at most every half second, and at the end of an epoch.

    Attributes:
        source: the batches.
        epochs: the number of epochs of the training.
    """

    source: BatchSource
    epochs: int

    @property
    def schema(self) -> DataSchema:
        return self.source.schema

    def steps(self) -> int:
        return self.source.steps()

    def rows(self) -> int:
        return self.source.rows()

    def has_rows(self, step: int) -> bool:
        return self.source.has_rows(step)

    def epoch(self, number: int, first_step: int = 0, stop: StopSignal | None = None) -> Iterator[Batch]:
        return self._reporting(number, first_step, stop)

    def _reporting(self, number: int, first_step: int, stop: StopSignal | None) -> Generator[Batch]:
        steps, last_report = self.source.steps(), 0.0
        batches: Any = self.source.epoch(number, first_step, stop)
        with closing(batches) if hasattr(batches, "close") else closing(_as_generator(batches)) as open_batches:
            for step, batch in enumerate(open_batches, first_step + 1):
                yield batch
                if step == steps or time.monotonic() - last_report > _REPORT_INTERVAL_SECONDS:
                    last_report = time.monotonic()
                    progress = {"done": number * steps + step, "all": self.epochs * steps}
                    sys.stdout.write(f"{_MARKER}{json.dumps(progress)}\n")


def _as_generator(batches: Iterator[Batch]) -> Generator[Batch]:
    yield from batches


def is_interactive() -> bool:
    """Return whether stdout is a terminal or a notebook, and tqdm is installed to draw a bar."""
    try:
        import tqdm  # noqa: F401, PLC0415
    except ImportError:
        return False
    return sys.stdout.isatty() or type(sys.stdout).__module__.startswith("ipykernel")


class ProgressOutput(io.TextIOBase):
    """The ranks' stdout on the driver: lines go to ``target``, and progress reports move a bar below them.

    Args:
        target: receives the lines; None means the current ``sys.stdout``.
        description: the text before the bar.
    """

    def __init__(self, description: str, target: TextIO | None = None) -> None:
        super().__init__()
        self._target = target or sys.stdout
        self._description = description
        self._lock = threading.Lock()
        self._bar: Any = None  # guarded by _lock

    def write(self, text: str) -> int:
        with self._lock:
            for report in _LINE.findall(text):
                self._move(json.loads(report))
            lines = _LINE.sub("", text)
            if lines and self._bar is not None:
                self._bar.write(lines, file=self._target, end="")
            elif lines:
                self._target.write(lines)
        return len(text)

    def flush(self) -> None:
        self._target.flush()

    def close(self) -> None:
        """Stop updating the bar, which stays visible; the target stays open."""
        with self._lock:
            if self._bar is not None:
                self._bar.close()
                self._bar = None
        super().close()

    def _move(self, progress: dict[str, int]) -> None:
        from tqdm.std import tqdm  # noqa: PLC0415  (optional)

        if self._bar is None:
            # The interval 0 keeps tqdm from starting its monitor thread.
            bar_class = type("Bar", (tqdm,), {"monitor_interval": 0})
            self._bar = bar_class(
                total=progress["all"], desc=self._description, unit="step", file=self._target, mininterval=0
            )
        self._bar.update(max(0, progress["done"] - self._bar.n))
