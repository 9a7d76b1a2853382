from __future__ import annotations

import io
import os
import signal
import threading
import time

import psutil
import pytest
from pyspark.sql import SparkSession

import sparkhvd
from sparkhvd.errors import ConfigError, LaunchError, RankFailedError, SlotsError, StartTimeoutError

pytestmark = pytest.mark.spark


def place() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("SPARKHVD_", "LOCAL_RANK", "MY_"))}


def test_every_rank_knows_its_place_and_results_are_ordered_by_rank(spark):
    places = sparkhvd.run(place, num_proc=3, env={"MY_SETTING": "yes"})
    assert [one["SPARKHVD_RANK"] for one in places] == ["0", "1", "2"]
    assert [one["SPARKHVD_LOCAL_RANK"] for one in places] == ["0", "1", "2"]
    for one in places:
        assert (one["SPARKHVD_SIZE"], one["SPARKHVD_LOCAL_SIZE"], one["SPARKHVD_CROSS_SIZE"]) == ("3", "3", "1")
        assert one["LOCAL_RANK"] == one["SPARKHVD_LOCAL_RANK"]
        assert one["MY_SETTING"] == "yes"


def sum_over_ranks(offset: int, *, scale: int) -> tuple[int, int, float]:
    import torch  # noqa: PLC0415

    import sparkhvd.torch as hvd  # noqa: PLC0415

    hvd.init()
    total = hvd.allreduce(torch.tensor([float(hvd.rank() + offset)]), op=hvd.Sum)
    return hvd.rank(), hvd.size(), total.item() * scale


def test_ranks_find_each_other_through_init_twice_in_a_row(spark):
    for _ in range(2):
        results = sparkhvd.run(sum_over_ranks, (10,), {"scale": 2}, num_proc=2, preload=("torch",))
        assert results == [(0, 2, 42.0), (1, 2, 42.0)]


def test_num_proc_none_takes_all_slots(spark):
    assert len(set(sparkhvd.run(os.getpid))) == 4


def talk() -> None:
    import sys  # noqa: PLC0415

    print("said by", os.environ["SPARKHVD_RANK"])
    print("warned", file=sys.stderr)
    sys.stdout.write("no newline at the end")


def test_output_reaches_the_driver_under_its_rank(spark):
    stdout, stderr = io.StringIO(), io.StringIO()
    sparkhvd.run(talk, num_proc=2, stdout=stdout, stderr=stderr)
    assert sorted(stdout.getvalue().splitlines()) == [
        "[0]<stdout>:no newline at the end",
        "[0]<stdout>:said by 0",
        "[1]<stdout>:no newline at the end",
        "[1]<stdout>:said by 1",
    ]
    assert sorted(stderr.getvalue().splitlines()) == ["[0]<stderr>:warned", "[1]<stderr>:warned"]


def wait_for_file(path: str) -> str:
    from pathlib import Path  # noqa: PLC0415

    print("waiting")
    while not Path(path).exists():
        time.sleep(0.01)
    return "seen"


class CreateFileOnText(io.StringIO):
    """Creates a file once something was written to it."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def write(self, text: str) -> int:
        open(self.path, "w").close()  # noqa: PTH123
        return super().write(text)


def test_output_arrives_while_the_rank_still_runs(spark, tmp_path):
    path = str(tmp_path / "go")
    assert sparkhvd.run(wait_for_file, (path,), num_proc=1, stdout=CreateFileOnText(path)) == ["seen"]


def raise_on_rank(rank: int) -> None:
    if os.environ["SPARKHVD_RANK"] == str(rank):
        raise ValueError(f"no luck on rank {rank}")
    time.sleep(600)


def test_a_rank_that_raises_ends_the_others_and_is_reported_with_its_traceback(spark):
    began = time.monotonic()
    with pytest.raises(RankFailedError) as caught:
        sparkhvd.run(raise_on_rank, (1,), num_proc=2)
    assert time.monotonic() - began < 60  # the other rank sleeps for 600 s
    assert (caught.value.rank, caught.value.host) == (1, "127.0.0.1")
    assert str(caught.value).startswith("Rank 1 on host 127.0.0.1 raised ValueError: no luck on rank 1.")
    assert "in raise_on_rank" in str(caught.value)
    assert "in raise_on_rank" in caught.value.remote_traceback


def end_on_rank(rank: int, how: int) -> None:
    import sys  # noqa: PLC0415

    if os.environ["SPARKHVD_RANK"] == str(rank):
        print("last words", file=sys.stderr)
        if how < 0:
            os.kill(os.getpid(), -how)
        os._exit(how)
    time.sleep(600)


@pytest.mark.parametrize(
    ("how", "words"),
    [(3, "ended with exit code 3 before fn returned"), (-signal.SIGKILL, r"was killed by signal 9 \(SIGKILL\)")],
)
def test_a_rank_that_dies_without_an_exception_is_reported_with_its_last_words(spark, how, words):
    with pytest.raises(RankFailedError, match=rf"Rank 0 on host 127.0.0.1 {words}") as caught:
        sparkhvd.run(end_on_rank, (0, how), num_proc=2, stderr=io.StringIO())
    assert caught.value.stderr_tail == "last words"
    assert "last words" in str(caught.value)


def die_before_a_collective(how: int) -> None:
    import torch  # noqa: PLC0415

    import sparkhvd.torch as hvd  # noqa: PLC0415

    hvd.init()
    hvd.allreduce(torch.ones(1))
    if hvd.rank() == 1:
        if how < 0:
            os.kill(os.getpid(), -how)
        raise ValueError("the cause")
    hvd.allreduce(torch.ones(1))


@pytest.mark.parametrize(("how", "words"), [(1, "raised ValueError: the cause"), (-signal.SIGKILL, "was killed by")])
def test_the_cause_is_reported_and_not_the_loss_that_it_means_for_the_others(spark, how, words):
    with pytest.raises(RankFailedError, match=rf"Rank 1 on host 127\.0\.0\.1 {words}"):
        sparkhvd.run(die_before_a_collective, (how,), num_proc=2, preload=("torch",))


def big(size: int) -> bytes:
    return bytes(size)


def test_results_are_cut_into_chunks_and_put_together_again(spark):
    results = sparkhvd.run(big, (20_000_000,), num_proc=2)
    assert [len(result) for result in results] == [20_000_000, 20_000_000]


def test_results_above_the_cap_are_refused_with_the_way_out(spark):
    with pytest.raises(LaunchError, match=r"returned 140,\d+,\d+ bytes, and all ranks together 280,.*Store"):
        sparkhvd.run(big, (140_000_000,), num_proc=2)


def test_too_many_ranks_fail_at_once_with_both_numbers_and_the_setting(spark):
    with pytest.raises(SlotsError, match=r"num_proc=9 .* has 4 slots .*local\[9\]"):
        sparkhvd.run(place, num_proc=9)


def sleeping_rows(batches):
    time.sleep(600)
    yield from batches


def test_busy_slots_end_in_a_start_timeout_that_leaves_nothing_running(spark):
    context = spark.sparkContext

    def keep_busy() -> None:
        context.addJobTag("busy")
        with pytest.raises(Exception, match=r"(?i)cancel"):
            spark.range(4, numPartitions=4).mapInArrow(sleeping_rows, "id long").collect()

    busy = threading.Thread(target=keep_busy, name="busy")
    busy.start()
    tracker = context.statusTracker()
    try:
        wait_until(lambda: any(tracker.getStageInfo(s).numActiveTasks == 4 for s in tracker.getActiveStageIds()))
        with pytest.raises(
            StartTimeoutError, match=r"Timed out waiting for Spark tasks to start\. .*slots for 2 ranks"
        ):
            sparkhvd.run(place, num_proc=2, start_timeout=2)
    finally:
        context.cancelJobsWithTag("busy")
        busy.join()
    wait_until(lambda: not list(tracker.getActiveJobsIds()))


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.05)


def test_run_works_from_several_threads_at_once(spark):
    results: dict[int, list[int]] = {}

    def one(index: int) -> None:
        results[index] = sparkhvd.run(pow, (2, index), num_proc=2, spark=spark)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {index: [2**index] * 2 for index in range(3)}


def write_pid_and_stay(folder: str) -> None:
    from pathlib import Path  # noqa: PLC0415

    print("up")
    Path(folder, os.environ["SPARKHVD_RANK"]).write_text(str(os.getpid()))
    time.sleep(600)


def test_ctrl_c_ends_the_ranks_and_comes_through(spark, tmp_path):
    pids = [tmp_path / "0", tmp_path / "1"]

    def interrupt() -> None:
        wait_until(lambda: all(path.exists() and path.read_text() for path in pids))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            sparkhvd.run(write_pid_and_stay, (str(tmp_path),), num_proc=2)
    finally:
        interrupter.join()
        signal.signal(signal.SIGINT, previous)
    wait_until(lambda: not any(psutil.pid_exists(int(path.read_text())) for path in pids))


def test_arguments_that_cannot_work_are_refused(spark):
    with pytest.raises(ConfigError, match="num_proc=0 is not a number of processes"):
        sparkhvd.run(place, num_proc=0)
    with pytest.raises(ConfigError, match=r"env\['A'\] has a value of type int"):
        sparkhvd.run(place, env={"A": 1})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="start_timeout=0 is not above 0"):
        sparkhvd.run(place, start_timeout=0)


def test_a_missing_session_is_said(monkeypatch):
    monkeypatch.setattr(SparkSession, "getActiveSession", classmethod(lambda cls: None))
    with pytest.raises(LaunchError, match=r"no active SparkSession.*pass spark="):
        sparkhvd.run(place, num_proc=1)


def test_dynamic_allocation_is_refused_with_the_reason(spark, monkeypatch):
    monkeypatch.setattr(type(spark.conf), "get", lambda self, name, default=None: "true")
    with pytest.raises(LaunchError, match=r"does not run barrier stages .*dynamicAllocation.enabled=false"):
        sparkhvd.run(place, num_proc=1, spark=spark)
