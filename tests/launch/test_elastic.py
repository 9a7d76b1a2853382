"""Elastic jobs on this machine, whose ranks are killed, raise, hang and join."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import sparkhvd
from sparkhvd.driver.elastic import policy
from sparkhvd.errors import (
    ConfigError,
    DataError,
    LaunchError,
    MismatchError,
    RankFailedError,
    StartTimeoutError,
)
from tests.launch import elastic_frameworks as frameworks
from tests.launch import elastic_generations as generations
from tests.launch import elastic_training as training

pytestmark = pytest.mark.usefixtures("warm_ranks")  # other tests of elastic jobs start each rank anew

FAST = {"launcher": "local", "start_timeout": 60, "elastic_timeout": 30, "cooldown_range": (0.5, 5), "verbose": 0}


def steps(folder: Path) -> list[tuple[int, int, int, float, int]]:
    """Return step, rank, size, time and process of all steps, ordered by time."""
    taken = []
    for path in folder.glob("log-*"):
        for line in path.read_text().splitlines():
            kind, *numbers = line.split()
            if kind == "step":
                step, rank, size, at = numbers
                taken.append((int(step), int(rank), int(size), float(at), int(path.name.removeprefix("log-"))))
    return sorted(taken, key=lambda one: one[3])


def end_times(folder: Path) -> list[float]:
    """Return the times at which ranks ended themselves."""
    lines = [line for path in folder.glob("log-*") for line in path.read_text().splitlines()]
    return [float(line.split()[1]) for line in lines if line.startswith("end")]


def test_a_job_without_changes_returns_the_results_in_rank_order(tmp_path):
    results = sparkhvd.run_elastic(training.train, (5, str(tmp_path)), num_proc=3, **FAST)
    assert [(result[0], result[1], result[2], result[3]) for result in results] == [
        (5, 15.0, rank, 3) for rank in range(3)
    ]


@pytest.mark.parametrize(("end", "lost"), [("kill", 1), ("raise", 1), ("exit", 0), ("exit 0", 1)])
def test_survivors_keep_their_process_and_lose_no_commit_and_a_new_rank_joins(tmp_path, end, lost):
    events = {(5, lost, 2): end}
    results = sparkhvd.run_elastic(
        training.train, (10, str(tmp_path), events, (2, 1, 2)), num_proc=2, min_num_proc=1, **FAST
    )
    done = steps(tmp_path)
    (survivor,) = {one[4] for one in done if one[2] == 1}
    assert [result[2:4] for result in results] == [(0, 2), (1, 2)]
    assert results[0][4] == survivor, "the survivor has become rank 0"
    mine = [one[0] for one in done if one[4] == survivor]
    assert mine == list(range(1, results[0][0] + 1)), "every step ran once, in one process"
    assert results[0][0] == results[1][0]
    assert results[0][1] == results[1][1] == sum(range(1, results[0][0] + 1))
    assert results[0][5] == [1, 2], "the reset callbacks ran once per change"
    alone = min(one[3] for one in done if one[2] == 1)
    assert alone - min(end_times(tmp_path)) < 5.0


@pytest.fixture
def without_ssh(tmp_path, monkeypatch):
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "env").symlink_to("/usr/bin/env")
    monkeypatch.setenv("PATH", str(programs))


@pytest.mark.usefixtures("without_ssh")
def test_hosts_that_are_this_machine_need_no_ssh(tmp_path):
    results = sparkhvd.run_elastic(
        training.train,
        (10, str(tmp_path), {(5, 1, 3): "kill"}, (3, 2, 3)),
        num_proc=3,
        min_num_proc=1,
        hosts="localhost:1,127.0.0.1:2",
        **FAST | {"launcher": "auto"},
    )
    assert [result[2:4] for result in results] == [(0, 3), (1, 3), (2, 3)]
    assert {result[:2] for result in results} == {(results[0][0], float(sum(range(1, results[0][0] + 1))))}
    assert results[0][5] == [2, 3]


@pytest.mark.usefixtures("without_ssh")
def test_without_ssh_the_error_names_the_host_that_needs_it():
    options = FAST | {"launcher": "auto", "cooldown_range": (0.1, 0.1)}
    with pytest.raises(RankFailedError, match=r"Rank 0 on host elsewhere did not start: .*No such file.*'ssh'"):
        sparkhvd.run_elastic(os.getpid, num_proc=1, hosts="elsewhere:1", **options)


def test_two_ranks_are_lost_at_once(tmp_path):
    events = {(3, 0, 3): "kill", (3, 2, 3): "kill"}
    results = sparkhvd.run_elastic(
        training.train, (8, str(tmp_path), events, (3, 1, 3)), num_proc=3, min_num_proc=1, **FAST
    )
    assert [result[2:4] for result in results] == [(0, 3), (1, 3), (2, 3)]
    assert {result[:2] for result in results} == {(results[0][0], float(sum(range(1, results[0][0] + 1))))}


def test_too_few_ranks_wait_for_elastic_timeout_and_the_error_lists_the_reasons(tmp_path):
    begin = time.monotonic()
    options = FAST | {"elastic_timeout": 1.5, "cooldown_range": (60, 60)}
    with pytest.raises(RankFailedError) as caught:
        sparkhvd.run_elastic(training.train, (99, str(tmp_path), {(3, 1, 2): "raise"}), num_proc=2, **options)
    message = str(caught.value)
    assert "Only 1 of at least 2 ranks were ready within elastic_timeout=1.5 s." in message
    assert "- Rank 1 on host" in message
    assert "raised ValueError: no luck" in message
    assert "in fail" in caught.value.remote_traceback
    assert 1.5 < time.monotonic() - begin < 100
    assert not any(psutil.pid_exists(one[4]) for one in steps(tmp_path))


def test_the_job_waits_for_a_replacement_when_too_few_ranks_are_left(tmp_path):
    results = sparkhvd.run_elastic(training.train, (8, str(tmp_path), {(3, 1, 2): "kill"}), num_proc=2, **FAST)
    assert [result[:4] for result in results] == [(8, 36.0, 0, 2), (8, 36.0, 1, 2)]
    assert {one[2] for one in steps(tmp_path)} == {2}


def test_the_loss_of_all_ranks_ends_the_job_at_once(tmp_path):
    events = {(3, 0, 2): "raise", (3, 1, 2): "raise"}
    with pytest.raises(RankFailedError, match="All ranks that held the state of the training were lost") as caught:
        sparkhvd.run_elastic(training.train, (9, str(tmp_path), events), num_proc=2, min_num_proc=1, **FAST)
    assert "ValueError: no luck" in str(caught.value)


def test_the_error_of_a_job_is_that_of_its_rank_and_not_of_workers_that_could_not_join_earlier(tmp_path):
    options = FAST | {"num_proc": 1, "max_num_proc": 2, "cooldown_range": (0.1, 0.1)}
    options["discovery"] = lambda: {"localhost": 2 if (tmp_path / "start-0").exists() else 1}
    with pytest.raises(RankFailedError, match=r"All ranks that held the state [\s\S]*- .* a broken host") as caught:
        sparkhvd.run_elastic(training.lose_the_rank_after_failed_starts, (str(tmp_path),), **options)
    assert re.search(r"\n\nRank 0 on host \S+ was killed by signal 9", str(caught.value))


def test_reset_limit_ends_the_job(tmp_path):
    with pytest.raises(RankFailedError, match=r"(?s)The job has reached reset_limit=0\..*was killed by signal 9"):
        sparkhvd.run_elastic(
            training.train, (9, str(tmp_path), {(3, 1, 2): "kill"}), num_proc=2, min_num_proc=1, reset_limit=0, **FAST
        )


def test_a_flapping_rank_is_retried_until_reset_limit(tmp_path):
    with pytest.raises(RankFailedError, match=r"reset_limit=2") as caught:
        sparkhvd.run_elastic(
            training.always_fail_on_the_last_rank,
            (str(tmp_path),),
            num_proc=2,
            min_num_proc=1,
            reset_limit=2,
            **FAST,
        )
    assert str(caught.value).count("raised ValueError: no luck at step") >= 2


def test_a_job_that_swallows_an_error_fails(tmp_path):
    assert sparkhvd.run_elastic(training.swallow, (str(tmp_path),), num_proc=2, min_num_proc=1, **FAST)[0] == 10


def test_a_job_fails_although_no_other_rank_notices_the_loss_of_a_rank():
    options = FAST | {"cooldown_range": (0.05, 0.05)}
    with pytest.raises(RankFailedError, match="was killed by signal 9"):
        sparkhvd.run_elastic(training.lose_a_rank_without_a_loop, num_proc=2, **options)


def test_a_second_training_of_a_function_runs_with_constant_ranks():
    assert sparkhvd.run_elastic(training.train_twice, ("",), num_proc=2, min_num_proc=1, **FAST) == [(3, 3)] * 2
    for fault, why in [("error", "no luck"), ("init", "it called hvd.init() again")]:
        with pytest.raises(LaunchError, match=rf"left generation 1: {re.escape(why)} \(after the training had ended\)"):
            sparkhvd.run_elastic(training.train_twice, (fault,), num_proc=2, min_num_proc=1, **FAST)


def test_ranks_that_disagree_end_the_job_without_a_retry(tmp_path):
    with pytest.raises(RankFailedError, match="MismatchError"):
        sparkhvd.run_elastic(training.mismatch, (str(tmp_path),), num_proc=2, min_num_proc=1, **FAST)
    assert len(list(tmp_path.glob("call-0-*"))) == 1
    assert issubclass(MismatchError, Exception)


def test_an_error_that_returns_every_time_ends_the_job(tmp_path):
    with pytest.raises(LaunchError, match="3 times in a row without progress") as caught:
        sparkhvd.run_elastic(training.fail_every_time, (str(tmp_path),), num_proc=2, min_num_proc=1, **FAST)
    assert "the network is down" in str(caught.value)
    assert len(list(tmp_path.glob("call-*"))) == 4


@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_an_error_that_returns_at_the_same_step_ends_the_job(tmp_path, ranks):
    options = FAST | {"cooldown_range": (0.1, 0.1), "max_restarts": 9}
    with pytest.raises(RankFailedError) as caught:
        sparkhvd.run_elastic(
            training.fail_at_a_step, (str(tmp_path), ranks, ValueError("no luck")), num_proc=2, **options
        )
    first, *rest = str(caught.value).splitlines()
    assert re.match(
        rf"Rank {caught.value.rank} on host .* raised ValueError: no luck \(in fn, after init\(\)\)\. Ranks have "
        "failed like this 3 times without a new commit in between",
        first,
    )
    assert caught.value.rank in ranks
    assert "in fail_at_a_step" in caught.value.remote_traceback
    assert caught.value.remote_traceback in "\n".join([*rest, ""])
    assert len(end_times(tmp_path)) == 3 * len(ranks)


def test_an_error_of_the_input_ends_the_job_at_its_first_report(tmp_path):
    options = FAST | {"max_restarts": 9}
    arguments = (str(tmp_path), (1,), DataError("no rows today"))
    with pytest.raises(
        RankFailedError, match=r"^Rank 1 .* raised DataError: no rows today .* Every attempt would raise"
    ):
        sparkhvd.run_elastic(training.fail_at_a_step, arguments, num_proc=2, **options)
    assert len(end_times(tmp_path)) == 1


def test_a_state_that_cannot_be_pickled_ends_the_job():
    options = FAST | {"cooldown_range": (0.1, 0.1)}
    with pytest.raises(RankFailedError, match=r"^Rank 0 .*cannot pickle '_thread.lock' object.* failed like this 3 "):
        sparkhvd.run_elastic(training.keep_a_lock_in_the_state, num_proc=2, min_num_proc=1, **options)


def test_an_error_before_init_that_returns_every_time_ends_the_job_long_before_start_timeout():
    def use_a_name_that_does_not_exist():
        return this_name_does_not_exist  # noqa: F821

    options = FAST | {"cooldown_range": (0.1, 0.1), "start_timeout": 3600}
    with pytest.raises(RankFailedError, match="All of the first 6 workers failed before they reached") as caught:
        sparkhvd.run_elastic(use_a_name_that_does_not_exist, num_proc=2, min_num_proc=1, **options)
    assert "name 'this_name_does_not_exist' is not defined" in str(caught.value)


def test_a_new_worker_that_hangs_at_its_start_is_replaced(tmp_path):
    options = FAST | {"start_timeout": 5}
    results = sparkhvd.run_elastic(
        training.hang_at_the_start, (str(tmp_path), 2), num_proc=2, min_num_proc=1, **options
    )
    assert [result[2:4] for result in results] == [(0, 2), (1, 2)]


def test_first_workers_that_hang_are_named(tmp_path):
    with pytest.raises(StartTimeoutError, match=r"start_timeout=1 s\..*have not reached hvd\.init\(\): 0 on host"):
        sparkhvd.run_elastic(training.hang_at_the_start, (str(tmp_path), 0), num_proc=1, **FAST | {"start_timeout": 1})


def test_a_rank_that_hangs_in_the_training_is_ended_and_the_others_continue(tmp_path):
    results = sparkhvd.run_elastic(
        training.hang_once_in_training,
        (str(tmp_path),),
        num_proc=2,
        min_num_proc=1,
        env={"SPARKHVD_COLLECTIVE_TIMEOUT": "1"},
        **FAST | {"elastic_timeout": 2, "cooldown_range": (60, 60)},
    )
    assert results == [5]


def test_ranks_join_and_leave_with_the_slots(tmp_path):
    def discover() -> dict[str, int]:
        done = steps(tmp_path)
        if not done or any(one[2] == 3 for one in done):
            return {"localhost": 2}
        return {"localhost": 2, "127.0.0.1": 1}

    results = sparkhvd.run_elastic(
        training.train, (9, str(tmp_path), None, (2, 3, 2)), num_proc=2, min_num_proc=1, discovery=discover, **FAST
    )
    assert [result[2:4] for result in results] == [(0, 2), (1, 2)]
    assert results[0][5] == [3, 2]
    assert {result[:2] for result in results} == {(results[0][0], float(sum(range(1, results[0][0] + 1))))}
    assert {one[4] for one in steps(tmp_path) if one[2] == 2} == {result[4] for result in results}


def test_the_state_moves_to_another_host(tmp_path):
    def discover() -> dict[str, int]:
        return {"127.0.0.1": 1} if steps(tmp_path) else {"localhost": 1}

    results = sparkhvd.run_elastic(
        training.train, (9, str(tmp_path), None, (1, 2, 1)), num_proc=1, discovery=discover, **FAST
    )
    processes = list(dict.fromkeys(one[4] for one in steps(tmp_path)))
    assert len(processes) == 2
    assert results[0][4] == processes[1]
    assert results[0][1] == sum(range(1, results[0][0] + 1)), "no step was lost"


def test_samples_are_processed_exactly_once_per_epoch_when_ranks_change(tmp_path):
    results = sparkhvd.run_elastic(training.sample, (str(tmp_path), 120, 4, 2), num_proc=3, min_num_proc=2, **FAST)
    seen = results[0][0]
    counts = Counter(seen)
    assert set(counts) == {(epoch, index) for epoch in range(2) for index in range(120)}
    assert sum(counts.values()) - len(counts) <= 2 * 2, "only the ends of epochs are padded"


def test_a_user_defined_state_survives_the_loss_of_rank_0(tmp_path):
    results = sparkhvd.run_elastic(training.train_own_state, (str(tmp_path),), num_proc=2, min_num_proc=1, **FAST)
    assert results[0] == [10.0, 20.0]


def test_a_new_rank_continues_alone_if_all_others_are_lost_as_soon_as_it_has_the_state(tmp_path):
    results = sparkhvd.run_elastic(
        training.lose_the_only_other_rank_after_a_sync, (str(tmp_path),), num_proc=2, min_num_proc=1, **FAST
    )
    assert (tmp_path / "handed over").exists()
    handed_over = int((tmp_path / "synced-1").read_text())
    assert handed_over >= 3
    assert results[0] == max(9, handed_over), "it took over the state, and ran only the remaining steps"


def test_a_job_that_waits_for_slots_reports_this_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(policy, "SHORTAGE_SECONDS", 0.5)
    options = FAST | {"start_timeout": 4, "discovery": lambda: {"localhost": 1}}
    with pytest.raises(StartTimeoutError, match="Only 1 of at least 2 ranks"):
        sparkhvd.run_elastic(training.train, (1, str(tmp_path)), num_proc=2, **options)
    printed = [
        text for text in caplog.messages if text.startswith("The job waits for slots: 1 of at least 2 ranks are")
    ]
    assert len(printed) == 1


def test_a_job_without_a_rank_that_can_start_ends_in_a_start_timeout(tmp_path):
    with pytest.raises(StartTimeoutError, match=r"Only 0 of at least 1 ranks(?s:.)*elsewhere is not this machine"):
        sparkhvd.run_elastic(
            training.train,
            (1, str(tmp_path)),
            num_proc=1,
            discovery=lambda: {"elsewhere": 1},
            **FAST | {"start_timeout": 1, "cooldown_range": (60, 60)},
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"launcher": "mpi"}, "launcher='mpi' cannot start elastic jobs"),
        ({"launcher": "ssh"}, "launcher='ssh' needs either hosts, for example hosts='host1:2,host2:2', or discovery"),
        ({"launcher": "ssh", "hosts": "a:2", "discovery": dict}, "launcher='ssh' needs either hosts"),
        ({"launcher": "auto", "hosts": "a:2:3"}, "'a:2:3' is not a valid host"),
        ({"launcher": "auto", "discovery": dict}, "discovery requires launcher='local', 'ssh' or 'ray'"),
        ({"launcher": "ssh", "hosts": "a:2", "spark": object()}, "spark has no effect with launcher='ssh'"),
        ({"hosts": "a:2"}, "hosts requires launcher='ssh', got launcher='local'"),
        ({"ssh_port": 22}, "ssh_port and ssh_identity_file require launcher='ssh', got 'local'"),
        ({"gpus_per_task": 1}, "gpus_per_task and cpus_per_task of elastic jobs require launcher='ray', got 'local'"),
        ({"num_proc": None}, "needs a number of ranks"),
        ({"num_proc": 0}, "num_proc must be an integer of at least 1, got 0"),
        ({"min_num_proc": 3}, "must not decrease in this order"),
        ({"reset_limit": -1}, "reset_limit must be"),
        ({"max_same_errors": 0}, "max_same_errors must be an integer of at least 1, got 0"),
        ({"elastic_timeout": 0}, "elastic_timeout must be a positive number"),
        ({"cooldown_range": (5, 1)}, "cooldown_range"),
        ({"discovery": "/does/not/exist"}, "not an executable file"),
    ],
)
def test_arguments_that_cannot_work_are_rejected(arguments, message):
    with pytest.raises(ConfigError, match=message):
        sparkhvd.run_elastic(os.getpid, **{"num_proc": 2, "launcher": "local"} | arguments)


@pytest.mark.parametrize("name", ["num_proc", "max_num_proc"])
def test_more_ranks_than_this_process_may_have_open_files_are_refused_at_once(name):
    with pytest.raises(ConfigError, match=rf"^{name}=1,099,511,627,776 with launcher='local' needs .*ulimit -Hn"):
        sparkhvd.run_elastic(os.getpid, **{"num_proc": 2, name: 2**40}, launcher="local")


def test_a_tensorflow_function_outlives_the_loss_of_a_rank_and_averages_over_the_remaining_ranks(tmp_path):
    results = sparkhvd.run_elastic(
        frameworks.train_tensorflow,
        (str(tmp_path), 12),
        num_proc=2,
        min_num_proc=1,
        env={"KERAS_BACKEND": "tensorflow"},
        preload=("keras",),
        **FAST,
    )
    table, bias = np.zeros((4, 2)), 0.0
    for step in range(12):
        ids = frameworks.ids_of_step(step)
        slopes = 2 * (table[ids] + bias - 1)
        np.subtract.at(table, ids, 0.1 * slopes)
        bias -= 0.01 * slopes.sum()
    assert (tmp_path / "killed").exists()
    for found, found_bias in results:
        np.testing.assert_allclose(found, table, rtol=1e-4)
        assert found_bias == pytest.approx(bias, rel=1e-4)


@pytest.mark.parametrize("backend", ["tensorflow", pytest.param("torch", marks=pytest.mark.soak)])
def test_a_keras_training_that_loses_a_rank_ends_with_the_weights_of_an_undisturbed_one(tmp_path, backend):
    results = sparkhvd.run_elastic(
        frameworks.train_keras,
        (str(tmp_path),),
        num_proc=2,
        min_num_proc=1,
        env={"KERAS_BACKEND": backend},
        preload=("keras", *(["torch._dynamo"] if backend == "torch" else [])),
        **FAST,
    )
    model, optimizer = frameworks.keras_model()
    model.compile(optimizer, "mse")
    for epoch in range(frameworks.KERAS_EPOCHS):
        model.fit(*frameworks.keras_rows(epoch), frameworks.KERAS_BATCH, shuffle=False, verbose=0)
    assert (tmp_path / "killed").exists()
    (_, starts), *_ = results  # of the survivor; a new rank may join only at the end
    assert starts[:3] == [(0, 0), (1, 0), (1, 2)], "training continued from the last commit, within the epoch"
    for weights, _ in results:
        for found, expected in zip(weights, model.get_weights(), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_a_torch_training_that_loses_a_rank_ends_with_the_weights_of_an_undisturbed_one(tmp_path):
    results = sparkhvd.run_elastic(
        frameworks.train_torch, (str(tmp_path), 12, 8), num_proc=2, min_num_proc=1, preload=("torch._dynamo",), **FAST
    )
    steps_done, weights = results[0]
    model = torch.nn.Linear(4, 1)
    model.load_state_dict(torch.load(tmp_path / "first.pt"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(steps_done):
        features, labels = frameworks.rows_of_step(step, 8)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(features), labels).backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        for _, found in results:
            assert torch.allclose(torch.from_numpy(found[name]), value, atol=1e-5)
    assert set(weights) == {"weight", "bias"}
    assert len(results) == 1


def test_a_model_whose_state_dict_has_copies_is_synchronized():
    options = FAST | {"preload": ("torch._dynamo",)}
    weights = sparkhvd.run_elastic(frameworks.synchronize_a_model_whose_state_dict_holds_copies, num_proc=2, **options)
    assert weights == [5.0, 5.0]


@pytest.mark.parametrize(
    ("how", "framework"),
    [
        ("kill", "numpy"),
        ("reset", "torch"),
        pytest.param("reset", "keras", marks=pytest.mark.soak),
        pytest.param("kill", "torch", marks=pytest.mark.soak),
    ],
)
def test_neither_the_driver_nor_a_surviving_rank_grows_with_the_generations(tmp_path, how, framework):
    samples, keys = generations.changing(tmp_path, (14, 22), how, framework, launcher="local")
    early, late = samples
    assert 22 <= late.generation <= 23
    for of in ("rank", "parent", "driver"):
        first, last = getattr(early, of), getattr(late, of)
        assert (last.descriptors, last.threads) == (first.descriptors, first.threads), f"{of}: {first}, then {last}"
        assert last.memory - first.memory < 16 * generations.MEGABYTE, f"{of}: {first}, then {last}"
    assert keys <= 8, "the server keeps the keys of the last generation only"
