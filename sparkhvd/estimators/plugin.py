"""The whole surface of a framework towards the estimators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from sparkhvd.data.read.batches import Arrays, BatchSource
from sparkhvd.data.read.readers import Reading
from sparkhvd.data.schema.data_schema import DataSchema
from sparkhvd.data.schema.manifest import LabelRanges
from sparkhvd.estimators.normalization import Normalization
from sparkhvd.estimators.params.policies import Checkpoints, EarlyStopping
from sparkhvd.estimators.reports import EpochRecord, EpochReport, StepReport
from sparkhvd.estimators.runs.resume_check import ModelFacts
from sparkhvd.world import World


@dataclass(frozen=True)
class TrainSpec:
    """What every framework's trainer needs to know, the same on every rank.

    Attributes:
        labels: the ranges of labels, as far as they are known.
        sample: a real row by column, for ranks that have had none; None where no row is known.
    """

    schema: DataSchema
    epochs: int
    batch_size: int
    val_batch_size: int
    seed: int
    scale_lr: bool
    backward_passes_per_step: int = 1
    shuffle: bool = True
    train_steps_per_epoch: int | None = None
    validation_steps_per_epoch: int | None = None
    reading: Reading = field(default_factory=Reading)
    val_reading: Reading = field(default_factory=Reading)
    early_stopping: EarlyStopping | None = None
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    terminate_on_nan: bool = False
    log_every_n_steps: int | None = None
    use_gpu: bool = True
    normalization: Normalization = field(default_factory=Normalization)
    model: ModelFacts | None = None
    labels: LabelRanges = ()
    sample: Arrays | None = field(default=None, compare=False, repr=False)

    def seed_of(self, epoch: int, rank: int) -> int:
        """Of a rank's random numbers in an epoch, so that a resumed run draws what an undisturbed one would."""
        return ((self.seed * 100_003 + epoch) * 10_007 + rank) % 2**63


class TrainHooks(Protocol):
    """What the shared side does around a framework's own loop; every rank calls every hook, in the same order."""

    @property
    def first_epoch(self) -> int:
        """The epoch to start with; above 0 when a run resumes."""

    @property
    def first_step(self) -> int:
        """The batches of the first epoch that are done already, to be left out: ``source.epoch(n, first_step)``."""

    @property
    def first_epoch_batches(self) -> int | None:
        """How many batches the first epoch gives, where others have begun it; None where that is no matter."""

    @property
    def rank_state(self) -> bytes | None:
        """What this rank's ``StepReport.rank_state`` gave at ``first_step``."""

    @property
    def history(self) -> Sequence[EpochRecord]:
        """The epochs that are done, those before an interruption included."""

    def keep_file(self, path: Path) -> None:
        """Keep a file of this rank's in the folder of the run, in place of one of the same name.

        Without a Store it does nothing.
        """

    def on_step_end(self, report: StepReport, trainer: Trainer) -> None:
        """Say how far the rank is, end for a loss that is no number, checkpoint where it is time.

        Trainers call it between steps, when ``trainer.state()`` is that of a step's end.
        """

    def on_epoch_end(self, report: EpochReport, trainer: Trainer) -> bool:
        """Average the metrics, log, checkpoint on rank 0. Returns whether training goes on, the same on every rank."""

    def on_train_end(self, trainer: Trainer) -> None:
        """Keep what callbacks made of the model at the end of a training that one of them has ended.

        Trainers call it last, once for all epochs; a later fit of the run gets its model from there.
        """


class Trainer(Protocol):
    """One rank's training."""

    def restore(self, state: bytes) -> None:
        """Continue from what ``state()`` returned on rank 0."""

    def state(self) -> bytes:
        """Model, optimizer and whatever else makes a resumed run equal an undisturbed one."""

    def fit(self, train: BatchSource, val: BatchSource | None, hooks: TrainHooks) -> None: ...

    def export(self, folder: Path) -> None:
        """Write the trained model as files that ``FrameworkPlugin.predictor`` opens, without Spark."""


@dataclass(frozen=True)
class Inference:
    """How a model is run in the executors of a transform.

    Attributes:
        gpu: the number that the framework knows Spark's GPU of this task by; None computes on the CPU.
        function: takes the place of the model's call: ``function(model, *inputs)``, the inputs as the model gets them.
    """

    gpu: int | None = None
    function: Callable[..., Any] | None = None


ON_CPU = Inference()

# One output for a batch: an array whose first dimension are the rows, or one such array per field of a struct.
Predicted = npt.NDArray[np.generic] | Mapping[str, npt.NDArray[np.generic]]


class Predictor(Protocol):
    """A trained model, ready for batches; used in the executors of a transform."""

    def predict(self, columns: Arrays) -> Sequence[Predicted]:
        """What it gives for these rows, by output."""


class FrameworkPlugin(Protocol):
    """One framework, as a stateless object that a module-level name finds on driver, rank and executor alike.

    Attributes:
        takes_texts: whether models may have columns of strings as features; ``check`` and ``export`` then refuse what
            else is no number.
    """

    takes_texts: ClassVar[bool]

    def check(self, params: Mapping[str, object], schema: DataSchema, rows: Arrays | None) -> list[tuple[int, ...]]:
        """Fail on the driver, before training, if the model cannot be trained on such rows.

        Args:
            params: the estimator's parameters by name.
            schema: the columns; shapes may be unknown while ``rows`` is None.
            rows: a few rows by column, once there are any; without them, made-up ones where all shapes are known.

        Returns:
            The shape of one row of every output, empty while it cannot be known.
        """

    def try_out(self, payload: bytes, schema: DataSchema, rows: Arrays) -> list[tuple[int, ...]]:
        """What ``check`` does with rows, from what ``pack`` gave: by a rank, where only ranks have the rows.

        ``pack`` may not have known the shapes; ``schema`` has them all.
        """

    def mapping(self, params: Mapping[str, object], schema: DataSchema) -> str:
        """Which columns go to which input and output, in words for the log."""

    def pack(self, params: Mapping[str, object]) -> bytes:
        """Everything the trainer needs of the user's objects, for the way to the ranks.

        ``params`` are the estimator's parameters and, as ``"schema"``, the columns with all shapes.
        """

    def facts(self, params: Mapping[str, object]) -> ModelFacts:
        """What a checkpoint must have in common with the model and optimizer to go on with them."""

    def normalization(self, params: Mapping[str, object]) -> Normalization:
        """Which layers of the model normalize by their batch."""

    def trainer(self, payload: bytes, spec: TrainSpec, world: World) -> Trainer: ...

    def export(self, params: Mapping[str, object], schema: DataSchema, folder: Path) -> None:
        """Write the model of ``params`` as it is, in the form of ``Trainer.export``; the schema may lack labels."""

    def predictor(self, folder: Path, inference: Inference = ON_CPU) -> Predictor:
        """Open what ``Trainer.export`` wrote."""
