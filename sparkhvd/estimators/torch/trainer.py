"""One rank's training of a torch model."""

from __future__ import annotations

import io
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch

import sparkhvd.torch as hvd
from sparkhvd.data.batches import Batch, BatchSource
from sparkhvd.errors import DataError
from sparkhvd.estimators.plugin import EpochReport, StepTimes, TrainHooks, TrainSpec
from sparkhvd.estimators.torch import artifact
from sparkhvd.estimators.torch.inputs import ModelInput
from sparkhvd.estimators.torch.objective import Objective
from sparkhvd.torch.exchanging import ExchangingOptimizer
from sparkhvd.world import World

T = TypeVar("T")


@dataclass(frozen=True)
class Package:
    """The user's objects, pickled together so that the optimizer keeps the model's own parameters."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    inputs: tuple[ModelInput, ...]
    objective: Objective


@dataclass
class Sums:
    """Sums over rows of the loss and the metrics of one epoch."""

    names: list[str]
    rows: int = 0
    totals: dict[str, float] = field(default_factory=dict)

    def add(self, values: dict[str, float], rows: int) -> None:
        self.rows += rows
        for name, value in values.items():
            self.totals[name] = self.totals.get(name, 0.0) + value * rows

    def report(self) -> dict[str, tuple[float, int]]:
        return {name: (self.totals.get(name, 0.0), self.rows) for name in self.names}


@dataclass
class Stopwatch:
    """Where the time goes: ``lap(kind)`` books what passed since the last lap."""

    times: dict[str, float] = field(default_factory=dict)
    last: float = field(default_factory=time.monotonic)

    def lap(self, kind: str) -> None:
        now = time.monotonic()
        self.times[kind] = self.times.get(kind, 0.0) + now - self.last
        self.last = now

    def step_times(self) -> StepTimes:
        return StepTimes(*(self.times.get(kind, 0.0) for kind in ("data_wait", "compute", "communication")))


class TorchTrainer:
    """Trains on this rank's part of every global batch.

    The gradient of a step is the mean over the rows of all ranks: each rank weights the gradient of its own mean loss
    by its share of the rows, and one without rows contributes zeros without running the model. BatchNorm therefore
    sees this rank's rows only, and dropout draws on every rank for itself; with these, N ranks are not exactly one big
    batch.
    """

    def __init__(self, package: Package, spec: TrainSpec, world: World) -> None:
        self._spec = spec
        self._world = world
        self._model = package.model
        self._inputs = package.inputs
        self._objective = package.objective
        self._plain_optimizer = package.optimizer
        self._lr_scale = float(world.size) if spec.scale_lr else 1.0
        _scale_lr(package.optimizer, self._lr_scale)

    def state(self) -> bytes:
        """Weights and optimizer state, loadable with ``weights_only=True``."""
        buffer = io.BytesIO()
        content = {
            "model": self._model.state_dict(),
            "optimizer": self._plain_optimizer.state_dict(),
            "lr_scale": self._lr_scale,
        }
        torch.save(content, buffer)
        return buffer.getvalue()

    def restore(self, state: bytes) -> None:
        """Continue from ``state``; the learning rate is the one of then, in this run's scale."""
        content = torch.load(io.BytesIO(state), weights_only=True, map_location="cpu")
        self._model.load_state_dict(content["model"])
        self._plain_optimizer.load_state_dict(content["optimizer"])
        _scale_lr(self._plain_optimizer, self._lr_scale / content["lr_scale"])

    def fit(self, train: BatchSource, val: BatchSource | None, hooks: TrainHooks) -> None:
        """Train from ``hooks.first_epoch`` to the last epoch, or until a hook ends it; collective."""
        hvd.broadcast_parameters(_tensors(self._model), root_rank=0)
        hvd.broadcast_optimizer_state(self._plain_optimizer, root_rank=0)
        optimizer = hvd.DistributedOptimizer(self._plain_optimizer)
        try:
            for epoch in range(hooks.first_epoch, self._spec.epochs):
                # From the epoch, so that a resumed run draws what an undisturbed one would.
                torch.manual_seed((self._spec.seed * 100_003 + epoch) * 10_007 + self._world.rank)
                watch = Stopwatch()
                sums = self._train(train, epoch, optimizer, watch)
                validation = {} if val is None else self._validate(val, epoch).report()
                report = EpochReport(epoch, sums.report(), validation, watch.step_times(), train.steps())
                if not hooks.on_epoch_end(report, self):
                    break
        finally:
            optimizer.close()
            # Some optimizers replace what they hold instead of changing it; the plain one is what is saved.
            self._adopt(optimizer)

    def export(self, folder: Path) -> None:
        """Write the model, and the optimizer with the user's unscaled learning rate."""
        _scale_lr(self._plain_optimizer, 1.0 / self._lr_scale)
        try:
            artifact.save(folder, self._model.eval(), self._plain_optimizer, self._inputs)
        finally:
            _scale_lr(self._plain_optimizer, self._lr_scale)

    def _train(self, source: BatchSource, epoch: int, optimizer: ExchangingOptimizer, watch: Stopwatch) -> Sums:
        self._model.train()
        sums = Sums(self._objective.names())
        with closing(_closable(source.epoch(epoch))) as batches:
            while group := _take(batches, self._spec.backward_passes_per_step):
                watch.lap("data_wait")
                self._step(group, optimizer, sums, watch)
        self._adopt(optimizer)
        return sums

    def _step(self, group: Sequence[Batch], optimizer: ExchangingOptimizer, sums: Sums, watch: Stopwatch) -> None:
        """One optimizer step over the global rows of all batches of ``group``."""
        total = sum(batch.global_rows for batch in group)
        optimizer.set_backward_passes_per_step(len(group))
        optimizer.zero_grad()
        for batch in group:
            if batch.rows == 0:
                optimizer.contribute_nothing()
                continue
            outputs = self._forward(batch)
            labels = self._objective.labels(outputs, batch.columns)
            loss = self._objective.loss(outputs, labels, batch.columns)
            optimizer.weight_next(batch.rows / total)
            loss.backward()  # type: ignore[no-untyped-call]
            sums.add(self._objective.measure(loss, outputs, labels), batch.rows)
        watch.lap("compute")
        optimizer.synchronize()
        watch.lap("communication")
        optimizer.step()
        watch.lap("compute")

    @torch.no_grad()
    def _validate(self, source: BatchSource, epoch: int) -> Sums:
        self._model.eval()
        sums = Sums(self._objective.names())
        with closing(_closable(source.epoch(epoch))) as batches:
            for batch in batches:
                if batch.rows == 0:
                    continue
                outputs = self._forward(batch)
                labels = self._objective.labels(outputs, batch.columns)
                loss = self._objective.loss(outputs, labels, batch.columns)
                sums.add(self._objective.measure(loss, outputs, labels), batch.rows)
        return sums

    def _forward(self, batch: Batch) -> list[torch.Tensor]:
        return outputs_of(self._model(*(part.tensor(batch.columns, batch.rows) for part in self._inputs)))

    def _adopt(self, optimizer: torch.optim.Optimizer) -> None:
        self._plain_optimizer.state = optimizer.state
        self._plain_optimizer.param_groups = optimizer.param_groups


def outputs_of(result: object) -> list[torch.Tensor]:
    """A model's result as the list of its outputs.

    Raises:
        DataError: it is neither a tensor nor a tuple or list of tensors.
    """
    outputs: list[Any] = list(result) if isinstance(result, tuple | list) else [result]
    for output in outputs:
        if not isinstance(output, torch.Tensor):
            raise DataError(
                f"The model returned {type(output).__name__}; it must return a tensor, or a tuple or list with one "
                "tensor per label column."
            )
    return outputs


def _take(batches: Iterator[T], count: int) -> list[T]:
    return list(islice(batches, count))


def _closable(batches: Iterator[Batch]) -> Generator[Batch]:
    """A generator over ``batches``: closing it closes them where they can be closed."""
    try:
        yield from batches
    finally:
        if (close := getattr(batches, "close", None)) is not None:
            close()


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}


def _scale_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        for name in ("lr", "initial_lr"):
            if factor != 1.0 and name in group:
                group[name] = group[name] * factor
