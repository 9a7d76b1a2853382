"""A program that changes settings in its environment before it calls ``init()``: python changed_settings.py FOLDER."""

from __future__ import annotations

import json
import os
import sys

import numpy as np


def change_settings(folder: str) -> list[tuple[int, float, str]]:
    """Return the settings of three connections, each after a change of the environment."""
    from sparkhvd.comm import session  # noqa: PLC0415  only a rank imports it

    settings = []
    changes = [{"HOROVOD_TIMELINE": f"{folder}/own.json", "HOROVOD_CACHE_CAPACITY": "5"}, {}, {"HOROVOD_TIMELINE": ""}]
    for number, change in enumerate(changes):
        os.environ.update(change)
        if number == 1:
            del os.environ["HOROVOD_CACHE_CAPACITY"]
        session.init()
        communicator = session.current()
        communicator.allreduce(np.ones(1), name=f"sum{number}")
        config = communicator._context.config
        settings.append((config.cache_capacity, config.stall_check_seconds, config.timeline.rpartition("/")[2]))
        session.shutdown()
    return settings


if __name__ == "__main__":
    print(json.dumps(change_settings(sys.argv[1])))
