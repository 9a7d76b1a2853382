"""Extensions of the strategy and the user's module that make N ranks train as one rank would on the global batch."""

from __future__ import annotations

import inspect
import math
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils._pytree import tree_leaves

from sparkhvd.comm import objects, session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.config import scratch_folder
from sparkhvd.errors import DataError
from sparkhvd.estimators.lightning.attributes import attributes_unchanged
from sparkhvd.estimators.lightning.batches import FOREIGN, BatchShare, RankLoader
from sparkhvd.estimators.lightning.checkpoint.epoch_values import EpochValues, within_step
from sparkhvd.estimators.lightning.checkpoint.hot_start import load_earlier_states
from sparkhvd.estimators.lightning.checkpoint.mid_epoch_resume import (
    end_epoch_with_schedulers,
    finish_epoch,
    repeat_epoch_start_hooks,
)
from sparkhvd.estimators.lightning.checkpoint.weights import prepare_module, prune_as_saved
from sparkhvd.estimators.lightning.hints import batch_hint
from sparkhvd.estimators.lightning.step_values import StepValues, monitored_names, refuse_metric_of_single_rank
from sparkhvd.estimators.lightning.substitute_metrics import metrics_ignore_batch
from sparkhvd.estimators.torch.checkpoint.attributes import ChangedAttributes
from sparkhvd.estimators.torch.checkpoint.frozen import freeze_only
from sparkhvd.estimators.torch.checkpoint.safe_state import plain_numbers
from sparkhvd.estimators.torch.kept_modules import common_modules, kept_modules, of_existing_modules
from sparkhvd.estimators.torch.losses.divisors import counted_rows
from sparkhvd.estimators.torch.renormalization import Renormalization, rows_keep_their_norms
from sparkhvd.estimators.torch.schedule import RATES, refuse_own_rates, scale_schedule
from sparkhvd.lightning.reductions import reduce_op as find_reduce_op
from sparkhvd.torch.buffers import buffers_unchanged, copies_of_buffers, synchronize_buffers, take_buffers
from sparkhvd.torch.sync_batch_norm import synchronized_layers

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins import Precision
    from lightning.pytorch.utilities.types import LRSchedulerConfig

# The neutral element of each reduction except the mean, by Lightning's name of the reduction.
_NEUTRAL_ELEMENTS = {"sum": 0.0, "max": -math.inf, "min": math.inf}
_HYPERPARAMETER_KEYS = re.compile("hparams|hyper_parameters")


@dataclass
class Feed:
    """A rank's rows and results in an epoch.

    Attributes:
        train: the training rows.
        validation: the validation rows.
        values: the values that torchmetrics and ``log`` accumulate in the epoch.
        sums: per stage, the sum of the losses over all rows, and the number of rows.
        logged: per stage, the names of values that this epoch or the latest validation has logged for all of its rows.
        communicated: seconds spent waiting for the other ranks' gradients.
        validated: whether there was a validation since the last report.
        loss: loss of the current step; None if the rank has no rows in this step. With manual optimization, where a
            step may return nothing, ``backward`` records a NaN or infinite loss.
        rank_zero_logged: per stage, the names of values that only rank 0 logs for whole epochs.
        step_values: the values that training steps log only for themselves.
        within_epoch: whether the run resumes within an epoch and has not started its first batch yet.
        rows_of_buffers: number of rows that have changed this rank's buffers since their last synchronization.
        rows_of_copies: the same for the buffers of the modules that callbacks keep.
    """

    train: RankLoader
    validation: RankLoader | None
    values: EpochValues
    sums: dict[str, tuple[float, int]] = field(default_factory=dict)
    logged: dict[str, set[str]] = field(default_factory=lambda: {"train": set(), "validation": set()})
    rank_zero_logged: dict[str, set[str]] = field(default_factory=lambda: {"train": set(), "validation": set()})
    step_values: StepValues = field(default_factory=StepValues)
    communicated: float = 0.0
    validated: bool = False
    loss: float | None = None
    within_epoch: bool = False
    rows_of_buffers: int = 0
    rows_of_copies: int = 0

    def share(self, stage: str) -> BatchShare:
        """Return this rank's share of the current batch; weight 1 if the rows come from the user's own loader."""
        loader = self.train if stage == "train" else self.validation
        return loader.share if loader is not None and loader.used else FOREIGN

    def add(self, stage: str, loss: float, rows: int) -> None:
        total, count = self.sums.get(stage, (0.0, 0))
        self.sums[stage] = (total + loss * rows, count + rows)

    def forget_names(self, stage: str) -> None:
        """Forget the names of the values that an earlier epoch or validation has logged."""
        self.logged[stage].clear()
        self.rank_zero_logged[stage].clear()

    def add_missing(self, trainer: Trainer) -> None:
        """Complete the values of an interrupted epoch at its end, see ``EpochValues.add_missing``; collective."""
        for form in self.values.add_missing(trainer):
            names = self.rank_zero_logged if form["rank_zero_only"] else self.logged
            names["train"].add(form["name"])


class EstimatorSteps:
    """Mixin for a Lightning strategy; precedes the strategy's class in the bases."""

    feed: Feed
    losses: torch.nn.ModuleList
    lr_scale: float
    earlier_optimizers: Sequence[torch.optim.Optimizer] = ()  # of the fit to continue
    lightning_module: LightningModule
    optimizers: list[torch.optim.Optimizer]
    lr_scheduler_configs: list[LRSchedulerConfig]
    call: ModuleType
    root_device: torch.device
    is_global_zero: bool
    reduce_boolean_decision: Callable[..., bool]
    precision_plugin: Precision
    saves_alone = False
    ended = False
    resumable = False
    attributes: ChangedAttributes
    frozen: Sequence[str] | None = None  # the parameters to freeze when the run resumes
    own_buffers: dict[str, Any] | None
    _agreed_copies: Mapping[str, torch.Tensor] = MappingProxyType({})
    _validates_every: float | None = None
    _weight_of_logged: float | None = None  # the weight of the value that a step is logging
    _renormalization: Renormalization | None = None
    before_update: Callable[[int], None]  # called with the epoch
    kept_progress: Mapping[str, Any] | None = None  # of Lightning's loops, to save instead of their current progress
    _during_substitute: ExitStack  # what lasts for a substitute batch

    def setup(self, trainer: Trainer) -> None:
        """Start to track embeddings with ``max_norm``; the module's own setup has already run."""
        self._during_substitute = ExitStack()
        super().setup(trainer)  # type: ignore[misc]
        self._renormalization = Renormalization(self.lightning_module)
        self._renormalization.attach()

    def teardown(self) -> None:
        """Remove the hooks from the module."""
        self.end_batch()
        if self._renormalization is not None:
            self._renormalization.detach()
            self._renormalization = None
        super().teardown()  # type: ignore[misc]

    def weight_of_pass(self) -> float:
        """See ``RankStrategy``."""
        return self.feed.share("train").weight

    def weight_of_buffers(self) -> float:
        """See ``RankStrategy``."""
        return self.feed.rows_of_buffers

    def module_with_buffers(self) -> torch.nn.Module:
        """See ``RankStrategy``; a loss may have buffers, too, such as running means of what it has seen."""
        return torch.nn.ModuleList([self.lightning_module, self.losses])

    def can_synchronize(self) -> bool:
        """See ``RankStrategy``; False while only this rank saves a checkpoint, and after the end."""
        together: bool = super().can_synchronize()  # type: ignore[misc]
        return together and not self.saves_alone and not self.ended

    def synchronize_buffers(self) -> dict[str, torch.Tensor]:
        """See ``RankStrategy``; rows of embeddings are shortened as the other ranks have shortened them."""
        if not self.can_synchronize():
            return {}
        own: dict[str, torch.Tensor] = super().synchronize_buffers()  # type: ignore[misc]
        self.feed.rows_of_buffers = 0
        self._renormalize()
        return own

    def on_train_start(self) -> None:
        """Prepare to resume within an epoch; this is the last hook before the first epoch.

        If a validation is due at the batch from which a run resumes, Lightning considers this batch done and skips it.
        Validation is therefore off until the first batch starts.
        """
        super().on_train_start()  # type: ignore[misc]
        if self.frozen is not None:
            freeze_only(self.lightning_module, self.frozen)
            self.frozen = None
        if self.feed.within_epoch:
            trainer = self.lightning_module.trainer
            repeat_epoch_start_hooks(trainer, self.call)
            self._validates_every, trainer.val_check_batch = trainer.val_check_batch, math.inf
            self.take_own_buffers()
        self.attributes.owners.update(
            {f"optimizer {index}": optimizer for index, optimizer in enumerate(self.optimizers)}
        )
        self.attributes.begin()

    def synchronize_state(self) -> None:
        """Synchronize the ranks' state that goes into a checkpoint; collective."""
        self.synchronize_buffers()
        self.synchronize_copies()
        self.attributes.agree()

    def synchronize_state_within_epoch(self) -> None:
        """Synchronize buffers and attributes within an epoch, until ``take_own_buffers()``; collective."""
        self.synchronize_within_epoch()
        self.attributes.agree()

    def synchronize_within_epoch(self) -> None:
        """See ``RankStrategy``; includes the modules that callbacks keep."""
        before, rows, rows_of_copies = self.own_buffers, self.feed.rows_of_buffers, self.feed.rows_of_copies
        super().synchronize_within_epoch()  # type: ignore[misc]
        of_copies = self.synchronize_copies()
        if before is None and self.own_buffers is not None:
            self.own_buffers |= {"rows": rows, "copies": of_copies, "rows_of_copies": rows_of_copies}
            self._agreed_copies = copies_of_buffers(torch.nn.ModuleDict(self._copies()), of_copies)

    def take_own_buffers(self) -> None:
        """See ``RankStrategy``; includes the modules that callbacks keep, and the weights of the buffers."""
        own = self.own_buffers
        agreed, self._agreed_copies = self._agreed_copies, {}
        super().take_own_buffers()  # type: ignore[misc]
        if own is not None:
            kept = torch.nn.ModuleDict(self._copies())
            take_buffers(kept, of_existing_modules(kept, own["copies"]), unless_changed_since=agreed)
            self.feed.rows_of_buffers, self.feed.rows_of_copies = own["rows"], own["rows_of_copies"]

    def _copies(self) -> dict[str, torch.nn.Module]:
        """Return the modules that callbacks keep, by names that are the same on all ranks."""
        callbacks: Sequence[object] = self.lightning_module.trainer.callbacks  # type: ignore[attr-defined]
        return kept_modules(callbacks, (self.lightning_module, self.losses))

    def modules_and_kept(self) -> torch.nn.ModuleList:
        """Return all modules that this rank trains or that callbacks keep."""
        return torch.nn.ModuleList([self.lightning_module, self.losses, *self._copies().values()])

    def synchronize_copies(self) -> dict[str, torch.Tensor]:
        """Synchronize the buffers of modules that callbacks keep, such as moving averages; collective.

        Returns this rank's own values of the buffers that differed.
        """
        if not self.can_synchronize():
            return {}
        modules = common_modules(self._copies())
        rows, self.feed.rows_of_copies = self.feed.rows_of_copies, 0
        return synchronize_buffers(modules, rows, "buffers of callbacks") if modules else {}

    def batch_to_device(self, batch: object, *rest: object, **named: object) -> object:
        """Move a batch as Lightning begins it, before any of its hooks; its share is now the current one."""
        loader = self.feed.train if _stage_of(self.lightning_module.trainer) == "train" else self.feed.validation
        self.end_batch()
        if loader is not None:
            loader.begin_batch()
            if loader.share.is_substitute:
                callbacks: Sequence[object] = self.lightning_module.trainer.callbacks  # type: ignore[attr-defined]
                self._during_substitute.enter_context(metrics_ignore_batch(self.lightning_module, *callbacks))
        result: object = super().batch_to_device(batch, *rest, **named)  # type: ignore[misc]
        return result

    def end_batch(self) -> None:
        """Let torchmetrics change again after the last hook of a substitute batch."""
        self._during_substitute.close()

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Complete the preparation of ``on_train_start`` if the run resumes within an epoch."""
        super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]
        if self.feed.within_epoch:
            self.feed.within_epoch = False
            trainer = self.lightning_module.trainer
            trainer.val_check_batch = self._validates_every
            self.feed.values.restore_metrics(self.lightning_module)
            end_epoch_with_schedulers(trainer)

    @contextmanager
    def weighting_logged(self, weight: float | None) -> Iterator[None]:
        """Use this weight for logged values in their mean over the ranks until the block ends."""
        self._weight_of_logged = weight
        try:
            yield
        finally:
            self._weight_of_logged = None

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the reduction over the ranks, see ``RankStrategy``; the mean of logged values is weighted."""
        weight = self._weight_of_logged
        if weight is None or find_reduce_op(reduce_op) is not ReduceOp.AVERAGE:
            return super().reduce(tensor, group, reduce_op)  # type: ignore[misc]
        parts = torch.stack([tensor * weight, torch.full_like(tensor, float(weight))])
        total, weights = super().reduce(parts, group, "sum")  # type: ignore[misc]
        return torch.where(weights > 0, total / weights, tensor)

    def training_step(self, *batch: object, **named: object) -> object:
        return self._step("train", super().training_step, batch, named)  # type: ignore[misc]

    def validation_step(self, *batch: object, **named: object) -> object:
        return self._step("validation", super().validation_step, batch, named)  # type: ignore[misc]

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)  # type: ignore[misc]
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        if self.earlier_optimizers:
            load_earlier_states(self.optimizers, self.earlier_optimizers, schedulers)
        if self.lr_scale != 1.0:
            refuse_unscalable(schedulers)
            scale_lr(self.optimizers, schedulers, self.lr_scale)

    def load_checkpoint(self, checkpoint_path: str | Path, *rest: object, **named: object) -> dict[str, Any]:
        """Load a checkpoint, also one that only rank 0's host has, such as LearningRateFinder's; collective."""
        path = Path(checkpoint_path)
        with tempfile.TemporaryDirectory(prefix="sparkhvd-checkpoint-", dir=scratch_folder()) as folder:
            if not self.reduce_boolean_decision(path.is_file()):
                content = path.read_bytes() if self.is_global_zero else b""
                path = Path(folder) / path.name
                path.write_bytes(objects.broadcast_object(session.current(), content, 0, name="checkpoint of rank 0"))
            loaded: dict[str, Any] = super().load_checkpoint(path, *rest, **named)  # type: ignore[misc]
            return loaded

    def load_model_state_dict(self, checkpoint: dict[str, Any], *rest: object, **named: object) -> None:
        """Load the weights in the Trainer's precision, which Lightning sets only later, and restore the pruning."""
        self.precision_plugin.convert_module(self.lightning_module)
        prepare_module(self.lightning_module, checkpoint)
        super().load_model_state_dict(checkpoint, *rest, **named)  # type: ignore[misc]
        prune_as_saved(self.lightning_module, checkpoint)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Call ``finish_epoch`` if needed: Lightning has already restored its loops."""
        super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]
        trainer = self.lightning_module.trainer
        if not self.feed.within_epoch and trainer.max_steps != -1:
            finish_epoch(trainer)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks, unless only this rank saves a checkpoint."""
        if not self.saves_alone:
            super().barrier(name)  # type: ignore[misc]

    def save_checkpoint(
        self, checkpoint: Mapping[str, object], filepath: str | Path, *rest: object, **named: object
    ) -> None:
        """Omit hyperparameters if runs resume from the checkpoint: they may have any type, and the module has them."""
        if self.kept_progress is not None:
            checkpoint = {**checkpoint, "loops": {**checkpoint["loops"], "fit_loop": self.kept_progress}}  # type: ignore[dict-item]
        if self.resumable:
            saved = {name: part for name, part in checkpoint.items() if not _HYPERPARAMETER_KEYS.search(name)}
            checkpoint = {name: plain_numbers(part) for name, part in saved.items()}
        if self.saves_alone:  # perhaps not on rank 0, after a loss
            # Lightning's own writer imports the packages of all object stores that are installed.
            with Path(filepath).open("wb") as file:
                torch.save(checkpoint, file)
        else:
            super().save_checkpoint(checkpoint, filepath, *rest, **named)  # type: ignore[misc]

    def backward(self, closure_loss: torch.Tensor, *rest: object, **named: object) -> torch.Tensor:
        """Record a NaN or infinite loss of manual optimization; see ``Feed.loss``."""
        is_manual = not self.lightning_module.automatic_optimization and not self.feed.share("train").is_substitute
        if is_manual and closure_loss.numel() == 1 and not math.isfinite(value := float(closure_loss.detach())):
            self.feed.loss = value
        result: torch.Tensor = super().backward(closure_loss, *rest, **named)  # type: ignore[misc]
        return result

    def _run_closure(self, closure: Callable[[], Any]) -> Any:
        result = super()._run_closure(closure)  # type: ignore[misc]
        self._renormalize()
        self.before_update(int(self.lightning_module.trainer.current_epoch))
        return result

    def _renormalize(self) -> None:
        """Shorten the rows of embeddings that other ranks have looked up, unless an exception is ending this rank."""
        if self._renormalization is not None and not self.lightning_module.trainer.interrupted:
            self._renormalization.synchronize()

    def _synchronize(self, exchange: object) -> None:
        before = time.monotonic()
        super()._synchronize(exchange)  # type: ignore[misc]
        self.feed.communicated += time.monotonic() - before

    def _step(
        self, stage: str, step: Callable[..., object], batch: tuple[object, ...], named: dict[str, object]
    ) -> object:
        share = self.feed.share(stage)
        self.feed.loss = None
        if share.is_substitute:
            with preserved_state(self.lightning_module, stage), buffers_unchanged(self.losses):
                return step(*batch, **named)
        rows = _count_rows(batch) if share.is_foreign else share.rows
        self.feed.rows_of_buffers += rows  # in a validation too, where a loss may change its buffers
        if stage == "train":
            self.feed.rows_of_copies += rows
        try:
            result = step(*batch, **named)
        except Exception as error:
            hint = batch_hint(f"{step.__name__} of the model", error, batch[0] if batch else None)
            if hint is None:
                raise
            raise DataError(hint) from error
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            value = float(loss.detach())
            if stage == "train" and self.feed.loss is None:
                self.feed.loss = value
            self.feed.add(stage, value, counted_rows(rows, share.factors))
        return result


def _count_rows(batch: object) -> int:
    """Return the length of the first tensor in a batch; 1 without such a tensor."""
    return next((len(part) for part in tree_leaves(batch) if isinstance(part, torch.Tensor) and part.dim()), 1)


@contextmanager
def preserved_state(module: torch.nn.Module, stage: str) -> Iterator[None]:
    """Undo all changes of a step except gradients: in buffers, attributes, torchmetrics and random generators.

    Statistics of synchronized layers still change, as on the other ranks, but this rank's rows do not count in them.
    """
    synchronized = synchronized_layers(module)
    for layer in synchronized:
        layer.counts_rows = False
    devices = {part.device for part in module.parameters() if part.is_cuda}
    try:
        with (
            torch.random.fork_rng(devices),
            buffers_unchanged(module, synchronized),
            rows_keep_their_norms(module),
            attributes_unchanged(module, counters=stage == "validation"),
        ):
            yield
    finally:
        for layer in synchronized:
            layer.counts_rows = True


def _stage_of(trainer: Trainer) -> str:
    return "validation" if trainer.validating or trainer.sanity_checking else "train"


def strategy_of(trainer: Trainer) -> EstimatorSteps:
    """Return the strategy of an estimator's Trainer."""
    strategy: object = trainer.strategy
    if not isinstance(strategy, EstimatorSteps):
        raise TypeError("the Trainer of an estimator must have the estimator's strategy")
    return strategy


class DistributedLog:
    """Replaces ``LightningModule.log``, so that values for a whole epoch cover the rows of all ranks."""

    def __init__(self, module: LightningModule, feed: Feed) -> None:
        self._module = module
        self._log = module.log
        self._feed = feed
        vars(module)["log"] = self

    def __call__(self, name: str, value: Any, *rest: object, **options: Any) -> None:
        if rest:
            names = list(inspect.signature(self._log).parameters)[2:]
            options = {**dict(zip(names, rest, strict=False)), **options}
        trainer = self._module.trainer
        stage = _stage_of(trainer)
        in_step = within_step(self._module._current_fx_name or "")  # noqa: SLF001  (Lightning uses it for this decision, too)
        is_step = in_step and stage == "train"
        on_epoch = self._share_over_ranks(name, value, options, stage, is_step=is_step)
        share = self._feed.share(stage)
        if in_step and (share.is_substitute or (options.get("batch_size") is None and not share.is_foreign)):
            options["batch_size"] = share.rows
        reduction = _name_of(options.get("reduce_fx", "mean"))
        if is_step and not on_epoch and not _is_shared(options):
            value = self._value_of_step(name, value, share, options.get("batch_size"), reduction)
        elif in_step and share.is_substitute:
            value = _neutral_element(value, reduction)
        elif in_step and options.get("batch_size") == 0:
            value = _finite(value)  # a mean over no rows is NaN, and so is 0 times NaN
        with strategy_of(trainer).weighting_logged(options.get("batch_size") if in_step else None):
            self._log(name, value, **options)
        if stage == "train":
            self._feed.values.add_logged(trainer)

    def _share_over_ranks(self, name: str, value: Any, options: dict[str, Any], stage: str, *, is_step: bool) -> bool:
        """Set ``sync_dist`` for a value that needs the rows of all ranks; return whether it is a value of the epoch."""
        trainer = self._module.trainer
        on_epoch = not is_step if options.get("on_epoch") is None else bool(options["on_epoch"])
        if on_epoch and options.get("rank_zero_only"):
            self._feed.rank_zero_logged[stage].add(name)
        elif on_epoch:
            self._feed.logged[stage].add(name)
            options["sync_dist"] = True
        elif not _is_shared(options) and name in monitored_names(trainer):
            options["sync_dist"] = True  # decisions by the value of a single rank would let the ranks diverge
        if is_step if options.get("on_step") is None else options["on_step"]:
            refuse_metric_of_single_rank(name, value, trainer)
        return on_epoch

    def _value_of_step(self, name: str, value: Any, share: BatchShare, rows: int | None, reduction: str) -> Any:
        """Return the value to log, which is the earlier one if this rank has no rows in the step."""
        values = self._feed.step_values
        if not isinstance(value, torch.Tensor | int | float):
            return value
        if share.is_substitute:
            return values.before(name, value)
        batch = int(self._module.trainer.fit_loop.total_batch_idx)
        values.add(name, batch, value, 1 if rows is None else rows, reduction)
        return value

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return the same object, because callbacks copy the module to average its weights."""
        return self

    def close(self) -> None:
        """Restore the module's own method."""
        del self._module.log


class BatchEndHook:
    """Replaces ``on_train_batch_end`` or ``on_validation_batch_end`` of a module, the last hook of a batch.

    Args:
        module: the module.
        name: the hook.
        after_hook: called with the batch number after the hook, so that a checkpoint contains the changes of all hooks.
    """

    def __init__(self, module: LightningModule, name: str, after_hook: Callable[[int], None] = lambda _: None) -> None:
        self._module = module
        self._name = name
        self._own = getattr(module, name)
        self._after_hook = after_hook
        vars(module)[name] = self

    def __call__(self, outputs: object, batch: object, batch_idx: int, *loader: int) -> None:
        self._own(outputs, batch, batch_idx, *loader)
        strategy_of(self._module.trainer).end_batch()
        self._after_hook(batch_idx)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return the same object, because callbacks copy the module to average its weights."""
        return self

    def close(self) -> None:
        """Restore the module's own method."""
        delattr(self._module, self._name)


def _is_shared(options: Mapping[str, Any]) -> bool:
    """Return whether a value is reduced over the ranks, or logged by rank 0 alone."""
    return bool(options.get("sync_dist") or options.get("rank_zero_only"))


def _finite(value: Any) -> Any:
    """Return a number or tensor with NaN and infinite values replaced by 0."""
    if isinstance(value, torch.Tensor):
        return torch.nan_to_num(value, 0.0, 0.0, 0.0)
    return 0.0 if isinstance(value, float) and not math.isfinite(value) else value


def _name_of(reduction: object) -> str:
    """Return Lightning's name of a reduction, which may be a function of torch or of Python."""
    return str(getattr(reduction, "__name__", reduction)).lower()


def _neutral_element(value: Any, name: str) -> Any:
    """Return the neutral element of a reduction over batches and ranks, in the type of ``value``."""
    if name not in _NEUTRAL_ELEMENTS or not isinstance(value, torch.Tensor | int | float):
        return _finite(value)  # it has no effect, because its batch size is 0
    if not isinstance(value, torch.Tensor):
        return _NEUTRAL_ELEMENTS[name]
    dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
    return torch.full_like(value, _NEUTRAL_ELEMENTS[name], dtype=dtype)


def refuse_unscalable(schedulers: Iterable[object]) -> None:
    """Refuse schedulers that ``scale_lr`` cannot scale.

    Raises:
        ParamError: a scheduler is an ``SWALR``, or contains one.
    """
    for scheduler in schedulers:
        refuse_own_rates(scheduler, lambda part: type(part).__name__ == "SWALR")


def scale_lr(optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[Any], factor: float) -> None:
    """Multiply the learning rates of optimizers and the base rates of schedulers by ``factor``."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name in RATES:
                if name in group:
                    group[name] = group[name] * factor
    for scheduler in schedulers:
        scale_schedule(scheduler, factor)
