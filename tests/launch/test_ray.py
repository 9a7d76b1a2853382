"""Jobs on a real Ray cluster with two nodes on this machine."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from itertools import groupby
from pathlib import Path

import psutil
import pytest

import sparkhvd
from sparkhvd._util.background import in_background
from sparkhvd.comm import session
from sparkhvd.errors import ConfigError, LaunchError, RankFailedError, SlotsError, StartTimeoutError
from tests.launch import elastic_training as training
from tests.launch.faults import RAY_FAULTS, complaints, inject
from tests.ports import free_port
from tests.scripts import ROOT
from tests.waiting import wait_for

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster():
    """Connect to a head with one CPU, and a node with two CPUs and two fake GPUs."""
    from ray.cluster_utils import Cluster  # noqa: PLC0415 - Ray may be missing

    head = {
        "num_cpus": 1,
        "num_gpus": 0,
        "include_dashboard": False,
        "object_store_memory": 80 << 20,
        # Ray's own niceness of 15 would let the other tests on this machine starve its workers.
        "_system_config": {"worker_niceness": 0},
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=2, num_gpus=2, object_store_memory=80 << 20)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def describe() -> tuple[int, str | None, float]:
    import numpy as np  # noqa: PLC0415

    import sparkhvd.numpy as hvd  # noqa: PLC0415

    hvd.init()
    print("said by", hvd.rank())
    return hvd.rank(), os.environ.get("MINE"), float(hvd.allreduce(np.ones(1), op=hvd.Sum)[0])


@pytest.mark.usefixtures("cluster")
def test_ranks_run_as_actors_and_their_output_reaches_the_driver(tmp_path):
    stdout = io.StringIO()
    results = sparkhvd.run(
        describe, num_proc=3, launcher="ray", env={"MINE": "yes"}, stdout=stdout, output_filename=str(tmp_path)
    )
    assert results == [(rank, "yes", 3.0) for rank in range(3)]
    assert sorted(stdout.getvalue().splitlines()) == [f"[{rank}]<stdout>:said by {rank}" for rank in range(3)]
    assert (tmp_path / "rank.2" / "stdout").read_text() == "said by 2\n"


def devices() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "SPARKHVD_DEVICES"))


@pytest.mark.usefixtures("cluster")
def test_ranks_see_the_gpus_of_their_node_in_the_order_of_local_ranks():
    stdout = io.StringIO()
    # All nodes have room for as many ranks as there are GPUs.
    assert sparkhvd.run(devices, launcher="ray", gpus_per_task=1, stdout=stdout) == [
        ("0", "0,1", "0"),
        ("1", "0,1", "1"),
    ]
    assert "rank 1: host " in stdout.getvalue()


def stay(folder: str) -> None:
    child = subprocess.Popen(["sleep", "600"])  # Ray ends an actor and its children, but not this grandchild
    if "SPARKHVD_RANK" not in os.environ:  # a rank of an elastic job has no number before
        session.init()
    path = Path(folder, os.environ["SPARKHVD_RANK"])
    path.with_suffix(".new").write_text(f"{os.getppid()} {os.getpid()} {child.pid}")
    path.with_suffix(".new").rename(path)
    time.sleep(600)


def pids_in(folder: Path, count: int) -> dict[str, list[int]]:
    """Return the ids of actor, worker process and child by rank, once all ranks have written them."""
    ranks = [str(rank) for rank in range(count)]
    wait_for(lambda: all((folder / rank).exists() for rank in ranks), seconds=120.0)
    return {rank: [int(pid) for pid in (folder / rank).read_text().split()] for rank in ranks}


def assert_ended(pids: dict[str, list[int]]) -> None:
    all_pids = {pid for pids_of_rank in pids.values() for pid in pids_of_rank}
    left = [process for process in psutil.process_iter() if process.pid in all_pids]
    assert psutil.wait_procs(left, timeout=20)[1] == []


@pytest.mark.soak
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("process", "words"),
    [
        (1, r"Rank 1 on host \S+ was killed by signal 9 \(SIGKILL\).* \(in fn\)"),
        (0, r"Rank 1 on host \S+ was lost \(in fn\): its Ray actor ended unexpectedly"),
    ],
    ids=["worker", "actor"],
)
def test_the_loss_of_a_worker_or_an_actor_ends_the_job_and_names_the_rank(process, words, tmp_path):
    pids: dict[str, list[int]] = {}

    def kill() -> None:
        pids.update(pids_in(tmp_path, 2))
        os.kill(pids["1"][process], signal.SIGKILL)

    killer = threading.Thread(target=kill, name="killer")
    killer.start()
    with pytest.raises(RankFailedError, match=words) as caught:
        sparkhvd.run(stay, (str(tmp_path),), num_proc=2, launcher="ray")
    killer.join()
    assert caught.value.rank == 1
    assert_ended(pids)


@pytest.mark.soak
@pytest.mark.usefixtures("cluster")
def test_an_interrupt_ends_all_processes_of_a_job_and_releases_its_resources(tmp_path):
    pids: dict[str, list[int]] = {}

    def interrupt() -> None:
        try:
            pids.update(pids_in(tmp_path, 2))
        finally:  # otherwise the job would not end
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, name="interrupter")
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        sparkhvd.run(stay, (str(tmp_path),), num_proc=2, launcher="ray")
    thread.join()
    assert pids
    assert_ended(pids)
    wait_for(lambda: ray.available_resources().get("CPU") == 3.0)


@pytest.mark.usefixtures("cluster")
def test_too_few_resources_are_reported_with_the_resources_of_the_cluster():
    nodes = r"1 node with 1 CPU; 1 node with 2 CPU and 2 GPU"
    words = rf"4 ranks with 1 CPU each were requested, but the Ray cluster has {nodes}\. Request fewer ranks"
    with pytest.raises(SlotsError, match=words):
        sparkhvd.run(describe, num_proc=4, launcher="ray", start_timeout=1)
    with pytest.raises(SlotsError, match=r"2 ranks with 2 CPU and 0\.5 GPU each"):
        sparkhvd.run(describe, num_proc=2, cpus_per_task=2, gpus_per_task=0.5, launcher="ray", start_timeout=1)
    with pytest.raises(SlotsError, match=rf"no room for a rank with 8 CPU: it has {nodes}"):
        sparkhvd.run(describe, cpus_per_task=8, launcher="ray")


@pytest.mark.soak
@pytest.mark.usefixtures("cluster")
def test_resources_that_stay_busy_cause_a_start_timeout():
    from ray.util.placement_group import placement_group, remove_placement_group  # noqa: PLC0415

    group = placement_group([{"CPU": 2.0}])
    assert group.wait(30)
    try:
        words = r"within start_timeout=1 s\. The cluster has .*, but other jobs use them: only 1 CPU and 2 GPU are"
        with pytest.raises(StartTimeoutError, match=words):
            sparkhvd.run(describe, num_proc=2, launcher="ray", start_timeout=1)
    finally:
        remove_placement_group(group)
    wait_for(lambda: ray.available_resources().get("CPU") == 3.0)


@pytest.mark.usefixtures("cluster")
def test_an_estimator_trains_on_parquet_files_without_a_spark_session(tmp_path, monkeypatch):
    import pyarrow as pa  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from pyarrow import parquet  # noqa: PLC0415

    monkeypatch.setattr("sparkhvd.estimators.params.backend.current_session", lambda: None)
    parquet.write_table(
        pa.table({"x": [float(number) for number in range(8)], "y": [1.0] * 8}), tmp_path / "rows.parquet"
    )
    model = torch.nn.Linear(1, 1)
    estimator = sparkhvd.TorchEstimator(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=2,
        epochs=2,
        num_proc=1,  # other tests have several ranks on Ray; each would import PyTorch
        backend="ray",
        verbose=0,
    )
    trained = estimator.fit_on_parquet(path=str(tmp_path / "rows.parquet"))
    assert len(trained.history) == 2


class Counter:
    def __init__(self, start: int, step: int = 1) -> None:
        self.value = start
        self.step = step

    def add(self) -> int:
        self.value += self.step
        return self.value


def join() -> tuple[int, str | None]:
    import sparkhvd.numpy as hvd  # noqa: PLC0415

    hvd.init()
    return hvd.rank(), os.environ.get("MINE")


def total(value: float) -> float:
    import numpy as np  # noqa: PLC0415

    import sparkhvd.numpy as hvd  # noqa: PLC0415

    return float(hvd.allreduce(np.full(1, value), op=hvd.Sum)[0])


def fail_on_rank_1() -> None:
    if os.environ["SPARKHVD_RANK"] == "1":
        raise ValueError("no luck")
    total(1.0)


def test_an_executor_keeps_its_ranks_between_calls_and_reports_a_failure(cluster, tmp_path):
    from sparkhvd.ray import RayExecutor  # noqa: PLC0415

    settings = RayExecutor.create_settings(timeout_s=100, placement_group_timeout_s=50)
    with RayExecutor(settings, num_hosts=2) as executor:
        with pytest.raises(LaunchError, match=r"ranks of this RayExecutor are not running\. Call start\(\) first"):
            executor.run(join)
        executor.start(Counter, executable_args=(5,), executable_kwargs={"step": 2}, extra_env_vars={"MINE": "yes"})
        with pytest.raises(LaunchError, match=r"are already running\. Call shutdown\(\) before start"):
            executor.start()
        assert executor.run(join) == [(0, "yes"), (1, "yes")]
        assert executor.run(total, args=(3.0,)) == [6.0, 6.0]
        assert executor.execute(Counter.add) == [7, 7]
        assert executor.execute_single(lambda counter: counter.add()) == 9
        refs = [*executor.run_remote(total, kwargs={"value": 1.5}), *executor.run_remote(join)]
        assert ray.get(refs) == [3.0, 3.0, (0, "yes"), (1, "yes")]
        assert executor.execute(Counter.add) == [11, 9]
        refs = executor.run_remote(fail_on_rank_1)
        for ref in refs:
            with pytest.raises(RankFailedError, match=r"Rank 1 on host \S+ raised ValueError: no luck .* start\(\)"):
                ray.get(ref)
        with pytest.raises(RankFailedError, match=r"^Rank 1 on host \S+ raised ValueError: no luck \(in fn, after "):
            executor.run(join)
        words = r"are not running\. They ended because of a failure: Rank 1 .* no luck .*\. Call start\(\) first\."
        with pytest.raises(LaunchError, match=words):
            executor.run(join)
        executor.start()
        assert executor.run(join) == [(0, None), (1, None)]
        executor.shutdown()
        executor.shutdown()
    wait_for(lambda: ray.available_resources().get("CPU") == 3.0)


@pytest.mark.soak
@pytest.mark.usefixtures("cluster")
def test_an_executor_in_a_ray_task_uses_its_placement_group():
    from ray.util.placement_group import placement_group, remove_placement_group  # noqa: PLC0415
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: PLC0415

    def run_ranks(count: int) -> list[str | None]:
        from sparkhvd.ray import RayExecutor  # noqa: PLC0415

        with RayExecutor(num_workers=count) as executor:
            executor.start()
            return executor.run(os.getenv, ("SPARKHVD_RANK",))

    group = placement_group([{"CPU": 1.0}] * 3)  # all of the cluster
    task = ray.remote(num_cpus=1, scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0))(run_ranks)
    try:
        assert ray.get(task.remote(2), timeout=100) == ["0", "1"]
        with pytest.raises(
            SlotsError, match="current placement group has room for 3 ranks with 1 CPU each, but 4 were"
        ):
            ray.get(task.remote(4), timeout=100)
    finally:
        remove_placement_group(group)
    wait_for(lambda: ray.available_resources().get("CPU") == 3.0)


@pytest.mark.soak
def test_jobs_run_over_ray_client():
    command = [sys.executable, "-m", "tests.launch.ray_client_script", str(free_port())]
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:  # short, for the names of Ray's sockets
        environment = {**os.environ, "TMPDIR": folder}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
        )
    assert done.returncode == 0, done.stderr
    assert "Rank 1 on host " in done.stdout


@pytest.mark.soak
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("fault", RAY_FAULTS, ids=lambda fault: fault.name)
def test_the_driver_reports_the_failure_of_a_rank_soon_and_leaves_nothing_behind(fault, tmp_path):
    assert complaints(fault, inject(fault, tmp_path, None)) == []
    wait_for(lambda: ray.available_resources().get("CPU") == 3.0)


_DRIVER = """
import ray, sparkhvd
from tests.launch.test_ray import stay
ray.init(address={address!r}, log_to_driver=False)
sparkhvd.{call}(stay, ({folder!r},), num_proc=2, launcher="ray")
"""


@pytest.mark.soak
@pytest.mark.parametrize("call", ["run", "run_elastic"])
def test_a_job_whose_driver_is_killed_leaves_no_processes(call, cluster, tmp_path):
    code = _DRIVER.format(address=cluster.address, call=call, folder=str(tmp_path))
    driver = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        pids = pids_in(tmp_path, 2)
    finally:
        driver.kill()
        driver.wait()
    assert_ended(pids)
    wait_for(lambda: ray.available_resources().get("CPU") == 3.0)


def sizes_of(folder: Path) -> list[int]:
    """Return the sizes of the generations in which rank 0 has taken steps, in their order."""
    lines = [line.split() for path in folder.glob("log-*") for line in path.read_text().splitlines()]
    steps = sorted((float(line[4]), int(line[3])) for line in lines if line[0] == "step" and line[2] == "0")
    return [size for size, _ in groupby(size for _, size in steps)]


def pids_of(folder: Path) -> list[int]:
    """Return the processes of the ranks that have taken steps."""
    return [int(path.name.removeprefix("log-")) for path in folder.glob("log-*")]


@pytest.mark.parametrize("with_nodes", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_an_elastic_job_survives_lost_actors_and_nodes_and_uses_new_nodes(cluster, tmp_path, with_nodes):
    from sparkhvd.ray import RayExecutor  # noqa: PLC0415

    def train() -> tuple[int, float, int, int, int, list[int]]:
        return training.train(10, folder, {(5, 2, 3): "kill with host"}, sizes)

    folder, sizes = str(tmp_path), (3, 4, 3) if with_nodes else (3,)
    settings = RayExecutor.create_settings(verbose=0)
    executor = RayExecutor(settings, min_workers=3, cooldown_range=(0.5, 5))
    executor.start()
    job = in_background(lambda: executor.run(train), "job")
    wait_for(lambda: len(pids_of(tmp_path)) == 4 and sizes_of(tmp_path) == [3], seconds=250.0)
    if with_nodes:
        node = cluster.add_node(num_cpus=1, object_store_memory=80 << 20)  # only the main thread can start nodes
        wait_for(lambda: sizes_of(tmp_path) == [3, 4], seconds=250.0)
        cluster.remove_node(node, allow_graceful=False)
    results = job.result(250.0)
    steps = results[0][0]
    assert [result[:4] for result in results] == [(steps, steps * (steps + 1) / 2, rank, 3) for rank in range(3)]
    wait_for(lambda: not any(map(training.lives, pids_of(tmp_path))))
    wait_for(lambda: ray.available_resources().get("CPU") == 3.0)


@pytest.mark.usefixtures("cluster")
def test_a_discovery_limits_an_elastic_job_to_its_slots(tmp_path):
    from sparkhvd.ray import ElasticRayExecutor  # noqa: PLC0415

    address = ray.nodes()[0]["NodeManagerAddress"]
    slots = {address: 1}
    settings = ElasticRayExecutor.create_settings(verbose=0)
    settings.discovery = lambda: dict(slots)
    executor = ElasticRayExecutor(settings, override_discovery=False)
    executor.start()
    folder = str(tmp_path)
    job = in_background(lambda: executor.run(lambda: training.train(10, folder, sizes=(1, 2, 1))), "job")
    wait_for(lambda: sizes_of(tmp_path) == [1], seconds=250.0)
    assert ray.available_resources().get("CPU") == 2.0, "without the discovery, the job would use all three CPUs"
    slots[address] = 2
    wait_for(lambda: sizes_of(tmp_path) == [1, 2], seconds=250.0)
    slots[address] = 1
    ((steps, total, *identity, _, _),) = job.result(250.0)
    assert (total, identity) == (steps * (steps + 1) / 2, [0, 1])
    wait_for(lambda: ray.available_resources().get("CPU") == 3.0)


def test_a_discovery_that_cannot_be_called_is_refused():
    from sparkhvd.ray import ElasticRayExecutor  # noqa: PLC0415

    with pytest.raises(ConfigError, match=r"needs a discovery, got settings\.discovery=None"):
        ElasticRayExecutor(override_discovery=False)


@pytest.mark.soak
def test_the_loss_of_a_node_ends_the_ranks_and_names_one_of_them(cluster, tmp_path):
    """Remove a node of the cluster; this must be the last test."""
    from sparkhvd.ray import RayExecutor  # noqa: PLC0415

    pids: dict[str, list[int]] = {}

    def remove() -> None:
        pids.update(pids_in(tmp_path, 2))
        cluster.remove_node(next(node for node in cluster.list_all_nodes() if not node.head), allow_graceful=False)

    with RayExecutor(num_hosts=2) as executor:
        executor.start()
        remover = threading.Thread(target=remove, name="remover")
        remover.start()
        with pytest.raises(RankFailedError, match=r"Rank [01] on host \S+ was lost \(in fn\)"):
            executor.run(stay, (str(tmp_path),))
        remover.join()
    assert_ended(pids)
