"""Batch normalization over the batch of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm  # torch's own layers derive from it

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.errors import ConfigError
from sparkhvd.torch.ops.operations import allgather, allreduce


class SyncBatchNorm(_BatchNorm):
    """Replaces ``torch.nn.BatchNorm1d``, ``2d`` and ``3d``, with statistics over the rows of all ranks.

    Ranks may have different numbers of rows. In training mode, all ranks must run the layer the same number of times;
    in evaluation mode, the layer does not communicate. Gradients are exact if the ranks' losses have equal weight, as
    with ``DistributedOptimizer`` and ``op=Average``, but not after ``optimizer.weight_next``. Second derivatives, as in
    gradient penalties, raise ``RuntimeError``.

    Args:
        num_features: channels, the second dimension of the input.
        eps: added to the variance.
        momentum: weight of a step in the running statistics; None for the plain mean of all steps.
        affine: whether the layer has a weight and a bias per channel.
        track_running_stats: whether running statistics are kept and used in evaluation mode.
        process_set: the ranks that take part, all by default.
    """

    def __init__(  # noqa: PLR0917  the order of torch's own layers
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set
        self.counts_rows = True  # False where the rows of this rank are placeholders and must not be counted

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, process_set: ProcessSet | None = None) -> torch.nn.Module:
        """Replace every batch normalization in ``module``, and return the module.

        Weights, statistics and hooks are kept.

        Raises:
            ConfigError: a layer's class overrides ``forward``, which the replacement would not run.
        """
        return cls._converted(module, process_set, {})

    @classmethod
    def _converted(
        cls, module: torch.nn.Module, process_set: ProcessSet | None, known: dict[torch.nn.Module, torch.nn.Module]
    ) -> torch.nn.Module:
        """Return the module itself or its replacement; ``known`` has both for modules that have several names."""
        if module not in known:
            known[module] = cls._replacement_of(module, process_set) if isinstance(module, _BatchNorm) else module
            for name, child in module._modules.items():  # noqa: SLF001  (named_children omits further names)
                if child is not None:
                    module.add_module(name, cls._converted(child, process_set, known))
        return known[module]

    @classmethod
    def _replacement_of(cls, old: _BatchNorm, process_set: ProcessSet | None) -> SyncBatchNorm:
        if type(old).forward not in {kind.forward for kind in (_BatchNorm, torch.nn.SyncBatchNorm, cls)}:
            raise ConfigError(
                f"{type(old).__name__} is a batch normalization layer that overrides forward, which a SyncBatchNorm "
                "would not run. Replace it yourself with a SyncBatchNorm and a module that does what its forward adds."
            )
        new = cls(old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats, process_set)
        new.weight, new.bias = old.weight, old.bias
        new.running_mean, new.running_var = old.running_mean, old.running_var
        new.num_batches_tracked = old.num_batches_tracked
        vars(new).update({name: value for name, value in vars(old).items() if "_hooks" in name})
        new.train(old.training)
        return new

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  torch's name
        """Normalize an input of shape (rows, channels, ...)."""
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        name = session.current().channel(self.process_set).name_of(self, "sync_batch_norm")
        common = (name, self.process_set, self.counts_rows)
        output, mean, variance, count = _apply(input, self.weight, self.bias, self.eps, *common)
        if self.track_running_stats:
            self._track(mean, variance, count)
        return output

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        """Move the running statistics towards those of this step."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        weight = 1.0 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight)

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm needs an input of shape (rows, {self.num_features} channels, ...), "
                f"got {tuple(input.shape)}."
            )
        if not input.is_floating_point():
            raise ValueError(f"SyncBatchNorm needs an input of floating-point numbers, got {input.dtype}; convert it.")


def synchronized_layers(module: torch.nn.Module) -> list[SyncBatchNorm]:
    """Return the layers that all ranks must run, forward and backward, because they communicate."""
    return [part for part in module.modules() if isinstance(part, SyncBatchNorm)]


def without_nan(gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient with 0 in place of NaN and infinity, which a NaN or infinite loss times 0 causes."""
    return torch.nan_to_num(gradient, 0.0, 0.0, 0.0)


class _Normalization(torch.autograd.Function):
    """Normalizes with the statistics of all ranks, and returns these statistics, too.

    The ranks' means and sums of squared deviations are combined by the formulas of Chan, Golub and LeVeque (1979),
    which keep their precision where the mean is much larger than the deviation.
    """

    @staticmethod
    def forward(  # noqa: PLR0917  autograd passes arguments by position
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        name: str,
        process_set: ProcessSet | None,
        counts_rows: bool,
    ) -> tuple[torch.Tensor, ...]:
        mean, variance, count = _statistics(x, name, process_set, counts_rows)
        inverse = torch.rsqrt(variance + eps)
        normalized = (x.to(mean.dtype) - _expanded(mean, x)) * _expanded(inverse, x)
        ctx.save_for_backward(normalized, inverse, weight, bias, count)
        ctx.arguments = (name, process_set, x.dtype, counts_rows)
        output = normalized if weight is None else normalized * _expanded(weight.to(mean.dtype), x)
        output = output if bias is None else output + _expanded(bias.to(mean.dtype), x)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    # Autograd sees the saved statistics as constants, so second derivatives would lack their contribution.
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normalized, inverse, weight, bias, count = ctx.saved_tensors
        name, process_set, dtype, counts_rows = ctx.arguments
        gradient = gradient.to(normalized.dtype)
        if not counts_rows:
            gradient = without_nan(gradient)
        dims = _reduced_dimensions(normalized)
        bias_gradient, weight_gradient = gradient.sum(dims), (gradient * normalized).sum(dims)
        input_gradient = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([bias_gradient, weight_gradient])
            sums = allreduce(sums, name=f"{name}.gradient", op=ReduceOp.SUM, process_set=process_set) / count
            factor = inverse if weight is None else inverse * weight.to(inverse.dtype)
            if counts_rows:  # then the statistics depend on this rank's rows
                gradient = gradient - _expanded(sums[0], normalized) - normalized * _expanded(sums[1], normalized)
            input_gradient = (gradient * _expanded(factor, normalized)).to(dtype)
        affine_gradients = [
            None if parameter is None else gradient.to(parameter.dtype)
            for parameter, gradient in ((weight, weight_gradient), (bias, bias_gradient))
        ]
        return input_gradient, *affine_gradients, None, None, None, None


# torch does not annotate `Function.apply`.
_apply: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = _Normalization.apply


def _statistics(
    x: torch.Tensor, name: str, process_set: ProcessSet | None, counts_rows: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean and variance per channel over the rows of all ranks, and the number of values per channel."""
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    dims, channels = _reduced_dimensions(x), x.shape[1]
    rows = x.numel() // channels if counts_rows else 0
    if rows:
        variance, mean = torch.var_mean(x.to(dtype), dims, correction=0)
    else:
        variance = mean = torch.zeros(channels, dtype=dtype, device=x.device)
    own = torch.cat([mean, variance, torch.full((1,), float(rows), dtype=dtype, device=x.device)])
    parts = allgather(own[None], name=name, process_set=process_set)
    counts = parts[:, -1:]
    total = counts.sum()
    if total <= 1:
        raise ValueError(
            f"SyncBatchNorm needs more than 1 value per channel in training mode, but all ranks together have {total}."
        )
    shares = counts / total
    means, variances = parts[:, :channels], parts[:, channels:-1]
    mean = (means * shares).sum(0)
    return mean, ((variances + (means - mean).square()) * shares).sum(0), total


def _reduced_dimensions(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _expanded(channels: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return channels.reshape(1, -1, *[1] * (like.dim() - 2))
