"""Listen on the network of ``tests.launch.hosts``."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sparkhvd.deadline import Deadline

_ALL_PROTOCOLS = 0x0003
_POLL_SECONDS = 0.2
_REST_SECONDS = 2.0


@contextmanager
def overheard(words: Sequence[bytes]) -> Iterator[set[bytes]]:
    """Yield the ``words`` that pass an interface other than loopback during the block; needs root."""
    heard: set[bytes] = set()
    over = threading.Event()

    def listen() -> None:
        deadline = Deadline(math.inf)
        while not deadline.expired():
            if over.is_set():  # packets that have already arrived are still checked
                deadline = deadline.capped(_REST_SECONDS)
            try:
                packet, (interface, *_) = listener.recvfrom(1 << 17)
            except TimeoutError:
                if over.is_set():
                    return
                continue
            if interface != "lo":
                heard.update(word for word in words if word in packet)

    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
        listener.settimeout(_POLL_SECONDS)
        thread = threading.Thread(target=listen, name="listener", daemon=True)
        thread.start()
        try:
            yield heard
        finally:
            over.set()
            thread.join()
