"""Autotuning in real processes: its log, and the settings in force."""

from __future__ import annotations

import csv
from dataclasses import replace

import numpy as np
import pytest

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.communicator import Communicator
from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.config import Config
from sparkhvd.errors import CollectiveError
from tests.ranks import RankGroup

UNTUNED = {
    "fusion_threshold": 1024 * 1024,  # in shared memory
    "small_allreduce": 32 * 1024,
    "allreduce_chunk": 256 * 1024,
    "hierarchical_allreduce": 1,
    "searching": 0,
}


@pytest.fixture(scope="module")
def group():
    with RankGroup(3) as started:
        yield started


# Functions that the ranks run.


def train(steps, scope, settings):
    """Reduce tensors of all ranks and of a process set; return the settings in force after each step."""
    offered = session.launch_context()
    context = replace(offered, config=replace(offered.config, **settings))
    with Communicator(context, scope=scope) as communicator:
        beside = communicator.add_process_set(ProcessSet([0, 2]))
        seen = []
        for step in range(steps):
            handles = [
                communicator.allreduce_async(
                    np.full(length, i + step + communicator.world.rank), ReduceOp.SUM, name=f"gradient {i}"
                )
                for i, length in enumerate((3, 700, 40_000, 5, 9000))
            ]
            if beside.included():
                mean = communicator.allreduce(
                    np.full(2000, float(communicator.world.rank)), name="beside", process_set=beside
                )
                assert (mean == 1.0).all()
            for i, handle in enumerate(handles):
                assert (handle.wait() == 3 * (i + step) + 3).all()
            seen.append(communicator.tuning())
        untouched = communicator.channel(beside).engine.tuning() if beside.included() else None
        return seen, untouched


def test_every_sample_is_in_the_log_and_the_last_choice_holds_on_all_ranks(group, tmp_path):
    log = tmp_path / "tuning.csv"
    settings = {
        "autotune": True,
        "autotune_log": str(log),
        "autotune_warmup_samples": 2,
        "autotune_steps_per_sample": 1,
        "autotune_max_samples": 50,
    }
    results = group.run(train, 180, "tuned", settings)
    rows = list(csv.DictReader(log.read_text().splitlines()))
    assert [row["stage"] for row in rows] == ["warm-up"] * 2 + ["search"] * 50 + ["final"]
    assert all(int(row["bytes_per_second"]) > 0 for row in rows)
    final = {name: int(rows[-1][name]) for name in UNTUNED if name != "searching"}
    for seen, untouched in results:
        assert seen[-1] == final | {"searching": 0}, "the last settings of the log are in force on every rank"
        assert seen[0] == UNTUNED | {"searching": 1}
        assert len({tuple(one.items()) for one in seen}) > 10, "every rank tried many settings"
        assert untouched in (None, UNTUNED), "a process set is not tuned"


def test_settings_of_the_user_are_kept_and_the_others_tuned(group, tmp_path):
    settings = {
        "fusion_threshold": 1000,
        "autotune": True,
        "autotune_steps_per_sample": 1,
        "autotune_max_samples": 8,
    }
    for seen, _ in group.run(train, 60, "fixed", settings):
        assert {one["fusion_threshold"] for one in seen} == {1000}
        assert {one["small_allreduce"] for one in seen} > {32 * 1024}
        assert seen[-1]["searching"] == 0


def test_without_autotuning_no_setting_changes(group):
    for seen, _ in group.run(train, 5, "off", {}):
        assert seen == [UNTUNED] * 5


def test_a_log_that_cannot_be_written_is_named(tmp_path):
    config = Config(autotune=True, autotune_log=str(tmp_path / "missing" / "log.csv"))
    with pytest.raises(CollectiveError, match=r"cannot write the autotuning log '.*missing/log.csv': No such file"):
        Communicator(LaunchContext(config=config))


def test_a_job_of_one_rank_has_nothing_to_tune(tmp_path):
    log = tmp_path / "tuning.csv"
    with Communicator(LaunchContext(config=Config(autotune=True, autotune_log=str(log)))) as communicator:
        communicator.allreduce(np.ones(3), name="x")
        assert communicator.tuning() == UNTUNED | {"fusion_threshold": 64 * 1024 * 1024}
    assert [line.split(",")[0] for line in log.read_text().splitlines()] == ["stage", "final"]
