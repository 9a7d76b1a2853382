"""The checkpoint from which a run resumes, and the parts of its first epoch that are already trained."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sparkhvd._util.counts import counted
from sparkhvd.comm import objects
from sparkhvd.comm.communicator import Communicator
from sparkhvd.estimators.reports import EpochRecord
from sparkhvd.estimators.training import checkpoint
from sparkhvd.estimators.training.checkpoint import Checkpoint, EpochPart, EpochPosition
from sparkhvd.store.protocol import Store
from sparkhvd.world import World

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResumeState:
    """Where a run resumes; without a checkpoint, at its start.

    Attributes:
        checkpoint: the run's last checkpoint.
        kept_epochs: the epochs with a checkpoint at their end.
        repartitioned_batches: the number of batches of the first epoch if it is the repartitioned rest of an epoch;
            else None.
    """

    checkpoint: Checkpoint | None = None
    kept_epochs: frozenset[int] = frozenset()
    repartitioned_batches: int | None = None

    @property
    def history(self) -> tuple[EpochRecord, ...]:
        """The epochs that were completed before the interruption."""
        return () if self.checkpoint is None else self.checkpoint.history

    @property
    def lost_epochs(self) -> frozenset[int]:
        """The completed epochs without a checkpoint."""
        return frozenset(range(len(self.history))) - self.kept_epochs

    @property
    def ended(self) -> bool:
        """Whether a callback has ended the run."""
        return self.checkpoint is not None and self.checkpoint.ended

    @property
    def within(self) -> EpochPosition | None:
        """The position in the first epoch if the run was interrupted within it."""
        return None if self.checkpoint is None else self.checkpoint.within

    @property
    def first_epoch(self) -> int:
        """The epoch to start with."""
        return 0 if self.checkpoint is None else self.checkpoint.first_epoch

    @property
    def first_step(self) -> int:
        """The number of completed batches of the first epoch; 0 if the rest of the epoch was repartitioned."""
        return 0 if self.within is None or self.repartitioned_batches is not None else self.within.step

    @property
    def steps_done(self) -> int:
        """The number of completed steps of the first epoch, over all of its parts."""
        return 0 if self.within is None else self.within.steps_done

    def rank_state(self, world: World) -> bytes | None:
        """Return the state of a rank at ``first_step``; None if there is none, such as after a change of ranks."""
        if self.within is None or self.repartitioned_batches is not None:
            return None
        states = self.within.rank_states
        return states[world.rank] if len(states) == world.size else None

    def earlier_sums(self, epoch: int) -> Mapping[str, tuple[float, float]]:
        """Return the metrics of the part of an epoch that was trained before the interruption."""
        return {} if self.within is None or epoch != self.first_epoch else self.within.sums

    @property
    def earlier_metrics(self) -> tuple[bytes, ...]:
        """The states of metrics from the part of the first epoch that was trained before the interruption."""
        return () if self.within is None else self.within.metrics

    def earlier_sizes(self, epoch: int) -> tuple[int, ...]:
        """Return the numbers of ranks that trained the earlier part of an epoch."""
        if self.within is None or epoch != self.first_epoch:
            return ()
        return self.within.sizes or tuple(part.num_proc for part in self.within.parts)

    def wanted_end(self, epoch: int) -> bool:
        """Return whether a callback requested the end of the training in the earlier part of an epoch."""
        return self.within is not None and epoch == self.first_epoch and self.within.wants_end

    def earlier_parts(self, epoch: int) -> tuple[EpochPart, ...]:
        """Return the parts of an epoch that were trained before its rest was repartitioned."""
        if self.within is None or self.repartitioned_batches is None or epoch != self.first_epoch:
            return ()
        return self.within.parts


def load_resume_state(
    store: Store | None, run_id: str, communicator: Communicator, committed: Checkpoint | None = None
) -> ResumeState:
    """Return the state from which all ranks resume the run; collective.

    The state is ``committed``, which all ranks have, or else the last checkpoint that rank 0 finds in the Store.
    """
    if store is None:
        return ResumeState(committed)
    latest: tuple[str | None, frozenset[int]] = (None, frozenset())
    if communicator.world.rank == 0:
        path = None if committed is not None else checkpoint.latest(store, run_id)
        latest = (path, checkpoint.kept_epochs(store, run_id))
    path, kept = objects.broadcast_object(communicator, latest, 0, name="checkpoint to resume")
    return ResumeState(committed if path is None else checkpoint.load(store, path), kept)


def with_final_state(state: ResumeState, store: Store, run_id: str, communicator: Communicator) -> ResumeState:
    """Return the state of a finished run, including the changes of callbacks at its end; collective."""
    path = None
    if communicator.world.rank == 0 and state.checkpoint is not None:
        path = checkpoint.final(store, run_id, state.checkpoint.epoch)
    path = objects.broadcast_object(communicator, path, 0, name="final state")
    return state if path is None else replace(state, checkpoint=checkpoint.load(store, path))


def log_resumption(run_id: str, state: ResumeState, epochs: int) -> None:
    """Log where a run that trains for ``epochs`` epochs resumes; log nothing if it starts from the beginning."""
    resumed = state.checkpoint
    if resumed is None:
        return
    if resumed.ended:
        logger.warning(
            "Run %s was ended by a callback after epoch %d, so nothing is left to train; its model is returned. Choose "
            "another run_id to train from the start.",
            run_id,
            resumed.first_epoch,
        )
    elif resumed.within is not None:
        logger.info("run %s resumes in epoch %d after step %d", run_id, resumed.epoch + 1, resumed.within.step)
    elif resumed.first_epoch < epochs:
        logger.info("run %s resumes after epoch %d", run_id, resumed.first_epoch)
    else:
        logger.warning(
            "Run %s has already been trained for %s and epochs=%d, so nothing is left to train; its model is "
            "returned. Raise epochs, or choose another run_id to train from the start.",
            run_id,
            counted(resumed.first_epoch, "epoch"),
            epochs,
        )
