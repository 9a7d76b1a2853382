"""An elastic program for ``sparkhvdrun``; rank 1 is killed once, after it has written its process id."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

from sparkhvd.comm import session
from sparkhvd.comm.elastic.loop import run
from sparkhvd.comm.elastic.state import ObjectState

folder, last = Path(sys.argv[1]), int(sys.argv[2])
session.init()
(folder / f"pid-{os.getpid()}").touch()


@run
def train(state):
    state.sizes = (*state.sizes, session.size())
    while state.step < last or not (folder / "end").exists():
        session.current().allreduce(np.ones(1), name="step")
        state.step += 1
        if state.step == 20 and session.rank() == 0:
            (folder / "running").touch()
        if len(state.sizes) > 2 and session.rank() == 0:
            (folder / "end").touch()
        time.sleep(0.01)
        state.commit()
    return state.sizes


state = ObjectState(step=0, sizes=())
sizes = train(state)
print("sizes", sizes, "environment", os.environ["SPARKHVD_RANK"], os.environ["HOROVOD_SIZE"], flush=True)
