"""Training of a torch model on one rank."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch

import sparkhvd.torch as hvd
from sparkhvd.comm import objects, session
from sparkhvd.data.read.batches import Batch, BatchSource
from sparkhvd.errors import ParamError
from sparkhvd.estimators.plugin import TrainHooks, TrainSpec
from sparkhvd.estimators.reports import EpochRecord, EpochReport, StepReport, StepTimes
from sparkhvd.estimators.torch.callbacks import TorchCallback, TorchRun
from sparkhvd.estimators.torch.checkpoint.attributes import ChangedAttributes
from sparkhvd.estimators.torch.checkpoint.frozen import freeze_only, frozen_parameters
from sparkhvd.estimators.torch.checkpoint.optimizer_groups import load_with_groups, named_groups, options_unchanged
from sparkhvd.estimators.torch.checkpoint.pruning import prune_only, pruning_masks
from sparkhvd.estimators.torch.checkpoint.rank_state import own_buffers, rank_state, restore_random, seed_generators
from sparkhvd.estimators.torch.checkpoint.safe_state import is_loadable, plain_numbers
from sparkhvd.estimators.torch.checkpoint.versions import has_only_parameters, versions
from sparkhvd.estimators.torch.inputs import plan_inputs
from sparkhvd.estimators.torch.kept_modules import common_modules, kept_modules, of_existing_modules
from sparkhvd.estimators.torch.losses.divisors import loss_divisors
from sparkhvd.estimators.torch.losses.epoch_metrics import EpochMetrics
from sparkhvd.estimators.torch.renormalization import Renormalization
from sparkhvd.estimators.torch.schedule import RATES, RunningSchedule
from sparkhvd.estimators.torch.serialization import artifact
from sparkhvd.estimators.torch.serialization.package import Package
from sparkhvd.estimators.torch.steps import Forward, Stepper
from sparkhvd.estimators.training.commits import until_change
from sparkhvd.torch.buffers import non_persistent_buffers, synchronize_buffers, take_buffers, take_new_buffers
from sparkhvd.torch.optimizer.exchange import own_attributes
from sparkhvd.torch.states import load_optimizer_state
from sparkhvd.world import World

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass
class Stopwatch:
    """Measures the time of phases: ``lap(phase)`` attributes the time since the last lap to a phase."""

    times: dict[str, float] = field(default_factory=dict)
    last: float = field(default_factory=time.monotonic)

    def lap(self, phase: str) -> None:
        now = time.monotonic()
        self.times[phase] = self.times.get(phase, 0.0) + now - self.last
        self.last = now

    def step_times(self) -> StepTimes:
        return StepTimes(*(self.times.get(phase, 0.0) for phase in ("data_wait", "compute", "communication")))


class TorchTrainer:
    """Trains on this rank's part of every global batch.

    The gradient of a step is the mean over the rows of all ranks: each rank weights the gradient of its own mean loss
    by its share of the rows. A rank without rows contributes zeros; it runs the model only if layers synchronize their
    statistics. BatchNorm sees only this rank's rows, unless it is sparkhvd.torch.SyncBatchNorm. Dropout draws
    independently on every rank. With BatchNorm or dropout, N ranks are therefore not exactly one big batch. Buffers,
    such as running statistics, are averaged over the ranks before a validation and a checkpoint.
    """

    def __init__(self, package: Package, spec: TrainSpec, world: World) -> None:
        self._package = package
        self._spec = spec
        self._world = world
        self._model = package.model
        self._inputs = plan_inputs(package.model, spec.schema.of("feature"), package.input_shapes, package.named_inputs)
        self._plain_optimizer = package.optimizer
        self._own_groups = len(package.optimizer.param_groups)
        self._lr_scale = spec.lr_scale(world.size)
        _scale_lr(package.optimizer, self._lr_scale)
        self._schedule = RunningSchedule(package.schedule, package.optimizer, self._lr_scale)
        self._device = _device(spec.use_gpu, world)
        self._forward = Forward(self._model, self._inputs, package.objective, package.stepping, self._device)
        self._renormalization = Renormalization(package.model)
        self._rows_of_buffers = 0  # rows that changed this rank's buffers since their last synchronization
        self._own_buffers: dict[str, Any] | None = None  # while the model has those of a checkpoint within an epoch
        divisors = loss_divisors(package.objective, spec.schema, spec.labels)
        self._stepper = Stepper(self._forward, package.stepping, divisors, spec.sample)
        losses = {f"losses[{index}]": loss for index, loss in enumerate(package.objective.loss_modules())}
        self._attributes = ChangedAttributes({"model": package.model, **losses, "optimizer": package.optimizer})
        self._ended = False  # whether callbacks have ended the training
        self._kept_states: dict[str, Any] = {}  # the states of callbacks' modules to restore, by name

    def state(self) -> bytes:
        """Return the weights and all state that a step changes; ``torch.load(..., weights_only=True)`` loads it."""
        buffer = io.BytesIO()
        content = {
            "model": self._model.state_dict(),
            "buffers": non_persistent_buffers(self._model),
            "frozen": frozen_parameters(self._model),
            "masks": pruning_masks(self._model),
            "optimizer": plain_numbers(self._plain_optimizer.state_dict()),
            "groups": named_groups(self._plain_optimizer, self._model),
            "lr_scale": self._lr_scale,
            "schedule": self._schedule.state(),
            "scaler": self._stepper.scaler.state_dict(),
            **self._loss_states(),
            "kept": {name: _module_state(module) for name, module in self._kept_modules().items()},
            "attributes": self._attributes.state(),
            "ended": self._ended,
        }
        torch.save(content, buffer)
        return buffer.getvalue()

    def restore(self, state: bytes) -> None:
        """Resume from ``state``; the saved learning rate is rescaled to this run's ``lr_scale``."""
        content = torch.load(io.BytesIO(state), weights_only=True, map_location="cpu")
        prune_only(self._model, content.get("masks", {}))
        take_new_buffers(self._model, content["model"])
        self._model.load_state_dict(content["model"])
        take_buffers(self._model, content.get("buffers", {}))
        if "frozen" in content:
            freeze_only(self._model, content["frozen"])
        load_with_groups(
            self._plain_optimizer,
            content["optimizer"],
            own=self._own_groups,
            module=self._model,
            names=content.get("groups", ()),
        )
        factor = self._lr_scale / content["lr_scale"]
        _scale_lr(self._plain_optimizer, factor)
        self._schedule.restore(content["schedule"], factor)
        if content["scaler"]:
            self._stepper.scaler.load_state_dict(content["scaler"])
        self._restore_losses(content)
        self._kept_states = content.get("kept", {})
        self._attributes.restore(content.get("attributes", {}))
        self._ended = content.get("ended", False)

    def fit(self, train: BatchSource, val: BatchSource | None, hooks: TrainHooks) -> None:
        """Train from ``hooks.first_epoch`` to the last epoch, or until a hook stops it; collective."""
        _check_devices(self._device)
        self._agree_on_losses()
        self._move(self._device)
        hvd.broadcast_parameters(_tensors(self._model), root_rank=0)
        hvd.broadcast_optimizer_state(self._plain_optimizer, root_rank=0)
        optimizer = hvd.DistributedOptimizer(self._plain_optimizer, compression=self._package.stepping.compression)
        run = TorchRun(self._model, optimizer, self._world.rank, self._world.size, self._spec.epochs)
        is_over = hooks.first_epoch >= self._spec.epochs
        callbacks = self._package.callbacks
        has_end = any(type(callback).on_train_end is not TorchCallback.on_train_end for callback in callbacks)
        if is_over and (self._ended or not has_end):  # else the run was interrupted after its last epoch
            callbacks = ()
        if self._world.rank == 0 and not is_over:
            self._attributes.warn_of_missing()
        self._renormalization.attach(optimizer)
        try:
            for callback in callbacks:
                callback.on_train_begin(run)
            self._restore_kept_modules()
            self._attributes.begin()
            for epoch in range(hooks.first_epoch, self._spec.epochs):
                if not self._epoch(epoch, train, val, hooks, run):
                    break
            for callback in callbacks:
                callback.on_train_end(run)
            self._ended = has_end
        finally:
            self._renormalization.detach()
            optimizer.close()
            # Some optimizers replace their state instead of changing it. The plain optimizer is saved.
            self._adopt(optimizer)
        hooks.on_train_end(self)

    def export(self, folder: Path) -> None:
        """Write the model and the optimizer, with the user's unscaled learning rate."""
        self._move(torch.device("cpu"))
        _scale_lr(self._plain_optimizer, 1.0 / self._lr_scale)
        try:
            artifact.save(folder, self._model.eval(), self._plain_optimizer, self._inputs)
        finally:
            _scale_lr(self._plain_optimizer, self._lr_scale)

    def _epoch(self, epoch: int, train: BatchSource, val: BatchSource | None, hooks: TrainHooks, run: TorchRun) -> bool:
        """Train and validate one epoch; return whether to train another."""
        first = epoch == hooks.first_epoch
        seed_generators(self._spec.seed_of(epoch, self._world.rank))
        resumes_within = first and (hooks.first_step > 0 or hooks.first_epoch_batches is not None)
        # The callbacks already changed these learning rates before the interruption.
        with options_unchanged([run.optimizer]) if resumes_within else nullcontext():
            for callback in self._package.callbacks:
                callback.on_epoch_begin(run, epoch)
        self._restore_kept_modules(last=True)
        if resumes_within:
            self._attributes.apply()
            self._resume_random(epoch, hooks)
        watch = Stopwatch()
        measures = self._train(train, epoch, hooks, run, watch)
        self._synchronize_buffers()
        watch.lap("communication")
        validation = {} if val is None else self._validate(val, epoch).report(session.current())
        self._renormalization.synchronize()  # the forward passes of a validation shorten rows, too

        def on_record(record: EpochRecord) -> bool:
            self._schedule.after_epoch(record)
            logs = {**record.train, **{f"val_{name}": value for name, value in record.validation.items()}}
            for callback in self._package.callbacks:
                callback.on_epoch_end(run, epoch, logs)
            self._synchronize_state()  # only rank 0 makes the checkpoint
            return run.stop

        training = measures.report(session.current())
        steps = (hooks.first_epoch_batches if first else None) or train.steps()
        steps -= hooks.first_step if first else 0  # the steps that the times cover
        report = EpochReport(epoch, training, validation, watch.step_times(), steps, on_record)
        return hooks.on_epoch_end(report, self)

    def _resume_random(self, epoch: int, hooks: TrainHooks) -> None:
        seed_generators(self._spec.seed_of(epoch, self._world.rank, hooks.steps_done))
        if (state := hooks.rank_state) is not None:
            restore_random(state, self._device)
            self._own_buffers = own_buffers(state)
            self._take_own_buffers()

    def _train(
        self, source: BatchSource, epoch: int, hooks: TrainHooks, run: TorchRun, watch: Stopwatch
    ) -> EpochMetrics:
        self._model.train()
        first = epoch == hooks.first_epoch
        earlier = hooks.metrics[self._world.rank :: self._world.size] if first else ()
        measures = EpochMetrics(self._package.objective, self._device, earlier=earlier)
        step = hooks.first_step if first else 0
        steps = (hooks.first_epoch_batches if first else None) or source.steps()
        optimizer: Any = run.optimizer
        can_keep_state = self._can_keep_state()
        watch.lap("other")
        with closing(_closable(source.epoch(epoch, step))) as batches:
            while group := _next_batches(batches, self._spec.backward_passes_per_step):
                watch.lap("data_wait")
                loss = self._stepper.step(
                    group,
                    optimizer,
                    measures,
                    step,
                    watch.lap,
                    before_update=lambda: hooks.before_update(epoch, measures.sums()),
                )
                step += len(group)
                self._rows_of_buffers += sum(batch.rows for batch in group)
                self._schedule.after_step()
                self._adopt(optimizer)
                for callback in self._package.callbacks:
                    callback.on_step_end(run, epoch, step, loss)
                report = StepReport(
                    epoch,
                    step,
                    steps,
                    loss,
                    measures.sums,
                    lambda: rank_state(self._device, self._own_buffers),
                    synchronize=self._synchronize_within_epoch,
                    metrics=measures.state,
                    wants_end=run.stop,
                    prepare_recovery=self._keep_state if can_keep_state else None,
                )
                hooks.on_step_end(report, self)
                self._take_own_buffers()
                watch.lap("compute")
        return measures

    def _can_keep_state(self) -> bool:
        """Return whether this rank has the whole state of a step, see ``has_only_parameters``."""
        is_own = self._package.stepping.minibatch_fn is not None or self._package.objective.stateful()
        return self._spec.elastic and not is_own and has_only_parameters(self._modules_and_kept())

    def _keep_state(self) -> Callable[[], bytes | None]:
        """Return a function that returns the current state until an update or a forward pass changes it, then None."""
        modules = self._modules_and_kept()

        def state() -> bytes | None:
            is_partial = self._attributes.have_changed() or not has_only_parameters(modules)
            return None if is_partial else self.state()

        return until_change(lambda: versions(modules), state)

    def _modules(self) -> torch.nn.ModuleList:
        """Return all modules that this rank trains: a loss may have buffers, too, such as running means."""
        return torch.nn.ModuleList([self._model, *self._package.objective.loss_modules()])

    def _kept_modules(self) -> dict[str, torch.nn.Module]:
        """Return the modules that callbacks keep, by names that are the same on all ranks."""
        return kept_modules(self._package.callbacks, self._modules())

    def _modules_and_kept(self) -> torch.nn.ModuleList:
        return self._modules().append(torch.nn.ModuleDict(self._kept_modules()))

    def _synchronize_buffers(self) -> dict[str, torch.Tensor]:
        modules = self._modules()
        if self._package.callbacks:
            modules.append(common_modules(self._kept_modules()))
        own = synchronize_buffers(modules, self._rows_of_buffers)
        self._rows_of_buffers = 0
        return own

    def _synchronize_state(self) -> None:
        self._synchronize_buffers()
        self._attributes.agree()

    def _synchronize_within_epoch(self) -> None:
        rows = self._rows_of_buffers
        self._own_buffers = {"values": self._synchronize_buffers(), "rows": rows}
        self._attributes.agree()

    def _take_own_buffers(self) -> None:
        """Continue with this rank's own buffers after a checkpoint within an epoch, see ``rank_state``."""
        if self._own_buffers is not None:
            modules = self._modules_and_kept()
            take_buffers(modules, of_existing_modules(modules, self._own_buffers["values"]))
            self._rows_of_buffers, self._own_buffers = self._own_buffers["rows"], None

    @torch.no_grad()
    def _validate(self, source: BatchSource, epoch: int) -> EpochMetrics:
        self._model.eval()
        measures = EpochMetrics(self._package.objective, self._device, validating=True)
        with closing(_closable(source.epoch(epoch))) as batches:
            for batch in batches:
                if batch.rows:
                    measures.add_validation(*self._forward.parts(batch), batch.rows)
                    self._rows_of_buffers += batch.rows  # a loss may also change its buffers here
        return measures

    def _restore_kept_modules(self, *, last: bool = False) -> None:
        """Restore the modules that callbacks have created so far; ``last`` warns of states without their module."""
        for name, module in self._kept_modules().items():
            if name in self._kept_states and _fits(module, self._kept_states[name]):
                _restore_module(module, self._kept_states.pop(name))
        if last and self._kept_states and self._world.rank == 0:
            logger.warning(
                "The checkpoint holds the states of modules that the callbacks have not created again: %s. Create such "
                "modules, with the same layers, in __init__, on_train_begin or on_epoch_begin of the callback.",
                ", ".join("callbacks[{}].{}".format(*name.split(" ", 1)) for name in sorted(self._kept_states)),
            )
        if last:
            self._kept_states = {}

    def _loss_states(self) -> dict[str, Any]:
        losses = self._package.objective.loss_modules()
        return {
            "losses": [_persistent_state(loss) for loss in losses],
            "loss_buffers": [non_persistent_buffers(loss) for loss in losses],
        }

    def _restore_losses(self, content: Mapping[str, Any]) -> None:
        losses = self._package.objective.loss_modules()
        for loss, values in zip(losses, content["losses"], strict=True):
            take_new_buffers(loss, values)
            loss.load_state_dict(values, strict=False)
        for loss, buffers in zip(losses, content.get("loss_buffers", ()), strict=False):
            take_buffers(loss, buffers)

    def _agree_on_losses(self) -> None:
        """Give all ranks the state of rank 0's losses: ``loss_constructors`` may draw random numbers."""
        if not self._package.objective.constructors:
            return
        states = objects.broadcast_object(session.current(), self._loss_states(), name="states of the losses")
        if self._world.rank != 0:
            self._restore_losses(states)

    def _adopt(self, optimizer: torch.optim.Optimizer) -> None:
        self._plain_optimizer.__dict__.update(own_attributes(optimizer))

    def _move(self, device: torch.device) -> None:
        if device.type != "cpu" or next((p.device.type for p in self._model.parameters()), "cpu") != "cpu":
            for module in (self._model, *self._package.objective.loss_modules()):
                module.to(device)
            # Loading moves the state to the device of the parameters.
            load_optimizer_state(self._plain_optimizer, self._plain_optimizer.state_dict())


def _next_batches(batches: Iterator[T], count: int) -> list[T]:
    return list(islice(batches, count))


def _closable(batches: Iterator[Batch]) -> Generator[Batch]:
    """Yield from ``batches``, and close them with the generator if they can be closed."""
    try:
        yield from batches
    finally:
        if (close := getattr(batches, "close", None)) is not None:
            close()


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}


def _module_state(module: torch.nn.Module) -> dict[str, Any]:
    return {"persistent": _persistent_state(module), "buffers": non_persistent_buffers(module)}


def _fits(module: torch.nn.Module, state: Mapping[str, Any]) -> bool:
    """Return whether a result of ``_module_state`` is from a module with the same tensors."""
    own = _tensors(module)
    saved = {name: part for name, part in state["persistent"].items() if isinstance(part, torch.Tensor)}
    return own.keys() == saved.keys() and all(own[name].shape == part.shape for name, part in saved.items())


def _restore_module(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    module.load_state_dict(state["persistent"], strict=False)
    take_buffers(module, state["buffers"])


def _persistent_state(module: torch.nn.Module) -> dict[str, Any]:
    """Return the tensors of a module, and the extra states that a checkpoint can hold."""
    state = module.state_dict()
    return {name: part for name, part in state.items() if isinstance(part, torch.Tensor) or is_loadable(part)}


def _scale_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        for name in RATES:
            if factor != 1.0 and name in group:
                group[name] = group[name] * factor


def _device(use_gpu: bool, world: World) -> torch.device:
    if not use_gpu or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", world.local_rank % torch.cuda.device_count())


def _check_devices(device: torch.device) -> None:
    communicator = session.current()
    device_types = objects.allgather_object(communicator, device.type, name="devices of the ranks")
    if len(set(device_types)) > 1:
        without_gpu = [rank for rank, device_type in enumerate(device_types) if device_type == "cpu"]
        raise ParamError(
            f"Ranks {without_gpu} see no GPU while the others do, so they would train at different speeds. Request "
            "one GPU per task from Spark, or pass use_gpu=False."
        )
