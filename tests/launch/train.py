"""A program that ``sparkhvdrun`` starts once per rank."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp

TUNING = [f"autotune{rest}" for rest in ("", "_log", "_warmup_samples", "_steps_per_sample", "_max_samples")]

session.init()
config = session.launch_context().config
communicator = session.current()
world = communicator.world
total = communicator.allreduce(np.array([world.rank + 1.0]), ReduceOp.SUM, name="sum")[0]
print(
    json.dumps(
        {
            "world": [world.rank, world.size, world.local_rank, world.cross_rank],
            "total": float(total),
            "arguments": sys.argv[1:],
            "cache": config.cache_capacity,
            "start_timeout": config.start_timeout,
            "interfaces": config.network_interfaces,
            "autotune": [getattr(config, name) for name in TUNING],
            "secrets": [name for name, value in os.environ.items() if "SECRET" in name or "TOKEN" in name],
        }
    ),
    flush=True,
)
if sys.argv[1:] == ["fail"]:
    if world.rank == 1:
        print("rows.csv is missing", file=sys.stderr)
        sys.exit(5)
    time.sleep(600)
if sys.argv[1:2] == ["stay"]:
    Path(sys.argv[2], str(world.rank)).write_text(str(os.getpid()))
    time.sleep(600)
session.shutdown()
