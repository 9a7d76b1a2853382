"""The records that a trainer, the hooks and the history exchange about steps and epochs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepTimes:
    """Where the time of an epoch's training steps went on this rank, in seconds.

    Attributes:
        data_wait: waiting for rows.
        compute: forward, backward and the optimizer.
        communication: with the other ranks, as far as the computing had to wait for it.
    """

    data_wait: float = 0.0
    compute: float = 0.0
    communication: float = 0.0


@dataclass(frozen=True)
class EpochRecord:
    """One epoch of a run.

    Attributes:
        epoch: from 0.
        train: metric name -> mean over the training rows of all ranks.
        validation: the same over the validation rows; empty without validation.
        rows_per_second: training rows of all ranks per second of training.
        step_seconds: mean duration of a training step.
        shares: parts of that duration by what they went to: data_wait, compute, communication.
    """

    epoch: int
    train: dict[str, float]
    validation: dict[str, float] = field(default_factory=dict)
    rows_per_second: float = 0.0
    step_seconds: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)

    def line(self, epochs: int) -> str:
        """The record on one line, for people who watch the run."""
        parts = [f"epoch {self.epoch + 1}/{epochs}"]
        parts += [f"{name} {value:.4g}" for name, value in self.train.items()]
        parts += [f"val_{name} {value:.4g}" for name, value in self.validation.items()]
        parts.append(f"{self.rows_per_second:,.0f} rows/s")
        shares = [f"{kind.split('_')[0]} {share:.0%}" for kind, share in self.shares.items()]
        parts.append(f"step {self.step_seconds * 1000:.1f} ms{' = ' if shares else ''}{' + '.join(shares)}")
        return "  ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The record as JSON knows it."""
        return asdict(self)


@dataclass(frozen=True)
class EpochReport:
    """What a trainer tells the hooks at the end of an epoch. Values are this rank's sums, not yet averaged over ranks.

    Before its validation the trainer has given all ranks the same of what each rank changes for itself (running
    statistics): the model that is measured is the one that rank 0 keeps.

    Attributes:
        epoch: from 0.
        train: metric name -> (sum over this rank's rows, rows); ``loss`` is always there.
        validation: the same over the validation rows; empty without validation.
        times: where the time went.
        steps: training steps, the same on every rank.
        on_record: called with the record of all ranks before the checkpoint is made: for what the trainer's state is to
            hold. Returns whether this rank wants the training to end; it ends on all ranks when one wants it.
    """

    epoch: int
    train: Mapping[str, tuple[float, int]]
    validation: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    times: StepTimes = StepTimes()
    steps: int = 0
    on_record: Callable[[EpochRecord], bool] | None = None


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class StepReport:
    """What a trainer tells the hooks after a training step.

    Attributes:
        epoch: from 0.
        step: batches of the epoch that are done, those before an interruption included.
        steps: batches of the whole epoch.
        loss: of this rank in this step; None where it had no rows.
        sums: this rank's metrics of the epoch so far, as in ``EpochReport.train``.
        rank_state: what this rank has of its own and needs to go on from here, such as the state of random numbers.
        whole: whether the trainer's state is all there is; not where gradients wait for those of further batches.
        synchronize: gives all ranks the same of what each rank changes for itself, such as running statistics;
            collective, called before a checkpoint within the epoch.
    """

    epoch: int
    step: int
    steps: int
    loss: float | None
    sums: Callable[[], Mapping[str, tuple[float, int]]]
    rank_state: Callable[[], bytes]
    whole: bool = True
    synchronize: Callable[[], None] = _nothing
