"""The receiver of the workers' output on the driver."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO, TextIO

from sparkhvd.rpc.messages import Acknowledged, Flush, Message, Output, Started
from sparkhvd.task.log_files import LogFiles, StoreOutput

logger = logging.getLogger(__name__)

# A carriage return would overwrite the prefix.
_LINE_END = re.compile(r"\r*\n\r*|\r+")
# The number of files that stay open: both streams of each rank, and as many of workers that have no rank yet. An
# elastic job may start any number of workers.
_FILES_PER_RANK = 4


_thread = threading.local()


def is_in_write() -> bool:
    """Return whether this thread is in the ``write`` of a job's ``stdout`` or ``stderr``."""
    return getattr(_thread, "is_in_write", False)


class LogStream:
    """Writes the workers' lines, prefixed with their ranks; a handler for ``sparkhvd.rpc.server.Server``.

    Args:
        stdout: destination of stdout lines; None means ``sys.stdout`` at the time a line arrives. Files of a Store get
            the lines without prefixes.
        stderr: the same for stderr lines and ``sys.stderr``.
        timestamps: whether a line starts with the time of its arrival.
        folder: where each rank's output is also saved, without prefixes, in ``rank.<number>/stdout`` and ``stderr``;
            the numbers are padded with zeros to the same width. None saves nothing.
        num_proc: number of ranks.
        shown: whether lines go to ``sys.stdout`` and ``sys.stderr`` at all.

    Attributes:
        started: set when all ranks have been started, or when the job has ended before that.
    """

    def __init__(  # noqa: PLR0917
        self,
        stdout: TextIO | LogFiles | None,
        stderr: TextIO | LogFiles | None,
        timestamps: bool,
        folder: Path | None = None,
        num_proc: int = 1,
        shown: bool = True,
    ) -> None:
        self._folder = folder  # guarded by _lock; None when nothing is saved (any more)
        self._digits = len(str(num_proc - 1))
        self._most_files = _FILES_PER_RANK * num_proc
        self._files: dict[tuple[int, str], BinaryIO] = {}  # guarded by _lock; the file that was written last comes last
        self._begun: set[tuple[int, str]] = set()  # guarded by _lock; the files that contain output of this job
        self.started = threading.Event()
        self._sinks = {"stdout": stdout, "stderr": stderr}
        self._stored = StoreOutput(self._warn, self._show_stored, self._most_files)  # guarded by _lock
        self._timestamps = timestamps
        self._shown = shown
        self._lock = threading.Lock()  # keeps lines whole

    def handle(self, message: Message) -> Message | None:
        if isinstance(message, Started):
            self.started.set()
        elif isinstance(message, Output):
            self._write(message)
        elif isinstance(message, Flush):
            return Acknowledged()
        return None

    def _write(self, output: Output) -> None:
        sink = self._sinks.get(output.stream)
        with self._lock:
            self._save(output)
            if isinstance(sink, LogFiles):
                self._stored.write(sink, output.rank, output.stream, output.content)
            elif sink is not None or self._shown:
                self._show(sink, output)

    def _warn(self, text: str) -> None:
        logger.warning("%s%s", text[:1].upper(), text[1:])

    def _show_stored(self, rank: int, stream: str, content: bytes) -> None:
        """Show output that cannot be stored: the user asked for it, so ``shown`` does not matter."""
        self._show(None, Output(rank, stream, content))

    def _show(self, sink: TextIO | None, output: Output) -> None:
        target: TextIO | None = sink if sink is not None else (sys.stderr if output.stream == "stderr" else sys.stdout)
        if target is None:  # the driver was started without it
            return
        text = output.content.decode("utf-8", "replace")
        stamp = time.strftime("%a %b %d %H:%M:%S %Y") if self._timestamps else ""
        prefix = f"{stamp}[{output.rank}]<{output.stream}>:"
        lines = "".join(f"{prefix}{line}\n" for line in _LINE_END.split(text.strip("\r")))
        _thread.is_in_write = True
        try:
            try:
                target.write(lines)
            except UnicodeEncodeError:
                encoding = getattr(target, "encoding", None) or "ascii"
                target.write(lines.encode(encoding, "backslashreplace").decode(encoding))
            target.flush()
        except Exception as error:  # noqa: BLE001 - the file is the user's and may be closed
            logger.warning("Output of rank %d cannot be written: %s", output.rank, error)
        finally:
            _thread.is_in_write = False

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            for file in self._files.values():
                with contextlib.suppress(OSError):  # a failed write has been logged
                    file.close()
            self._files.clear()
            self._stored.close()

    def _save(self, output: Output) -> None:
        if self._folder is None:
            return
        key = (output.rank, output.stream)
        try:
            file = self._files.pop(key, None)
            if file is None:
                path = self._folder / f"rank.{output.rank:0{self._digits}d}" / output.stream
                path.parent.mkdir(parents=True, exist_ok=True)
                file = path.open("ab" if key in self._begun else "wb")
                self._begun.add(key)
            self._files[key] = file
            if len(self._files) > self._most_files:
                self._files.pop(next(iter(self._files))).close()
            file.write(output.content + b"\n")
            file.flush()
        except OSError as error:
            logger.warning("The output of the ranks is no longer saved in %s: %s", self._folder, error)
            self._folder = None
