"""Test the roster alone, and the roster together with the policy in random histories."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkhvd.driver.elastic.policy import (
    Abandon,
    Done,
    Fail,
    Form,
    LeaveOut,
    Limits,
    Notify,
    Phase,
    Start,
    Stop,
    decide,
)
from sparkhvd.driver.elastic.roster import Cooldown, Roster


def roster_of(size: int) -> Roster:
    """Return a roster whose first generation runs and has a state."""
    roster = Roster(Cooldown(), 0.0)
    roster.offer({"a": size})
    for worker in range(size):
        roster.started(worker, "a", 0.0)
        assert roster.waiting(worker, 0, -1, "", 0.0)
    roster.formed(tuple(range(size)), 0.0)
    for worker in range(size):
        assert roster.synced(worker, 1, 0)
    return roster


def test_a_duplicate_or_late_report_does_not_count():
    roster = roster_of(2)
    assert not roster.waiting(0, 0, -1, "late", 1.0), "the worker has meanwhile joined generation 1"
    assert roster.waiting(0, 1, 3, "an error", 1.0)
    assert not roster.waiting(0, 1, 4, "doubled", 1.0)
    assert not roster.synced(0, 1, 9)
    assert not roster.finished(0, 1, 1.0)
    assert roster.member(0).commit == 3
    assert not roster.waiting(77, 0, -1, "unknown", 1.0)


def test_a_lost_worker_stays_lost():
    roster = roster_of(2)
    assert roster.lost(1, "was killed", 1.0)
    assert not roster.lost(1, "was killed", 1.0)
    assert not roster.waiting(1, 1, 5, "", 1.0)
    assert not roster.returned(1, 1.0)
    assert roster.view(1.0).reasons == ("was killed",)


def test_workers_that_fail_before_they_are_ready_are_counted_until_one_is_ready():
    roster = Roster(Cooldown(), 0.0)
    roster.offer({"a": 2})
    for worker in range(4):
        roster.started(worker, "a", 0.0)
    roster.lost(0, "raised an error", 1.0)
    roster.lost(1, "was ended because its slot is no longer offered", 1.0, failed=False)
    assert roster.view(1.0).failed_starts == 1
    roster.waiting(2, 0, -1, "", 2.0)
    roster.lost(2, "was killed", 3.0)
    assert roster.view(3.0).failed_starts == 0
    roster.lost(3, "raised an error", 4.0)
    assert roster.view(4.0).failed_starts == 1


def test_a_broken_generation_is_complete_when_no_survivor_is_still_arriving():
    roster = roster_of(3)
    roster.lost(2, "was killed", 1.0)
    assert roster.view(1.0).idle
    assert roster.view(1.0).gathered_since is None
    roster.waiting(0, 1, 1, "", 2.0)
    assert roster.view(2.0).gathered_since is None
    roster.waiting(1, 1, 1, "", 3.0)
    assert roster.view(3.0).gathered_since == 3.0


def test_the_loss_of_a_worker_that_is_not_a_member_does_not_break_the_generation():
    roster = roster_of(1)
    roster.started(5, "a", 1.0)
    roster.lost(5, "did not start", 2.0)
    assert not roster.view(2.0).idle


def test_a_failing_host_cools_down_longer_each_time_and_recovers():
    roster = Roster(Cooldown(2.0, 6.0), 0.0)
    for worker, (at, seconds) in enumerate([(0.0, 2.0), (10.0, 4.0), (20.0, 6.0), (30.0, 6.0), (200.0, 2.0)]):
        roster.started(worker, "a", at)
        roster.lost(worker, "failed", at)
        assert roster.view(at + seconds - 0.1).cooling == {"a"}
        assert roster.view(at + seconds).cooling == frozenset()


def test_the_loss_of_all_workers_of_a_host_counts_as_one_failure():
    roster = Roster(Cooldown(2.0, 60.0), 0.0)
    for worker in range(8):
        roster.started(worker, "a", 0.0)
    for worker in range(8):
        roster.lost(worker, "its host was lost", 1.0 + 0.1 * worker)
    assert roster.view(2.9).cooling == {"a"}
    assert roster.view(3.0).cooling == frozenset()
    roster.started(8, "a", 3.0)
    roster.lost(8, "its host was lost", 3.0)
    assert roster.view(6.9).cooling == {"a"}, "the next failure counts as the second"


def test_failed_starts_count_only_after_one_on_every_offered_host():
    roster = Roster(Cooldown(), 0.0)
    roster.offer({"a": 2, "b": 1})
    for worker, host in enumerate(["a", "b", "a"]):
        roster.started(worker, host, 0.0)
    roster.lost(0, "ssh cannot reach it", 1.0)
    roster.lost(2, "ssh cannot reach it", 2.0)
    assert roster.view(2.0).failed_starts == 0, "b may still start"
    roster.lost(1, "raised an error", 3.0)
    assert roster.view(3.0).failed_starts == 3


def test_a_worker_that_is_stopped_on_purpose_does_not_cool_down_its_host():
    roster = roster_of(2)
    roster.lost(1, "its slot is no longer offered", 1.0, failed=False)
    assert roster.view(1.0).cooling == frozenset()


def test_a_loss_after_others_have_finished_is_kept():
    roster = roster_of(2)
    assert roster.finished(0, 1, 1.0)
    roster.lost(1, "Rank 1 was killed", 2.0)
    assert roster.view(2.0).failed_end == "Rank 1 was killed"


def test_a_result_of_a_worker_without_a_generation_does_not_count():
    roster = Roster(Cooldown(), 0.0)
    roster.started(0, "a", 0.0)
    assert roster.returned(0, 1.0)
    assert roster.member(0) is None
    assert roster.view(1.0).reasons[0] == (
        "Worker 0 on host a ended without calling hvd.init(), which every rank of an elastic job must call"
    )
    roster.started(1, "a", 2.0)
    assert roster.waiting(1, 0, -1, "", 3.0)
    assert roster.returned(1, 4.0)
    assert "returned without being a member" in roster.view(4.0).reasons[-1]


@pytest.mark.parametrize("returns_first", [True, False])
def test_a_rank_that_returns_while_another_continues_is_lost(returns_first):
    roster = roster_of(2)
    reports = [lambda: roster.returned(1, 1.0), lambda: roster.waiting(0, 1, 0, "lost rank 1", 1.0)]
    for report in reports if returns_first else reversed(reports):
        assert report()
    assert roster.member(1) is None
    view = roster.view(9.0)
    assert any(reason.startswith("Rank 1 on host a returned from fn or called sys.exit(0)") for reason in view.reasons)
    assert Form((0,)) in decide(view, Limits(2, 1, None, 60.0, 60.0), 9.0)


def test_a_rank_that_returns_after_the_training_has_ended_is_kept():
    roster = roster_of(2)
    for worker in range(2):
        assert roster.finished(worker, 1, 1.0)
    assert roster.returned(1, 2.0)
    member = roster.member(1)
    assert member is not None
    assert member.phase is Phase.RETURNED


@pytest.mark.parametrize(("reason", "expected"), [("lost rank 2", "lost rank 2"), ("", "it called hvd.init() again")])
@pytest.mark.parametrize("others_return", [True, False])
def test_a_rank_that_waits_after_the_training_has_ended_on_another_ends_the_job(reason, expected, others_return):
    roster = roster_of(2)
    assert roster.finished(0, 1, 1.0)
    if others_return:
        assert roster.returned(0, 2.0)
    assert roster.waiting(1, 1, 0, reason, 3.0)
    (failure,) = decide(roster.view(3.0), Limits(2, 1, None, 60.0, 60.0), 3.0)
    assert isinstance(failure, Fail)
    assert f"Rank 1 on host a left generation 1: {expected} (after the training had ended)" in failure.why


@pytest.mark.parametrize("loses_first", [True, False])
def test_a_job_does_not_succeed_without_the_result_of_a_lost_rank(loses_first):
    roster = roster_of(2)
    events = [lambda: roster.lost(1, "was killed", 1.0), lambda: roster.returned(0, 1.0)]
    for event in events if loses_first else reversed(events):
        assert event()
    (failure,) = decide(roster.view(9.0), Limits(2, 1, None, 60.0, 60.0), 9.0)
    assert isinstance(failure, Fail)
    assert "was killed" in failure.why


def test_resets_without_progress_are_counted_until_a_commit_or_a_loss():
    roster = roster_of(2)
    counts = []
    for generation, commit in [(1, 5), (2, 5), (3, 5), (4, 6)]:
        for worker in range(2):
            roster.waiting(worker, generation, commit, "an error", float(generation))
        roster.formed((0, 1), float(generation))
        counts.append(roster.view(9.0).fruitless)
    assert counts == [0, 1, 2, 0]


def count_errors(roster: Roster) -> tuple[str, int]:
    view = roster.view(99.0)
    return view.same_error, view.same_errors


def test_an_error_is_counted_per_generation_until_a_new_commit():
    roster = roster_of(3)
    counts = []
    for generation, commit in [(1, 0), (2, 0), (3, 4), (4, 4), (5, 4)]:
        newest = 2 + generation
        for worker in (newest - 2, newest - 1) if generation > 1 else (1, 2):  # an error on both workers counts once
            roster.raised(worker, "ValueError: no luck", is_final=False)
            roster.lost(worker, "raised ValueError: no luck", float(generation))
        roster.waiting(0, generation, commit, "lost a rank", float(generation))
        counts.append(count_errors(roster))
        for worker in (newest, newest + 1):
            roster.started(worker, "a", float(generation))
            roster.waiting(worker, 0, -1, "", float(generation))
        roster.formed((0, newest, newest + 1), float(generation))
        for worker in (0, newest, newest + 1):
            roster.synced(worker, generation + 1, commit)
    assert counts == [("ValueError: no luck", count) for count in (1, 2, 1, 2, 3)]


def test_another_loss_in_between_does_not_reset_the_count_of_an_error():
    roster = roster_of(1)
    for worker, error in enumerate(["ValueError: no luck", "", "ValueError: no luck", "OSError: disk full"]):
        if worker:
            roster.started(worker, "a", 1.0)
            roster.waiting(worker, 0, -1, "", 1.0)
            roster.formed((worker,), 1.0)
            roster.synced(worker, worker + 1, 0)
        roster.raised(worker, error, is_final=False)
        roster.lost(worker, error or "was killed", 1.0)
    assert count_errors(roster) == ("ValueError: no luck", 2)


@pytest.mark.parametrize("published", [True, False])
def test_after_the_loss_of_all_ranks_only_a_published_commit_counts_as_progress(published):
    roster = roster_of(1)
    roster.raised(0, "ValueError: no luck", is_final=False)
    roster.lost(0, "raised ValueError: no luck", 1.0)
    roster.started(1, "a", 1.0)
    roster.waiting(1, 0, -1, "", 1.0)
    roster.formed((1,), 1.0)
    roster.synced(1, 2, 7)  # the worker has read commit 7 from the Store
    if published:
        roster.published()
    roster.raised(1, "ValueError: no luck", is_final=False)
    roster.lost(1, "raised ValueError: no luck", 2.0)
    assert count_errors(roster) == ("ValueError: no luck", 1 if published else 2)


def test_commits_that_a_restarted_job_repeats_do_not_count_as_progress():
    roster = roster_of(2)

    def fail(worker: int) -> None:
        roster.raised(worker, "ValueError: no luck", is_final=False)
        roster.lost(worker, "raised ValueError: no luck", 1.0)

    fail(1)
    roster.waiting(0, 1, 1, "lost a rank", 1.0)
    roster.formed((0,), 1.0)
    roster.synced(0, 2, 1)
    fail(0)
    for worker in (2, 3):
        roster.started(worker, "a", 1.0)
        roster.waiting(worker, 0, -1, "", 1.0)
    roster.formed((2,), 1.0)
    roster.synced(2, 3, 0)
    roster.notified()
    roster.waiting(2, 3, 1, "", 1.0)  # worker 3 joins after the first commit
    roster.formed((2, 3), 1.0)
    fail(3)
    roster.waiting(2, 4, 1, "lost a rank", 1.0)
    assert count_errors(roster) == ("ValueError: no luck", 3)


def test_a_commit_that_a_generation_has_read_from_a_store_does_not_count_as_progress():
    roster = roster_of(2)
    for worker in range(2):
        roster.lost(worker, "was killed", 1.0)
        roster.started(2 + worker, "a", 1.0)
        roster.waiting(2 + worker, 0, -1, "", 1.0)
    roster.formed((2, 3), 1.0)
    for worker in (2, 3):
        roster.synced(worker, 2, 7)
    for generation in (2, 3):
        for worker in (2, 3):
            roster.waiting(worker, generation, 7, "an error", 2.0)
        roster.formed((2, 3), 2.0)
        for worker in (2, 3):
            roster.synced(worker, generation + 1, 7)
    assert roster.view(9.0).fruitless == 2


def test_workers_count_as_unreachable_until_a_generation_has_connected():
    roster = roster_of(3)
    roster.unreachable(2, [0, 1])
    roster.lost(1, "was killed", 1.0)
    assert roster.view(1.0).unreachable == {(2, 0), (2, 1)}
    for worker in (0, 2):
        roster.waiting(worker, 1, 0, "could not connect", 1.0)
    roster.formed((2, 0), 1.0)
    roster.connected(2, 1)
    assert roster.view(1.0).unreachable == {(2, 0), (2, 1)}, "generation 1 is over"
    roster.connected(2, 2)
    assert roster.view(1.0).unreachable == {(2, 1)}, "worker 1 is not in generation 2"
    roster.synced(2, 2, 0)
    assert not roster.view(1.0).unreachable
    roster.unreachable(2, [1, 7])
    assert roster.view(1.0).unreachable == {(2, 0)}, "rank 1 of generation 2"


def test_an_error_that_every_attempt_would_raise_is_final_unless_a_new_host_may_cause_it():
    roster = roster_of(1)
    roster.started(5, "b", 1.0)
    roster.raised(5, "DataError: no rows", is_final=True)
    roster.lost(5, "raised DataError: no rows", 1.0)
    assert not roster.view(1.0).final_error
    roster.raised(0, "DataError: no rows", is_final=True)
    assert roster.view(1.0).final_error == "DataError: no rows"
    before = Roster(Cooldown(), 0.0)
    before.started(0, "a", 0.0)
    before.raised(0, "ParamError: no column", is_final=True)
    assert before.view(0.0).final_error == "ParamError: no column"


class Simulation:
    """Simulate workers with a roster and the policy, and check the invariants of every generation."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.roster = Roster(Cooldown(1.0, 8.0), 0.0)
        self.now = 0.0
        self.workers = 0
        self.commits: dict[int, int] = {}  # the newest commit of every worker, according to the worker
        self.sent: list[tuple[str, int, int, int]] = []  # reports that may be repeated
        self.end: Fail | Done | None = None
        self.has_run = False
        self.first_commit = 0  # the newest commit of all earlier generations
        self.raised = False  # whether a member of the current generation has raised
        self.raised_before = 0  # how many generations have ended with an error since the last new commit
        self.withdrawn: frozenset[int] = frozenset()

    def settle(self) -> None:
        for _ in range(200):
            decisions = decide(self.roster.view(self.now), self.limits, self.now)
            if not decisions:
                return
            for decision in decisions:
                self.carry_out(decision)
                if self.end is not None:
                    return
        raise AssertionError(f"endless decisions: {decisions}")

    def carry_out(self, decision) -> None:
        if isinstance(decision, Start):
            self.roster.started(self.workers, decision.host, self.now)
            self.commits[self.workers] = -1
            self.workers += 1
        elif isinstance(decision, Stop):
            self.roster.lost(decision.worker, decision.why, self.now, failed=decision.failed)
        elif isinstance(decision, Notify | Abandon):
            self.roster.notified()
        elif isinstance(decision, Form):
            self.form(decision)
        elif isinstance(decision, LeaveOut):
            self.leave_out(decision.workers)
        else:
            self.end = decision

    def leave_out(self, workers: tuple[int, ...]) -> None:
        waiting = self.members(Phase.WAITING)
        assert not self.members(Phase.RUNNING)
        others = set(waiting) - set(workers)
        assert len(others) == len(waiting) - len(workers) >= self.limits.min_size
        newest = max(self.commits[worker] for worker in waiting)
        assert max(self.commits[worker] for worker in others) == newest, "the newest commit is lost"
        for worker in workers:
            self.roster.lost(worker, "its host cannot reach another", self.now)

    def form(self, decision: Form) -> None:
        workers, view = decision.workers, self.roster.view(self.now)
        assert bool(decision.separated) == any(set(self.members(Phase.WAITING)) >= {*pair} for pair in view.unreachable)
        waiting = [member.worker for member in view.members if member.phase is Phase.WAITING]
        assert len(set(workers)) == len(workers)
        assert set(workers) <= set(waiting)
        assert self.limits.min_size <= len(workers) <= (self.limits.max_size or 99)
        assert not any(member.phase is Phase.RUNNING for member in view.members)
        assert self.commits[workers[0]] == max(self.commits[worker] for worker in waiting)
        has_state = any(self.commits[worker] >= 0 for worker in waiting)
        if view.stateful and (has_state or view.restarts == self.limits.max_restarts):
            assert self.commits[workers[0]] >= 0, "rank 0 is a survivor with a state"
            assert self.roster.member(workers[0]).generation > 0
        newest = max(self.commits[worker] for worker in waiting)
        if newest > self.first_commit:
            self.raised_before = 0
        self.raised_before += self.raised
        assert self.raised_before < self.limits.max_same_errors, "the same error has returned too often"
        self.raised, self.first_commit = False, max(newest, self.first_commit)
        number = self.roster.formed(workers, self.now)
        assert number == view.generation + 1
        assert self.limits.reset_limit is None or number - 1 <= self.limits.reset_limit
        members = [m for m in self.roster.view(self.now).members if m.phase is Phase.RUNNING]
        assert sorted(member.rank for member in members) == list(range(len(workers)))
        self.has_run = True

    def members(self, *phases: Phase) -> list[int]:
        return [member.worker for member in self.roster.view(self.now).members if member.phase in phases]

    def report(self, kind: str, worker: int, generation: int, commit: int) -> None:
        self.sent.append((kind, worker, generation, commit))
        self.deliver(*self.sent[-1])

    def deliver(self, kind: str, worker: int, generation: int, commit: int) -> None:
        if kind == "waiting":
            self.roster.waiting(worker, generation, commit, "a reason", self.now)
        elif kind == "synced":
            self.roster.synced(worker, generation, commit)
        else:
            self.roster.finished(worker, generation, self.now)

    def sync(self, worker: int) -> None:
        self.commits[worker] = max(0, *(self.commits[member] for member in self.members(Phase.RUNNING)))
        self.report("synced", worker, self.roster.member(worker).generation, self.commits[worker])

    def step(self, action: str, pick: int, seconds: float) -> None:
        self.now += seconds
        everyone = self.members(*Phase)
        if action == "capacity":
            self.offer({"a": pick % 4, "b": pick // 4 % 3})
        elif action == "again" and self.sent:
            self.deliver(*self.sent[pick % len(self.sent)])
        elif action.startswith("all "):
            for worker in everyone:
                self.act_on(worker, action.removeprefix("all "))
        elif everyone:
            self.act_on(everyone[pick % len(everyone)], action)

    def offer(self, capacity: dict[str, int]) -> None:
        self.capacity = capacity
        self.roster.offer(capacity, self.withdrawn)

    def act_on(self, worker: int, action: str) -> None:
        member = self.roster.member(worker)
        if action == "withdraw":
            self.withdrawn |= {worker}
            self.offer({host: count - (host == member.host) for host, count in self.capacity.items()})
        if action == "raise":
            self.raised |= member.phase is Phase.RUNNING
            self.roster.raised(worker, "ValueError: no luck", is_final=False)
        if action in {"lose", "raise"}:
            self.roster.lost(worker, f"worker {worker} was killed", self.now)
        elif action == "arrive" and member.phase in {Phase.STARTING, Phase.RUNNING}:
            self.report("waiting", worker, member.generation, self.commits[worker])
        elif action == "sync" and member.phase is Phase.RUNNING:
            self.sync(worker)
        elif action == "separate" and member.phase is Phase.RUNNING:
            self.roster.unreachable(worker, range(member.rank))
        elif action == "commit" and self.commits[worker] >= 0 and member.phase is Phase.RUNNING:
            self.commits[worker] += 1


ACTIONS = (
    *("capacity", "again", "lose", "raise", "raise", "arrive", "all arrive", "sync", "all sync", "commit", "commit"),
    *("separate", "all separate", "withdraw"),
)
HISTORIES = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, 40), st.sampled_from([0.0, 0.1, 1.0, 7.0])), max_size=60
)


@settings(max_examples=300)
@given(
    history=HISTORIES,
    min_size=st.integers(1, 3),
    above_min_size=st.integers(0, 2),
    above_num_proc=st.none() | st.integers(0, 2),
    reset_limit=st.none() | st.integers(0, 4),
    max_restarts=st.integers(0, 2),
    max_same_errors=st.integers(1, 3),
)
def test_every_history_leads_to_valid_generations_and_to_an_end(  # noqa: PLR0917
    history, min_size, above_min_size, above_num_proc, reset_limit, max_restarts, max_same_errors
):
    num_proc = min_size + above_min_size
    max_size = None if above_num_proc is None else num_proc + above_num_proc
    limits = Limits(num_proc, min_size, max_size, 20.0, 10.0, reset_limit, max_restarts, max_same_errors)
    simulation = Simulation(limits)
    simulation.offer({"a": 3, "b": 1})
    simulation.settle()
    for action, pick, seconds in history:
        if simulation.end is not None:
            break
        simulation.step(action, pick, seconds)
        simulation.settle()
    for _ in range(40):  # no worker reports from now on, so every wait must have a limit
        if simulation.end is not None:
            break
        simulation.now += 5.0
        simulation.settle()
    if simulation.end is None:
        view = simulation.roster.view(simulation.now)
        assert not view.idle, "an idle job must end"
        assert all(member.phase is Phase.RUNNING for member in view.members if member.generation == view.generation)
    elif isinstance(simulation.end, Fail):
        assert simulation.end.why
        assert simulation.end.started == simulation.has_run
        assert bool(simulation.end.error) == ("max_same_errors" in simulation.end.why)
