"""The processor cores to which the kernel pins the threads of the C++ core."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

import pytest

from sparkhvd.comm import session
from sparkhvd.comm.channel import processor_core_of
from sparkhvd.comm.communicator import Communicator
from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.config import Config, from_environment
from sparkhvd.deadline import Deadline
from sparkhvd.errors import ConfigError
from sparkhvd.world import World
from tests.ranks import RankGroup

CORES = sorted(os.sched_getaffinity(0))


def cores_by_thread() -> dict[str, set[str]]:
    """Return the cores that the threads of this process may use, by thread name."""
    cores: dict[str, set[str]] = {}
    for path in Path("/proc/self/task").glob("*/status"):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            fields = dict(re.findall(r"^(Name|Cpus_allowed_list):\s*(.*)$", path.read_text(), re.MULTILINE))
            cores.setdefault(fields["Name"], set()).add(fields["Cpus_allowed_list"])
    return cores


def cores_of_the_engine_and_others(expected):
    """Wait until the engine's thread has started, and return the cores of it and of the other threads."""
    deadline = Deadline.after(25.0)
    while (cores := cores_by_thread()).get("shvd-engine") != {str(expected[session.current().world.rank])}:
        if deadline.expired():
            break
        time.sleep(0.01)
    session.current().barrier()
    return cores.pop("shvd-engine", None), set.union(*cores.values())


def test_the_engine_of_each_local_rank_runs_on_its_listed_core():
    listed = (CORES[-1], CORES[0])
    with RankGroup(2, thread_affinity=listed) as group:
        results = group.run(cores_of_the_engine_and_others, listed)
    everywhere = set.union(*cores_by_thread().values())
    for core, (engines, others) in zip(listed, results, strict=True):
        assert engines == {str(core)}
        assert others == everywhere, "only the core's own threads are pinned"


def test_a_core_that_does_not_exist_is_named():
    missing = (os.cpu_count() or 1) + 7
    context = LaunchContext(config=Config(thread_affinity=(missing,)))
    with pytest.raises(ConfigError, match=rf"cannot be pinned to core {missing}: this host has \d+ cores"):
        Communicator(context)


def test_every_local_rank_needs_a_core():
    context = LaunchContext(World(2, 3, 2, 3), config=Config(thread_affinity=(4, 5)))
    with pytest.raises(ConfigError, match=r"lists 2 cores \[4, 5\], but this host has 3 ranks"):
        processor_core_of(context)
    assert processor_core_of(LaunchContext(World(1, 3, 1, 3), config=context.config)) == 5


def test_cores_are_listed_with_commas():
    assert from_environment({"HOROVOD_THREAD_AFFINITY": "4, 5,12"}).thread_affinity == (4, 5, 12)
    with pytest.raises(ConfigError, match="AFFINITY must be a list of core numbers such as 0,1,2, got '0-3'"):
        from_environment({"SPARKHVD_THREAD_AFFINITY": "0-3"})
