from __future__ import annotations

import queue

import pytest

from sparkhvd.driver.host_process import HostEnded, HostProcess


@pytest.mark.timeout(60)
def test_a_message_that_cannot_be_read_ends_the_host():
    # The pickle of a class that this machine lacks, after its length of 23 bytes. The host ends with its input.
    message = r"\nsparkhvd is ready\n\0\0\0\027cno_such_module\nThing\n."
    received: queue.SimpleQueue[object] = queue.SimpleQueue()
    process = HostProcess(["/bin/sh", "-c", f"printf '{message}'; cat"], received.put)
    try:
        assert received.get(timeout=30) == HostEnded(
            "it sent a message that this machine cannot read (ModuleNotFoundError: No module named 'no_such_module'). "
            "Install the same version of sparkhvd and its requirements on all hosts"
        )
    finally:
        process.close()
