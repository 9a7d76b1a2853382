from __future__ import annotations

import threading

from sparkhvd.deadline import Deadline
from sparkhvd.rpc.messages import Output
from sparkhvd.task.ray import outbox as module
from sparkhvd.task.ray.outbox import Outbox


def test_messages_arrive_in_order_and_together():
    outbox = Outbox()
    outbox.put("first")
    outbox.put("second")
    assert outbox.take(Deadline.after(5)) == ["first", "second"]


def test_a_driver_waits_for_the_first_message_until_the_deadline_or_the_end():
    outbox = Outbox()
    assert outbox.take(Deadline.after(0.01)) == []
    closer = threading.Timer(0.01, outbox.close)
    closer.start()
    assert outbox.take(Deadline.after(60)) == []
    closer.join()


def test_a_rank_waits_while_the_driver_has_too_much_unread_output(monkeypatch):
    monkeypatch.setattr(module, "_MAX_BYTES", 10)
    outbox, written = Outbox(), threading.Event()
    outbox.put(Output(0, "stdout", b"ten bytes."))

    def write() -> None:
        outbox.put(Output(0, "stdout", b"more"))
        written.set()

    writer = threading.Thread(target=write)
    writer.start()
    outbox.put("other messages do not wait")
    assert not written.wait(0.05)
    assert len(outbox.take(Deadline.after(5))) == 2
    assert written.wait(60)
    writer.join()
    outbox.close()
    outbox.put(Output(0, "stdout", b"no message waits after the end"))
    assert len(outbox.take(Deadline.after(5))) == 2
