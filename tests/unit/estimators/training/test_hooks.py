from __future__ import annotations

import json
import logging
import math
from dataclasses import replace

import pytest

from sparkhvd.comm import session
from sparkhvd.errors import ConfigError, DataError, ParamError
from sparkhvd.estimators.params.policies import Checkpoints, EarlyStopping
from sparkhvd.estimators.reports import EpochRecord, EpochReport, StepReport
from sparkhvd.estimators.runs.run_lease import Fence
from sparkhvd.estimators.training import checkpoint
from sparkhvd.estimators.training.commits import Commits
from sparkhvd.estimators.training.hooks import RunHooks
from sparkhvd.store import Store, layout
from tests.ranks import RankGroup
from tests.unit.estimators.arrays import schema, spec

DATA = schema(x=("feature", "float64", (), "scalar"))


@pytest.fixture(scope="module")
def group():
    with RankGroup(2, imports=("sparkhvd.estimators.training.hooks",)) as started:
        yield started


class Counting:
    """A trainer whose state is the last step, and which tries a collective while it makes the state."""

    def __init__(self):
        self.now = b"start"
        self.restored = None

    def state(self):
        if session.is_initialized() and session.current().world.size > 1:
            with pytest.raises(ConfigError, match="A collective was called while a checkpoint is saved on rank 0 only"):
                session.current().barrier()
        return self.now

    def restore(self, state):
        self.restored = state


def step(number, trainer, loss=1.0, epoch=0):
    trainer.now = b"step %d" % number
    rank = session.current().world.rank
    return StepReport(epoch, number, 9, loss, lambda: {"loss": (loss * number, number)}, lambda: b"rank %d" % rank)


def run_within_an_epoch(url):
    store, trainer = Store.create(url), Counting()
    how = spec(DATA, epochs=3, checkpoints=Checkpoints(every_steps=4))
    hooks = RunHooks(store, "run", how, session.current(), "blocks")
    hooks.on_epoch_end(EpochReport(0, {"loss": (2.0, 2)}), trainer)
    for number in (2, 5, 7):  # some steps have two batches
        hooks.on_step_end(step(number, trainer, epoch=1), trainer)
    again = RunHooks(store, "run", how, session.current(), "blocks")
    kept = (
        again.first_epoch,
        again.first_step,
        again.rank_state,
        again.resume.checkpoint.state,
        again.resume.within.sums,
    )
    again.on_epoch_end(EpochReport(1, {"loss": (11.0, 1)}), trainer)
    return (
        kept,
        again.history[-1].train["loss"],
        [path.rpartition("/")[2] for path in store.list("runs/run/checkpoints")],
    )


def test_a_run_resumes_within_an_epoch_with_the_state_of_every_rank(group, tmp_path):
    results = group.run(run_within_an_epoch, str(tmp_path))
    for rank, (kept, loss, files) in enumerate(results):
        assert kept == (1, 5, b"rank %d" % rank, b"step 5", {"loss": (10.0, 10.0)})
        assert loss == pytest.approx((10.0 + 22.0) / 12.0), "the part before the interruption counts"
        assert rank or files == ["epoch-00001"], "rank 1 does not wait for the writes of rank 0"


def run_with_the_best(url):
    store = Store.create(url) if url else None
    policy = Checkpoints(best="val_loss", keep=2)
    rule = EarlyStopping("val_loss", patience=3)
    how = spec(DATA, epochs=9, checkpoints=policy if url else Checkpoints(best="val_loss"), early_stopping=rule)
    hooks, trainer, goes_on = RunHooks(store, "best", how, session.current()), Counting(), []
    for epoch, loss in enumerate((3.0, 1.0, 2.0, 2.5, 4.0)):
        trainer.now = b"epoch %d" % epoch
        # The ranks have different losses, but decide by their mean.
        own = loss + (1 if session.current().world.rank else -1)
        goes_on.append(hooks.on_epoch_end(EpochReport(epoch, {"loss": (1.0, 1)}, {"loss": (own, 1)}), trainer))
    if session.current().world.rank == 0:
        hooks.restore_best(trainer)
    files = store.list(layout.checkpoints_folder("best")) if store else []
    ended = RunHooks(store, "best", how, session.current()).first_epoch if store else 9
    return goes_on, trainer.restored, [path.rpartition("/")[2] for path in files], ended


@pytest.mark.parametrize("with_store", [True, False])
def test_the_best_epoch_is_kept_and_the_ranks_stop_together(group, tmp_path, with_store):
    first, second = group.run(run_with_the_best, str(tmp_path) if with_store else "")
    assert first[0] == second[0] == [True, True, True, True, False]
    assert (first[1], second[1]) == (b"epoch 1", None)
    if with_store:
        assert first[2] == ["epoch-00001", "epoch-00003", "epoch-00004"]
    assert first[3] == 9, "a run that stopped early is not resumed"


def stop_at_the_request_of_one_callback():
    hooks = RunHooks(None, "r", spec(DATA, epochs=9), session.current())
    wants = session.current().world.rank == 1
    report = EpochReport(0, {"loss": (1.0, 1)}, on_record=lambda record: wants)
    return hooks.on_epoch_end(report, Counting())


def test_a_stop_on_one_rank_stops_all_ranks(group):
    assert group.run(stop_at_the_request_of_one_callback) == [False, False]


def test_the_best_epoch_of_a_resumed_run_is_one_whose_checkpoint_is_kept(alone, tmp_path, caplog):
    store, trainer = Store.create(str(tmp_path)), Counting()

    def train(policy, losses):
        hooks = RunHooks(store, "run", spec(DATA, epochs=9, checkpoints=policy), alone)
        for loss in losses:
            trainer.now = b"epoch %d" % len(hooks.history)
            hooks.on_epoch_end(EpochReport(len(hooks.history), {"loss": (loss, 1)}), trainer)
        hooks.restore_best(trainer)

    train(Checkpoints(), (5.0, 1.0, 4.0))
    train(Checkpoints(best="loss"), (2.0, 3.0))
    assert "Run run was best by loss after epoch 2, but that checkpoint was not kept" in caplog.text
    assert trainer.restored == b"epoch 3"
    with store.open(layout.history_path("run"), "rb") as file:
        assert [record["train"]["loss"] for record in json.loads(file.read())] == [5.0, 1.0, 4.0, 2.0, 3.0]
    assert all(store.exists(layout.events_path("run", "train", epoch)) for epoch in range(5))


def test_a_nan_or_infinite_loss_ends_the_training_with_terminate_on_nan(alone):
    trainer = Counting()
    RunHooks(None, "r", spec(DATA), alone).on_step_end(step(3, trainer, math.nan), trainer)
    strict = RunHooks(None, "r", spec(DATA, terminate_on_nan=True), alone)
    strict.on_step_end(step(2, trainer, 5.0), trainer)
    with pytest.raises(DataError, match=r"loss of epoch 1 of 1, step 3 of 9 is nan on rank 0, and terminate_on_nan"):
        strict.on_step_end(step(3, trainer, math.nan), trainer)
    with pytest.raises(DataError, match="is inf on rank 0"):
        strict.on_step_end(step(3, trainer, math.inf), trainer)


def test_a_nan_or_infinite_loss_causes_one_warning(alone, caplog):
    hooks, trainer = RunHooks(None, "r", spec(DATA, epochs=9), alone), Counting()
    hooks.on_step_end(step(1, trainer, 1.0), trainer)
    assert caplog.messages == []
    hooks.on_step_end(step(2, trainer, math.nan), trainer)
    hooks.on_step_end(step(3, trainer, math.nan), trainer)
    hooks.on_epoch_end(EpochReport(0, {"loss": (math.nan, 1)}), trainer)
    (message,) = caplog.messages
    assert "the loss of epoch 1 of 9, step 2 of 9 is nan" in message
    assert "terminate_on_nan=True" in message


def test_a_nan_or_infinite_loss_of_another_rank_causes_a_warning(alone, caplog):
    hooks = RunHooks(None, "r", spec(DATA, epochs=9), alone)
    hooks.on_epoch_end(EpochReport(0, {"loss": (math.inf, 1)}), Counting())
    assert "the loss of epoch 1 of 9 is inf" in caplog.text


def test_a_line_is_logged_every_n_steps(alone, caplog):
    hooks, trainer = RunHooks(None, "r", spec(DATA, log_every_n_steps=3), alone), Counting()
    with caplog.at_level(logging.INFO, "sparkhvd"):
        for number in (1, 2, 4, 5, 6, 9):
            hooks.on_step_end(step(number, trainer, 0.5), trainer)
    assert [message.partition("step ")[2] for message in caplog.messages] == [
        "4 of 9  loss 0.5",
        "6 of 9  loss 0.5",
        "9 of 9  loss 0.5",
    ]


def test_a_checkpoint_within_an_epoch_survives_saving_and_loading(tmp_path):
    within = checkpoint.EpochPosition(3, 2, 4, "blocks", {"loss": (1.0, 2.0)}, (b"a", b"bc"))
    content = checkpoint.Checkpoint(1, 5, (EpochRecord(0, {"loss": 1.0}),), b"state\n", within)
    store = Store.create(str(tmp_path))
    checkpoint.save(Fence(store, "r", 0), content)
    assert checkpoint.load(store, checkpoint.latest(store, "r")) == content


def commit_within_an_epoch(url):
    store, trainer, commits = Store.create(url), Counting(), Commits()
    how = spec(DATA, epochs=3)
    rank = session.current().world.rank
    hooks = RunHooks(store, "run", how, session.current(), "blocks", division_proc=5, commits=commits)
    trainer.now = b"epoch 0 of rank %d" % rank
    hooks.on_epoch_end(EpochReport(0, {"loss": (2.0, 2)}), trainer)
    end, commits = commits.checkpoint, Commits()  # the first step after it is committed
    commits.checkpoint = end
    hooks = RunHooks(store, "run", how, session.current(), "blocks", division_proc=5, commits=commits)
    hooks.on_step_end(step(4, trainer, epoch=1), trainer)
    again = RunHooks(store, "run", how, session.current(), "blocks", commits=commits)
    return (
        (end.epoch, end.state, end.history[0].sizes),
        (again.first_epoch, again.first_step, again.rank_state, again.resume.checkpoint.state),
        commits.checkpoint.within.division_proc,
        [path.rpartition("/")[2] for path in store.list("runs/run/checkpoints")],
    )


class Recovering(Commits):
    """Never commits, and keeps the last complete step."""

    def __init__(self):
        super().__init__()
        self.exchanges_metrics = True

    def is_due(self):
        return False

    def complete_step(self, recover):
        self.recover = recover


def request_the_end_on_rank_1():
    trainer, commits, wanted = Counting(), Recovering(), []
    hooks = RunHooks(None, "run", spec(DATA, epochs=3), session.current(), commits=commits)
    for number in (1, 2, 3):
        hooks.before_update(0, {"loss": (1.0, 1)})
        requests = session.current().world.rank == 1 and number == 2
        report = replace(step(number, trainer), wants_end=requests, prepare_recovery=lambda: lambda: b"state")
        hooks.on_step_end(report, trainer)
        wanted.append((commits.recover().within.wants_end, dict(commits.recover().within.sums)))
    return wanted


def test_survivors_end_the_training_that_a_lost_rank_has_requested_to_end(group):
    (rank_0, _) = group.run(request_the_end_on_rank_1)
    assert rank_0 == [(False, {"loss": (2.0, 2.0)}), (False, {"loss": (2.0, 2.0)}), (True, {"loss": (2.0, 2.0)})]


def test_all_ranks_have_the_commits_of_rank_0_and_resume_there(group, tmp_path):
    for rank, (end, position, division, files) in enumerate(group.run(commit_within_an_epoch, str(tmp_path))):
        assert end == (0, b"epoch 0 of rank 0", (2,))
        assert position == (1, 4, b"rank %d" % rank, b"step 4")
        assert division == 5
        assert files == ["epoch-00000"], "commits within an epoch stay in memory"


def stop_within_an_interrupted_epoch(url):
    """Request the end on rank 1 before two interruptions of an epoch; return whether the training then continues."""
    store, trainer, commits = Store.create(url), Counting(), Commits()
    how, communicator = spec(DATA, epochs=3), session.current()
    hooks = RunHooks(store, "run", how, communicator, "blocks", commits=commits)
    hooks.on_step_end(replace(step(2, trainer), wants_end=communicator.world.rank == 1), trainer)
    kept, commits = commits.checkpoint, Commits()
    commits.checkpoint = kept
    hooks = RunHooks(store, "run", how, communicator, "blocks", commits=commits)
    hooks.on_step_end(step(4, trainer), trainer)
    path = checkpoint.publish(Fence(store, f"rank {communicator.world.rank}", 0), commits.checkpoint)
    commits.checkpoint = checkpoint.load(store, path)
    hooks = RunHooks(store, "run", how, communicator, "blocks", commits=commits)
    return hooks.on_epoch_end(EpochReport(0, {"loss": (1.0, 1)}), trainer), hooks.stopped()


def test_a_run_that_resumes_within_an_epoch_ends_after_it_if_a_callback_requested_the_end(group, tmp_path):
    assert group.run(stop_within_an_interrupted_epoch, str(tmp_path)) == [(False, True)] * 2


def sync_commits_of_another_generation():
    commits = Commits()
    if session.rank() == 0:
        commits._interval, commits._steps = 3, 2
    commits.on_reset()
    commits.sync()
    return [commits.is_due() for _ in range(4)]


def test_a_change_of_the_ranks_does_not_advance_the_next_commit(group):
    """Otherwise an error that returns at the same step would follow a new commit each time."""
    assert group.run(sync_commits_of_another_generation) == [[False, False, True, True]] * 2


def refused_commit(url):
    class Refusing(Counting):
        def state(self):
            raise ParamError("It holds an object.")

    hooks = RunHooks(Store.create(url), "run", spec(DATA, epochs=3), session.current(), commits=Commits())
    with pytest.raises(ParamError) as refusal:
        hooks.on_epoch_end(EpochReport(0, {"loss": (2.0, 2)}), Refusing())
    return str(refusal.value)


def test_a_checkpoint_that_rank_0_refuses_to_commit_is_refused_on_all_ranks(group, tmp_path):
    assert group.run(refused_commit, str(tmp_path)) == ["It holds an object."] * 2


def test_the_rest_of_a_repartitioned_epoch_includes_the_earlier_part(alone, tmp_path):
    store, trainer, commits = Store.create(str(tmp_path)), Counting(), Commits()
    earlier = checkpoint.EpochPosition(3, 2, 4, "blocks", {"loss": (8.0, 4.0)})
    commits.checkpoint = checkpoint.Checkpoint(0, 5, (), b"step 3", earlier)
    how = spec(DATA, epochs=3)
    hooks = RunHooks(store, "run", how, alone, "blocks", commits=commits)
    hooks.repartition_first_epoch(7)
    assert (hooks.first_step, hooks.rank_state, hooks.first_epoch_batches) == (0, None, 7)
    hooks.on_step_end(step(2, trainer, 2.0), trainer)
    within = commits.checkpoint.within
    assert within.parts == (checkpoint.EpochPart(3, 2, 4), checkpoint.EpochPart(2, 1, how.batch_size))
    assert within.sums == {"loss": (12.0, 6.0)}
    path = checkpoint.publish(Fence(store, "run", 0), commits.checkpoint)
    assert checkpoint.load(store, path) == commits.checkpoint
    hooks.on_epoch_end(EpochReport(0, {"loss": (8.0, 4)}), trainer)
    assert hooks.history[0].sizes == (2, 1)
    assert hooks.history[0].train == {"loss": 2.0}


def test_ranks_that_share_a_fixed_number_of_shards_stay_at_their_step(alone, tmp_path):
    store, trainer, commits = Store.create(str(tmp_path)), Counting(), Commits()
    earlier = checkpoint.EpochPosition(3, 3, 4, "blocks", {"loss": (8.0, 4.0)}, (b"", b""), sizes=(2,))
    commits.checkpoint = checkpoint.Checkpoint(0, 5, (), b"step 3", earlier)
    how = spec(DATA, epochs=3, shards=3)
    hooks = RunHooks(store, "run", how, alone, "blocks", commits=commits)
    assert (hooks.first_step, hooks.rank_state, hooks.first_epoch_batches) == (3, None, None)
    hooks.on_step_end(step(4, trainer, 2.0), trainer)
    within = commits.checkpoint.within
    assert within.parts == (checkpoint.EpochPart(4, 3, how.batch_size),)
    assert within.sizes == (2, 1)
    assert (how.lr_scale(1), replace(how, scale_lr=True).lr_scale(1)) == (1.0, 3.0)


def test_the_end_of_an_epoch_that_a_lost_rank_0_did_not_save_is_saved(alone, tmp_path):
    store, commits = Store.create(str(tmp_path)), Commits()
    commits.checkpoint = checkpoint.Checkpoint(
        1, 5, (EpochRecord(0, {"loss": 3.0}), EpochRecord(1, {"loss": 2.0})), b"1"
    )
    RunHooks(store, "run", spec(DATA, epochs=3), alone, commits=commits)
    assert checkpoint.load(store, checkpoint.epoch_end_path(store, "run", 1)).state == b"1"


def test_the_end_of_the_last_epoch_is_no_commit(alone, tmp_path):
    """Ranks that resumed from it would skip the calls of callbacks at the end of the training."""
    commits = Commits()
    hooks = RunHooks(Store.create(str(tmp_path)), "run", spec(DATA, epochs=2), alone, commits=commits)
    for epoch in range(2):
        hooks.on_epoch_end(EpochReport(epoch, {"loss": (1.0, 1)}), Counting())
    assert commits.checkpoint.epoch == 0


class Averaging(Counting):
    """A trainer with a callback that changes the model at the end of the training."""

    def finish(self, hooks, state):
        self.now = state
        hooks.on_train_end(self)


@pytest.mark.parametrize("at_the_end", [b"epoch 1", b"an average"])
def test_a_run_that_a_callback_ended_stays_ended_with_its_final_model(alone, tmp_path, caplog, at_the_end):
    store, trainer = Store.create(str(tmp_path)), Averaging()
    hooks = RunHooks(store, "run", spec(DATA, epochs=9), alone)
    for epoch, ends in enumerate((False, True)):
        trainer.now = b"epoch %d" % epoch
        report = EpochReport(epoch, {"loss": (1.0, 1)}, on_record=lambda _, ends=ends: ends)
        assert hooks.on_epoch_end(report, trainer) is not ends
    before = RunHooks(store, "run", spec(DATA, epochs=9), alone)
    assert (before.first_epoch, before.resume.checkpoint.state) == (9, b"epoch 1"), (
        "the end is recorded before the callbacks return"
    )
    trainer.finish(hooks, at_the_end)
    again = RunHooks(store, "run", spec(DATA, epochs=20), alone)
    assert (again.first_epoch, len(again.history), again.resume.checkpoint.state) == (20, 2, at_the_end)
    assert "Run run was ended by a callback after epoch 2, so nothing is left to train" in caplog.text
    trainer.finish(again, b"nobody has trained")
    assert RunHooks(store, "run", spec(DATA), alone).resume.checkpoint.state == at_the_end


def test_the_final_model_is_kept_after_an_epoch_that_a_callback_adds(alone, tmp_path):
    store, trainer = Store.create(str(tmp_path)), Averaging()
    hooks = RunHooks(store, "run", spec(DATA, epochs=1), alone)
    for epoch in (0, 1):
        trainer.now = b"epoch %d" % epoch
        hooks.on_epoch_end(EpochReport(epoch, {"loss": (1.0, 1)}), trainer)
    trainer.finish(hooks, b"an average")
    again = RunHooks(store, "run", spec(DATA, epochs=1), alone)
    assert (len(again.history), again.resume.checkpoint.state) == (2, b"an average")
