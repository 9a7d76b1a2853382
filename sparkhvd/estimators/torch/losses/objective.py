"""Losses, labels and metrics of a torch model.

With ``label_shapes``, a label first gets its shape. The first rule that applies then decides its form at the loss:

* int64 class indices for the class losses (cross entropy, negative log likelihood) if the label has fewer elements than
  the output, which must have one element per class (a single class is refused, because it teaches nothing);
* int64 for ``MultiLabelMarginLoss``;
* the output's shape and dtype if the label has as many elements as the output and, with ``label_shapes``, its shape;
* otherwise the label's own shape; integers and booleans become int64, other types get the output's dtype.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from sparkhvd._util.counts import counted
from sparkhvd._util.frameworks import estimator_hint
from sparkhvd.errors import DataError, ModelOutputError, ParamError
from sparkhvd.estimators.params.shapes import row_shape
from sparkhvd.estimators.plugin import typed_params
from sparkhvd.estimators.torch.synthetic_rows import fails_by_shape
from sparkhvd.estimators.training.user_errors import describe_error, is_tensor_error, with_full_stop

Measure = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_CLASS_LOSSES = (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)
_CLASS_LOSS_FUNCTIONS = (functional.cross_entropy, functional.nll_loss)
_BROADCAST_WARNING = "that is different to the input size"  # torch warns, but then broadcasts the shapes


@dataclass(frozen=True)
class Metric:
    """A function of one output and its label that returns a mean over the rows."""

    name: str
    output: int
    function: Measure
    group: int


@dataclass(frozen=True)
class Objective:
    """Labels, losses and metrics of the outputs.

    Attributes:
        label_cols: one label column per output of the model, in its order.
        losses: one per label, each a mean over the rows.
        weights: weights of the losses in their sum.
        label_shapes: shape of one row of each label; None leaves the shape to the rules above.
        metrics: metrics that are reported with the loss.
        weight_col: the column with the weight of every row. A weighted loss is the mean over the rows of weight times
            loss: it is divided by the number of rows, not by the sum of the weights.
        constructors: functions that create ``losses`` on the rank; empty if the user passed losses.
    """

    label_cols: tuple[str, ...]
    losses: tuple[Measure, ...]
    weights: tuple[float, ...]
    label_shapes: tuple[tuple[int, ...], ...] | None
    metrics: tuple[Metric, ...]
    weight_col: str | None = None
    constructors: tuple[Callable[..., Measure], ...] = ()

    def labels(
        self, outputs: Sequence[torch.Tensor], columns: Mapping[str, npt.NDArray[np.generic]]
    ) -> list[torch.Tensor]:
        """Return the label tensors in the form that the losses take."""
        labels = []
        for index, (name, output, loss) in enumerate(zip(self.label_cols, outputs, self.losses, strict=True)):
            raw = torch.from_numpy(columns[name]).to(output.device)
            shape = self.label_shapes[index] if self.label_shapes else None
            labels.append(_label(name, raw if shape is None else raw.reshape(len(raw), *shape), output, loss, shape))
        return labels

    def check_training(self, outputs: Sequence[torch.Tensor]) -> None:
        """Check that the model returns one output per label in training mode.

        Raises:
            ModelOutputError: the numbers differ; in training mode, some models return auxiliary outputs.
        """
        if len(outputs) != len(self.label_cols):
            raise ModelOutputError(
                f"In training mode the model returns {counted(len(outputs), 'output')} with the shapes "
                f"{[list(o.shape) for o in outputs]}, but in evaluation mode one per column of label_cols "
                f"{list(self.label_cols)}. Turn auxiliary outputs off (aux_logits=False for torchvision's models), or "
                "combine all outputs into one loss in train_minibatch_fn."
            )

    def parts(
        self,
        outputs: Sequence[torch.Tensor],
        labels: Sequence[torch.Tensor],
        columns: Mapping[str, npt.NDArray[np.generic]],
    ) -> list[torch.Tensor]:
        """Return the loss of every output; ``columns`` contain the weights of the rows."""
        rows = None if self.weight_col is None else torch.from_numpy(columns[self.weight_col]).to(outputs[0].device)
        losses = [_on_device(loss, output.device) for loss, output in zip(self.losses, outputs, strict=True)]
        return [
            loss(output, label) if rows is None else _weighted(loss, output, label, rows)
            for loss, output, label in zip(losses, outputs, labels, strict=True)
        ]

    def loss(
        self,
        outputs: Sequence[torch.Tensor],
        labels: Sequence[torch.Tensor],
        columns: Mapping[str, npt.NDArray[np.generic]],
        factors: Sequence[float | None] | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum of the losses.

        Args:
            outputs: outputs of the model.
            labels: one per output, see ``labels``.
            columns: the batch, with the weights of its rows.
            factors: one per loss, see ``divisors.loss_factors``.
        """
        return self.combined(self.parts(outputs, labels, columns), outputs, labels, factors)

    def combined(
        self,
        values: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        labels: Sequence[torch.Tensor],
        factors: Sequence[float | None] | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum of the results of ``parts``; ``factors`` apply to labels that are class indices."""
        parts = [weight * value for weight, value in zip(self.weights, values, strict=True)]
        if factors is not None:
            parts = [
                _scaled(part, factor, output) if label.dtype is torch.int64 else part
                for part, factor, output, label in zip(parts, factors, outputs, labels, strict=True)
            ]
        return torch.stack(parts).sum() if len(parts) > 1 else parts[0]

    def measure(
        self, loss: torch.Tensor, outputs: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]
    ) -> dict[str, float]:
        """Return the loss and every metric of one batch, without torchmetrics."""
        values = {"loss": float(loss.detach())}
        with torch.no_grad():
            for metric in self.metrics:
                if is_stateful(metric.function):
                    continue
                output = outputs[metric.output].detach()
                values[metric.name] = float(metric.function(output, labels[metric.output]))
        return values

    def loss_modules(self) -> list[torch.nn.Module]:
        """Return the losses that are modules, which may hold buffers that change."""
        return [loss for loss in self.losses if isinstance(loss, torch.nn.Module)]

    def names(self) -> list[str]:
        """Return ``loss`` and the names of all metrics."""
        return ["loss", *(metric.name for metric in self.metrics)]

    def stateful(self) -> tuple[Metric, ...]:
        """Return the torchmetrics, whose values are not means over rows."""
        return tuple(metric for metric in self.metrics if is_stateful(metric.function))

    def try_out(
        self,
        outputs: Sequence[torch.Tensor],
        columns: Mapping[str, npt.NDArray[np.generic]],
        *,
        synthetic: bool = False,
    ) -> None:
        """Compute losses and metrics once on a few rows; a failure due to the values of synthetic rows is ignored.

        Raises:
            ModelOutputError: the outputs do not match the labels, a loss or a metric; the message names the shapes.
        """
        if len(outputs) != len(self.label_cols):
            raise ModelOutputError(
                f"The model returns {counted(len(outputs), 'output')} with the shapes "
                f"{[list(o.shape) for o in outputs]}, but label_cols has {len(self.label_cols)}: "
                f"{list(self.label_cols)}. Each output needs a label column, in the same order."
            )
        labels = self.labels(outputs, columns)
        for name, output, label, loss in zip(self.label_cols, outputs, labels, self.losses, strict=True):
            _try_measure(f"The loss {name_of(loss)}", loss, output, label, name, synthetic=synthetic)
            if self.weight_col is not None:
                row_weights = torch.from_numpy(columns[self.weight_col])
                subject = f"The weighted loss {name_of(loss)}"
                weighted = partial(_weighted, loss, row_weights=row_weights)
                _try_measure(subject, weighted, output, label, name, synthetic=synthetic)
        for metric in self.metrics:
            name = self.label_cols[metric.output]
            function = copy.deepcopy(metric.function) if is_stateful(metric.function) else metric.function
            output, label = outputs[metric.output], labels[metric.output]
            _try_measure(f"The metric {metric.name!r}", function, output, label, name, synthetic=synthetic)


def _scaled(part: torch.Tensor, factor: float | None, output: torch.Tensor) -> torch.Tensor:
    """Return a loss times its factor. A factor of 0 or None means that all labels are ignored and the loss is NaN."""
    if factor:
        return part * factor
    return (torch.nan_to_num(output, 0.0, 0.0, 0.0) * 0).sum()  # masked outputs may be infinite


@dataclass(frozen=True)
class ObjectiveParams:
    """The parameters that describe losses and metrics; see ``TorchEstimator``."""

    label_cols: Sequence[str]
    sample_weight_col: str | None
    loss_weights: Sequence[float] | None
    label_shapes: Sequence[Sequence[int]] | None


def objective_of(params: Mapping[str, object]) -> Objective:
    """Return the objective that an estimator's parameters describe.

    Raises:
        ParamError: a list and ``label_cols`` differ in length, or a loss is not a mean.
    """
    own = typed_params(ObjectiveParams, params)
    label_cols = tuple(own.label_cols)
    count = len(label_cols)
    losses, constructors = _repeated(params["loss"], count), _repeated(params.get("loss_constructors"), count)
    weights = own.loss_weights or (1.0 / count,) * count
    shapes = own.label_shapes
    lists: dict[str, Sequence[object] | None] = {
        "loss": losses,
        "loss_constructors": constructors,
        "loss_weights": weights,
        "label_shapes": shapes,
    }
    for name, values in lists.items():
        if values and len(values) != count:
            entries = counted(len(values), "entry", "entries")
            raise ParamError(f"{name} has {entries}, but label_cols has {count}: {list(label_cols)}.")
    for loss in (*losses, *constructors):
        if not callable(loss):
            raise ParamError(f"loss={loss!r} is not callable; pass a function or module that takes (output, label).")
        if hint := estimator_hint(loss, ("torch", "lightning", "pytorch_lightning")):
            raise ParamError(f"The loss {name_of(loss)} does not compute with PyTorch tensors.{hint}")
    for loss in losses:
        _refuse_class("loss", loss)
        refuse_lazy_loss(loss)
    for loss in (*losses, *constructors):
        reduction = _reduction(loss)
        if reduction != "mean" and not (reduction == "batchmean" and _is_divergence(loss)):
            raise ParamError(
                f"The loss {name_of(_unwrapped(loss))} has reduction={reduction!r}; it must be 'mean', because the "
                "gradient of a step is the mean over the rows of all ranks."
            )
    return Objective(
        label_cols=label_cols,
        losses=losses,
        weights=tuple(weights),
        label_shapes=None if shapes is None else tuple(row_shape(shape) for shape in shapes),
        metrics=_metrics(params.get("metrics"), label_cols),
        weight_col=own.sample_weight_col,
        constructors=constructors,
    )


def _reduction(loss: Any) -> Any:
    return loss.keywords.get("reduction", "mean") if isinstance(loss, partial) else getattr(loss, "reduction", "mean")


def _is_divergence(loss: Measure) -> bool:
    """Return whether the loss is PyTorch's Kullback-Leibler divergence, whose ``batchmean`` is the mean over rows."""
    function = _unwrapped(loss)
    return isinstance(function, torch.nn.KLDivLoss) or function is functional.kl_div


def _refuse_class(name: str, value: object) -> None:
    if isinstance(value, type):
        raise ParamError(f"{name} holds the class {value.__name__}; pass an instance such as {value.__name__}().")


def refuse_lazy_loss(loss: object) -> None:
    """Refuse a loss with lazy parameters or buffers, because each rank would initialize them with different values.

    Raises:
        ParamError: the loss has such parameters; the message names them.
    """
    if not isinstance(loss, torch.nn.Module):
        return
    if lazy := lazy_names(loss):
        raise ParamError(
            f"The parameters {lazy} of the loss {name_of(loss)} have no shape and no values yet. Call the loss on an "
            "output and a label before you create the estimator, or in the function of loss_constructors."
        )


def lazy_names(module: torch.nn.Module) -> list[str]:
    """Return the names of the parameters and buffers of a module that have no shape yet."""
    tensors = chain(module.named_parameters(), module.named_buffers())
    return [name for name, tensor in tensors if torch.nn.parameter.is_lazy(tensor)]


def is_stateful(function: object) -> bool:
    """Return whether a metric has the interface of torchmetrics: ``update``, ``compute`` and ``reset``."""
    return all(callable(getattr(function, name, None)) for name in ("update", "compute", "reset"))


def _repeated(value: object, count: int) -> tuple[Any, ...]:
    """Return one value per label, from one value for all labels or a list."""
    if value is None:
        return ()
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return values * count if len(values) == 1 else values


def _metrics(value: object, label_cols: tuple[str, ...]) -> tuple[Metric, ...]:
    """Return metrics from a dict, a list of functions, or Horovod's list of groups of functions."""
    if not value:
        return ()
    metrics: list[Metric] = []
    items = list(value.items()) if isinstance(value, dict) else [(None, item) for item in value]  # type: ignore[attr-defined]
    for index, (key, item) in enumerate(items):
        grouped = isinstance(item, list | tuple)
        functions = tuple(item) if grouped else (item,)
        functions = functions * len(label_cols) if len(functions) == 1 else functions
        if len(functions) != len(label_cols) or not all(callable(function) for function in functions):
            raise ParamError(
                f"metrics: entry {index} must be a function, or a group with one function for all labels or one per "
                f"label ({len(label_cols)}), got {item!r}."
            )
        for function in functions:
            _refuse_class("metrics", function)
        for output, (label, function) in enumerate(zip(label_cols, functions, strict=True)):
            name = f"group_{index}_{label}" if grouped else key or name_of(function)
            name = name if grouped or len(label_cols) == 1 else f"{name}_{label}"
            metrics.append(Metric(name, output, function, index))
    names = ["loss", *(metric.name for metric in metrics)]
    if len(set(names)) != len(names):
        raise ParamError(f"metrics: the names {names[1:]} are not unique; pass a dict of name: function.")
    return tuple(metrics)


def _on_device(loss: Measure, device: torch.device) -> Measure:
    """Return the loss with its own tensors, such as class weights, on ``device``."""
    if isinstance(loss, torch.nn.Module):
        tensor = next(chain(loss.parameters(), loss.buffers()), None)
        return loss if tensor is None or tensor.device == device else loss.to(device)
    if isinstance(loss, partial):
        moved = {name: value.to(device) for name, value in loss.keywords.items() if isinstance(value, torch.Tensor)}
        return partial(loss, **moved) if moved else loss
    return loss


def _weighted(loss: Measure, output: torch.Tensor, label: torch.Tensor, row_weights: torch.Tensor) -> torch.Tensor:
    """Return the mean over the rows of weight times loss."""
    if isinstance(loss, torch.nn.Module) and hasattr(loss, "reduction"):
        unreduced: Any = copy.copy(loss)
        unreduced.reduction = "none"
        values: torch.Tensor = unreduced(output, label)
    else:
        values = loss(output, label, reduction="none")  # type: ignore[call-arg]  # checked on the driver
    if values.dim() == 0 or len(values) != len(row_weights):
        raise ModelOutputError(
            f"The loss {name_of(loss)} returned shape {list(values.shape)} for {counted(len(row_weights), 'row')} when "
            "called with reduction='none'; sample_weight_col needs one value per row."
        )
    values = values.reshape(len(row_weights), -1)
    row_losses = values.sum(dim=1) if _reduction(loss) == "batchmean" else values.mean(dim=1)
    weighted: torch.Tensor = row_losses * row_weights.to(values.dtype)
    return weighted.mean()


def _label(
    name: str, label: torch.Tensor, output: torch.Tensor, loss: Measure, shape: tuple[int, ...] | None
) -> torch.Tensor:
    if is_class_loss(loss):
        if (output.dim() == 1 or output.shape[1] == 1) and is_unmodified_torch_loss(loss):
            raise ModelOutputError(
                f"{name_of(loss)} needs one output per class; the model returns 1 (its output has shape "
                f"{list(output.shape)}). For label {name!r} with two classes, give the model's last layer two outputs, "
                "or use torch.nn.BCEWithLogitsLoss() with a float label of 0 and 1."
            )
        if label.numel() < output.numel():
            return _class_numbers(name, label, output)
    if _takes_indices(loss):
        return label.to(torch.int64)
    if label.numel() == output.numel() and (shape is None or label.shape == output.shape):
        label = label.reshape(output.shape)
        return label.to(output.dtype) if output.is_floating_point() else label
    if label.is_floating_point():
        return label.to(output.dtype) if output.is_floating_point() else label
    return label.to(torch.int64)


def is_class_loss(loss: Measure) -> bool:
    """Return whether the loss is PyTorch's cross entropy or negative log likelihood, or a subclass."""
    function = _unwrapped(loss)
    return isinstance(function, _CLASS_LOSSES) or function in _CLASS_LOSS_FUNCTIONS


def _takes_indices(loss: Measure) -> bool:
    """Return whether the loss takes class indices in the shape of its output, padded with -1."""
    function = _unwrapped(loss)
    return isinstance(function, torch.nn.MultiLabelMarginLoss) or function is functional.multilabel_margin_loss


def is_unmodified_torch_loss(loss: Measure) -> bool:
    """Return whether the loss is not a user's subclass, which may treat its outputs differently."""
    function = _unwrapped(loss)
    return type(function) in _CLASS_LOSSES or not isinstance(function, _CLASS_LOSSES)


def _unwrapped(loss: Measure) -> Measure:
    return loss.func if isinstance(loss, partial) else loss


def _class_numbers(name: str, label: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    numbers = label.to(torch.int64)
    if label.is_floating_point() and not bool((numbers == label).all()):
        raise DataError(f"Label column {name!r} holds fractional numbers; a class loss needs integer class indices.")
    return numbers.reshape(len(numbers)) if output.dim() == 2 and numbers.numel() == len(numbers) else numbers


def _try_measure(
    subject: str, function: Measure, output: torch.Tensor, label: torch.Tensor, name: str, *, synthetic: bool
) -> None:
    shapes = f"output of shape {list(output.shape)} with label {name!r} of shape {list(label.shape)} ({label.dtype})"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore" if is_stateful(function) else "default", category=UserWarning)
            warnings.filterwarnings("error", message=f".*{_BROADCAST_WARNING}.*")
            value = function(output, label)
    except ModelOutputError:
        raise
    except Exception as error:
        if synthetic and not isinstance(error, UserWarning) and not fails_by_shape(function, (output, label), error):
            return
        if not is_tensor_error(error) and not isinstance(error, UserWarning):
            raise ModelOutputError(
                f"{subject} raised {describe_error(error)} It was called with the {shapes}."
            ) from error
        raise ModelOutputError(
            f"{subject} cannot compare the model's {shapes}: {with_full_stop(error)} Change the model's last layer, "
            "label_cols or label_shapes so that they match."
        ) from error
    is_dict = isinstance(value, Mapping)
    if is_dict or (np.size(value) != 1 and torch.as_tensor(value).numel() != 1):
        returned = f"a dict with keys {list(value)}" if is_dict else f"shape {list(torch.as_tensor(value).shape)}"
        raise ModelOutputError(
            f"{subject} returns {returned} for the model's {shapes}; it must return one number, the mean over the rows."
        )


def name_of(function: object) -> str:
    """Return the name of a loss or metric for error messages."""
    return str(getattr(function, "__name__", None) or type(function).__name__)
