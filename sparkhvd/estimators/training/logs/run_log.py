"""The log of a run in its folder of the Store: the history as JSON, and event files for TensorBoard.

``tensorboard --logdir <store>/runs/<run id>/logs`` shows training and validation curves in one chart. Every epoch has
its own file, because a Store cannot append to files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from sparkhvd.estimators.reports import EpochRecord
from sparkhvd.estimators.training.logs.tensorboard_events import event_file
from sparkhvd.store import layout
from sparkhvd.store.protocol import Store


def write(store: Store, run_id: str, history: Sequence[EpochRecord]) -> None:
    """Write the last epoch of ``history``; an epoch that a resumed run trains again replaces the earlier one."""
    record, now = history[-1], time.time()
    times = {"time/rows_per_second": record.rows_per_second, "time/step_seconds": record.step_seconds}
    for part, values in (("train", {**record.train, **times}), ("validation", record.validation)):
        if values:
            _replace(store, layout.events_path(run_id, part, record.epoch), event_file(now, record.epoch, values))
    _replace(store, layout.history_path(run_id), json.dumps([epoch.to_json() for epoch in history]).encode())


def _replace(store: Store, path: str, content: bytes) -> None:
    """Replace a file; readers see the earlier content until the new content is complete."""
    with store.open(path, "wb") as file:
        file.write(content)
