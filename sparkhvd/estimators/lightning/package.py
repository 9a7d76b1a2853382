"""Pickles of the user's Lightning objects for the ranks, and the LightningModule around a plain module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sparkhvd.data.schema.data_schema import DataSchema
from sparkhvd.estimators.lightning.batches import Columns
from sparkhvd.estimators.lightning.steps import strategy_of
from sparkhvd.estimators.params.named_inputs import NamedInput
from sparkhvd.estimators.torch.inputs import ModelInput, called_in_order, plan_inputs
from sparkhvd.estimators.torch.losses.divisors import batch_divisors
from sparkhvd.estimators.torch.losses.epoch_metrics import weighted_mean_loss
from sparkhvd.estimators.torch.losses.objective import Objective
from sparkhvd.lightning.flavour import FlavourName, default_flavour, flavour_of, import_lightning

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_STAGES = ("train", "val")
_HALF_TYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class LightningPackage:
    """The user's objects, pickled together.

    Attributes:
        model: a LightningModule; or a plain module, which then comes with an optimizer and ``objective``.
        optimizers: optimizers over the model's parameters, which train a plain module, or whose state the optimizers of
            a LightningModule take over.
        objective: losses and metrics of a plain module.
        input_shapes: see the estimator's parameter.
        label_shapes: see the estimator's parameter.
        batch_format: see the estimator's parameter.
        callbacks: callbacks of the Trainer.
        logger: logger of the Trainer.
        trainer_args: further arguments of the Trainer.
        data_module: creates a LightningDataModule from the ranks' loaders.
        compression: compression of the gradients that ranks exchange.
        named_inputs: for a plain module: the estimator's ``inputs``.
    """

    model: torch.nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    objective: Objective | None
    input_shapes: Sequence[Sequence[int]] | None
    label_shapes: Sequence[Sequence[int]] | None
    batch_format: str
    callbacks: tuple[object, ...]
    logger: object
    trainer_args: Mapping[str, object]
    data_module: Callable[..., object] | None
    compression: object = None
    named_inputs: Mapping[str, NamedInput] | None = None

    @property
    def flavour(self) -> FlavourName:
        """Return the name under which Lightning is used: by the module's class, else by the callbacks."""
        names = [flavour_of(part) for part in (self.model, *self.callbacks)]
        return next((name for name in names if name is not None), None) or default_flavour()

    @property
    def plain(self) -> bool:
        """Whether the model is not a LightningModule."""
        return flavour_of(self.model) is None

    @property
    def losses(self) -> torch.nn.ModuleList:
        """The losses of a plain module that are modules, as their buffers are state of the training."""
        losses = () if self.objective is None else self.objective.losses
        return torch.nn.ModuleList(loss for loss in losses if isinstance(loss, torch.nn.Module))

    def inputs(self, schema: DataSchema) -> tuple[ModelInput, ...]:
        """Return the inputs of ``forward``."""
        return plan_inputs(self.model, schema.of("feature"), self.input_shapes, self.named_inputs)


def lightning_module(package: LightningPackage, schema: DataSchema) -> Any:
    """Return the LightningModule to train: the user's own, or one around a plain module."""
    if not package.plain:
        return package.model
    lightning = import_lightning(package.flavour)
    module_class = type("PlainModule", (PlainSteps, lightning.LightningModule), {"__module__": __name__})
    module: Any = module_class()
    module.model, module.package, module.schema = package.model, package, schema
    module.measures = (
        {} if package.objective is None else {stage: _reset_copies(package.objective) for stage in _STAGES}
    )
    module.val_loss = None if package.objective is None else _create_validation_loss(package.objective.weights)
    # Lightning moves and resets submodules. They are in a list, because a metric's name may be invalid for a submodule.
    module.kept_measures = torch.nn.ModuleList(
        part for metrics in module.measures.values() for part in metrics.values()
    )
    return module


class PlainSteps:
    """Training steps of a plain module; precedes ``LightningModule`` in the bases. Batches are arrays by column."""

    model: torch.nn.Module
    package: LightningPackage
    schema: DataSchema
    inputs: tuple[ModelInput, ...]
    measures: dict[str, dict[str, Any]]
    val_loss: Any
    device: torch.device
    log: Callable[..., None]
    trainer: Trainer

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.model(*inputs)

    def on_fit_start(self) -> None:
        """Plan the inputs for the module's dtype, which the Trainer's precision may have changed."""
        self.inputs = self.package.inputs(self.schema)

    def training_step(self, batch: Columns, batch_idx: int) -> torch.Tensor:  # noqa: ARG002  (Lightning's signature)
        return self._loss(batch, "train")

    def validation_step(self, batch: Columns, batch_idx: int) -> torch.Tensor:  # noqa: ARG002
        return self._loss(batch, "val")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.package.optimizers[0]

    def _loss(self, columns: Columns, stage: str) -> torch.Tensor:
        from sparkhvd.estimators.torch.steps import outputs_of  # noqa: PLC0415

        objective = self.package.objective
        if objective is None:
            raise AssertionError("a plain module must have an objective")
        rows = len(next(iter(columns.values())))
        call = called_in_order(self.model, self.inputs)
        outputs = outputs_of(call(*(part.tensor(columns, rows).to(self.device) for part in self.inputs)))
        # Labels are created from arrays on the CPU in the outputs' dtype; 16 bits cannot hold every label.
        outputs = [output.cpu().float() if output.dtype in _HALF_TYPES else output.cpu() for output in outputs]
        labels = objective.labels(outputs, columns)
        factors = strategy_of(self.trainer).feed.share("train").factors if stage == "train" else None
        parts = objective.parts(outputs, labels, columns)
        loss = objective.combined(parts, outputs, labels, factors)
        measured: dict[str, Any] = objective.measure(loss, outputs, labels)
        if stage == "val":
            self.val_loss.update(parts, batch_divisors(objective, labels, rows))
            measured["loss"] = self.val_loss
        for metric in objective.stateful():
            metric_state = measured[metric.name] = self.measures[stage][metric.name]
            metric_state.update(outputs[metric.output].detach().to(self.device), labels[metric.output].to(self.device))
        for name in objective.names():
            if stage == "val":  # separate names, because Lightning keeps one value per name
                self.log(f"val_{name}", measured[name], on_step=False, on_epoch=True, batch_size=rows)
            elif name != "loss":
                self.log(name, measured[name], on_step=False, on_epoch=True, batch_size=rows)
        return loss


def _create_validation_loss(weights: Sequence[float]) -> Any:
    """Return a torchmetrics metric: the weighted sum of mean losses over all rows, each with its divisor."""
    from torchmetrics import Metric  # noqa: PLC0415  (Lightning brings it)

    class CountedLoss(Metric):
        totals: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.add_state("totals", torch.zeros(len(weights), 2, dtype=torch.float64), dist_reduce_fx="sum")

        def update(self, parts: Sequence[torch.Tensor], counts: Sequence[float]) -> None:
            for index, (part, count) in enumerate(zip(parts, counts, strict=True)):
                if count:
                    self.totals[index] += torch.tensor([float(part) * count, count], dtype=torch.float64)

        def compute(self) -> torch.Tensor:
            return torch.tensor(weighted_mean_loss(weights, self.totals.cpu().numpy()))

    return CountedLoss()


def _reset_copies(objective: Objective) -> dict[str, Any]:
    """Return copies of the torchmetrics by name, with their state reset."""
    metrics: dict[str, Any] = {metric.name: copy.deepcopy(metric.function) for metric in objective.stateful()}
    for metric in metrics.values():
        metric.reset()
    return metrics
