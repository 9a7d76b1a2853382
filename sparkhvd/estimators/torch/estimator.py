"""``TorchEstimator`` and ``TorchModel``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, cast

import torch

from sparkhvd.errors import ParamError
from sparkhvd.estimators.api.estimator import DistributedEstimator
from sparkhvd.estimators.models.model import TrainedModel
from sparkhvd.estimators.params.declarations import Declared, declared
from sparkhvd.estimators.params.fit_plan import FitPlan
from sparkhvd.estimators.params.params import (
    callable_object,
    flag_or_arguments,
    numbers,
    objects,
    objects_or_named,
    one_of,
    positive_integer,
    positive_number,
    shapes,
)
from sparkhvd.estimators.torch.callbacks import TorchCallback
from sparkhvd.estimators.torch.params import uncompiled
from sparkhvd.estimators.torch.schedule import lr_schedule
from sparkhvd.estimators.torch.serialization import artifact
from sparkhvd.estimators.torch.serialization.package import dumps_params
from sparkhvd.estimators.training.job_files import local_copies

Measure = Callable[..., torch.Tensor]

_PLUGIN = "sparkhvd.estimators.torch.plugin:PLUGIN"


class TorchModel(TrainedModel):
    """A trained ``torch.nn.Module`` as a Spark Transformer."""

    plugin: ClassVar[str] = _PLUGIN

    def getModel(self) -> torch.nn.Module:  # noqa: N802  (Horovod's name)
        """Return the trained module in evaluation mode; every call returns a new copy."""
        with local_copies(self.file_source, self._trained.files) as folder:
            return artifact.load_model(folder)

    def getOptimizer(self) -> torch.optim.Optimizer:  # noqa: N802  (Horovod's name)
        """Return the optimizer in its final state, with the unscaled learning rate.

        Its parameters belong to a copy of the module; to continue training, take both from
        ``getModelAndOptimizer()``.
        """
        return self.getModelAndOptimizer()[1]

    def getModelAndOptimizer(self) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: N802
        """Return the trained module and its optimizer, which holds the module's parameters."""
        with local_copies(self.file_source, self._trained.files) as folder:
            model = artifact.load_model(folder)
            return model, cast("torch.optim.Optimizer", artifact.load_optimizer(folder, model))


class TorchEstimator(DistributedEstimator):
    """Trains a ``torch.nn.Module`` on a Spark DataFrame, with one process per rank.

    Every parameter has a setter and a getter (``setBatchSize``, ``getBatchSize``); ``explainParams()`` describes them.
    ``sparkhvd.estimators.torch.inputs`` describes how columns become inputs, and
    ``sparkhvd.estimators.torch.losses.objective`` how labels reach the loss. The model and optimizer that you pass
    never change.

    Examples:
        >>> estimator = TorchEstimator(
        ...     num_proc=2,
        ...     store=Store.create("/tmp/experiments"),
        ...     model=net,
        ...     optimizer=torch.optim.Adam(net.parameters()),
        ...     loss=torch.nn.functional.cross_entropy,
        ...     feature_cols=["pixels"],
        ...     label_cols=["digit"],
        ...     epochs=3,
        ... )
        >>> predicted = estimator.fit(train_df).transform(test_df)  # doctest: +SKIP
    """

    plugin: ClassVar[str] = _PLUGIN
    model_class: ClassVar[type[TrainedModel]] = TorchModel
    preload: ClassVar[tuple[str, ...]] = (
        "torch",
        "torch._dynamo",  # the first step of an optimizer imports it
        "sparkhvd.estimators.torch.plugin",
        "sparkhvd.estimators.training.worker",
    )
    required: ClassVar[tuple[str, ...]] = ("model", "optimizer", "feature_cols", "label_cols")

    model: Declared[torch.nn.Module | None] = declared(
        "The module to train; it is copied, not changed. If it is the result of torch.compile, the original module is "
        "trained; see torch_compile.",
        uncompiled,
        default=None,
    )
    optimizer: Declared[torch.optim.Optimizer | None] = declared(
        "An optimizer over the model's parameters; it is copied, not changed.", default=None
    )
    loss: Declared[Measure | Sequence[Measure] | None] = declared(
        "Loss of (output, label) that is a mean over the rows; one loss, or a list with one per label.", default=None
    )
    loss_weights: Declared[Sequence[float] | None] = declared(
        "Weights of the losses in their sum; by default equal, with a sum of 1.", numbers, default=None
    )
    metrics: Declared[Sequence[object] | Mapping[str, Measure] | None] = declared(
        "Functions of (output, label) that are means over the rows: a list, a dict by name, or a list of groups with "
        "one function per label.",
        objects_or_named,
        default=None,
    )
    input_shapes: Declared[Sequence[Sequence[int]] | None] = declared(
        "Shape of one row of every feature column, with or without a leading -1 for the rows.", shapes, default=None
    )
    label_shapes: Declared[Sequence[Sequence[int]] | None] = declared(
        "Shape of one row of every label column; by default the output's shape if it has as many elements.",
        shapes,
        default=None,
    )
    loss_constructors: Declared[Callable[..., Measure] | Sequence[Callable[..., Measure]] | None] = declared(
        "Functions that create the losses on the ranks, instead of loss; they may take the arguments model, optimizer "
        "and label_cols, which are passed by name.",
        default=None,
    )
    train_minibatch_fn: Declared[Callable[..., object] | None] = declared(
        "Takes a training step instead of the estimator: a function of (model, optimizer, transform_outputs, loss_fn, "
        "inputs, labels, sample_weights, backward_passes_per_step, batch_idx) that returns (outputs, loss). If it "
        "takes several optimizer steps with a batch, every rank needs rows in every batch.",
        callable_object,
        default=None,
    )
    callbacks: Declared[Sequence[TorchCallback] | None] = declared(
        "TorchCallback objects, run on every rank.", objects, default=None
    )
    lr_scheduler: Declared[object] = declared(
        "The learning rate schedule: an LRSchedule; or a scheduler, or a function that creates one from the "
        "optimizer, which then steps after every epoch.",
        lr_schedule,
        default=None,
    )
    clip_grad_norm: Declared[float | None] = declared(
        "Largest norm of a step's gradient over all parameters of the optimizer; None does not clip.",
        positive_number,
        default=None,
    )
    clip_grad_value: Declared[float | None] = declared(
        "Largest absolute value of a gradient's elements; None does not clip.", positive_number, default=None
    )
    mixed_precision: Declared[str | None] = declared(
        "Reduced precision of the computation: 'bf16', or 'fp16' with loss scaling; the weights keep their type.",
        one_of("bf16", "fp16"),
        default=None,
    )
    torch_compile: Declared[bool | Mapping[str, object]] = declared(
        "Whether the ranks compile the model with torch.compile; a dict passes arguments to it.",
        flag_or_arguments,
        default=False,
    )
    backward_passes_per_step: Declared[int] = declared(
        "Batches per rank whose gradients are averaged, over all their rows, for one step.",
        positive_integer,
        default=1,
    )

    def _pickled(self, objects: dict[str, object]) -> bytes:
        return dumps_params(objects)

    def _checked_plan(self, **overrides: object) -> FitPlan:
        plan = super()._checked_plan(**overrides)
        losses = [name for name in ("loss", "loss_constructors") if plan.own[name] is not None]
        if not losses:
            raise ParamError("TorchEstimator needs a loss; set loss or loss_constructors.")
        if len(losses) == 2:
            raise ParamError("loss and loss_constructors are both set, and both define the loss; set only one of them.")
        return plan
