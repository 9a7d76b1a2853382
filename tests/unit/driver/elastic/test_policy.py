from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import pytest

from sparkhvd.driver.elastic.policy import (
    JOIN_SECONDS,
    MAX_FAILED_STARTS,
    MAX_FRUITLESS,
    MAX_STATELESS,
    SETTLE_SECONDS,
    SHORTAGE_SECONDS,
    Abandon,
    Done,
    Fail,
    Form,
    LeaveOut,
    Limits,
    Member,
    Notify,
    Phase,
    Start,
    Stop,
    View,
    decide,
    shortage,
)

LIMITS = Limits(num_proc=2, min_size=1, max_size=3, start_timeout=60.0, elastic_timeout=30.0)


def member(worker: int, phase: Phase, **fields) -> Member:
    return Member(**{"worker": worker, "host": "a", "phase": phase, "since": 0.0} | fields)


def waiting(worker: int, commit: int = -1, **fields) -> Member:
    return member(worker, Phase.WAITING, commit=commit, **fields)


def running(worker: int, rank: int, commit: int = 1, **fields) -> Member:
    return member(worker, Phase.RUNNING, **{"generation": 1, "rank": rank, "commit": commit} | fields)


def starting_job(*members: Member, slots: int = 3, **fields) -> View:
    return View(**{"generation": 0, "members": members, "capacity": {"a": slots}} | fields)


def running_job(*members: Member, slots: int = 3, **fields) -> View:
    defaults = {"generation": 1, "idle": False, "gathered_since": None, "stateful": True}
    return View(**defaults | {"members": members, "capacity": {"a": slots}} | fields)


def broken_job(*members: Member, slots: int = 3, **fields) -> View:
    return running_job(*members, slots=slots, **{"idle": True, "gathered_since": 0.0} | fields)


def test_workers_start_on_free_slots_up_to_the_largest_size():
    assert decide(starting_job(slots=2), LIMITS, 0.0) == [Start("a")] * 2
    assert decide(starting_job(slots=9), LIMITS, 0.0) == [Start("a")] * 3
    assert decide(starting_job(member(0, Phase.STARTING), slots=2), LIMITS, 0.0) == [Start("a")]


def test_workers_start_on_the_hosts_with_the_most_free_slots_first():
    view = starting_job(capacity={"a": 1, "b": 4})
    assert decide(view, dataclasses.replace(LIMITS, max_size=2), 0.0) == [Start("b"), Start("b")]


def test_no_worker_starts_on_a_host_that_cools_down():
    assert decide(starting_job(cooling=frozenset({"a"})), LIMITS, 0.0) == []


def test_the_first_generation_waits_only_a_short_time_for_workers_that_are_starting():
    view = starting_job(waiting(0), waiting(1, since=1.0), member(2, Phase.STARTING))
    assert decide(view, LIMITS, 1.0 + JOIN_SECONDS / 2) == []
    assert decide(view, LIMITS, 1.0 + JOIN_SECONDS) == [Form((0, 1))]


def test_the_first_generation_forms_at_once_when_all_workers_wait():
    assert decide(starting_job(waiting(1), waiting(0), waiting(2)), LIMITS, 0.0) == [Form((0, 1, 2))]


def test_a_job_starts_with_fewer_ranks_than_num_proc_when_no_more_are_coming():
    assert decide(starting_job(waiting(0), slots=1), LIMITS, SETTLE_SECONDS - 1) == []
    assert decide(starting_job(waiting(0), slots=1), LIMITS, SETTLE_SECONDS) == [Form((0,))]


def test_a_job_below_its_smallest_size_fails_after_start_timeout_with_the_reasons():
    limits = dataclasses.replace(LIMITS, min_size=2)
    view = starting_job(waiting(0), slots=1, reasons=("Rank 1 was killed",))
    assert decide(view, limits, 59.9) == []
    (failure,) = decide(view, limits, 60.0)
    assert isinstance(failure, Fail)
    assert not failure.started
    assert failure.why == (
        "Only 1 of at least 2 ranks were ready within start_timeout=60 s. Offered slots: a:1. What happened before:\n"
        "- Rank 1 was killed"
    )


def test_a_job_reports_that_it_waits_for_slots_but_not_while_its_workers_start():
    limits = dataclasses.replace(LIMITS, min_size=2)
    late = SHORTAGE_SECONDS + 1
    assert shortage(starting_job(waiting(0), slots=1), limits, late) == (
        "The job waits for slots: 1 of at least 2 ranks are ready. Offered slots: a:1. It fails after "
        "start_timeout=60 s."
    )
    assert shortage(broken_job(slots=0, capacity={}), limits, late) == (
        "The job waits for slots: 0 of at least 2 ranks are ready. Offered slots: none. It fails after "
        "elastic_timeout=30 s."
    )
    assert not shortage(starting_job(waiting(0), slots=1), limits, SHORTAGE_SECONDS - 1)
    assert not shortage(starting_job(waiting(0), member(1, Phase.STARTING)), limits, late)
    assert not shortage(starting_job(waiting(0), cooling=frozenset({"a"})), limits, late)
    assert not shortage(running_job(running(0, 0)), limits, late)


def test_survivors_form_a_generation_at_once_and_the_survivor_with_the_newest_commit_is_rank_0():
    arrived = (waiting(4, 7, generation=1, rank=0), waiting(5, 8, generation=1, rank=1), waiting(9))
    assert decide(broken_job(*arrived), LIMITS, 0.0) == [Form((5, 4, 9))]


def test_survivors_keep_their_order_among_equal_commits():
    arrived = (waiting(4, 7, generation=1, rank=2), waiting(5, 7, generation=1, rank=1))
    assert decide(broken_job(*arrived), LIMITS, 0.0) == [Form((5, 4))]


def disconnected_job(hosts: str, *pairs: tuple[int, int], commits: Sequence[int] = (), **fields) -> View:
    """Return a job whose workers, one per letter of ``hosts``, wait; the ``pairs`` of workers could not connect."""
    members = (
        waiting(worker, commits[worker] if commits else 5, host=host, generation=1, rank=worker)
        for worker, host in enumerate(hosts)
    )
    return broken_job(*members, capacity=Counter(hosts), unreachable=frozenset(pairs), **fields)


def workers_left_out(view: View, limits: Limits = LIMITS) -> tuple[int, ...]:
    """Return the workers that the policy leaves out first."""
    decisions = decide(view, limits, 0.0)
    return decisions[0].workers if isinstance(decisions[0], LeaveOut) else ()


def test_the_job_continues_without_one_of_two_hosts_that_cannot_reach_each_other():
    why = (
        "Hosts reach the driver but not each other: a and b. The job continues without b (1 rank) and tries again "
        "after a pause"
    )
    assert decide(disconnected_job("ab", (1, 0)), LIMITS, 0.0) == [LeaveOut((1,), why)]
    after = broken_job(waiting(0, 5, generation=1, rank=0), capacity={"a": 1, "b": 1}, unreachable=frozenset({(1, 0)}))
    assert decide(after, LIMITS, 0.0) == [Form((0,))], "a worker that has ended does not count"


def test_as_few_ranks_as_possible_are_left_out():
    assert workers_left_out(disconnected_job("abb", (1, 0))) == (0,)
    assert workers_left_out(disconnected_job("abc", (1, 0), (2, 0))) == (0,), (
        "the host that no other host reaches, although it has rank 0"
    )
    assert workers_left_out(disconnected_job("abbcc", (1, 0), (3, 0))) == (0,)
    assert workers_left_out(disconnected_job("abcd", (1, 0), (3, 2))) == (1, 2), (
        "two separate pairs, in the order of the names"
    )
    chain = disconnected_job("abcde", (1, 0), (2, 1), (3, 2), (4, 3))
    assert workers_left_out(chain) == (1, 3)
    star = disconnected_job("aaaabcddd", (4, 0), (5, 0), (6, 0))
    assert workers_left_out(star) == (0, 1, 2, 3), "four ranks instead of five"


def test_the_smaller_of_two_disconnected_groups_of_hosts_is_left_out_quickly():
    hosts = "".join(map(chr, range(ord("A"), ord("A") + 50)))
    pairs = [(first, second) for first in range(30) for second in range(30, 50)]
    assert workers_left_out(disconnected_job(hosts, *pairs)) == tuple(range(30, 50))
    large = "a" * 40 + hosts[:30]
    assert workers_left_out(disconnected_job(large, *((0, 40 + index) for index in range(30)))) == tuple(range(40, 70))


def test_a_host_with_the_newest_commit_is_not_left_out():
    assert workers_left_out(disconnected_job("ab", (1, 0), commits=[4, 5])) == (0,)
    assert workers_left_out(disconnected_job("abb", (1, 0), commits=[5, -1, -1])) == (1, 2), (
        "although it has fewer ranks"
    )
    returned = disconnected_job("cab", (2, 1), commits=[5, 5, -1])
    assert workers_left_out(returned) == (2,), "the new worker of a host that was left out before"
    assert workers_left_out(disconnected_job("cba", (2, 1), commits=[5, -1, 5])) == (1,)


def test_hosts_are_not_left_out_if_too_few_ranks_would_be_left():
    limits = dataclasses.replace(LIMITS, min_size=2)
    (formed,) = decide(disconnected_job("ab", (1, 0)), limits, 0.0)
    assert formed == Form(
        (0, 1),
        "Hosts reach the driver but not each other: a and b. The job needs at least 2 ranks, so it cannot leave any of "
        "these hosts out and tries again",
    )
    assert workers_left_out(disconnected_job("abc", (1, 0)), limits) == (1,)


def test_hosts_that_cannot_reach_each_other_stop_dialing_when_new_ranks_can_replace_them():
    limits = dataclasses.replace(LIMITS, min_size=2)
    dialing = [running(0, 0), dataclasses.replace(running(1, 1), host="b")]
    separated = {"capacity": {"a": 1, "b": 1, "c": 1}, "unreachable": frozenset({(1, 0)})}
    abandoned = [Abandon("New ranks are ready, so the job no longer needs hosts that cannot reach each other")]
    joined = running_job(*dialing, waiting(2, host="c"), **separated)
    assert decide(joined, limits, 0.0) == abandoned
    assert decide(running_job(*dialing, waiting(2, host="c"), notified=True, **separated), limits, 0.0) == []
    assert Abandon not in map(type, decide(running_job(*dialing, **separated), limits, 0.0))
    limited = dataclasses.replace(limits, reset_limit=0)
    assert decide(joined, limited, 0.0) == [], "the next generation would end the job"


def test_ranks_of_one_host_that_cannot_connect_try_again():
    separated = "Ranks on the same host cannot reach each other, so they try again: a"
    assert decide(disconnected_job("aa", (1, 0)), LIMITS, 0.0) == [Form((0, 1), separated)]
    assert workers_left_out(disconnected_job("aab", (1, 0), (2, 0))) == (2,)


def test_no_host_is_left_out_before_all_survivors_have_arrived():
    view = disconnected_job("ab", (1, 0))
    late = dataclasses.replace(view, members=(*view.members, running(2, 2)), capacity={"a": 2, "b": 1})
    assert decide(late, LIMITS, 0.0) == []


def test_no_generation_forms_while_a_survivor_is_still_arriving():
    view = broken_job(waiting(0, 1, generation=1, rank=0), running(1, 1), slots=2, gathered_since=None)
    assert decide(view, LIMITS, 29.9) == []


def test_a_survivor_that_does_not_leave_is_stopped():
    view = broken_job(waiting(0, 1, generation=1, rank=0), running(1, 1), slots=2, gathered_since=None)
    stop = Stop(1, "it did not leave the broken generation within elastic_timeout=30 s", True)
    assert decide(view, LIMITS, 30.0) == [stop, Start("a")]


def test_a_worker_that_does_not_reach_init_is_stopped():
    late = member(1, Phase.STARTING)
    stop = Stop(1, "it did not reach hvd.init() within start_timeout=60 s", True)
    assert decide(running_job(running(0, 0), late, slots=2), LIMITS, 59.9) == []
    assert decide(running_job(running(0, 0), late, slots=2), LIMITS, 60.0) == [stop, Start("a")]


def test_too_few_survivors_wait_for_elastic_timeout():
    limits = dataclasses.replace(LIMITS, min_size=2)
    view = broken_job(waiting(0, 1, generation=1, rank=0), slots=1)
    assert decide(view, limits, 29.9) == []
    (failure,) = decide(view, limits, 30.0)
    assert failure == Fail(
        "Only 1 of at least 2 ranks were ready within elastic_timeout=30 s. Offered slots: a:1.", True
    )


def test_a_job_fails_at_once_when_the_state_is_lost():
    (failure,) = decide(broken_job(waiting(3)), LIMITS, 0.0)
    assert isinstance(failure, Fail)
    assert "All ranks that held the state of the training were lost" in failure.why


def test_a_job_may_restart_a_limited_number_of_times_when_the_state_is_lost():
    limits = dataclasses.replace(LIMITS, max_restarts=2)
    assert decide(broken_job(waiting(3), restarts=1), limits, 0.0) == [Form((3,))]
    (failure,) = decide(broken_job(waiting(3), restarts=2), limits, 0.0)
    assert isinstance(failure, Fail)
    assert "All ranks that held the state of the training were lost 3 times" in failure.why


def test_without_a_state_new_workers_start_from_the_beginning():
    assert decide(broken_job(waiting(3), stateful=False), LIMITS, 0.0) == [Form((3,))]


def test_reset_limit_counts_the_generations_after_the_first():
    survivor = waiting(0, 1, generation=2, rank=0)
    assert decide(broken_job(survivor, generation=2), dataclasses.replace(LIMITS, reset_limit=2), 0.0) == [Form((0,))]
    (failure,) = decide(broken_job(survivor, generation=2), dataclasses.replace(LIMITS, reset_limit=1), 0.0)
    assert failure == Fail("The job has reached reset_limit=1.", True)


def test_a_job_at_its_reset_limit_admits_no_worker_and_releases_no_slot_but_continues():
    limits = dataclasses.replace(LIMITS, reset_limit=0)
    assert decide(running_job(running(0, 0), waiting(1), slots=2), limits, 9.0) == []
    assert decide(running_job(running(0, 0), running(1, 1), slots=1), limits, 9.0) == []


def test_resets_without_progress_end_the_job():
    (failure,) = decide(broken_job(waiting(0, 1, generation=1, rank=0), fruitless=MAX_FRUITLESS), LIMITS, 0.0)
    assert isinstance(failure, Fail)
    assert "reset 3 times in a row without progress" in failure.why


def test_a_state_that_cannot_be_synchronized_ends_the_job():
    survivor = waiting(0, generation=MAX_STATELESS, rank=0)
    (failure,) = decide(broken_job(survivor, generation=MAX_STATELESS, stateful=False), LIMITS, 0.0)
    assert isinstance(failure, Fail)
    assert "The first 5 generations all ended before their ranks had synchronized a state" in failure.why
    fewer = broken_job(waiting(0, generation=MAX_STATELESS - 1, rank=0), generation=MAX_STATELESS - 1, stateful=False)
    assert decide(fewer, LIMITS, 0.0) == [Form((0,))]


def test_the_job_ends_if_all_workers_fail_before_they_are_ready():
    failed = View(0, (member(9, Phase.STARTING),), {"a": 3}, failed_starts=MAX_FAILED_STARTS * LIMITS.num_proc)
    (failure,) = decide(failed, LIMITS, 1.0)
    assert isinstance(failure, Fail)
    assert "All of the first 6 workers failed before they reached hvd.init()" in failure.why
    assert not any(
        isinstance(decision, Fail) for decision in decide(dataclasses.replace(failed, failed_starts=5), LIMITS, 1.0)
    )
    one_is_ready = dataclasses.replace(failed, members=(*failed.members, waiting(0)))
    assert not any(isinstance(decision, Fail) for decision in decide(one_is_ready, LIMITS, 1.0))


def test_a_joining_worker_causes_one_new_generation():
    view = running_job(running(0, 0), waiting(1, since=1.0), slots=2)
    assert decide(view, LIMITS, 1.0) == [Notify()]
    assert decide(dataclasses.replace(view, notified=True), LIMITS, 1.0) == []


def test_a_joining_worker_waits_only_a_short_time_for_workers_that_are_starting():
    view = running_job(running(0, 0), waiting(1, since=1.0), member(2, Phase.STARTING))
    assert decide(view, LIMITS, 1.0 + JOIN_SECONDS / 2) == []
    assert decide(view, LIMITS, 1.0 + JOIN_SECONDS) == [Notify()]


def test_a_generation_that_has_not_synchronized_its_state_is_not_notified():
    assert decide(running_job(running(0, 0, commit=-1), waiting(1), slots=2, stateful=False), LIMITS, 0.0) == []


def test_a_generation_of_the_largest_size_admits_no_worker():
    members = (running(0, 0), running(1, 1), running(2, 2), waiting(3))
    assert decide(running_job(*members, slots=4), LIMITS, 9.0) == []


def test_a_member_without_a_slot_passes_on_the_newest_commit_before_it_leaves():
    waiting_survivor = waiting(1, 2, generation=1, rank=1)
    incomplete = broken_job(running(0, 0), waiting_survivor, slots=1)
    assert not any(isinstance(decision, Stop) for decision in decide(incomplete, LIMITS, 0.0))
    both = broken_job(waiting(0, 1, generation=1, rank=0), waiting_survivor, slots=1)
    assert decide(both, LIMITS, 0.0) == [Form((1, 0))]


def test_the_newest_worker_of_a_host_leaves_after_a_new_generation_when_a_slot_is_withdrawn():
    view = running_job(running(0, 0), running(1, 1), slots=1)
    assert decide(view, LIMITS, 0.0) == [Notify()]
    arrived = (waiting(0, 2, generation=1, rank=0), waiting(1, 2, generation=1, rank=1))
    assert decide(broken_job(*arrived, slots=1), LIMITS, 0.0) == [Form((0,))]
    left = running_job(running(0, 0, generation=2), arrived[1], generation=2, slots=1)
    assert decide(left, LIMITS, 0.0) == [Stop(1, "its slot is no longer offered", False)]


def test_a_worker_whose_own_slot_is_withdrawn_leaves_instead_of_the_newest_of_its_host():
    members = (running(0, 0), running(1, 1))
    withdrawn = {"slots": 1, "withdrawn": frozenset({0})}
    assert decide(running_job(*members, **withdrawn), LIMITS, 0.0) == [Notify()]
    arrived = (waiting(0, 2, generation=1, rank=0), waiting(1, 2, generation=1, rank=1))
    assert decide(broken_job(*arrived, **withdrawn), LIMITS, 0.0) == [Form((1,))]
    left = running_job(running(1, 0, generation=2), arrived[0], generation=2, **withdrawn)
    assert decide(left, LIMITS, 0.0) == [Stop(0, "its slot is no longer offered", False)]
    replaced = running_job(*members, notified=True, **withdrawn | {"slots": 2})
    assert decide(replaced, LIMITS, 0.0) == [Start("a")], "its slot is not one of those that are offered"


def test_a_rank_whose_own_slot_is_withdrawn_trains_on_if_too_few_ranks_would_stay():
    limits = dataclasses.replace(LIMITS, min_size=2)
    members = (running(0, 0), running(1, 1))
    assert decide(running_job(*members, slots=1, withdrawn=frozenset({1})), limits, 0.0) == []
    replaced = running_job(*members, waiting(2), slots=2, withdrawn=frozenset({1}))
    assert decide(replaced, limits, 0.0) == [Notify()]


def test_the_state_moves_to_other_hosts_before_the_last_holder_leaves():
    old = waiting(0, 5, generation=1, rank=0)
    new = [waiting(worker, host="b") for worker in (1, 2)]
    limits = dataclasses.replace(LIMITS, max_size=2)
    assert decide(running_job(running(0, 0), capacity={"b": 2}), limits, 0.0) == [Start("b")] * 2
    assert decide(running_job(running(0, 0), *new, capacity={"b": 2}), limits, 0.0) == [Notify()]
    assert decide(broken_job(old, *new, capacity={"b": 2}), limits, 0.0) == [Form((0, 1))]
    moved = [running(0, 0, generation=2), running(1, 1, generation=2, host="b"), new[1]]
    view = running_job(*moved, generation=2, capacity={"b": 2})
    assert decide(view, limits, 0.0) == [Notify()]


def test_an_error_that_returns_without_progress_ends_the_job_once_the_survivors_have_arrived():
    returns = {"same_error": "ValueError: no luck", "reasons": ("Rank 1 raised ValueError: no luck",)}
    survivor = waiting(0, 1, generation=1, rank=0)
    assert decide(broken_job(survivor, slots=1, **returns, same_errors=2), LIMITS, 0.0) == [Form((0,))]
    incomplete = broken_job(survivor, running(1, 1), slots=2, gathered_since=None, **returns, same_errors=3)
    assert decide(incomplete, LIMITS, 0.0) == []
    for members in ((survivor,), ()):
        (failure,) = decide(broken_job(*members, **returns, same_errors=3), LIMITS, 0.0)
        assert failure == Fail(
            "Ranks have failed like this 3 times without a new commit in between, so the same error probably returns "
            "every time. The job has reached max_same_errors=3. What happened before:\n"
            "- Rank 1 raised ValueError: no luck",
            started=True,
            error="ValueError: no luck",
        )


def test_max_same_errors_limits_how_often_an_error_may_return():
    returns = {"same_error": "ValueError: no luck", "same_errors": 1}
    (failure,) = decide(broken_job(**returns), dataclasses.replace(LIMITS, max_same_errors=1, max_restarts=9), 0.0)
    assert failure.why == "The job has ended, because max_same_errors=1."
    seldom = dataclasses.replace(LIMITS, max_same_errors=9, max_restarts=9)
    assert not any(
        isinstance(decision, Fail) for decision in decide(broken_job(**returns | {"same_errors": 8}), seldom, 0.0)
    )


@pytest.mark.parametrize(
    "view", [starting_job(), running_job(running(0, 0)), broken_job(running(0, 0), waiting(1, 1, generation=1, rank=1))]
)
def test_an_error_that_every_attempt_would_raise_ends_the_job_at_once(view):
    (failure,) = decide(dataclasses.replace(view, final_error="DataError: no rows"), LIMITS, 0.0)
    assert failure.why == "Every attempt would raise this error, so the job has ended."
    assert (failure.error, failure.started) == ("DataError: no rows", view.generation > 0)


def test_results_are_those_of_the_last_generation_in_rank_order():
    ended = [member(7, Phase.RETURNED, generation=1, rank=1), member(8, Phase.RETURNED, generation=1, rank=0)]
    assert decide(running_job(*ended, waiting(9)), LIMITS, 0.0) == [Done((8, 7))]


@pytest.mark.parametrize("phase", [Phase.FINISHED, Phase.RETURNED])
def test_nothing_changes_once_the_training_has_finished(phase):
    ended = member(7, phase, generation=1, rank=0)
    assert decide(running_job(ended, running(8, 1), waiting(9)), LIMITS, 99.0) == []
    (failure,) = decide(running_job(ended, waiting(9), failed_end="Rank 1 was killed"), LIMITS, 99.0)
    assert isinstance(failure, Fail)
