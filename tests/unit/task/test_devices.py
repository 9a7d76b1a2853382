from __future__ import annotations

import pytest

from sparkhvd.rpc.registration import TaskOffer
from sparkhvd.task.assignment import assign
from sparkhvd.task.devices import (
    cuda_names,
    device_kind,
    device_map,
    device_variables,
    drop_user_variables,
    mixed_devices,
    selection_variables,
)
from sparkhvd.task.job import Job


def slots(*tasks: tuple[str, tuple[str, ...]]):
    return assign([TaskOffer(i, host, f"node-{host}", "", devices) for i, (host, devices) in enumerate(tasks)])


def visible_devices(assigned) -> list[str | None]:
    return [dict(device_variables(assigned, slot)).get("CUDA_VISIBLE_DEVICES") for slot in assigned]


def test_each_rank_finds_its_own_device_at_its_local_rank():
    assigned = slots(("a", ("3",)), ("b", ("0",)), ("a", ("1",)), ("a", ("0",)))
    assert visible_devices(assigned) == ["3,1,0", "3,1,0", "3,1,0", "0"]
    for slot, listed in zip(assigned, visible_devices(assigned), strict=True):
        assert listed.split(",")[slot.world.local_rank] == slot.offer.devices[0]


def test_further_devices_follow_the_first_devices_of_all_ranks():
    assert visible_devices(slots(("a", ("0", "1")), ("a", ("2", "3")))) == ["0,2,1,3"] * 2


def test_gpus_that_the_user_selects_are_those_of_the_rank():
    assigned = selection_variables(("3", "1"), ("3",))
    assert drop_user_variables(assigned, (("MINE", "1"),)) == assigned
    assert drop_user_variables(assigned, (("CUDA_VISIBLE_DEVICES", "7, 5"),)) == (("SPARKHVD_DEVICES", "7,5"),)
    assert drop_user_variables(assigned, (("CUDA_VISIBLE_DEVICES", None),)) == (("SPARKHVD_DEVICES", "3"),)
    assert drop_user_variables((), (("CUDA_VISIBLE_DEVICES", "7"),)) == ()


def test_ranks_that_share_a_device_each_see_their_own():
    assert visible_devices(slots(("a", ("0",)), ("a", ("0",)), ("a", ("1",)))) == ["0", "0", "1"]


def test_containers_with_separate_gpu_indices_count_as_separate_hosts():
    """In YARN containers, each task sees only its own GPUs, numbered from 0."""
    tasks = [("one", ("0",)), ("two", ("0",)), ("one", ("1",)), ("two", ("1",))]
    assigned = assign(
        [TaskOffer(i, "a", "node", "", devices, container=container) for i, (container, devices) in enumerate(tasks)]
    )
    assert [slot.offer.container for slot in assigned] == ["one", "one", "two", "two"]
    assert [(slot.world.rank, slot.world.local_rank, slot.world.local_size) for slot in assigned] == [
        (0, 0, 2),
        (1, 1, 2),
        (2, 0, 2),
        (3, 1, 2),
    ]
    assert visible_devices(assigned) == ["0,1"] * 4
    lines = device_map(assigned).splitlines()
    assert len(lines) == 5
    assert lines[4].startswith("Containers on host node use the same GPU indices: sparkhvd assumes that YARN isolates")


def test_containers_with_distinct_gpu_names_share_their_host():
    assigned = assign([TaskOffer(i, "a", "node", "", (str(i),), container=f"of {i}") for i in range(2)])
    assert [slot.world.local_rank for slot in assigned] == [0, 1]
    assert visible_devices(assigned) == ["0,1"] * 2


def test_without_devices_the_environment_is_unchanged():
    assert visible_devices(slots(("a", ()), ("a", ()))) == [None, None]


@pytest.mark.parametrize(
    ("addresses", "visible", "names"),
    [
        (["0", "1"], None, ("0", "1")),
        (["0", "1"], "", ("0", "1")),
        (["1"], "4,6", ("6",)),
        (["0"], "GPU-8d2f, GPU-11aa", ("GPU-8d2f",)),
        (["7"], "4,6", ("7",)),
        (["GPU-11aa"], "GPU-8d2f,GPU-11aa", ("GPU-11aa",)),
        # On Databricks, a task sees only its own GPUs, numbered from 0 or as in CUDA_VISIBLE_DEVICES.
        (["0"], "3", ("3",)),
        (["3"], "3", ("3",)),
        (["0", "1"], "1,2", ("1", "2")),
        (["1", "2"], "1,2", ("1", "2")),
    ],
)
def test_gpu_addresses_index_the_visible_devices_of_the_executor(addresses, visible, names):
    assert cuda_names(addresses, visible) == names


def test_cuda_device_order_matches_sparks_discovery_scripts():
    assigned = slots(("a", ("0",)))
    assert dict(device_variables(assigned, assigned[0]))["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_the_map_has_a_line_per_rank():
    assert device_map(slots(("a", ("0",)), ("b", ()))) == (
        "rank 0: host node-a, local rank 0, GPU 0\nrank 1: host node-b, local rank 0, GPU none"
    )
    assert device_map(slots(("a", ()))) == ""


def test_ranks_with_the_same_gpu_are_reported():
    lines = device_map(slots(("a", ("0",)), ("b", ("0",)), ("a", ("0",)), ("b", ("1",)))).splitlines()
    assert len(lines) == 5
    assert lines[4].startswith(
        "Spark assigned GPU 0 on host node-a to ranks 0, 1. On such a host each rank sees only its"
    )
    both = device_map(slots(*[("a", (name,)) for name in "0011"])).splitlines()[-1]
    assert both.startswith("Spark assigned GPU 0 on host node-a to ranks 0, 1; GPU 1 on host node-a to ranks 2, 3. On")


def test_the_map_names_gpu_models_that_differ_between_hosts():
    h100, l4, unknown = "GPU (NVIDIA H100)", "GPU (NVIDIA L4)", "GPU"

    def map_of(*kinds):
        return device_map(assign([TaskOffer(i, str(i), f"node-{i}", "", (), kind) for i, kind in enumerate(kinds)]))

    assert map_of(h100, l4, h100) == (
        "The ranks have different GPUs: GPU (NVIDIA H100) on host node-2; GPU (NVIDIA L4) on host node-1. "
        "Every step waits for the slowest one."
    )
    assert map_of(h100, unknown, h100) == map_of(l4, l4) == map_of(unknown) == ""


@pytest.fixture
def driver_files(tmp_path):
    """Write files like those in which NVIDIA's driver describes three GPUs."""
    for number, model in enumerate(("NVIDIA H100", "NVIDIA H100", "NVIDIA L4")):
        folder = tmp_path / f"0000:{number}5:00.0"
        folder.mkdir()
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ: 1\nGPU UUID: \t GPU-{number}a-77\n")
    return tmp_path


def test_the_device_kind_lists_the_models_that_nvidias_driver_reports(driver_files):
    all_models = "GPU (NVIDIA H100, NVIDIA L4)"
    assert device_kind((), None, driver_files) == device_kind(("7",), None, driver_files) == all_models
    assert device_kind((), "", driver_files) == device_kind((), "-1", driver_files) == ""
    missing = driver_files / "missing"
    assert device_kind((), None, missing) == ""
    assert device_kind(("0",), None, missing) == "GPU"


@pytest.mark.parametrize(
    ("assigned", "visible", "model"),
    [
        (("1",), "0,1", "NVIDIA H100"),
        (("2",), None, "NVIDIA L4"),
        (("GPU-2a",), None, "NVIDIA L4"),
        ((), "0", "NVIDIA H100"),
        ((), "1,2", "NVIDIA H100, NVIDIA L4"),
    ],
)
def test_the_device_kind_considers_only_assigned_or_visible_gpus(assigned, visible, model, driver_files):
    assert device_kind(assigned, visible, driver_files) == f"GPU ({model})"


def test_ranks_with_and_without_gpus_are_refused_unless_the_job_assigns_devices():
    with_gpu, without = TaskOffer(0, "a", "node-a", "", (), "GPU (NVIDIA H100)"), TaskOffer(1, "b", "node-b", "")
    job = Job(b"", 2)
    message = mixed_devices([with_gpu, without], job)
    assert "task 0 on host node-a has a GPU (NVIDIA H100), task 1 on host node-b has none" in message
    assert 'env={"CUDA_VISIBLE_DEVICES": ""}' in message
    assert mixed_devices([with_gpu, with_gpu], job) == mixed_devices([without, without], job) == ""
    assert mixed_devices([with_gpu, without], Job(b"", 2, env=(("CUDA_VISIBLE_DEVICES", ""),))) == ""
