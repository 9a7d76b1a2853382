"""Training of a LightningModule on one rank, with Lightning's Trainer."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import math
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sparkhvd.comm import objects, session
from sparkhvd.comm.connect.membership import LOST_CONNECTIONS
from sparkhvd.config import scratch_folder
from sparkhvd.data.read.batches import BatchSource
from sparkhvd.errors import ParamError
from sparkhvd.estimators.lightning.batches import BatchFormat, Columns, LightningBatch, RankLoader, build_batch_format
from sparkhvd.estimators.lightning.checkpoint import best_model
from sparkhvd.estimators.lightning.checkpoint.best_model import RUN_KEY
from sparkhvd.estimators.lightning.checkpoint.epoch_values import EpochValues
from sparkhvd.estimators.lightning.checkpoint.hot_start import keep_modes, train_as_before
from sparkhvd.estimators.lightning.checkpoint.mid_epoch_resume import (
    can_keep_state,
    ends_by_steps,
    reload_batches,
    resume_after_batch,
    validates_after,
)
from sparkhvd.estimators.lightning.checkpoint.weights import prepare_module
from sparkhvd.estimators.lightning.files import CHECKPOINT, LOGS
from sparkhvd.estimators.lightning.package import LightningPackage, lightning_module
from sparkhvd.estimators.lightning.steps import (
    BatchEndHook,
    DistributedLog,
    EstimatorSteps,
    Feed,
    scale_lr,
    strategy_of,
)
from sparkhvd.estimators.plugin import TrainHooks, TrainSpec
from sparkhvd.estimators.reports import EpochReport, StepReport, StepTimes
from sparkhvd.estimators.torch.checkpoint.attributes import ChangedAttributes
from sparkhvd.estimators.torch.checkpoint.frozen import freeze_only, frozen_parameters
from sparkhvd.estimators.torch.checkpoint.optimizer_groups import load_with_groups
from sparkhvd.estimators.torch.checkpoint.pruning import pruning_masks
from sparkhvd.estimators.torch.checkpoint.rank_state import own_buffers, rank_state, restore_random, seed_generators
from sparkhvd.estimators.torch.checkpoint.safe_state import refuse_unsafe
from sparkhvd.estimators.torch.checkpoint.versions import has_only_parameters, versions
from sparkhvd.estimators.torch.inputs import model_dtype
from sparkhvd.estimators.torch.losses.divisors import loss_divisors
from sparkhvd.estimators.torch.serialization import artifact
from sparkhvd.estimators.training.commits import until_change
from sparkhvd.estimators.training.user_errors import describe_error
from sparkhvd.lightning import strategy_class
from sparkhvd.lightning.flavour import import_lightning
from sparkhvd.torch.buffers import non_persistent_buffers, take_buffers, take_new_buffers
from sparkhvd.world import World

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from sparkhvd.estimators.lightning.checkpoint.best_model import BestModel, State

logger = logging.getLogger(__name__)


class LightningTrainer:
    """Trains on this rank's part of every global batch; see ``RankLoader`` and ``EstimatorSteps``."""

    def __init__(self, package: LightningPackage, spec: TrainSpec, world: World) -> None:
        self._package = package
        self._spec = spec
        self._world = world
        if not package.model.training:  # a fitted model is in evaluation mode, which Lightning keeps
            train_as_before(package.model)
        self._module = lightning_module(package, spec.schema)
        self._lightning = import_lightning(package.flavour)
        self._formats: dict[torch.dtype, BatchFormat] = {}
        self._trainer: Any = None  # Lightning's
        self._run_callback: Any = None  # see RunCallback
        self._resumed: bytes | None = None
        self._logs: bytes | None = None

    def state(self) -> bytes:
        """Return a Lightning checkpoint; called on rank 0 only."""
        with tempfile.TemporaryDirectory(prefix="sparkhvd-state-", dir=scratch_folder()) as folder:
            path = Path(folder) / CHECKPOINT
            with self._run_callback.including_best_model(
                best_model.pack_best_model(self._trainer.checkpoint_callbacks)
            ):
                self._save(path, resumable=True)
            refuse_unsafe(path, "A checkpoint (on_save_checkpoint, or state_dict of callbacks)")
            return path.read_bytes()

    def restore(self, state: bytes) -> None:
        """Make ``fit`` resume from ``state``. After ``fit``, load the weights and optimizers of ``state`` instead."""
        self._resumed = state
        if self._trainer is not None:
            self._load_weights(state)

    def fit(self, train: BatchSource, val: BatchSource | None, hooks: TrainHooks) -> None:
        """Train from ``hooks.first_epoch`` to the last epoch, or until a hook or callback stops it; collective."""
        self._seed_epoch(hooks.first_epoch)  # for hooks before the epoch, which may create layers
        to_batch: Callable[[Columns], LightningBatch] = dict if self._package.plain else self._batch_of
        size = self._world.size
        validation = None if val is None else RankLoader(val, to_batch, size, self._spec.sample)
        values = EpochValues(hooks.metrics, self._world.rank, size)
        feed = Feed(RankLoader(train, to_batch, size, self._spec.sample), validation, values)
        if self._package.objective is not None:
            feed.train.divisors = loss_divisors(self._package.objective, self._spec.schema, self._spec.labels)
        with (
            tempfile.TemporaryDirectory(prefix="sparkhvd-lightning-", dir=scratch_folder()) as folder,
            contextlib.chdir(folder),
        ):
            trainer = self._trainer = self._create_trainer(feed, hooks, Path(folder))
            feed.train.epoch = lambda: int(trainer.current_epoch)
            feed.train.passes = lambda: int(trainer.accumulate_grad_batches)
            feed.train.limit = lambda: float(trainer.num_training_batches)
            feed.train.on_epoch = partial(self._resume_random, hooks)
            feed.train.repeats_first_epoch = bool(self._package.trainer_args.get("overfit_batches"))
            if validation is not None:
                validation.epoch = feed.train.epoch
            log = DistributedLog(self._module, feed)
            batch_end_hooks = (
                BatchEndHook(self._module, "on_train_batch_end", self._run_callback.on_batch_end),
                BatchEndHook(self._module, "on_validation_batch_end"),
            )
            try:
                self._run(trainer, feed, hooks, Path(folder))
            finally:
                log.close()
                for hook in batch_end_hooks:
                    hook.close()
                feed.train.close()
                if validation is not None:
                    validation.close()
            hooks.on_train_end(self)
            self._keep_results(trainer, Path(folder))

    def export(self, folder: Path) -> None:
        """Write the model, a Lightning checkpoint, and the files of loggers."""
        keep_modes(self._package.model)
        self._module.cpu().eval()
        self._end_averaging()
        self._save(folder / CHECKPOINT)
        # Another fit of the exported model would scale the learning rate again.
        optimizers, scale = self._trainer.optimizers, self._trainer.strategy.lr_scale
        scale_lr(optimizers, [], 1 / scale)
        try:
            self._export_with(list(optimizers), folder)
        finally:
            scale_lr(optimizers, [], scale)
        if self._logs is not None:
            (folder / LOGS).write_bytes(self._logs)

    def _end_averaging(self) -> None:
        """Let Lightning's averaging callbacks save the module itself: it has their average, or the best epoch's."""
        averaging = getattr(self._lightning.callbacks, "WeightAveraging", ())  # Lightning has it since version 2.6
        for callback in vars(self._trainer)["callbacks"]:  # Lightning does not declare the attribute
            if isinstance(callback, averaging):
                vars(callback)["_average_model"] = None

    def _export_with(self, optimizers: list[torch.optim.Optimizer], folder: Path) -> None:
        model, inputs = self._package.model, self._package.inputs(self._spec.schema)
        try:
            artifact.save(folder, model, optimizers[0] if len(optimizers) == 1 else optimizers or None, inputs)
        except Exception as error:
            if self._package.plain:  # its optimizer has been pickled before
                raise
            logger.warning(
                "The model is saved without its optimizers, because they cannot be pickled: %s", describe_error(error)
            )
            artifact.save(folder, model, None, inputs)

    def _batch_of(self, columns: Columns) -> LightningBatch:
        """Convert rows to a batch in the module's dtype, which the Trainer's precision may have changed."""
        package, dtype = self._package, model_dtype(self._package.model)
        if dtype not in self._formats:
            self._formats[dtype] = build_batch_format(
                package.batch_format, package.model, self._spec.schema, package.input_shapes, package.label_shapes
            )
        return self._formats[dtype](columns)

    def _create_trainer(self, feed: Feed, hooks: TrainHooks, folder: Path) -> Trainer:
        """Return Lightning's Trainer for this run."""
        strategy_type = type("EstimatorStrategy", (EstimatorSteps, strategy_class(self._package.flavour)), {})
        strategy = strategy_type(
            **({} if self._package.compression is None else {"compression": self._package.compression})
        )
        strategy.feed, strategy.losses, strategy.before_update = feed, self._package.losses, hooks.before_update
        owners = {"model": self._module, "losses": self._package.losses}
        strategy.attributes = ChangedAttributes(owners, vars(self._lightning.LightningModule()))
        strategy.call = self._lightning.trainer.call
        strategy.earlier_optimizers = () if self._package.plain else self._package.optimizers
        strategy.lr_scale = self._spec.lr_scale(self._world.size)
        callback_type = type("RunCallback", (RunCallback, self._lightning.callbacks.Checkpoint), {})
        shared_values_type = type("SharedValues", (SharedValues, self._lightning.callbacks.Callback), {})
        resume_setting = "every_steps of checkpoints" if self._spec.checkpoints.every_steps is not None else ""
        resume_setting = "min_num_proc and max_num_proc" if self._spec.elastic else resume_setting
        run_callback = self._run_callback = callback_type(
            self,
            strategy.losses,
            feed,
            hooks,
            strategy.lr_scale,
            finder=self._lightning.callbacks.LearningRateFinder,
            resume_setting=resume_setting,
            is_elastic=self._spec.elastic,
        )
        is_finished = hooks.first_epoch >= self._spec.epochs  # perhaps early, with fewer epochs in Lightning's count
        run_callback.is_over = is_finished and len(hooks.history) != self._spec.epochs
        fixed_arguments = {
            "strategy": strategy,
            "devices": 1,
            "max_epochs": len(hooks.history) if is_finished else self._spec.epochs,
            "callbacks": [shared_values_type(self._seed_epoch), *self._package.callbacks, run_callback],
            "use_distributed_sampler": self._package.data_module is not None,
        }
        arguments = {
            "accelerator": "gpu" if self._uses_gpu() else "cpu",
            "logger": self._package.logger if self._package.logger is not None else False,
            "num_sanity_val_steps": 0,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(folder),
            **({} if self._spec.log_every_n_steps is None else {"log_every_n_steps": self._spec.log_every_n_steps}),
        }
        trainer: Trainer = self._lightning.Trainer(**{**arguments, **self._package.trainer_args, **fixed_arguments})
        return trainer

    def _uses_gpu(self) -> bool:
        return self._spec.use_gpu and torch.cuda.is_available()

    def _run(self, trainer: Trainer, feed: Feed, hooks: TrainHooks, folder: Path) -> None:
        source: State = {"train_dataloaders": feed.train, "val_dataloaders": feed.validation}
        if self._package.data_module is not None:
            source = {"datamodule": self._package.data_module(feed.train, feed.validation)}
        if self._resumed is not None:
            path = folder / "resumed.ckpt"
            path.write_bytes(self._resumed)
            self._run_callback.batches_done = self._batches_done(feed, hooks)
            source["ckpt_path"] = str(path)
            if "weights_only" in inspect.signature(trainer.fit).parameters:
                source["weights_only"] = True  # write access to the Store must not allow running code on a rank
        try:
            trainer.fit(self._module, **source)
        except SystemExit as error:
            if not trainer.received_sigterm:
                raise
            # Lightning's own error has no exit code, as if user code had called sys.exit().
            raise SystemExit(128 + signal.SIGTERM) from error

    def _batches_done(self, feed: Feed, hooks: TrainHooks) -> int | None:
        """If the run resumes within an epoch, skip the completed batches and return their number; None otherwise."""
        left, done = hooks.first_epoch_batches, hooks.first_step
        if left is None and not done:
            return None
        if left is not None:
            # The number of ranks has changed, but Lightning's count must still reach the epoch's length at the end.
            done = self._run_callback.batches_before = max(len(feed.train) - left, 0)
            # With fewer ranks, more steps may remain than ``train_steps_per_epoch`` allows for a whole epoch.
            self._run_callback.batches_left = left if left > len(feed.train) else None
        feed.train.begin_within(hooks.first_epoch, hooks.first_step, done)
        if hooks.rank_state is not None:
            strategy_of(self._trainer).own_buffers = own_buffers(hooks.rank_state)
        feed.within_epoch = True
        return done

    def _seed_epoch(self, epoch: int) -> None:
        seed_generators(self._spec.seed_of(epoch, self._world.rank))

    def _resume_random(self, hooks: TrainHooks, epoch: int) -> None:
        """Continue with the random numbers after the position within an epoch at which the run resumes."""
        if epoch != hooks.first_epoch:
            return
        if hooks.steps_done:
            seed_generators(self._spec.seed_of(epoch, self._world.rank, hooks.steps_done))
        if hooks.rank_state is not None:
            restore_random(hooks.rank_state, self._trainer.strategy.root_device)

    def _save(self, path: Path, *, resumable: bool = False) -> None:
        with _single_rank_save(self._trainer.strategy, resumable):
            self._trainer.save_checkpoint(path)

    def _load_weights(self, state: bytes) -> None:
        content = torch.load(io.BytesIO(state), weights_only=True, map_location="cpu")
        self._load_module(content)
        run = content["callbacks"][RUN_KEY]
        take_buffers(self._module, run.get("buffers", {}))
        freeze_only(self._module, run.get("frozen", frozen_parameters(self._module)))
        self._trainer.strategy.attributes.restore(run.get("attributes", {}))
        optimizers = self._trainer.optimizers
        for optimizer, known in zip(optimizers, content["optimizer_states"], strict=True):
            load_with_groups(optimizer, known, own=0)  # callbacks may have added groups in later epochs
        scale_lr(optimizers, [], self._trainer.strategy.lr_scale / run["lr_scale"])

    def _load_module(self, content: State) -> None:
        """Load the weights of a checkpoint as Lightning does: the module may change it or save only some weights."""
        self._module.on_load_checkpoint(content)
        prepare_module(self._module, content)
        self._module.load_state_dict(content["state_dict"], strict=getattr(self._module, "strict_loading", True))

    def _keep_results(self, trainer: Trainer, folder: Path) -> None:
        """On rank 0, load the best model of the user's ModelCheckpoint, and keep the files of loggers."""
        if self._world.rank != 0:
            return
        best = best_model.best_file(trainer.checkpoint_callbacks)
        if best is not None:
            # This process wrote the file, so unpickling any objects in it is safe.
            content = torch.load(best, weights_only=False, map_location="cpu")
            self._load_module(content)
            take_buffers(self._module, best_model.run_state(content).get("buffers", {}))
        written = [
            file for run_logger in trainer.loggers if run_logger.log_dir for file in Path(run_logger.log_dir).rglob("*")
        ]
        if any(file.resolve().is_relative_to(folder.resolve()) for file in written):
            with tempfile.TemporaryDirectory(prefix="sparkhvd-logs-", dir=scratch_folder()) as packed:
                for run_logger in trainer.loggers:
                    source = Path(run_logger.log_dir or "").resolve()
                    if run_logger.log_dir and source.is_relative_to(folder.resolve()) and source.is_dir():
                        relative = source.relative_to(folder.resolve())
                        shutil.copytree(source, Path(packed) / "logs" / relative, dirs_exist_ok=True)
                archive = shutil.make_archive(str(Path(packed) / "packed"), "zip", Path(packed) / "logs")
                self._logs = Path(archive).read_bytes()


@contextlib.contextmanager
def _single_rank_save(strategy: EstimatorSteps, resumable: bool) -> Iterator[None]:
    """Mark that only this rank saves a checkpoint in this block, and whether runs may resume from it."""
    strategy.saves_alone, strategy.resumable = True, resumable
    try:
        yield
    finally:
        strategy.saves_alone = strategy.resumable = False


class SharedValues:
    """The first callback: seeds epochs, and computes their metrics on all ranks; precedes ``Callback`` in the bases.

    Lightning computes a metric when a program first reads it, and needs all ranks to do so. After this callback has
    read the metrics on all ranks, later callbacks such as progress bars may read them on one rank alone.
    """

    def __init__(self, seed_epoch: Callable[[int], None]) -> None:
        super().__init__()
        self._seed_epoch = seed_epoch

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:  # noqa: ARG002
        """Forget the names of the last epoch: Lightning keeps values although this epoch may not log them again."""
        self._seed_epoch(int(trainer.current_epoch))
        strategy_of(trainer).feed.forget_names("train")

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:  # noqa: ARG002
        """Synchronize buffers, also those of moving averages, before a later callback swaps the two."""
        strategy_of(trainer).feed.forget_names("validation")
        strategy_of(trainer).synchronize_within_epoch()

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:  # noqa: ARG002
        """Compute the values of the epoch, and agree on those of its last step, which hooks of its end may read."""
        feed = strategy_of(trainer).feed
        feed.add_missing(trainer)
        metrics = trainer.callback_metrics
        for name, value in feed.step_values.agreed().items():
            metrics[name] = torch.full_like(metrics[name], value) if name in metrics else torch.tensor(value)

    def on_validation_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:  # noqa: ARG002
        _ = trainer.callback_metrics


class RunCallback:
    """The last callback, so its checkpoint contains the changes of all others; precedes ``Checkpoint`` in the bases."""

    def __init__(
        self,
        owner: LightningTrainer,
        losses: torch.nn.ModuleList,
        feed: Feed,
        hooks: TrainHooks,
        lr_scale: float,
        *,
        finder: type,
        resume_setting: str = "",
        is_elastic: bool = False,
    ) -> None:
        super().__init__()
        self._owner = owner
        self._losses = losses
        self._feed = feed
        self._hooks = hooks
        self._lr_scale = lr_scale
        self._finder = finder
        self.batches_done: int | None = None  # completed batches of the epoch in which the run resumes
        self.batches_before = 0  # the part of batches_done before the number of ranks changed
        self.batches_left: int | None = None  # remaining batches of that epoch, if they exceed a whole epoch
        self.is_over = False  # whether the run has ended, early or after an epoch that a callback added
        self._loaded: State = {}
        self._best: BestModel | None = None
        self._metrics: dict[str, float] = {}  # metrics at the end of the last epoch
        self._validation_metrics: dict[str, float] = {}  # metrics at the end of the last validation
        self._resume_setting = resume_setting  # the setting that makes runs resume within epochs, if any
        self._batches = 0  # completed batches of the current epoch; 0 at its end
        self._optimizer_steps = 0  # optimizer steps at the end of the last batch
        self._last_batch_ended = 0.0
        self._is_elastic = is_elastic
        self._can_keep_state = False  # see _keep_state
        self._kept: Callable[[], bytes | None] | None = None  # see _keep_state
        self._kept_values: State = {}  # while a kept state is saved, its values of this callback's state

    @property
    def state_key(self) -> str:
        return RUN_KEY

    @contextlib.contextmanager
    def including_best_model(self, best: BestModel | None) -> Iterator[None]:
        """Include the best model in checkpoints that are made in this block."""
        self._best = best
        try:
            yield
        finally:
            self._best = None

    def state_dict(self) -> State:
        metrics = _numbers(self._trainer.callback_metrics) if self._batches else self._metrics
        return {
            "lr_scale": self._lr_scale,
            "metrics": metrics,
            "best": self._best,
            "batches": self._batches,
            "buffers": non_persistent_buffers(self._trainer.lightning_module),
            "losses": dict(self._losses.state_dict()),
            "loss_buffers": non_persistent_buffers(self._losses),
            "frozen": frozen_parameters(self._trainer.lightning_module),
            "masks": pruning_masks(self._trainer.lightning_module),
            "gradients": _manual_gradients(self._trainer.lightning_module),
            "will_stop": self._trainer.should_stop and not _is_stopped(self._trainer),
            "validation": self._last_validation(),
            "attributes": strategy_of(self._trainer).attributes.state(),
            **self._kept_values,
        }

    def _last_validation(self) -> State | None:
        """Return the values of the last validation in the epoch so far; None without a validation."""
        if not self._feed.validated:
            return None
        names = [sorted(names["validation"]) for names in (self._feed.logged, self._feed.rank_zero_logged)]
        return {"metrics": self._validation_metrics, "logged": names[0], "rank_zero_logged": names[1]}

    def _take_validation(self, state: State) -> None:
        """Continue an epoch that had a validation before the interruption: the rest may have none."""
        feed = self._feed
        feed.validated, feed.sums["validation"] = True, feed.values.validation
        feed.logged["validation"].update(state["logged"])
        feed.rank_zero_logged["validation"].update(state["rank_zero_logged"])
        self._validation_metrics = state["metrics"]

    def on_load_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: State) -> None:  # noqa: ARG002
        # The learning rate finder ran when the run began. Running it again would lose the resumed state.
        for callback in vars(trainer)["callbacks"]:  # Lightning does not declare the attribute
            if isinstance(callback, self._finder):
                vars(callback)["on_fit_start"] = lambda *_: None
        states = checkpoint["callbacks"]
        best = states[self.state_key].pop("best", None)
        best_model.unpack_best_model(best, trainer.checkpoint_callbacks, states, trainer.is_global_zero)
        if self.batches_done is not None:
            resume_after_batch(checkpoint, self.batches_done)

    def load_state_dict(self, state: State) -> None:
        self._loaded = state

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:  # noqa: ARG002
        """Train no epoch if the run is over: StochasticWeightAveraging adds one to update batch normalization."""
        if self.is_over:
            trainer.fit_loop.max_epochs = len(self._hooks.history)

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Restore the loaded state, and step the schedulers that read a metric: they step only after a checkpoint."""
        if math.isinf(trainer.num_training_batches):
            raise ParamError(
                "The training loader of data_module has no length, which the estimator needs to report steps and to "
                "resume. Define __len__; a wrapper returns the len() of the loader that is passed to data_module."
            )
        self._optimizer_steps = int(trainer.global_step)
        self._can_keep_state = self._is_elastic and can_keep_state(trainer, strategy_of(trainer).modules_and_kept())
        if self.batches_left is not None:  # not earlier: learning rate schedules are made for whole epochs
            self._feed.train.batches_left, self.batches_left = self.batches_left, None
            reload_batches(trainer)
        if not self._loaded:
            return
        take_buffers(module, self._loaded.get("buffers", {}))
        losses = self._loaded.get("losses", {})
        take_new_buffers(self._losses, losses)
        self._losses.load_state_dict(losses, strict=False)
        take_buffers(self._losses, self._loaded.get("loss_buffers", {}))
        strategy_of(trainer).frozen = self._loaded.get("frozen")
        attributes = strategy_of(trainer).attributes
        attributes.restore(self._loaded.get("attributes", {}))
        if trainer.is_global_zero and not self.is_over:
            attributes.warn_of_missing()
        _take_gradients(module, self._loaded.get("gradients", {}))
        # If min_epochs or min_steps delays a stop by a callback, Lightning does not save that the training will stop.
        trainer.should_stop = trainer.should_stop or self._loaded.get("will_stop", False)
        if (validation := self._loaded.get("validation")) is not None:
            self._take_validation(validation)
        # Schedulers and callbacks may read the metrics of an earlier epoch.
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in self._loaded["metrics"].items()})
        batches = self._loaded.get("batches", 0)
        interval, done = ("step", batches) if batches else ("epoch", int(trainer.current_epoch))
        for config in trainer.lr_scheduler_configs:
            value = self._loaded["metrics"].get(config.monitor)
            due = config.interval == interval and done % config.frequency == 0
            if config.reduce_on_plateau and due and value is not None:
                module.lr_scheduler_step(config.scheduler, value)
        factor = self._lr_scale / self._loaded["lr_scale"]
        if factor != 1.0:
            scale_lr(trainer.optimizers, [config.scheduler for config in trainer.lr_scheduler_configs], factor)
        self._loaded = {}

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:  # noqa: ARG002
        """Become the last callback: Lightning has added the module's own ``ModelCheckpoint`` after this one."""
        self._trainer = trainer
        attributes = vars(trainer)  # Lightning does not declare the list of callbacks
        # A new list, because Lightning is iterating over the present one.
        attributes["callbacks"] = [*(other for other in attributes["callbacks"] if other is not self), self]

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:  # noqa: ARG002
        """Discard the sums of trial steps, such as LearningRateFinder's: Lightning has restored the model since."""
        self._feed.sums.pop("train", None)
        self._feed.rows_of_buffers, self._feed.rows_of_copies, self._feed.communicated = 0, 0, 0.0

    def on_batch_end(self, batch: int) -> None:
        """Report progress after all hooks of a batch; may raise for a NaN or infinite loss."""
        feed, trainer = self._feed, self._trainer
        if self not in vars(trainer)["callbacks"]:
            return  # a trial: Lightning has replaced all callbacks for it
        self._last_batch_ended = time.monotonic()
        if self._resume_setting and not feed.train.used:
            raise ParamError(
                "data_module trains with its own loader, whose position within an epoch cannot be saved. Use the "
                f"loader that is passed to data_module, or leave {self._resume_setting} out."
            )
        self._batches, strategy = batch + 1, strategy_of(trainer)
        # A checkpoint does not contain accumulated gradients, so it must follow an optimizer step.
        stepped, self._optimizer_steps = trainer.global_step > self._optimizer_steps, int(trainer.global_step)
        report = StepReport(
            int(trainer.current_epoch),
            self._batches - self.batches_before,
            int(trainer.num_training_batches) - self.batches_before,
            feed.loss,
            lambda: {"loss": feed.sums.get("train", (0.0, 0))},
            lambda: rank_state(strategy.root_device, strategy.own_buffers),
            allows_checkpoint=stepped
            and not validates_after(trainer, self._batches)
            and not self._ends_at_this_batch(),
            synchronize=strategy.synchronize_state_within_epoch,
            metrics=lambda: feed.values.state(trainer, feed.sums.get("validation", (0.0, 0))),
            prepare_recovery=self._keep_state if self._can_keep_state else None,
        )
        self._hooks.on_step_end(report, self._owner)
        strategy.take_own_buffers()

    def _keep_state(self) -> Callable[[], bytes | None]:
        """Return a function that returns the state after this batch until the weights change, then None.

        Lightning counts the next batch when it begins, so its counters are kept here.
        """
        trainer, strategy = self._trainer, strategy_of(self._trainer)
        modules = strategy.modules_and_kept()
        progress = trainer.fit_loop.state_dict()
        values = {"metrics": _numbers(trainer.callback_metrics), "batches": self._batches}

        def state() -> bytes | None:
            if strategy.attributes.have_changed() or not has_only_parameters(modules):
                return None
            strategy.kept_progress, self._kept_values = progress, values
            try:
                return self._owner.state()
            finally:
                strategy.kept_progress, self._kept_values = None, {}

        self._kept = until_change(lambda: versions(modules), state)
        return lambda: None if self._kept is None else self._kept()

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        """Make the state of the last complete step after the loss of a rank; Lightning then deletes what it needs."""
        if self._kept is not None and isinstance(exception, LOST_CONNECTIONS):
            state = self._kept()
            self._kept = lambda: state

    def _ends_at_this_batch(self) -> bool:
        """Return whether the training ends at this batch. A run that resumed here would train the rest of the epoch."""
        return ends_by_steps(self._trainer) or _is_stopped(self._trainer)

    def on_validation_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:  # noqa: ARG002
        """Synchronize buffers: earlier callbacks may have set other weights, such as moving averages."""
        strategy_of(trainer).synchronize_buffers()
        self._feed.sums.pop("validation", None)  # from an earlier validation in the epoch, with other weights

    def on_validation_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:  # noqa: ARG002
        self._feed.validated = not trainer.sanity_checking

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:  # noqa: ARG002
        """Keep the metrics: Lightning has one value per name, and the training may log the same names later."""
        self._validation_metrics = _numbers(trainer.callback_metrics)

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:  # noqa: ARG002
        """Report the epoch; collective."""
        feed = self._feed
        feed.train.close()
        strategy_of(trainer).synchronize_state()  # only rank 0 makes the checkpoint
        steps, self.batches_done = self._batches - (self.batches_done or 0), None
        self._batches, self._metrics, self.batches_before = 0, _numbers(trainer.callback_metrics), 0
        rows = max(1, feed.train.rows)
        train = {"loss": feed.sums.get("train", (0.0, 0)), **self._logged("train", rows)}
        validation = {}
        if feed.validated:
            # Every rank needs the same names in the same order, even if it has no validation rows.
            validation = {"loss": feed.sums.get("validation", (0.0, 0)), **self._logged("validation", rows)}
        epoch = int(trainer.current_epoch)
        wants_end = _is_stopped(trainer)
        report = EpochReport(epoch, train, validation, self._times(), steps, lambda _record: wants_end)
        feed.sums, feed.communicated, feed.validated = {}, 0.0, False
        if not self._hooks.on_epoch_end(report, self._owner):
            trainer.should_stop = True
        if feed.train.batches_left is not None:
            feed.train.batches_left = None
            reload_batches(trainer)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:  # noqa: ARG002
        strategy_of(trainer).ended = True

    def _logged(self, stage: str, rows: int) -> dict[str, tuple[float, int]]:
        """Return the values logged for the epoch; they cover all ranks, so every rank reports the same mean."""
        shared = self._feed.logged[stage]
        known = self._metrics if stage == "train" else self._validation_metrics
        own = _known_values(known, self._feed.rank_zero_logged[stage] - shared)
        # Other ranks may not even know the names that only rank 0 logs.
        own = objects.broadcast_object(session.current(), own, 0, name=f"values that only rank 0 logs in {stage}")
        values = own | _known_values(known, shared)
        short = {name: _short_name(name, values) if stage == "validation" else name for name in sorted(values)}
        return {short[name]: (values[name] * rows, rows) for name in short}

    def _times(self) -> StepTimes:
        seconds = max(self._last_batch_ended - self._feed.train.started, 0.0)
        waited, communicated = self._feed.train.waited, self._feed.communicated
        return StepTimes(waited, max(seconds - waited - communicated, 0.0), communicated)


def _known_values(known: Mapping[str, float], names: Collection[str]) -> dict[str, float]:
    """Return the values that were logged under some names; with several loaders, Lightning appends their numbers."""
    return {name: value for name, value in known.items() if name.partition("/dataloader_idx_")[0] in names}


def _short_name(name: str, names: Mapping[str, float]) -> str:
    """Return a validation metric's name without ``val_``, unless another metric than the loss has the short name."""
    short = name.removeprefix("val_")
    return name if short in names and short != "loss" else short


def _manual_gradients(module: LightningModule) -> dict[str, torch.Tensor]:
    """Return the gradients of a module with manual optimization, which may accumulate them over batches.

    They are equal on all ranks, which exchange them in every ``manual_backward``.
    """
    if module.automatic_optimization:
        return {}
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def _take_gradients(module: LightningModule, gradients: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in module.named_parameters():
        if name in gradients:
            parameter.grad = gradients[name].to(parameter.device)


def _is_stopped(trainer: Trainer) -> bool:
    """Return whether a callback has stopped the training; Lightning has not counted the current epoch yet."""
    epochs, steps = trainer.min_epochs or 0, trainer.min_steps or 0
    return bool(trainer.should_stop and trainer.current_epoch + 1 >= epochs and trainer.global_step >= steps)


def _numbers(metrics: Mapping[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
