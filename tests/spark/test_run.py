from __future__ import annotations

import io
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import sparkhvd
from sparkhvd._util.background import in_background
from sparkhvd.driver.launchers import barrier
from sparkhvd.driver.spark import barrier_stage
from sparkhvd.driver.spark.gang_queue import SlotUse
from sparkhvd.driver.spark.task_exchange import TaskExchange
from sparkhvd.driver.user_code import importable
from sparkhvd.errors import ConfigError, LaunchError, RankFailedError, SlotsError, StartTimeoutError
from sparkhvd.rpc.messages import ExchangeIntroductions, ExchangeUnavailable, Introductions, Message, TaskStatus
from sparkhvd.task.job import Job
from tests.spark.rank_functions import (
    LINE,
    big,
    end_beside_busy_siblings,
    hold,
    place,
    print_much,
    say,
    sum_over_ranks,
    talk_and_wait,
    wait_for_file,
    write_pid_and_stay,
)
from tests.waiting import wait_for

pytestmark = pytest.mark.spark


class CreateFileOnText(io.StringIO):
    """A stream that creates a file as soon as text is written to it."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def write(self, text: str) -> int:
        Path(self.path).touch()
        return super().write(text)


def test_every_rank_knows_its_world_and_its_output_is_streamed(spark, tmp_path):
    path = str(tmp_path / "go")
    stdout, stderr = CreateFileOnText(path), io.StringIO()
    worlds = sparkhvd.run(talk_and_wait, (path,), num_proc=3, env={"MY_SETTING": "yes"}, stdout=stdout, stderr=stderr)
    assert [one["SPARKHVD_RANK"] for one in worlds] == ["0", "1", "2"]
    assert [one["SPARKHVD_LOCAL_RANK"] for one in worlds] == ["0", "1", "2"]
    assert [(one["HOROVOD_RANK"], one["HOROVOD_SIZE"]) for one in worlds] == [("0", "3"), ("1", "3"), ("2", "3")]
    for one in worlds:
        assert (one["SPARKHVD_SIZE"], one["SPARKHVD_LOCAL_SIZE"], one["SPARKHVD_CROSS_SIZE"]) == ("3", "3", "1")
        assert one["LOCAL_RANK"] == one["SPARKHVD_LOCAL_RANK"]
        assert one["MY_SETTING"] == "yes"
    ends = [f"[{rank}]<stdout>:no newline at the end" for rank in range(3)]
    assert sorted(stdout.getvalue().splitlines()) == sorted(ends + [f"[{r}]<stdout>:said by {r}" for r in range(3)])
    assert sorted(stderr.getvalue().splitlines()) == [f"[{rank}]<stderr>:warned" for rank in range(3)]


def test_tasks_exchange_introductions_at_the_driver_if_all_reach_it(spark, monkeypatch):
    answers = []
    handle = TaskExchange.handle
    monkeypatch.setattr(
        TaskExchange, "handle", lambda self, message: [answers.append(handle(self, message)), answers[-1]][1]
    )
    sparkhvd.run(place, num_proc=4)
    met = [answer.result(0) for answer in answers if isinstance(answer, Future)]
    assert [type(answer) for answer in met] == [Introductions] * 4
    assert {one.offer.task_index for one in met[0].introductions} == {0, 1, 2, 3}


def test_tasks_exchange_introductions_through_spark_if_one_cannot_reach_the_driver(spark, monkeypatch):
    answers = []
    handle = TaskExchange.handle

    def deaf_to_task_1(self: TaskExchange, message: Message) -> object:
        if isinstance(message, TaskStatus) and message.task_index == 1:
            return None
        if isinstance(message, ExchangeIntroductions) and message.introduction.offer.task_index == 1:
            return ExchangeUnavailable()  # like a task that cannot reach the driver
        answers.append(handle(self, message))
        return answers[-1]

    monkeypatch.setattr(TaskExchange, "handle", deaf_to_task_1)
    places = sparkhvd.run(place, num_proc=3)
    assert [one["SPARKHVD_RANK"] for one in places] == ["0", "1", "2"]
    received = [one.result(0) if isinstance(one, Future) else one for one in answers]
    assert [one for one in received if isinstance(one, Introductions | ExchangeUnavailable)] == [
        ExchangeUnavailable()
    ] * 2


def slow_in_one_part(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if batch.num_rows and batch.column(0)[0].as_py() > 0:
            time.sleep(17.0)
        yield batch


def test_computing_the_rows_of_a_rank_may_exceed_the_start_timeout(spark):
    rows = spark.range(0, 20, numPartitions=2).mapInArrow(slow_in_one_part, "id long")
    assert sparkhvd.run(place, num_proc=2, rows=rows, start_timeout=15)[0]["SPARKHVD_RANK"] == "0"


@pytest.mark.parametrize("launcher", ["barrier", "mpi"])
def test_executors_with_another_version_of_sparkhvd_are_a_one_sentence_error(spark, monkeypatch, launcher):
    installed = sparkhvd.__version__
    monkeypatch.setattr(sparkhvd, "__version__", "77.0")
    words = rf"^The driver has sparkhvd 77\.0, but \S+ on host \S+ has {re.escape(installed)}"
    with pytest.raises(LaunchError, match=words):
        sparkhvd.run(place, num_proc=2, launcher=launcher)


@pytest.mark.parametrize("launcher", ["barrier", "mpi"])
def test_executors_with_another_version_of_a_framework_are_one_warning(spark, monkeypatch, tmp_path, caplog, launcher):
    installed = version("torch")
    (tmp_path / "torch-77.0.dist-info").mkdir()
    (tmp_path / "torch-77.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 77.0\n")
    monkeypatch.syspath_prepend(tmp_path)  # of the driver
    sparkhvd.run(place, num_proc=2, launcher=launcher, verbose=0)
    (printed,) = [record.message for record in caplog.records if "77.0" in record.message]
    assert re.match(rf"torch is 77\.0 on the driver, {re.escape(installed)} on [\w.]+\. Objects pickled", printed)
    caplog.clear()
    sparkhvd.run(place, num_proc=2, launcher=launcher, executable=sys.executable, verbose=0)
    assert "77.0" not in caplog.text, "another Python has its own packages"


def test_output_is_written_to_files_of_a_store_on_request(spark, tmp_path):
    store = sparkhvd.Store.create(str(tmp_path))
    sparkhvd.run(say, ("and more",), num_proc=2, stdout=sparkhvd.LogFiles(store, "logs/first"))
    assert store.list("logs") == [f"logs/first/rank.{rank}/stdout.000000" for rank in range(2)]
    with store.open("logs/first/rank.1/stdout.000000", "rb") as file:
        assert file.read() == b"1 and more\n"


def test_an_unreachable_driver_is_logged_with_the_location_of_the_output(spark, monkeypatch, caplog):
    sparkhvd.run(say, ("and more",), num_proc=2, spark=spark)
    assert "reached this driver" not in caplog.text
    monkeypatch.setattr(Job, "with_driver_addresses", lambda job, addresses: job)
    sparkhvd.run(say, ("and more",), num_proc=2, spark=spark)
    assert caplog.text.count("No task of this job has reached this driver (127.0.0.1). If executors") == 1


def test_an_unreachable_driver_is_logged_while_the_ranks_run(spark, monkeypatch, tmp_path):
    def note(record) -> bool:
        printed.append(record.getMessage())
        (tmp_path / "said").touch()
        return True

    printed: list[str] = []
    monkeypatch.setattr(Job, "with_driver_addresses", lambda job, addresses: job)
    monkeypatch.setattr(barrier_stage, "_POLL_SECONDS", 0.5)
    monkeypatch.setattr(barrier.logger, "filters", [note])
    for rows in (None, spark.range(4).repartition(2)):
        (tmp_path / "said").unlink(missing_ok=True)
        sparkhvd.run(wait_for_file, (str(tmp_path / "said"),), num_proc=2, spark=spark, rows=rows)
    assert [words[:46] for words in printed] == ["No task of this job has reached this driver (1"] * 2


def test_without_verbosity_output_goes_to_the_given_stream_or_folder(spark, tmp_path):
    stdout = io.StringIO()
    sparkhvd.run(say, ("and more",), num_proc=2, verbose=0, stdout=stdout)
    assert sorted(stdout.getvalue().splitlines()) == [f"[{rank}]<stdout>:{rank} and more" for rank in range(2)]
    sparkhvd.run(say, ("and more",), num_proc=2, verbose=0, output_filename=str(tmp_path))
    assert (tmp_path / "rank.1" / "stdout").read_text() == "1 and more\n"


def test_ranks_find_each_other_through_init(spark):
    results = sparkhvd.run(sum_over_ranks, (10,), {"scale": 2}, num_proc=2, preload=("torch",))
    assert results == [(0, 2, 42.0), (1, 2, 42.0)]


class CheckLines:
    """A text stream that counts whole lines without keeping them, and measures the memory of this process."""

    def __init__(self) -> None:
        self.count = 0
        self.broken: list[str] = []
        self.first_memory = 0
        self.most_memory = 0

    def write(self, text: str) -> int:
        lines = text.splitlines()
        self.count += len(lines)
        self.broken += [line for line in lines if line != f"[0]<stdout>:{LINE}"]
        memory = psutil.Process().memory_info().rss
        self.first_memory = self.first_memory or memory
        self.most_memory = max(self.most_memory, memory)
        return len(text)

    def flush(self) -> None:
        return


def test_large_output_arrives_in_whole_lines_with_bounded_memory(spark, monkeypatch):
    monkeypatch.setenv("SPARKHVD_WARM_SECONDS", "0")  # so that the rank is a child of its task
    count = 100_000  # 77 MB
    stdout = CheckLines()
    (growth,) = sparkhvd.run(print_much, (count,), num_proc=1, stdout=stdout)
    assert stdout.broken == []
    assert stdout.count == count + 1
    assert growth < 25_000_000
    assert stdout.most_memory - stdout.first_memory < 25_000_000


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "raised ValueError: no luck on rank 1"),
        ("exit", "ended with exit code 3"),
        ("kill", "was killed by signal 9 (SIGKILL); the kernel sends this signal on a host that runs out of memory"),
    ],
)
def test_a_rank_that_ends_early_is_reported_as_the_cause_and_ends_the_others(spark, tmp_path, how, words):
    with pytest.raises(RankFailedError) as caught:
        sparkhvd.run(
            end_beside_busy_siblings, (str(tmp_path), how), num_proc=3, stdout=io.StringIO(), stderr=io.StringIO()
        )
    # No wait is needed here: the error is raised after all processes have ended.
    assert [psutil.pid_exists(int((tmp_path / str(rank)).read_text())) for rank in range(3)] == [False] * 3
    assert (caught.value.rank, caught.value.host) == (1, "127.0.0.1")
    assert str(caught.value).startswith(f"Rank 1 on host 127.0.0.1 {words} (in fn, after init()).")
    if how == "raise":
        assert "in end_beside_busy_siblings" in str(caught.value)
        assert "in end_beside_busy_siblings" in caught.value.remote_traceback
    else:
        assert caught.value.stderr_tail.splitlines()[-1] == "last words"
        assert "last words" in str(caught.value)


def test_results_are_divided_into_chunks_and_reassembled(spark):
    results = sparkhvd.run(big, (20_000_000,), num_proc=2)
    assert [len(result) for result in results] == [20_000_000, 20_000_000]


def test_results_above_the_cap_are_refused_with_a_remedy(spark):
    with pytest.raises(LaunchError, match=r"returned 140,\d+,\d+ bytes, and all ranks together returned 280,.*Store"):
        sparkhvd.run(big, (140_000_000,), num_proc=2)


def test_too_many_ranks_fail_at_once_with_both_numbers_and_the_setting(spark):
    with pytest.raises(SlotsError, match=r"num_proc=9 is more than the 4 slots .*local\[9\]"):
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
        wait_for(lambda: sparkhvd.slots() == SlotUse(total=4, running=(), waiting=(), tasks=4))
        for launcher in ("barrier", "mpi"):
            # Ask the executors again which modules they can import.
            importable._answers_of_session.cache_clear()
            with pytest.raises(
                StartTimeoutError, match=r"Timed out waiting for Spark tasks to start\. .*slots for 4 ranks"
            ):
                # As many tasks as the other job has.
                sparkhvd.run(place, num_proc=4, launcher=launcher, start_timeout=1)
    finally:
        context.cancelJobsWithTag("busy")
        busy.join()
    wait_for(lambda: not list(tracker.getActiveJobsIds()))


def uses(slots: SlotUse) -> tuple[int, tuple[int, ...], tuple[int, ...], int | None]:
    """Return the numbers of slots, with the ranks of each waiting job."""
    return slots.total, slots.running, tuple(job.ranks for job in slots.waiting), slots.tasks


@pytest.mark.parametrize("launcher", ["barrier", pytest.param("mpi", marks=pytest.mark.soak)])
def test_jobs_of_several_threads_start_in_turn_however_long_the_others_run(spark, tmp_path, monkeypatch, launcher):
    names = ("first", "large", "small", "urgent", "elastic")
    sizes: dict[str, list[int]] = {}

    errors: dict[str, str] = {}

    def start(name: str, num_proc: int, run=sparkhvd.run, **options) -> None:
        def target() -> None:
            spark.sparkContext.addJobTag(name)
            try:
                sizes[name] = run(hold, (str(tmp_path / name),), num_proc=num_proc, spark=spark, **options)
            except LaunchError as error:
                errors[name] = str(error)

        threads.append(threading.Thread(target=target, name=name))
        threads[-1].start()

    def wait_for_jobs(*, running: tuple[int, ...], waiting: tuple[int, ...]) -> None:
        tasks = sum(running)
        wait_for(lambda: uses(sparkhvd.slots(spark)) == (4, running, waiting, tasks))

    threads: list[threading.Thread] = []
    try:
        start("first", 3)
        wait_for((tmp_path / "first runs").exists)
        start("large", 4, launcher=launcher)
        wait_for_jobs(running=(3,), waiting=(4,))
        start("small", 1)
        wait_for_jobs(running=(3,), waiting=(4, 1))
        start("urgent", 2, priority=1)
        wait_for_jobs(running=(3,), waiting=(2, 4, 1))
        start("elastic", 1, sparkhvd.run_elastic, max_num_proc=3)
        wait_for_jobs(running=(3,), waiting=(2, 4, 1, 3))
        start("unwanted", 4, priority=1)
        wait_for_jobs(running=(3,), waiting=(2, 4, 4, 1, 3))
        (unwanted,) = [job for job in sparkhvd.slots(spark).waiting if "unwanted" in job.tags]
        assert str(unwanted) == "WaitingJob(ranks=4, priority=1, tags=frozenset({'unwanted'}))"
        assert unwanted.cancel()
        wait_for(lambda: errors == {"unwanted": "A job of 4 ranks was cancelled while it waited for its slots."})
        wait_for_jobs(running=(3,), waiting=(2, 4, 1, 3))
        assert not unwanted.cancel()
        began, clock = time.monotonic(), time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: clock() + 1000)  # later than the start_timeout of all
        assert time.monotonic() - began > 1000
        for name, running, waiting in [
            ("first", (2,), (4, 1, 3)),
            ("urgent", (4,), (1, 3)),
            ("large", (1, 3), ()),
            ("small", (3,), ()),
            ("elastic", (), ()),
        ]:
            (tmp_path / name).touch()
            wait_for_jobs(running=running, waiting=waiting)
    finally:
        for name in names:
            (tmp_path / name).touch()
        for thread in threads:
            thread.join()
    ranks = sizes.pop("elastic")
    assert 1 <= len(ranks) <= 3
    assert sizes == {"first": [3] * 3, "large": [4] * 4, "small": [1], "urgent": [2] * 2}


def test_a_job_waits_for_the_barrier_stage_of_another_program(spark, tmp_path):
    def until_touched(batches):
        yield from batches
        while not (tmp_path / "other").exists():
            time.sleep(0.05)

    acts = {
        "other": lambda: spark.range(2, numPartitions=2).mapInArrow(until_touched, "id long", barrier=True).collect(),
        "first": lambda: sparkhvd.run(hold, (str(tmp_path / "first"),), num_proc=2, spark=spark),
        "second": lambda: sparkhvd.run(hold, (str(tmp_path / "second"),), num_proc=2, spark=spark),
    }
    threads = [threading.Thread(target=act, name=name) for name, act in acts.items()]
    try:
        for thread, use in zip(threads, [((), (), 2), ((2,), (), 4), ((2,), (2,), 4)], strict=True):
            thread.start()
            wait_for(lambda: uses(sparkhvd.slots(spark)) == (4, *use))  # noqa: B023
        assert not (tmp_path / "second runs").exists()
        (tmp_path / "other").touch()
        wait_for(lambda: sparkhvd.slots(spark) == SlotUse(4, (2, 2), (), 4))
    finally:
        for thread in filter(threading.Thread.is_alive, threads):
            (tmp_path / thread.name).touch()
            thread.join()


def test_ctrl_c_ends_the_ranks_and_is_raised(spark, tmp_path):
    pids = [tmp_path / "0", tmp_path / "1"]

    def interrupt() -> None:
        wait_for(lambda: all(path.exists() and path.read_text() for path in pids))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            sparkhvd.run(write_pid_and_stay, (str(tmp_path),), num_proc=2)
    finally:
        interrupter.join()
        signal.signal(signal.SIGINT, previous)
    assert len(traceback.extract_tb(caught.value.__traceback__)) == 2  # the caller's line and run
    wait_for(lambda: not any(psutil.pid_exists(int(path.read_text())) for path in pids))


# Not ``interruptTag``: in a classic session, Spark itself applies it only to jobs of the calling thread.
WAYS_TO_CANCEL = {
    "tag": (
        lambda spark: spark.sparkContext.addJobTag("mine"),
        lambda spark: spark.sparkContext.cancelJobsWithTag("mine"),
    ),
    "group": (
        lambda spark: spark.sparkContext.setJobGroup("mine", "a job of mine"),
        lambda spark: spark.sparkContext.cancelJobGroup("mine"),
    ),
    "session": (lambda spark: spark.addTag("mine"), lambda spark: spark.interruptAll()),
}


@pytest.mark.parametrize(
    ("launcher", "way"),
    [
        *(("barrier", way) for way in WAYS_TO_CANCEL),
        ("mpi", "tag"),
        pytest.param("mpi", "session", marks=pytest.mark.soak),
    ],
)
def test_cancelling_the_callers_jobs_cancels_the_job(spark, launcher, way, tmp_path):
    if way == "session" and spark.version < "4":
        pytest.skip("sessions of Spark 3.5 have tags only through Spark Connect")
    mark, cancel = WAYS_TO_CANCEL[way]
    pids = [tmp_path / "0", tmp_path / "1"]
    errors: list[Exception] = []

    def run() -> None:
        mark(spark)
        try:
            sparkhvd.run(write_pid_and_stay, (str(tmp_path),), num_proc=2, spark=spark, launcher=launcher)
        except LaunchError as error:
            errors.append(error)

    running = threading.Thread(target=run, name="tagged")
    running.start()
    wait_for(lambda: all(path.exists() and path.read_text() for path in pids))
    cancel(spark)
    running.join(60)
    assert not running.is_alive()
    assert re.match(r"Spark aborted the job: it was cancelled \(Job \d+ cancelled [^\n]*\)\.\n", str(errors[0]))
    wait_for(lambda: not any(psutil.pid_exists(int(path.read_text())) for path in pids))


def test_invalid_arguments_are_refused(spark):
    with pytest.raises(ConfigError, match="num_proc must be an integer of at least 1, got 0"):
        sparkhvd.run(place, num_proc=0)
    with pytest.raises(ConfigError, match=r"env\['A'\] has a value of type int"):
        sparkhvd.run(place, env={"A": 1})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="start_timeout must be a positive number of seconds, got 0"):
        sparkhvd.run(place, start_timeout=0)


def test_a_thread_uses_the_session_that_was_created_last(spark):
    job = in_background(lambda: sparkhvd.run(place, num_proc=1, verbose=0), "thread-without-session")
    assert [values["SPARKHVD_RANK"] for values in job.result(60)] == ["0"]


def test_a_missing_session_is_a_clear_error(monkeypatch):
    monkeypatch.setattr(SparkSession, "getActiveSession", classmethod(lambda cls: None))
    monkeypatch.setattr(SparkSession, "_instantiatedSession", None)
    with pytest.raises(LaunchError, match=r"no active SparkSession.*pass spark="):
        sparkhvd.run(place, num_proc=1)


def test_tasks_in_a_python_without_sparkhvd_are_refused_with_both_pythons(spark, monkeypatch, tmp_path):
    other = tmp_path / "python3"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # sees no installed packages
    other.chmod(0o755)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(other))
    words = rf"tasks run in {other}, which cannot import sparkhvd; this driver runs in \S+python\S*\. .*PYSPARK_PYTHON="
    with pytest.raises(LaunchError, match=words):
        sparkhvd.run(place, num_proc=2)
    assert re.search(words, str(sparkhvd.preflight(spark, 2, stdout=io.StringIO())))
