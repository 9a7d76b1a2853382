"""Logging, averaging, early stopping and checkpoints around every step and epoch, for all frameworks."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np

from sparkhvd._util.counts import counted
from sparkhvd.comm import objects
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.communicator import Communicator
from sparkhvd.errors import DataError
from sparkhvd.estimators.plugin import Trainer, TrainSpec
from sparkhvd.estimators.reports import EpochRecord, EpochReport, StepReport
from sparkhvd.estimators.runs.run_lease import Fence
from sparkhvd.estimators.training import checkpoint, job_files
from sparkhvd.estimators.training.checkpoint import Checkpoint, EpochPosition
from sparkhvd.estimators.training.commits import Commits
from sparkhvd.estimators.training.epoch_callback import CallbackClient
from sparkhvd.estimators.training.logs import run_log
from sparkhvd.estimators.training.logs.history import average_over_ranks
from sparkhvd.estimators.training.resume_state import load_resume_state, log_resumption, with_final_state
from sparkhvd.store import layout
from sparkhvd.store.protocol import Store

logger = logging.getLogger(__name__)

_REQUESTS = "requests to end the training"  # exchanged together with the metrics of a step


class RunHooks:
    """Averages metrics, logs, stops early, writes checkpoints, and finds where to resume an interrupted run.

    Construction is collective: rank 0 looks for the run's last checkpoint, and all ranks resume from it.

    Args:
        store: the Store of the run; None keeps nothing.
        run_id: the id of the run.
        spec: how to train.
        communicator: the communicator of all ranks.
        division: the division of the training rows, see ``checkpoint.EpochPosition``; empty if it is unknown.
        token: rank 0's token, see ``sparkhvd.estimators.runs.run_lease``; 0 if no other fit can take the run over.
        division_proc: the number of ranks that the rows in the Store were divided for; 0 is the current number.
        commits: the commits of an elastic fit; None otherwise.
        callback: the connection to the driver, on rank 0 if ``epoch_callback`` is set; None otherwise.
    """

    def __init__(  # noqa: PLR0917
        self,
        store: Store | None,
        run_id: str,
        spec: TrainSpec,
        communicator: Communicator,
        division: str = "",
        token: int = 0,
        *,
        division_proc: int = 0,
        commits: Commits | None = None,
        callback: CallbackClient | None = None,
    ) -> None:
        self._callback = callback
        self._store = store if store is not None and store.save_runs else None
        self._fence = None if self._store is None else Fence(self._store, run_id, token)
        self._run_id = run_id
        self._spec = spec
        self._communicator = communicator
        self._division = division
        self._division_proc = division_proc
        self._commits = commits
        committed = None if commits is None else commits.checkpoint
        self._save_missing_epoch_end(committed)
        self.resume = load_resume_state(store, run_id, communicator, committed)
        self.history: list[EpochRecord] = list(self.resume.history)
        self._ended = self.resume.ended
        if store is not None and self.first_epoch >= spec.epochs:
            self.resume = with_final_state(self.resume, store, run_id, communicator)
        self._end_digest: bytes | None = None  # digest of the last checkpoint's state, after the last epoch
        # In the current epoch, the last reported step and the last step that allowed a checkpoint.
        self._last_step = self._last_allowed = self.resume.first_step
        self._exchanged: _StepMetrics | None = None  # of the step whose update has begun
        self._wants_end = False  # whether this rank had requested the end of the training at the last step
        self._best: tuple[int, bytes] | None = None  # epoch and state, without a Store, on rank 0
        self._warned = False
        if communicator.world.rank == 0:
            log_resumption(run_id, self.resume, spec.epochs)
            if self._store is not None and self.resume.checkpoint is None:
                logger.info("run %s starts; a later fit with this run_id resumes it", run_id)
        self._warn_if_best_is_lost()

    @property
    def first_epoch(self) -> int:
        """See ``TrainHooks``; past the last epoch if nothing is left to train."""
        return self._spec.epochs if self.stopped() else self.resume.first_epoch

    @property
    def first_step(self) -> int:
        """See ``TrainHooks``."""
        return self.resume.first_step

    @property
    def first_epoch_batches(self) -> int | None:
        """See ``TrainHooks``."""
        return self.resume.repartitioned_batches

    @property
    def steps_done(self) -> int:
        """See ``TrainHooks``."""
        return self.resume.steps_done

    @property
    def rank_state(self) -> bytes | None:
        """See ``TrainHooks``."""
        return self.resume.rank_state(self._communicator.world)

    @property
    def metrics(self) -> Sequence[bytes]:
        """See ``TrainHooks``."""
        return self.resume.earlier_metrics

    def repartition_first_epoch(self, batches: int) -> None:
        """Record that the first epoch is the rest of an epoch that other ranks began, with ``batches`` batches."""
        self.resume = replace(self.resume, repartitioned_batches=batches)

    def stopped(self) -> bool:
        """Return whether a callback or early stopping has ended the training."""
        return self._ended or self._stops_early()

    def _is_last(self, epoch: int) -> bool:
        return self.stopped() or epoch + 1 >= self._spec.epochs  # a callback may add an epoch

    def _stops_early(self) -> bool:
        rule = self._spec.early_stopping
        return rule is not None and bool(self.history) and rule.ends(self.history)

    def before_update(self, epoch: int, sums: Mapping[str, tuple[float, int]] | None = None) -> None:
        """See ``TrainHooks``."""
        if self._commits is None:
            return
        self._commits.exchanges_states = sums is None
        if sums is not None and self._commits.exchanges_metrics:
            local = {**sums, _REQUESTS: (float(self._wants_end), 0.0)}
            totals = _totals(local, self.resume.earlier_sums(epoch), self._communicator, "sums of a step")
            self._exchanged = _StepMetrics(totals, wants_end=totals.pop(_REQUESTS)[0] > 0)
        self._commits.begin_update()

    def on_step_end(self, report: StepReport, trainer: Trainer) -> None:
        """See ``TrainHooks``."""
        spec, rank = self._spec, self._communicator.world.rank
        where = f"epoch {report.epoch + 1} of {spec.epochs}, step {report.step} of {report.steps}"
        self._communicator.note_progress(where)
        self._wants_end = report.wants_end
        self._check_loss(report.loss, where, f" on rank {rank}")
        if rank == 0 and _is_due(spec.log_every_n_steps, report, self._last_step):
            logger.info("%s%s", where, "" if report.loss is None else f"  loss {report.loss:.4g}")
        self._last_step = report.step
        if not report.allows_checkpoint:
            return
        due = report.step < report.steps and _is_due(spec.checkpoints.every_steps, report, self._last_allowed)
        self._last_allowed = report.step
        saves = due and self._fence is not None
        commits = self._commits is not None and self._commits.is_due() and report.step < report.steps
        self._complete_step(report)
        if saves or commits:
            self._save_within(report, trainer, to_store=saves)

    def _complete_step(self, report: StepReport) -> None:
        """Prepare to resume from this step if a later one fails; may be collective."""
        metrics, self._exchanged = self._exchanged, None
        commits = self._commits
        if commits is None:
            return
        commits.can_recover = report.prepare_recovery is not None
        if not commits.exchanges_metrics or report.step >= report.steps:
            return
        if metrics is None:
            metrics = self._exchange_metrics(report)
        if report.prepare_recovery is not None:
            commits.complete_step(partial(self._recovered, commits, report, metrics, report.prepare_recovery()))

    def _exchange_metrics(self, report: StepReport) -> _StepMetrics:
        """Return the metrics of all ranks at this step; collective."""
        own = (dict(report.sums()), report.metrics(), report.wants_end)
        ranks = objects.allgather_object(self._communicator, own, name="metrics of a step")
        totals = dict(self.resume.earlier_sums(report.epoch))
        for sums, _, _ in ranks:
            for name, (total, rows) in sums.items():
                before = totals.get(name, (0.0, 0.0))
                totals[name] = (before[0] + float(total), before[1] + float(rows))
        wants_end = any(wants_end for _, _, wants_end in ranks)
        return _StepMetrics(totals, tuple(state for _, state, _ in ranks if state), wants_end)

    def _recovered(
        self, commits: Commits, report: StepReport, metrics: _StepMetrics, recover: Callable[[], bytes | None]
    ) -> Checkpoint | None:
        """Return a checkpoint of a step that this rank has completed, after a later step has failed."""
        state = recover()
        if state is None:
            return None
        if report.wants_end:
            commits.requested_end = report.epoch
        last = commits.checkpoint
        committed = None if last is None or last.epoch != report.epoch else last.within
        # The rank that has requested the end may be the lost one.
        wanted_end = metrics.wants_end or (committed is not None and committed.wants_end)
        wants_end = report.wants_end or wanted_end
        within = self._position(report, metrics.sums, metrics=metrics.states, wants_end=wants_end)
        logger.info("run %s continues from epoch %d, step %d", self._run_id, report.epoch + 1, report.step)
        return self._checkpoint(report.epoch, state, within)

    def keep_file(self, path: Path) -> None:
        """See ``TrainHooks``."""
        if self._fence is not None:
            self._fence.check()
            job_files.replace_file(self._fence.store, layout.saved_path(self._run_id, path.name), path)

    def on_epoch_end(self, report: EpochReport, trainer: Trainer) -> bool:
        """See ``TrainHooks``."""
        record = average_over_ranks(report, self._communicator, self.resume.earlier_sums(report.epoch))
        record = replace(record, sizes=self._sizes(report.epoch))
        self.history.append(record)
        self._last_step = self._last_allowed = 0
        # rows_per_second is 0 if no step returned a loss, which is possible with user-defined steps.
        loss = record.train.get("loss") if record.rows_per_second else None
        self._check_loss(loss, f"epoch {record.epoch + 1} of {self._spec.epochs}")
        wants_end = report.on_record is not None and report.on_record(record)
        wants_end = wants_end or self.resume.wanted_end(report.epoch)
        wants_end = wants_end or (self._commits is not None and self._commits.requested_end == report.epoch)
        if self._callback is not None:
            wants_end = self._callback.report(self.history) or wants_end
        self._ended = self._any_rank(wants_end, report.epoch)  # before _save_epoch, which saves it
        if self._communicator.world.rank == 0:
            logger.info("%s", record.line(self._spec.epochs))
        self._save_epoch(record.epoch, trainer)
        if self._stops_early():
            self._log_early_stopping()
        return not self.stopped()

    def _sizes(self, epoch: int) -> tuple[int, ...]:
        """Return the numbers of ranks that have trained an epoch, in order, without consecutive duplicates."""
        sizes = [*self.resume.earlier_sizes(epoch), self._communicator.world.size]
        return tuple(size for size, _ in groupby(sizes))

    def on_train_end(self, trainer: Trainer) -> None:
        """See ``TrainHooks``."""
        if self._fence is None or self._end_digest is None:
            return
        content = self._checkpoint(self.history[-1].epoch, self._state_of(trainer))
        if _digest(content.state) != self._end_digest:
            checkpoint.save_final(self._fence, content)

    def _check_loss(self, loss: float | None, where: str, rank_suffix: str = "") -> None:
        """Warn once on rank 0, or raise an error, if a loss is NaN or infinite: the weights rarely recover from it."""
        if loss is None or math.isfinite(loss):
            return
        if self._spec.terminate_on_nan:
            raise DataError(
                f"The loss of {where} is {loss}{rank_suffix}, and terminate_on_nan is set. Lower the learning rate, "
                "clip the gradients, or look for NaN or infinite values in the rows."
            )
        if self._warned or self._communicator.world.rank != 0:
            return
        self._warned = True
        logger.warning(
            "run %s: the loss of %s is %s, and training continues. Set terminate_on_nan=True to stop there. Lower the "
            "learning rate, clip the gradients, or look for NaN or infinite values in the rows.",
            self._run_id,
            where,
            loss,
        )

    def _log_early_stopping(self) -> None:
        rule = self._spec.early_stopping
        if rule is not None and self._communicator.world.rank == 0:
            logger.info("training stops early: no better %s for %s", rule.monitor, counted(rule.patience, "epoch"))

    def restore_best(self, trainer: Trainer) -> None:
        """Restore the model of the best epoch, if ``Checkpoints(best=...)`` is set; on rank 0."""
        best = self._best_epoch()
        if best is None or best == len(self.history) - 1:
            return
        if self._best is not None and self._best[0] == best:
            trainer.restore(self._best[1])
        elif self._store is not None:
            path = checkpoint.epoch_end_path(self._store, self._run_id, best)
            trainer.restore(checkpoint.load(self._store, path).state)
        logger.info("the model of epoch %d is returned, the best by %s", best + 1, self._spec.checkpoints.best)

    def _best_epoch(self) -> int | None:
        return self._spec.checkpoints.best_epoch(self.history, self.resume.lost_epochs)

    def _warn_if_best_is_lost(self) -> None:
        policy = self._spec.checkpoints
        best = policy.best_epoch(self.history)
        if best in self.resume.lost_epochs and self._communicator.world.rank == 0:
            logger.warning(
                "Run %s was best by %s after epoch %d, but that checkpoint was not kept; the best of the other epochs "
                "is used instead. Set Checkpoints(best=%r) from the start of a run.",
                self._run_id,
                policy.best,
                (best or 0) + 1,
                policy.best,
            )

    def _any_rank(self, wants: bool, epoch: int) -> bool:
        total = self._communicator.allreduce(np.array([float(wants)]), ReduceOp.SUM, name=f"epoch {epoch} stop")
        return bool(total[0] > 0)

    def _state_of(self, trainer: Trainer) -> bytes:
        """Return the state on this rank, without collectives of the user's hooks and objects."""
        with self._communicator.alone("a checkpoint is saved"):
            return trainer.state()

    def _save_epoch(self, epoch: int, trainer: Trainer) -> None:
        fence = self._fence
        # No commit after the last epoch: ranks that resume from it would skip the callbacks at the end of the training.
        if fence is not None and self._commits is not None and not self._is_last(epoch):
            self._commits.take(lambda: self._save_epoch_end(fence, epoch, trainer))
        elif self._communicator.world.rank != 0:
            return
        elif fence is not None:
            self._save_epoch_end(fence, epoch, trainer)
        elif self._spec.checkpoints.best is not None and self._best_epoch() == epoch:
            self._best = (epoch, self._state_of(trainer))

    def _save_epoch_end(self, fence: Fence, epoch: int, trainer: Trainer) -> Checkpoint:
        """Save the end of an epoch in the Store, on rank 0."""
        fence.check()
        run_log.write(fence.store, self._run_id, self.history)
        content = self._checkpoint(epoch, self._state_of(trainer))
        self._save(fence, content)
        self._end_digest = _digest(content.state) if self._is_last(epoch) else None
        return content

    def _save(self, fence: Fence, content: Checkpoint) -> None:
        best = self._best_epoch()
        path = checkpoint.save(fence, content, self._spec.checkpoints.keep, () if best is None else (best,))
        if self._commits is not None:
            self._commits.published(path)

    def _save_missing_epoch_end(self, committed: Checkpoint | None) -> None:
        """Save the end of an epoch if the previous rank 0 was lost between its commit and its checkpoint."""
        if committed is None or committed.within is not None or self._fence is None:
            return
        if self._communicator.world.rank == 0 and committed.epoch not in checkpoint.kept_epochs(
            self._fence.store, self._run_id
        ):
            checkpoint.publish(self._fence, committed)

    def _checkpoint(self, epoch: int, state: bytes, within: EpochPosition | None = None) -> Checkpoint:
        spec, history = self._spec, tuple(self.history)
        return Checkpoint(epoch, spec.seed, history, state, within, model=spec.model, ended=self._ended)

    def _position(
        self,
        report: StepReport,
        sums: Mapping[str, tuple[float, float]],
        rank_states: tuple[bytes, ...] = (),
        metrics: tuple[bytes, ...] = (),
        *,
        wants_end: bool,
    ) -> EpochPosition:
        return EpochPosition(
            step=report.step,
            num_proc=self._spec.shards or self._communicator.world.size,
            batch_size=self._spec.batch_size,
            division=self._division,
            sums=dict(sums),
            rank_states=rank_states,
            metrics=metrics,
            division_proc=self._division_proc,
            earlier=self.resume.earlier_parts(report.epoch),
            sizes=self._sizes(report.epoch),
            wants_end=wants_end or self.resume.wanted_end(report.epoch),
        )

    def _save_within(self, report: StepReport, trainer: Trainer, *, to_store: bool) -> None:
        communicator = self._communicator
        report.synchronize()
        before = self.resume.earlier_sums(report.epoch)
        sums = _totals(report.sums(), before, communicator, f"epoch {report.epoch} step {report.step} sums")
        local_state = (report.rank_state(), report.metrics(), report.wants_end)
        states = objects.allgather_object(communicator, local_state, name=f"states of ranks at {report.step}")

        def make() -> Checkpoint:
            within = self._position(
                report,
                sums,
                tuple(state for state, _, _ in states),
                tuple(metrics for _, metrics, _ in states if metrics),
                wants_end=any(wants for _, _, wants in states),
            )
            content = self._checkpoint(report.epoch, self._state_of(trainer), within)
            if to_store and self._fence is not None:
                self._save(self._fence, content)
            return content

        if self._commits is not None:
            self._commits.take(make)
        elif communicator.world.rank == 0:
            make()


@dataclass(frozen=True)
class _StepMetrics:
    """What the ranks have exchanged in a step.

    Attributes:
        sums: ``StepReport.sums`` in total.
        states: ``StepReport.metrics`` of each rank.
        wants_end: whether any rank has requested the end of the training.
    """

    sums: Mapping[str, tuple[float, float]]
    states: tuple[bytes, ...] = ()
    wants_end: bool = False


def _digest(state: bytes) -> bytes:
    return hashlib.sha256(state).digest()


def _is_due(every: int | None, report: StepReport, since: int) -> bool:
    """Return whether a multiple of ``every`` was reached after the step ``since``."""
    return every is not None and report.step // every > since // every


def _totals(
    local: Mapping[str, tuple[float, float]],
    before: Mapping[str, tuple[float, float]],
    communicator: Communicator,
    name: str,
) -> dict[str, tuple[float, float]]:
    """Return the sums and rows over all ranks, added to the sums and rows in ``before``."""
    numbers = np.array([number for pair in local.values() for number in pair], np.float64)
    total = communicator.allreduce(numbers, ReduceOp.SUM, name=name).reshape(-1, 2)
    pairs = {metric: (float(pair[0]), float(pair[1])) for metric, pair in zip(local, total, strict=True)}
    return {
        metric: (pair[0] + before.get(metric, (0.0, 0.0))[0], pair[1] + before.get(metric, (0.0, 0.0))[1])
        for metric, pair in pairs.items()
    }
