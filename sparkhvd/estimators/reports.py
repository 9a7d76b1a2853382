"""The records that a trainer, the hooks and the history exchange about steps and epochs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepTimes:
    """The time that the training steps of an epoch took on this rank, by phase, in seconds.

    Attributes:
        data_wait: waiting for rows.
        compute: forward, backward and the optimizer.
        communication: communication with other ranks that did not overlap with compute.
    """

    data_wait: float = 0.0
    compute: float = 0.0
    communication: float = 0.0


@dataclass(frozen=True)
class EpochRecord:
    """One epoch of a run.

    Attributes:
        epoch: the epoch, counted from 0.
        train: metric name -> mean over the training rows of all ranks.
        validation: the same over the validation rows; empty without validation.
        rows_per_second: training rows of all ranks per second of training; 0 if it is unknown, because no training step
            returned a loss.
        step_seconds: mean duration of a training step.
        shares: fractions of that duration by phase: data_wait, compute, communication.
        sizes: the numbers of ranks that trained the epoch, in order; several if the ranks changed within the epoch.
    """

    epoch: int
    train: dict[str, float]
    validation: dict[str, float] = field(default_factory=dict)
    rows_per_second: float = 0.0
    step_seconds: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()

    def line(self, epochs: int) -> str:
        """Return the record as one line of text for the log and the console."""
        parts = [f"epoch {self.epoch + 1}/{epochs}"]
        parts += [f"{name} {value:.4g}" for name, value in self.train.items()]
        parts += [f"val_{name} {value:.4g}" for name, value in self.validation.items()]
        if self.rows_per_second:
            parts.append(f"{self.rows_per_second:,.0f} rows/s")
        shares = [f"{phase.split('_')[0]} {share:.0%}" for phase, share in self.shares.items()]
        parts.append(f"step {self.step_seconds * 1000:.1f} ms{' = ' if shares else ''}{' + '.join(shares)}")
        return "  ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON types."""
        return {**asdict(self), "sizes": list(self.sizes)}


@dataclass(frozen=True)
class EpochReport:
    """A trainer's report at the end of an epoch. Values are this rank's sums, not yet averaged over ranks.

    Before validation, the trainer synchronizes the state that each rank updates on its own, such as running statistics.
    All ranks therefore validate the model that rank 0 saves.

    Attributes:
        epoch: the epoch, counted from 0.
        train: metric name -> (sum over this rank's rows, rows); always includes ``loss``.
        validation: the same over the validation rows; empty without validation.
        times: the time by phase.
        steps: the training steps that ``times`` covers, equal on every rank; without the steps before an interruption.
        on_record: called with the record of all ranks before the checkpoint is written, to update the trainer's state.
            Returns whether this rank requests the end of the training; one request ends it on all ranks.
    """

    epoch: int
    train: Mapping[str, tuple[float, int]]
    validation: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    times: StepTimes = StepTimes()
    steps: int = 0
    on_record: Callable[[EpochRecord], bool] | None = None


def _do_nothing() -> None:
    """Do nothing."""


def _no_state() -> bytes:
    return b""


@dataclass(frozen=True)
class StepReport:
    """A trainer's report after a training step.

    Attributes:
        epoch: the epoch, counted from 0.
        step: completed batches of the epoch, including those before an interruption. If the rest of the epoch was
            repartitioned to other ranks, only the batches of the rest count, here and in ``steps``.
        steps: batches of the whole epoch.
        loss: the loss of this rank in this step; None if the rank had no rows.
        sums: this rank's metrics of the epoch so far, as in ``EpochReport.train``, without those in ``metrics``.
        rank_state: returns this rank's own state that a resumed run needs, such as the state of random numbers; called
            after ``synchronize``.
        allows_checkpoint: whether the trainer's state is complete after this step; False, for example, while gradients
            accumulate over several batches.
        synchronize: synchronizes the state that each rank updates on its own, such as running statistics; a
            collective, called before a checkpoint within the epoch.
        metrics: returns this rank's state of the metrics that ``sums`` lacks, including the states that it took over
            from ``TrainHooks.metrics``; empty without such metrics.
        wants_end: whether this rank requests the end of the training after this epoch. A run that resumes within the
            epoch keeps the request, because the callback may not repeat it.
        prepare_recovery: called at the end of the step. Returns a function that returns the trainer's state at this
            moment after a later step has failed, or None if the trainer no longer has this state. None if the trainer
            never has it.
    """

    epoch: int
    step: int
    steps: int
    loss: float | None
    sums: Callable[[], Mapping[str, tuple[float, int]]]
    rank_state: Callable[[], bytes]
    allows_checkpoint: bool = True
    synchronize: Callable[[], None] = _do_nothing
    metrics: Callable[[], bytes] = _no_state
    wants_end: bool = False
    prepare_recovery: Callable[[], Callable[[], bytes | None]] | None = None
