"""Training steps of one rank."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from sparkhvd.comm import session
from sparkhvd.data.read.batches import Arrays, Batch
from sparkhvd.errors import DataError
from sparkhvd.estimators.torch.inputs import ModelInput, called_in_order, taking_inputs_in_order
from sparkhvd.estimators.torch.losses.divisors import Divisor, LossFactors, loss_factors
from sparkhvd.estimators.torch.losses.epoch_metrics import EpochMetrics
from sparkhvd.estimators.torch.losses.objective import Objective
from sparkhvd.estimators.torch.renormalization import rows_keep_their_norms
from sparkhvd.estimators.torch.serialization.package import Stepping
from sparkhvd.estimators.training.synthetic_rows import at_least_two_rows
from sparkhvd.torch.buffers import buffers_unchanged
from sparkhvd.torch.optimizer.exchange import ExchangingOptimizer
from sparkhvd.torch.sync_batch_norm import SyncBatchNorm, synchronized_layers

_PLACEHOLDERS = 2  # the rows of a rank that has none
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# The arguments of a train_minibatch_fn, in order.
MINIBATCH_ARGUMENTS = (
    "model",
    "optimizer",
    "transform_outputs",
    "loss_fn",
    "inputs",
    "labels",
    "sample_weights",
    "backward_passes_per_step",
    "batch_idx",
)

Result = tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]  # loss, outputs, labels


class Forward:
    """Computes the loss of a batch in the chosen precision.

    Args:
        model: the module.
        inputs: its inputs.
        objective: its losses.
        stepping: options of a step.
        device: the device of the model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inputs: Sequence[ModelInput],
        objective: Objective,
        stepping: Stepping,
        device: torch.device,
    ) -> None:
        self.model = model
        self.objective = objective
        self.device = device
        self._inputs = inputs
        self._dtype = _DTYPES.get(stepping.mixed_precision or "")
        # The model to call; torch compiles it on the first call.
        self.called = model
        if stepping.compile is not None:
            self.called = cast("torch.nn.Module", torch.compile(model, **stepping.compile))
        self._call_model = called_in_order(self.called, inputs)

    def __call__(self, batch: Batch, factors: LossFactors = None) -> Result:
        with self.precision():
            outputs = self.outputs(self._call_model(*self.inputs(batch)))
            if self.model.training:
                self.objective.check_training(outputs)
            labels = self.objective.labels(outputs, batch.columns)
            return self.objective.loss(outputs, labels, batch.columns, factors), outputs, labels

    def parts(self, batch: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Return the loss of every output, the outputs and the labels."""
        with self.precision():
            outputs = self.outputs(self._call_model(*self.inputs(batch)))
            labels = self.objective.labels(outputs, batch.columns)
            return self.objective.parts(outputs, labels, batch.columns), outputs, labels

    def outputs(self, result: object) -> list[torch.Tensor]:
        """Return the outputs of a result in float32: labels take their dtype, and 16 bits cannot hold every label."""
        return [output.float() if output.dtype == self._dtype else output for output in outputs_of(result)]

    def precision(self) -> torch.autocast:
        """Return the context in which the model computes."""
        return torch.autocast(self.device.type, dtype=self._dtype, enabled=self._dtype is not None)

    def taking_inputs(self) -> AbstractContextManager[None]:
        """Return the context in which ``called(*inputs)`` works, whatever the arguments of ``forward``."""
        return taking_inputs_in_order(self.called, self._inputs)

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return the arguments of ``forward``."""
        return tuple(part.tensor(batch.columns, batch.rows).to(self.device) for part in self._inputs)


class Stepper:
    """Takes optimizer steps.

    Args:
        forward: computes the loss of a batch.
        stepping: options of a step.
        divisors: divisors of the losses; None for the number of rows.
        sample: real rows, for a rank without rows.
    """

    def __init__(
        self,
        forward: Forward,
        stepping: Stepping,
        divisors: Sequence[Divisor | None] = (),
        sample: Arrays | None = None,
    ) -> None:
        self._forward = forward
        self._divisors = divisors
        self._stepping = stepping
        self._synchronized = _SynchronizedPasses.of(forward.model, forward.objective, sample)
        # The scaler does nothing unless the precision is fp16.
        self.scaler = torch.amp.GradScaler(forward.device.type, enabled=stepping.mixed_precision == "fp16")

    def step(
        self,
        group: Sequence[Batch],
        optimizer: ExchangingOptimizer,
        measures: EpochMetrics,
        first: int,
        lap: Callable[[str], None],
        *,
        before_update: Callable[[], None],
    ) -> float | None:
        """Take one optimizer step over the global rows of all batches in ``group``.

        Args:
            group: batches whose gradients make the step.
            optimizer: exchanges the gradients.
            measures: accumulates losses and metrics.
            first: the number of the first batch within its epoch.
            lap: attributes the time since its last call.
            before_update: called once the gradients are averaged and the metrics are complete, before the weights
                change; not called for steps of a ``train_minibatch_fn``.

        Returns:
            The loss of the last batch that had rows on this rank, or the first NaN or infinite loss; None without rows.
        """
        optimizer.set_backward_passes_per_step(len(group))
        optimizer.zero_grad()
        if self._stepping.minibatch_fn is not None:
            loss = _MinibatchSteps(self._forward, self._stepping.minibatch_fn, len(group)).run(
                group, optimizer, measures, first
            )
            lap("compute")
            return loss
        loss = None
        total = sum(batch.global_rows for batch in group)
        self.scaler.scale(torch.zeros((), device=self._forward.device))  # ranks without rows need the scale, too
        for batch, factors in zip(group, loss_factors(self._divisors, group), strict=True):
            forward = partial(self._forward, factors=factors)
            if self._synchronized is not None:
                batch_loss, outputs, labels = self._synchronized.run(batch, forward)
                ranks = session.current().world.size
                optimizer.weight_next(1 / ranks)
                weighted = batch_loss * (ranks * batch.rows / total)
            elif batch.rows == 0:
                optimizer.contribute_nothing()
                continue
            else:
                batch_loss, outputs, labels = forward(batch)
                optimizer.weight_next(batch.rows / total)
                weighted = batch_loss
            self.scaler.scale(weighted).backward()  # type: ignore[no-untyped-call]
            if batch.rows:
                loss = _step_loss(loss, measures.add(batch_loss, outputs, labels, batch.rows, factors))
        lap("compute")
        optimizer.synchronize()
        before_update()
        lap("communication")
        self._apply(optimizer)
        lap("compute")
        return loss

    def _apply(self, optimizer: ExchangingOptimizer) -> None:
        # Only the optimizer's parameters: gradients of the model's other parameters are not averaged.
        stepping, parameters = self._stepping, [p for group in optimizer.param_groups for p in group["params"]]
        if stepping.clip_norm is not None or stepping.clip_value is not None:
            self.scaler.unscale_(optimizer)
        if stepping.clip_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, stepping.clip_value)
        if stepping.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, stepping.clip_norm)
        # All ranks have the same gradients, so they agree on whether a step overflowed and is skipped.
        self.scaler.step(optimizer)
        self.scaler.update()


class _SynchronizedPasses:
    """Passes of a model with layers that exchange statistics.

    Their gradients cross ranks in the backward pass, so the loss itself must carry the weight of its rank. A rank
    without rows must take part, too. It runs two rows that do not count, from an earlier batch, the sample, or zeros:
    other batch normalization refuses a single row.
    """

    def __init__(self, modules: torch.nn.Module, layers: Sequence[SyncBatchNorm], sample: Arrays | None) -> None:
        self._modules = modules
        self._layers = layers
        self._rows = None if sample is None else _placeholders(sample)

    @classmethod
    def of(cls, model: torch.nn.Module, objective: Objective, sample: Arrays | None) -> _SynchronizedPasses | None:
        layers = synchronized_layers(model)
        return cls(torch.nn.ModuleList([model, *objective.loss_modules()]), layers, sample) if layers else None

    def run(self, batch: Batch, forward: Callable[[Batch], Result]) -> Result:
        if batch.rows:
            self._rows = _placeholders(batch.columns)
            return forward(batch)
        rows = self._rows or {
            name: np.zeros((_PLACEHOLDERS, *array.shape[1:]), array.dtype) for name, array in batch.columns.items()
        }
        for layer in self._layers:
            layer.counts_rows = False
        try:
            with buffers_unchanged(self._modules, self._layers), rows_keep_their_norms(self._modules):
                loss, outputs, labels = forward(replace(batch, columns=rows, rows=_PLACEHOLDERS))
            for output in outputs:
                if output.requires_grad:  # the loss of these rows may be NaN, and so is NaN times 0
                    output.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
            return loss, outputs, labels
        finally:  # the layers are part of the trained model
            for layer in self._layers:
                layer.counts_rows = True


def _placeholders(columns: Arrays) -> Arrays:
    return at_least_two_rows({name: array[:_PLACEHOLDERS] for name, array in columns.items()})


class _MinibatchSteps:
    """Steps that the user's function takes, like Horovod's ``train_minibatch_fn``."""

    def __init__(self, forward: Forward, function: Callable[..., Any], passes: int) -> None:
        self._forward = forward
        self._function = function
        self._passes = passes

    def run(
        self, group: Sequence[Batch], optimizer: ExchangingOptimizer, measures: EpochMetrics, first: int
    ) -> float | None:
        steps_taken: list[object] = []
        total = sum(batch.global_rows for batch in group)

        def after_step(*_: object) -> None:
            steps_taken.append(None)
            if len(group) == 1:  # the function may take further steps with the batch
                optimizer.weight_next(group[0].rows / total)

        hook = optimizer.register_step_post_hook(after_step)
        loss = None
        try:
            for index, batch in enumerate(group):
                if batch.rows == 0:
                    optimizer.contribute_nothing()
                    continue
                optimizer.weight_next(batch.rows / total)
                loss = _step_loss(loss, self._run_batch(batch, optimizer, measures, first + index))
            if not steps_taken:  # this rank has no rows in the last batch, or the last group of the epoch is shorter
                optimizer.step()
        finally:
            hook.remove()
        return loss

    def _run_batch(self, batch: Batch, optimizer: ExchangingOptimizer, measures: EpochMetrics, index: int) -> float:
        forward, objective = self._forward, self._forward.objective

        def transform_outputs(outputs: Any, _labels: Any = None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            float_outputs = forward.outputs(outputs)
            return float_outputs, objective.labels(float_outputs, batch.columns)

        raw = [torch.from_numpy(batch.columns[name]).to(forward.device) for name in objective.label_cols]
        column = objective.weight_col
        weights = None if column is None else torch.from_numpy(batch.columns[column]).to(forward.device)

        def loss_fn(outputs: Any, labels: Any, sample_weights: torch.Tensor | None = weights) -> torch.Tensor:
            if sample_weights is weights:
                return objective.loss(forward.outputs(outputs), labels, batch.columns)
            own = {} if sample_weights is None else {"own": sample_weights.detach().cpu().numpy()}
            weighted = replace(objective, weight_col=next(iter(own), None))
            return weighted.loss(forward.outputs(outputs), labels, own)

        with forward.precision(), forward.taking_inputs():
            outputs, loss = self._function(
                forward.called,
                optimizer,
                transform_outputs,
                loss_fn,
                forward.inputs(batch),
                raw,
                weights,
                self._passes,
                index,
            )
        float_outputs = forward.outputs(outputs)
        return measures.add(loss, float_outputs, objective.labels(float_outputs, batch.columns), batch.rows)


def _step_loss(before: float | None, loss: float) -> float:
    """Return the loss of a step so far; an earlier NaN or infinite loss wins."""
    return loss if before is None or math.isfinite(before) else before


def outputs_of(result: object) -> list[torch.Tensor]:
    """Return the outputs in a model's result.

    The outputs are the tensor, or the tensors of a tuple or list. If the result has named fields, like the results of
    Hugging Face's models, the output is ``logits``, or else the only tensor besides ``loss``.

    Raises:
        DataError: the result has no such tensors.
    """
    fields = _fields(result)
    tensors = result if fields is None else _choose_output(fields, type(result).__name__)
    outputs: list[Any] = list(tensors) if isinstance(tensors, tuple | list) else [tensors]
    for output in outputs:
        if not isinstance(output, torch.Tensor):
            raise DataError(
                f"The model returned {type(output).__name__}; it must return a tensor, or a tuple or list with one "
                "tensor per label column."
            )
    return outputs


def _fields(result: object) -> Mapping[Any, Any] | None:
    """Return the fields of a mapping or dataclass that are not None; None for any other result."""
    if isinstance(result, Mapping):
        fields = dict(result)
    elif dataclasses.is_dataclass(result):
        fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    else:
        return None
    return {name: value for name, value in fields.items() if value is not None}


def _choose_output(fields: Mapping[Any, Any], class_name: str) -> object:
    if "logits" in fields:
        return fields["logits"]
    tensors = [value for name, value in fields.items() if isinstance(value, torch.Tensor) and name != "loss"]
    if len(tensors) == 1:
        return tensors[0]
    raise DataError(
        f"The model returned {class_name} with the fields {list(fields)}; it is not clear which of them are the "
        "outputs. The estimator uses 'logits', or the only tensor. Return a tensor or a tuple of tensors; a "
        "Hugging Face model returns a tuple if its configuration has return_dict=False."
    )
