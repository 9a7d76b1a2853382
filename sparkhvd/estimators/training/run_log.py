"""What people look at while a run trains, in its folder of the Store: the history, and files for TensorBoard.

``tensorboard --logdir <store>/runs/<run id>/logs`` shows the curves of training and validation over each other. Every
epoch is a file of its own, because a Store's files never grow.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from sparkhvd.estimators.reports import EpochRecord
from sparkhvd.estimators.training.tensorboard_events import event_file
from sparkhvd.store import layout
from sparkhvd.store.protocol import Store


def write(store: Store, run_id: str, history: Sequence[EpochRecord]) -> None:
    """Add the last epoch of ``history``; one that a continued run trains again takes the place of the old one."""
    record, now = history[-1], time.time()
    times = {"time/rows_per_second": record.rows_per_second, "time/step_seconds": record.step_seconds}
    for part, values in (("train", {**record.train, **times}), ("validation", record.validation)):
        if values:
            path = layout.events_path(run_id, part, record.epoch)
            store.delete(path)
            store.publish(path, event_file(now, record.epoch, values))
    store.delete(layout.history_path(run_id))
    store.publish(layout.history_path(run_id), json.dumps([each.to_json() for each in history]).encode())
