from __future__ import annotations

import json
from collections import defaultdict

import numpy as np
import pytest

from sparkhvd.comm import session
from sparkhvd.comm.communicator import Communicator
from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.comm.timeline import merge_timelines, read_timeline, recording_name, timeline_path
from sparkhvd.config import Config
from sparkhvd.errors import ConfigError
from tests.ranks import RankGroup

PHASES = {"QUEUE", "NEGOTIATE", "WAIT_FOR_EARLIER_TENSORS", "COLLECTIVE"}
COPIES = {"COPY_INTO_FUSION_BUFFER", "COPY_OUT_OF_FUSION_BUFFER"}


@pytest.fixture(scope="module")
def group():
    with RankGroup(2) as started:
        yield started


# Functions that the ranks run.


def record(path, die=False):
    communicator = session.current()
    communicator.start_timeline(path, mark_cycles=True)
    communicator.barrier(name="together")
    handles = [communicator.allreduce_async(np.ones(3), name=f"gradient {i}") for i in range(40)]
    for handle in handles:
        handle.wait()
    communicator.broadcast(np.ones(5), name="weights")
    if not die:
        communicator.stop_timeline()
    return communicator.counters()


def record_with_a_set(path):
    communicator = session.current()
    communicator.start_timeline(path)
    alone = communicator.add_process_set([1])
    communicator.allreduce(np.ones(3), name="gradient")
    if alone.included():
        communicator.allreduce(np.ones(3), name="gradient", process_set=alone)
    communicator.remove_process_set(alone)
    communicator.stop_timeline()
    return alone.process_set_id


def slices(events):
    """Return the names of completed slices by rank and tensor; fail if a slice ends that did not begin."""
    tensors, stacks, names_by_tensor = {}, defaultdict(list), defaultdict(list)
    for event in events:
        track = event["pid"], event.get("tid")
        if event["name" if "name" in event else "ph"] == "thread_name":
            tensors[track] = event["args"]["name"]
        elif event["ph"] == "B":
            stacks[track].append((event["name"], event["ts"]))
        elif event["ph"] == "E":
            name, start = stacks[track].pop()
            assert event["ts"] >= start
            names_by_tensor[event["pid"], tensors[track]].append(name)
    assert not any(stacks.values()), "everything that began has ended"
    return names_by_tensor


def test_one_file_shows_the_phases_of_every_tensor_on_all_ranks(group, tmp_path):
    path = tmp_path / "trace.json"
    counters = group.run(record, str(path))
    events = json.loads(path.read_text())
    slices_by_tensor = slices(events)
    for rank in range(2):
        assert PHASES | {"broadcast"} == set(slices_by_tensor[rank, "weights"])
        names = {name for i in range(40) for name in slices_by_tensor[rank, f"gradient {i}"]}
        assert names == PHASES | COPIES | {"allreduce"}, "some of forty small tensors are fused"
        assert counters[rank]["allreduce.operations"] >= 40
        assert counters[rank]["broadcast.bytes"] == 40
        assert 0 < counters[rank]["fusion_copy_us"] <= counters[rank]["collective_us"]
        assert counters[rank]["queue_us"] > 0
        assert counters[rank]["negotiation_us"] > 0
    cycles = [event for event in events if event["ph"] == "i"]
    assert {event["pid"] for event in cycles} == {0, 1}


def test_the_tensors_of_a_process_set_are_recorded_beside_those_of_the_job(group, tmp_path):
    path = tmp_path / "trace.json"
    group.run(record_with_a_set, str(path))
    slices_by_tensor = slices(json.loads(path.read_text()))
    shown = {place: set(names) for place, names in slices_by_tensor.items() if place[1].endswith("gradient")}
    sets = {name for _, name in shown} - {"gradient"}
    assert [name.partition(" set ")[0] for name in sets] == ["process"]
    assert set(shown) == {(0, "gradient"), (1, "gradient"), *((1, name) for name in sets)}
    assert all("allreduce" in names for names in shown.values())


def test_a_second_recording_replaces_the_first(group, tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("something else")
    for _ in range(2):
        group.run(record, str(path))
        assert len(slices(json.loads(path.read_text()))) == 2 * 42


def test_a_recording_from_the_start_ends_with_the_communicator(tmp_path):
    path = tmp_path / "trace.json"
    with Communicator(LaunchContext(config=Config(timeline=str(path)))) as alone:
        alone.allreduce(np.ones(3), name="x")
        with pytest.raises(ConfigError, match="stop it before starting another"):
            alone.start_timeline(str(path))
    assert slices(json.loads(path.read_text()))[0, "x"][-1] == "allreduce"


def test_a_killed_rank_leaves_a_file_that_the_others_complete(tmp_path):
    path = tmp_path / "trace.json"
    with RankGroup(2) as group:
        group.run(record, str(path), True)
        group.kill(1)
    events = list(read_timeline(path))
    assert json.loads(path.read_text()) == events, "the survivor has closed the array"
    assert {event["pid"] for event in events} == {0, 1}


def test_recordings_of_several_hosts_are_merged(tmp_path):
    paths = [tmp_path / timeline_path("trace.json", ranks) for ranks in ([0, 1], [2, 3])]
    assert [path.name for path in paths] == ["trace.json", "trace.rank-2.json"]
    for number, path in enumerate(paths):
        path.write_text(f'[\n{{"ph":"M","pid":{number}}},\n{{"ph":"B","na')  # like the file of a killed job
    merge_timelines(paths, tmp_path / "all.json")
    assert json.loads((tmp_path / "all.json").read_text()) == [{"ph": "M", "pid": 0}, {"ph": "M", "pid": 1}]
    with pytest.raises(ConfigError, match="not a timeline"):
        merge_timelines([tmp_path / "all.json", __file__], tmp_path / "more.json")


def test_the_name_of_a_recording_is_unique_to_the_job_and_hides_the_secret():
    assert recording_name(b"secret", "init-1", 0) == recording_name(b"secret", "init-1", 0)
    assert recording_name(b"secret", "init-1", 0) != recording_name(b"other", "init-1", 0)
    assert recording_name(b"", "", 0) != recording_name(b"", "", 0)
