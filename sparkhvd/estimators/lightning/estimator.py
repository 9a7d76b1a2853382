"""``LightningEstimator`` and ``LightningModel``."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch

from sparkhvd.errors import ParamError
from sparkhvd.estimators.api.estimator import DistributedEstimator
from sparkhvd.estimators.lightning.files import CHECKPOINT, LOGS
from sparkhvd.estimators.lightning.retired import LIGHTNING_RETIRED
from sparkhvd.estimators.models.model import TrainedModel
from sparkhvd.estimators.params.declarations import Declared, Identity, declared
from sparkhvd.estimators.params.fit_plan import FitPlan
from sparkhvd.estimators.params.params import RETIRED, numbers, objects, objects_or_named, shapes
from sparkhvd.estimators.torch.params import uncompiled
from sparkhvd.estimators.torch.serialization import artifact
from sparkhvd.estimators.torch.serialization.package import dumps_params
from sparkhvd.estimators.training.job_files import local_copies

_PLUGIN = "sparkhvd.estimators.lightning.plugin:PLUGIN"
_BATCH_FORMATS = ("dict", "tuple")

Measure = Callable[..., torch.Tensor]


def batch_format(name: str, value: object) -> str:
    """Return a checked ``batch_format``."""
    if value not in _BATCH_FORMATS:
        raise ParamError(f"{name}={value!r} must be one of {', '.join(map(repr, _BATCH_FORMATS))}.")
    return str(value)


def trainer_arguments(name: str, value: object) -> dict[str, object]:
    """Return checked arguments of the Trainer."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ParamError(f"{name}={value!r} must be a dict of Trainer arguments, such as {{'gradient_clip_val': 1.0}}.")
    return dict(value)


def lightning_data(name: str, value: object) -> Callable[..., object]:
    """Return a checked ``sparkhvd.data.DataModule`` class, or a function that creates a LightningDataModule."""
    if not callable(value):
        raise ParamError(
            f"{name}={value!r} must be a class or function that creates a LightningDataModule, or a subclass of "
            "sparkhvd.data.DataModule; the ranks create the instances."
        )
    factory: Callable[..., object] = value
    return factory


class LightningModel(TrainedModel):
    """A trained LightningModule (or plain module) as a Spark Transformer; ``transform`` calls its ``forward``."""

    plugin: ClassVar[str] = _PLUGIN

    def getModel(self) -> torch.nn.Module:  # noqa: N802  (Horovod's name)
        """Return the trained module in evaluation mode; every call returns a new copy."""
        with local_copies(self.file_source, self._trained.files) as folder:
            return artifact.load_model(folder)

    def getOptimizer(self) -> artifact.Optimizers:  # noqa: N802
        """Return the optimizer, or a list of several, in its final state over a copy of the module's parameters.

        Its learning rate is unscaled. To continue training, take both from ``getModelAndOptimizer()``.
        """
        return self.getModelAndOptimizer()[1]

    def getModelAndOptimizer(self) -> tuple[torch.nn.Module, artifact.Optimizers]:  # noqa: N802
        """Return the trained module and its optimizer, or a list of several, to continue with another estimator.

        Raises:
            ParamError: the model was saved without an optimizer.
        """
        with local_copies(self.file_source, self._trained.files) as folder:
            model = artifact.load_model(folder)
            return model, artifact.load_optimizer(folder, model)

    def save_checkpoint(self, path: str) -> None:
        """Write a Lightning checkpoint of the trained module, for ``MyModule.load_from_checkpoint(path)``."""
        with local_copies(self.file_source, self._trained.files) as folder:
            Path(path).write_bytes((folder / CHECKPOINT).read_bytes())

    def save_logs(self, folder: str) -> list[str]:
        """Unpack the files of loggers with a relative folder; return their names within ``folder``."""
        with local_copies(self.file_source, self._trained.files) as source:
            if not (source / LOGS).exists():
                return []
            with zipfile.ZipFile(source / LOGS) as archive:
                archive.extractall(folder)
                return [name for name in archive.namelist() if not name.endswith("/")]


class LightningEstimator(DistributedEstimator):
    """Trains a LightningModule on a Spark DataFrame, with one process per rank and Lightning's own Trainer in each.

    ``training_step`` receives a dict of tensors by column, or ``(features, labels)`` with ``batch_format="tuple"``.
    The dict has the columns that a ``transformation_fn`` returns, which may differ from the DataFrame's.
    Floating point columns have the dtype of the module's parameters, integers are int64. The gradient of a step is the
    mean over the rows of all ranks, and so are values that are logged for an epoch. The module is copied, not changed.

    ``fit`` returns the model of the last epoch, or with a ``ModelCheckpoint(monitor=...)`` the best one.

    Examples:
        >>> estimator = LightningEstimator(
        ...     num_proc=2,
        ...     store=Store.create("/tmp/experiments"),
        ...     model=MyLightningModule(),
        ...     feature_cols=["pixels"],
        ...     label_cols=["digit"],
        ...     validation=0.1,
        ...     callbacks=[EarlyStopping("val_loss")],
        ...     trainer_args={"gradient_clip_val": 1.0},
        ...     epochs=3,
        ... )
        >>> predicted = estimator.fit(train_df).transform(test_df)  # doctest: +SKIP
    """

    plugin: ClassVar[str] = _PLUGIN
    model_class: ClassVar[type[TrainedModel]] = LightningModel
    preload: ClassVar[tuple[str, ...]] = (
        "torch",
        "torch._dynamo",  # Lightning imports it
        "sparkhvd.estimators.training.worker",
    )
    required: ClassVar[tuple[str, ...]] = ("model", "feature_cols", "label_cols")
    retired = RETIRED | LIGHTNING_RETIRED

    model: Declared[torch.nn.Module | None] = declared(
        "The LightningModule to train, or a plain module with optimizer and loss; it is copied, not changed. If it "
        "is the result of torch.compile, the original module is trained.",
        uncompiled,
        default=None,
    )
    batch_format: Declared[str] = declared(
        "The batch of training_step: 'dict' of tensors by column, or 'tuple' of features and labels (and weights).",
        batch_format,
        default="dict",
    )
    trainer_args: Declared[Mapping[str, object] | None] = declared(
        "Further arguments of Lightning's Trainer, by name.", trainer_arguments, default=None
    )
    callbacks: Declared[Sequence[object] | None] = declared(
        "Callbacks of the Trainer, copied to every rank.", objects, default=None
    )
    logger: Declared[object] = declared(
        "Lightning's logger, or a list of them; files in a relative folder are returned with the model (save_logs).",
        default=None,
        identity=Identity.NEVER,
    )
    data_module: Declared[Callable[..., object] | None] = declared(
        "Class or function that creates a LightningDataModule on every rank; it is called with the rank's loaders of "
        "training and validation batches (None without validation). Or a subclass of sparkhvd.data.DataModule that "
        "loads the prepared rows instead of the readers.",
        lightning_data,
        default=None,
    )
    input_shapes: Declared[Sequence[Sequence[int]] | None] = declared(
        "Shape of one row of every feature column, with or without a leading -1 for the rows.", shapes, default=None
    )
    label_shapes: Declared[Sequence[Sequence[int]] | None] = declared(
        "Shape of one row of every label column.", shapes, default=None
    )
    optimizer: Declared[torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None] = declared(
        "For a plain module: an optimizer over its parameters. For a LightningModule, optionally: the optimizers of an "
        "earlier fit, whose state and learning rates the optimizers of configure_optimizers take over.",
        default=None,
    )
    loss: Declared[Measure | Sequence[Measure] | None] = declared(
        "For a plain module: loss of (output, label) that is a mean over the rows; one loss, or a list with one per "
        "label.",
        default=None,
    )
    loss_weights: Declared[Sequence[float] | None] = declared(
        "For a plain module: weights of the losses in their sum; by default equal.", numbers, default=None
    )
    metrics: Declared[Sequence[object] | Mapping[str, Measure] | None] = declared(
        "For a plain module: functions of (output, label) that are means over the rows.", objects_or_named, default=None
    )

    def _takes_any_columns(self, plan: FitPlan) -> bool:
        from sparkhvd.lightning.flavour import flavour_of  # noqa: PLC0415  (imports Lightning)

        return plan.params["batch_format"] == "dict" and flavour_of(plan.params["model"]) is not None

    def _pickled(self, objects: dict[str, object]) -> bytes:
        return dumps_params(objects)

    def _imports(self) -> tuple[str, ...]:
        from sparkhvd.lightning.flavour import default_flavour, flavour_of  # noqa: PLC0415  (imports Lightning)

        lightning = flavour_of(self.getOrDefault("model")) or default_flavour()
        return (*self.preload, lightning, "sparkhvd.estimators.lightning.plugin")

    def _new_run_id(self) -> str:
        return super()._new_run_id().replace("torch", "lightning", 1)
