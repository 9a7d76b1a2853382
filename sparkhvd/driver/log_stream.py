"""Where the workers' output arrives at the driver."""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import TextIO

from sparkhvd.rpc.messages import Acknowledged, Flush, Message, Output, Started

logger = logging.getLogger(__name__)


class LogStream:
    """Writes the workers' lines, each under its rank; a handler for ``sparkhvd.rpc.server.Server``.

    Args:
        stdout: where stdout lines go; None is ``sys.stdout`` as it is when a line arrives.
        stderr: the same for stderr.
        timestamps: whether a line starts with the time of its arrival.

    Attributes:
        started: set when all ranks run.
    """

    def __init__(self, stdout: TextIO | None, stderr: TextIO | None, timestamps: bool) -> None:
        self.started = threading.Event()
        self._given = {"stdout": stdout, "stderr": stderr}
        self._timestamps = timestamps
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
        text = output.content.decode("utf-8", "replace")
        stamp = time.strftime("%a %b %d %H:%M:%S %Y") if self._timestamps else ""
        prefix = f"{stamp}[{output.rank}]<{output.stream}>:"
        lines = "".join(f"{prefix}{line}\n" for line in text.split("\n"))
        with self._lock:
            target = self._target(output.stream)
            try:
                target.write(lines)
                target.flush()
            except (OSError, ValueError) as error:  # the user closed the stream
                logger.warning("Output of rank %d cannot be written: %s", output.rank, error)

    def _target(self, stream: str) -> TextIO:
        given = self._given.get(stream)
        if given is not None:
            return given
        return sys.stderr if stream == "stderr" else sys.stdout
