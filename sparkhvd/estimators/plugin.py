"""The interface between the estimators and a framework: the protocols of a plug-in, and the values that it receives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from sparkhvd.data.read.batches import Arrays, BatchSource
from sparkhvd.data.read.readers import ReadOptions
from sparkhvd.data.schema.data_schema import DataSchema
from sparkhvd.data.schema.manifest import LabelRanges
from sparkhvd.estimators.batch_dependence import BatchDependence
from sparkhvd.estimators.params.policies import Checkpoints, EarlyStopping
from sparkhvd.estimators.reports import EpochRecord, EpochReport, StepReport
from sparkhvd.estimators.runs.resume_check import ModelFacts
from sparkhvd.world import World

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


@dataclass(frozen=True)
class TrainSpec:
    """The training settings that every framework's trainer receives, identical on every rank.

    Attributes:
        shards: the number of batches of ``batch_size`` rows that make up a global batch, which the ranks divide among
            themselves; None means one batch per rank.
        elastic: whether ranks may join and leave within epochs.
        labels: the known ranges of labels.
        sample: one real row by column, for ranks without rows of their own; None if no row is known.
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
    reading: ReadOptions = field(default_factory=ReadOptions)
    val_reading: ReadOptions = field(default_factory=ReadOptions)
    early_stopping: EarlyStopping | None = None
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    terminate_on_nan: bool = False
    log_every_n_steps: int | None = None
    use_gpu: bool = True
    batch_dependence: BatchDependence = field(default_factory=BatchDependence)
    model: ModelFacts | None = None
    shards: int | None = None
    elastic: bool = False
    labels: LabelRanges = ()
    sample: Arrays | None = field(default=None, compare=False, repr=False)

    def lr_scale(self, size: int) -> float:
        """Return the factor for the learning rate with ``size`` ranks; a fixed number of shards takes precedence."""
        return float(self.shards or size) if self.scale_lr else 1.0

    def seed_of(self, epoch: int, rank: int, step: int = 0) -> int:
        """Return the seed of a rank's random numbers in an epoch, so that a resumed run draws the same numbers.

        Args:
            epoch: the epoch.
            rank: the rank.
            step: the completed steps of a resumed epoch, if other ranks did them; their numbers are not drawn again.
        """
        if step:
            entropy = (self.seed % 2**63, epoch, rank, step)
            return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) % 2**63
        return ((self.seed * 100_003 + epoch) * 10_007 + rank) % 2**63


def typed_params(params_class: type[T], params: Mapping[str, Any]) -> T:
    """Return an instance of a dataclass whose fields are named like parameters; missing parameters are None.

    The converters of the parameters have checked the types.
    """
    return params_class(**{field.name: params.get(field.name) for field in fields(params_class)})


class TrainHooks(Protocol):
    """The callbacks of a framework's training loop; every rank calls every hook, in the same order."""

    @property
    def first_epoch(self) -> int:
        """The epoch to start with; above 0 if a run resumes."""

    @property
    def first_step(self) -> int:
        """The number of completed batches of the first epoch, to be skipped: ``source.epoch(n, first_step)``."""

    @property
    def first_epoch_batches(self) -> int | None:
        """The number of batches of the first epoch, if it is the repartitioned rest of an epoch; else None."""

    @property
    def steps_done(self) -> int:
        """The completed steps of the first epoch, including those before its rest was repartitioned."""

    @property
    def rank_state(self) -> bytes | None:
        """The value of this rank's ``StepReport.rank_state`` at ``first_step``; None if there is none."""

    @property
    def metrics(self) -> Sequence[bytes]:
        """The ranks' values of ``StepReport.metrics`` in the first epoch before the interruption.

        One rank must take over each value. There may be more or fewer values than ranks.
        """

    @property
    def history(self) -> Sequence[EpochRecord]:
        """The completed epochs, including those before an interruption."""

    def keep_file(self, path: Path) -> None:
        """Save a file of this rank in the run's folder of the Store; do nothing without a Store.

        An existing file with the same name is replaced.
        """

    def before_update(self, epoch: int, sums: Mapping[str, tuple[float, int]] | None = None) -> None:
        """Announce that the weights are about to change, after the gradients were averaged; may be collective.

        A trainer must call this hook in every step if it sets ``StepReport.prepare_recovery`` and cannot notice all
        changes.

        Args:
            epoch: the epoch, counted from 0.
            sums: this rank's metrics of the epoch, including this step, as in ``StepReport.sums``; None if they are
                complete only after the update. If they are passed, the ranks exchange them here. Then the loss of a
                rank after the update does not cost the step.
        """

    def on_step_end(self, report: StepReport, trainer: Trainer) -> None:
        """Report progress, end the training on a NaN or infinite loss, and write a checkpoint when one is due.

        Trainers call this hook between steps, when ``trainer.state()`` is the state at the end of a step.
        """

    def on_epoch_end(self, report: EpochReport, trainer: Trainer) -> bool:
        """Average the metrics, log them and checkpoint on rank 0; return on every rank whether to continue."""

    def on_train_end(self, trainer: Trainer) -> None:
        """Save the model if callbacks changed it after the last checkpoint.

        Trainers call this hook last, once after all epochs. A later fit of the run returns the saved model.
        """


class Trainer(Protocol):
    """One rank's training."""

    def restore(self, state: bytes) -> None:
        """Restore a state that ``state()`` returned on rank 0."""

    def state(self) -> bytes:
        """Return the model, the optimizer and all state that a resumed run needs to equal an uninterrupted one."""

    def fit(self, train: BatchSource, val: BatchSource | None, hooks: TrainHooks) -> None:
        """Train all epochs, and call the hooks between steps and epochs."""

    def export(self, folder: Path) -> None:
        """Write the trained model as files that ``FrameworkPlugin.predictor`` opens without Spark."""


@dataclass(frozen=True)
class Inference:
    """How the executors of a transform run a model.

    Attributes:
        gpu: the framework's index of the GPU that Spark assigned to this task; None computes on the CPU.
        function: replaces the call of the model; ``function(model, *inputs)``, for Keras ``function(model, inputs)``.
    """

    gpu: int | None = None
    function: Callable[..., object] | None = None


ON_CPU = Inference()

# One output of a batch: an array whose first dimension is the rows, or one such array per field of a struct.
Predicted = npt.NDArray[np.generic] | Mapping[str, npt.NDArray[np.generic]]


class Predictor(Protocol):
    """A trained model that predicts batches in the executors of a transform."""

    def predict(self, columns: Arrays) -> Sequence[Predicted]:
        """Return one prediction per output for these rows."""


class FrameworkPlugin(Protocol):
    """One framework, as a stateless object that driver, rank and executor look up by a module-level name.

    Attributes:
        takes_texts: whether models accept string columns as features; ``check`` and ``export`` then refuse other
            columns that are not numeric.
    """

    takes_texts: ClassVar[bool]

    def check(self, params: Mapping[str, object], schema: DataSchema, rows: Arrays | None) -> list[tuple[int, ...]]:
        """Check on the driver, before training, that the model can be trained on these rows.

        Args:
            params: the estimator's parameters by name.
            schema: the columns; shapes may be unknown while ``rows`` is None.
            rows: a few rows by column. If None, synthetic rows are used, provided that all shapes are known.

        Returns:
            The shape of one row of every output; empty if it is not known yet.
        """

    def try_out(self, payload: bytes, schema: DataSchema, rows: Arrays) -> list[tuple[int, ...]]:
        """Run the check on a rank with the payload of ``pack``, for rows that only the ranks have.

        ``schema`` has all shapes, even if they were unknown to ``pack``.
        """

    def mapping(self, params: Mapping[str, object], schema: DataSchema) -> str:
        """Describe for the log which columns go to which input and output."""

    def pack(self, params: Mapping[str, object]) -> bytes:
        """Serialize the user's objects that the trainer needs on the ranks.

        ``params`` are the estimator's parameters and, as ``"schema"``, the columns with all shapes.
        """

    def monitors(self, params: Mapping[str, object]) -> Mapping[str, str]:
        """Return the monitored metric of each parameter: ``monitored_metrics(params)``, and the framework's own."""

    def facts(self, params: Mapping[str, object]) -> ModelFacts:
        """Return the facts that a checkpoint must share with the model and optimizer that resume from it."""

    def batch_dependence(self, params: Mapping[str, object]) -> BatchDependence:
        """Return the layers and losses that relate the rows of a batch."""

    def packages(self) -> tuple[str, ...]:
        """Return the packages that ``predictor`` may need; some of them may not be installed."""

    def trainer(self, payload: bytes, spec: TrainSpec, world: World) -> Trainer:
        """Create the trainer of one rank from the payload of ``pack``."""

    def export(self, params: Mapping[str, object], schema: DataSchema, folder: Path) -> None:
        """Write the untrained model of ``params`` in the format of ``Trainer.export``; the schema may lack labels."""

    def predictor(self, folder: Path, inference: Inference = ON_CPU) -> Predictor:
        """Open a model that ``Trainer.export`` wrote."""
