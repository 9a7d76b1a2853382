"""Elastic fits of a ``Trainer``: ``SparkHvdStrategy(elastic=True)``.

Lightning passes ``fit`` to the launcher of the strategy. Here, the launcher calls it within the loop of
``hvd.elastic.run``: after a change of the ranks, the same ``Trainer`` enters its ``fit`` again. All hooks up to
``on_train_epoch_start`` run again, and on a new rank for the first time. When the loop then asks for a batch, every
rank loads the last commit, and the loop continues with the batch after it.

A commit is made when the loop asks for the next batch: the batch before is complete then, with its hooks, schedulers
and validation.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import cloudpickle
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler
from torch.utils.data import SequentialSampler as InOrderSampler

from sparkhvd._util.class_pickling import PeerPickler, dumps
from sparkhvd.comm import objects, session
from sparkhvd.comm.connect.membership import LOST_CONNECTIONS
from sparkhvd.comm.elastic.loop import run
from sparkhvd.comm.elastic.sampler import ElasticSampler
from sparkhvd.comm.elastic.state import State
from sparkhvd.errors import HostsUpdatedInterrupt, MismatchError, ParamError
from sparkhvd.lightning.flavour import flavour_of
from sparkhvd.lightning.reductions import metrics_of
from sparkhvd.torch.buffers import non_persistent_buffers, take_buffers
from sparkhvd.torch.elastic import copied
from sparkhvd.torch.states import broadcast_nested

# Callbacks of Lightning whose whole state is in a commit, or that have none.
_SUPPORTED_CALLBACKS = frozenset(
    {
        "DeviceStatsMonitor",
        "EarlyStopping",
        "LambdaCallback",
        "LearningRateMonitor",
        "ModelCheckpoint",
        "ModelSummary",
        "OnExceptionCheckpoint",
        "ProgressBar",
        "RichModelSummary",
        "RichProgressBar",
        "TQDMProgressBar",
        "Timer",
    }
)
_PLAIN = (bool, int, float, str, type(None))


class _ElasticStrategy(Protocol):
    """The strategy of a Trainer; ``elastic_fit`` is set while an elastic fit runs."""

    elastic_fit: ElasticFit | None


class ElasticLauncher:
    """Runs ``fit`` so that it survives changes of the ranks, and all other functions of the ``Trainer`` unchanged."""

    is_interactive_compatible = True

    def __init__(self, strategy: _ElasticStrategy, batches_per_commit: int) -> None:
        self._strategy = strategy
        self._batches_per_commit = batches_per_commit

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Call a function of the ``Trainer``."""
        if trainer is None or trainer.state.fn != "fit":
            return function(*args, **kwargs)
        session.init()
        require_elastic_settings(trainer)
        fit = ElasticFit(trainer, self._batches_per_commit)
        arguments = inspect.signature(function).bind(*args, **kwargs).arguments

        @run
        def attempt(fit: ElasticFit) -> Any:
            with fit.prepared():
                return function(**arguments | ({"ckpt_path": None} if fit.is_resuming else {}))

        self._strategy.elastic_fit = fit
        try:
            return attempt(fit)
        finally:
            self._strategy.elastic_fit = None

    def kill(self, signum: int) -> None:
        """Do nothing: the launcher has started no processes."""


class ElasticFit(State):
    """The state of a ``Trainer`` within ``fit``.

    Attributes:
        is_resuming: whether the current attempt has not loaded the commit yet.
        divides_rows: whether Lightning is about to pass the training loader to ``divided``.
    """

    def __init__(self, trainer: Any, batches_per_commit: int) -> None:
        super().__init__()
        self._trainer = trainer
        self._batches_per_commit = batches_per_commit
        self._batches_since_commit = 0
        self._saved: dict[str, Any] | None = None
        self._first_loops = copy.deepcopy(trainer.fit_loop.state_dict())
        self._attempts = 0
        self._reload = trainer.reload_dataloaders_every_n_epochs
        self._sanity_steps = trainer.num_sanity_val_steps
        self.is_resuming = False
        self.divides_rows = False

    # The interface of states.

    def save(self) -> None:
        """Keep a copy of the state in memory; collective."""
        content = self._content()  # before the previous commit changes, because user code may fail here
        self._saved = copied(content, self._saved)
        self._batches_since_commit = 0

    def restore(self) -> None:
        """Do nothing: the next attempt loads the commit."""

    def sync(self) -> None:
        """Replace the commit of every rank with rank 0's; collective."""
        self._saved = broadcast_nested(self._saved, 0, "elastic.trainer")

    def dump_commit(self) -> bytes:
        """Return the last commit."""
        content: bytes = dumps(self._saved, PeerPickler)
        return content

    def load_commit(self, content: bytes) -> None:
        """Replace the last commit with the result of ``dump_commit`` from another process."""
        self._saved = cloudpickle.loads(content)

    @property
    def _commit(self) -> dict[str, Any]:
        """Return the last commit."""
        return self._saved or {}

    # The life of an attempt.

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """Prepare the Trainer to enter ``fit``, and end an interrupted ``fit`` without its hooks."""
        self._attempts += 1
        self.is_resuming = self._saved is not None
        if self._attempts > 1 or self.is_resuming:
            self._begin_again()
        try:
            yield
        except (*LOST_CONNECTIONS, HostsUpdatedInterrupt):
            self._trainer._teardown()  # noqa: SLF001
            self._trainer.fit_loop.teardown()  # also if a validation was interrupted
            raise
        finally:
            self._trainer.reload_dataloaders_every_n_epochs = self._reload
            self._trainer.num_sanity_val_steps = self._sanity_steps

    def _begin_again(self) -> None:
        """Set what ``Trainer.fit`` sets, and the counters as at the beginning of the epoch of the commit."""
        trainer, loop = self._trainer, self._trainer.fit_loop
        trainer.state.status = type(trainer.state.status).RUNNING
        trainer.training = True
        trainer.should_stop = False
        loop.epoch_loop._results.clear()  # noqa: SLF001
        loop.epoch_loop.val_loop._results.clear()  # noqa: SLF001
        for metric in metrics_of((trainer.lightning_module, *trainer.callbacks)):
            metric.reset()
        if self._saved is None:
            self._load_loops(self._first_loops)
            return
        trainer.num_sanity_val_steps = 0
        self._load_loops(self._commit["checkpoint"]["loops"]["fit_loop"])
        for counts in (loop.epoch_progress.total, loop.epoch_progress.current):
            counts.ready = counts.started = counts.completed = counts.processed

    def _load_loops(self, state: dict[str, Any]) -> None:
        """Set all counters. The loops must not take the ways of a restart, which repeat or omit hooks."""
        loop = self._trainer.fit_loop
        loop.load_state_dict(copy.deepcopy(state))
        loop.epoch_loop.restarting = False
        loop._restarting = False  # noqa: SLF001  (the public setter is without effect if max_steps is set)
        for part in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
            part.on_iteration_done()

    def load_modules(self) -> None:
        """Load the weights and the state of callbacks before the hooks of an attempt see them."""
        if self.is_resuming:
            with self._loading() as connector:
                connector.restore_datamodule()
                connector.restore_model()
                connector.restore_callbacks()

    @contextlib.contextmanager
    def _loading(self) -> Iterator[Any]:
        """Provide Lightning's connector with the checkpoint of the commit."""
        connector = self._trainer._checkpoint_connector  # noqa: SLF001
        checkpoint = copy.deepcopy(self._commit["checkpoint"])  # what loads it may keep or change it
        weights = OrderedDict(checkpoint["state_dict"])
        own = self._trainer.lightning_module.state_dict()
        vars(weights)["_metadata"] = getattr(own, "_metadata", None)  # the versions of the modules
        connector._loaded_checkpoint = {**checkpoint, "state_dict": weights}  # noqa: SLF001
        try:
            yield connector
        finally:
            connector._loaded_checkpoint = {}  # noqa: SLF001

    # The training loader.

    def divided(self, loader: Any) -> ElasticLoader:
        """Return the training loader, whose rows an ``ElasticSampler`` divides among the ranks; collective.

        Raises:
            ParamError: the loader cannot be divided again when the ranks change.
            MismatchError: the datasets of the ranks have different lengths.
        """
        if not self.divides_rows:
            raise ParamError("An elastic fit takes one training DataLoader, got several. Combine their datasets.")
        self.divides_rows = False
        loader, sampler = _with_elastic_sampler(self._trainer, loader)
        lengths = objects.allgather_object(session.current(), len(sampler.dataset), name="elastic.rows")
        if len(set(lengths)) > 1:
            raise MismatchError(
                f"The training datasets of the ranks have {lengths} rows. An elastic fit divides the rows of one "
                "dataset among the ranks, so create the same dataset on all ranks."
            )
        done = 0
        sampler.set_epoch(int(self._trainer.current_epoch))
        if self.is_resuming:
            sampler.load_state_dict(self._commit["sampler"])
            done = self._commit["checkpoint"]["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"]
        return ElasticLoader(self, loader, sampler, done)

    def enter_epoch(self, sampler: ElasticSampler) -> None:
        """Load the commit if the attempt resumes, else begin an epoch with all of its rows; collective."""
        trainer = self._trainer
        self._sampler = sampler
        if self.is_resuming:
            self._load(sampler)
            return
        trainer.reload_dataloaders_every_n_epochs = self._reload
        if trainer.fit_loop.epoch_loop.batch_progress.current.ready:
            raise ParamError(
                "The checkpoint in ckpt_path was made within an epoch. It does not contain which rows were used, so an "
                "elastic fit cannot resume from it. Use a checkpoint from the end of an epoch."
            )
        sampler.set_epoch(int(trainer.current_epoch))
        if self._saved is None or self._batches_since_commit >= self._batches_per_commit:
            self.commit()

    def complete_batch(self, index: int, batch_size: int) -> None:
        """Record a batch of this attempt, and commit if it is time; collective."""
        self._sampler.record_batch(index, batch_size)
        is_due = self._batches_since_commit >= self._batches_per_commit
        # Accumulated gradients are not part of a commit.
        if is_due and self._trainer.fit_loop.epoch_loop._accumulated_batches_reached():  # noqa: SLF001
            self.commit()

    def count_batch(self) -> None:
        """Count a batch that begins."""
        self._batches_since_commit += 1

    # The content of a commit.

    def _content(self) -> dict[str, Any]:
        trainer, module = self._trainer, self._trainer.lightning_module
        _refuse_accumulating_metrics(trainer)
        logged = objects.allgather_object(session.current(), self._logged_sums(), name="elastic.logged")
        connector = trainer._logger_connector  # noqa: SLF001
        with trainer.strategy.unsynchronized_buffers():
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)  # noqa: SLF001
        return {
            "checkpoint": checkpoint,
            "sampler": self._sampler.state_dict(),
            "buffers": non_persistent_buffers(module),
            "modes": {name: part.training for name, part in module.named_modules()},
            "trained": {name: parameter.requires_grad for name, parameter in module.named_parameters()},
            "should_stop": trainer.should_stop,
            "metrics": {name: dict(vars(connector)[name]) for name in _METRICS},
            "logged": logged,
            "savers": [_plain_attributes(callback) for callback in trainer.checkpoint_callbacks],
        }

    def _logged_sums(self) -> dict[str, LoggedSum]:
        """Return the sums of this rank's values that ``self.log`` keeps for the end of the epoch."""
        results = self._trainer.fit_loop.epoch_loop._results  # noqa: SLF001
        sums: dict[str, LoggedSum] = dict(getattr(results, "earlier", {}))
        for key, metric in results.items():
            if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset:
                weight = int(getattr(metric, "cumulated_batch_size", 0))
                operation = metric.meta.reduce_fx.__name__
                sums[key] = LoggedSum(operation, float(metric.value), weight, is_shared=bool(metric.meta.sync.should))
        return sums

    def _load(self, sampler: ElasticSampler) -> None:
        """Return to the commit, with the next batch."""
        trainer, module, saved = self._trainer, self._trainer.lightning_module, self._commit
        self.is_resuming = False
        with self._loading() as connector:
            connector.restore_datamodule()
            connector.restore_model()
            connector.restore_callbacks()
            connector.restore_training_state()
        self._load_loops(saved["checkpoint"]["loops"]["fit_loop"])
        sampler.load_state_dict(saved["sampler"])
        take_buffers(module, saved["buffers"])
        for name, part in module.named_modules():
            part.training = saved["modes"].get(name, part.training)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(saved["trained"].get(name, parameter.requires_grad))
        trainer.should_stop = saved["should_stop"]
        for name, values in copy.deepcopy(saved["metrics"]).items():
            vars(trainer._logger_connector)[name] = values  # noqa: SLF001
        for callback, attributes in zip(trainer.checkpoint_callbacks, saved["savers"], strict=True):
            vars(callback).update(attributes)
        communicator = session.current()
        earlier = combined_sums(saved["logged"], communicator.world.rank, communicator.world.size)
        _continue_sums(trainer.fit_loop.epoch_loop, earlier)
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        trainer.fit_loop._data_fetcher.fetched = done  # noqa: SLF001  (Lightning counts this batch afterwards)
        self._batches_since_commit = 0
        if done:  # the next epoch has another number of batches
            trainer.reload_dataloaders_every_n_epochs = 1


_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


class ElasticLoader:
    """The training loader of an elastic fit; passes all attributes of the ``DataLoader`` on.

    Its length is that of the whole epoch: the batches before a change of the ranks, and the batches since.
    """

    def __init__(self, fit: ElasticFit, loader: DataLoader[Any], sampler: ElasticSampler, done: int) -> None:
        self._fit = fit
        self._loader = loader
        self._sampler = sampler
        self._length = done + len(loader)
        self._batch_size = loader.batch_size or 1  # see _with_elastic_sampler

    @property
    def worker_init_fn(self) -> Any:
        return self._loader.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        self._loader.worker_init_fn = function

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches. Nothing happens before the first one is requested: Lightning discards iterators."""
        self._fit.enter_epoch(self._sampler)
        for index, batch in enumerate(self._loader):
            if index:
                self._fit.complete_batch(index - 1, self._batch_size)
            self._fit.count_batch()
            yield batch


@dataclass(frozen=True)
class LoggedSum:
    """What ``self.log`` has accumulated under one name on one rank.

    Attributes:
        operation: ``"mean"``, ``"sum"``, ``"max"`` or ``"min"``.
        value: the reduced value; for a mean, the sum of the values times their weights.
        weight: the sum of the weights of a mean.
        is_shared: whether the value of the epoch covers all ranks.
    """

    operation: str
    value: float
    weight: int
    is_shared: bool


def combined_sums(of_ranks: Sequence[Mapping[str, LoggedSum]], rank: int, size: int) -> dict[str, LoggedSum]:
    """Return the sums with which a rank of the next generation continues an epoch.

    A shared value covers the rows of all earlier ranks, including lost ones, so rank 0 continues with all of them. Of
    values that each rank logs for itself, all ranks continue with the mean over the earlier ranks.

    Args:
        of_ranks: the sums of all ranks in the earlier generation.
        rank: the rank in the next generation.
        size: the number of ranks in the next generation.
    """
    combined: dict[str, LoggedSum] = {}
    for key in {key: None for sums in of_ranks for key in sums}:
        parts = [sums[key] for sums in of_ranks if key in sums]
        operation, values = parts[0].operation, [part.value for part in parts]
        is_shared = any(part.is_shared for part in parts)
        if operation in {"max", "min"}:
            value, weight = (max if operation == "max" else min)(values), 0
        elif is_shared or len(parts) == 1:
            value, weight = (sum(values), sum(part.weight for part in parts)) if rank == 0 else (0.0, 0)
        else:
            value, weight = sum(values) / len(parts), sum(part.weight for part in parts) // len(parts)
        combined[key] = LoggedSum(operation, value, weight, is_shared and size > 1)
    return combined


class _ContinuedResults:
    """Results of ``self.log`` that continue from earlier sums; precedes Lightning's class in the bases."""

    earlier: dict[str, LoggedSum]

    def __setitem__(self, key: str, metric: Any) -> None:
        """Register a new name, and begin with its earlier sum."""
        super().__setitem__(key, metric)  # type: ignore[misc]
        part = self.earlier.pop(key, None)
        if part is not None and metric.is_tensor:
            metric.value = torch.tensor(part.value, dtype=metric.value.dtype)
            if metric.meta.is_mean_reduction:
                metric.cumulated_batch_size = torch.tensor(part.weight)


def _continue_sums(epoch_loop: Any, earlier: dict[str, LoggedSum]) -> None:
    results = epoch_loop._results  # noqa: SLF001
    if not isinstance(results, _ContinuedResults):
        kind = type(results)
        results.__class__ = type(kind.__name__, (_ContinuedResults, kind), {"__module__": kind.__module__})
    results.clear()
    results.earlier = earlier


def require_elastic_settings(trainer: Any) -> None:
    """Raise ``ParamError`` if a setting of the Trainer or its module prevents an elastic fit."""
    if not trainer.lightning_module.automatic_optimization:
        raise ParamError(
            "An elastic fit needs automatic optimization: with manual optimization, the strategy does not know where a "
            "step ends. Leave elastic=True out, or train in a loop of your own with hvd.elastic.TorchState."
        )
    if trainer.overfit_batches:
        raise ParamError(
            f"overfit_batches={trainer.overfit_batches} is not supported by an elastic fit, because the rows of these "
            "batches depend on the number of ranks. Leave one of the two out."
        )
    limit = trainer.limit_train_batches
    if isinstance(limit, float) and limit != 1.0:
        raise ParamError(
            f"limit_train_batches={limit} is not supported by an elastic fit, because the number of batches changes "
            "with the ranks. Pass a number of batches, such as limit_train_batches=100."
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise ParamError(
            f"reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs} is not supported by an "
            "elastic fit, because ranks that continue an epoch must have its rows. Leave one of the two out."
        )
    interval = trainer.val_check_interval
    if isinstance(interval, int) and trainer.check_val_every_n_epoch is not None:
        raise ParamError(
            f"val_check_interval={interval} counts the batches of an epoch, whose number changes with the ranks. "
            "Pass check_val_every_n_epoch=None, so that it counts the batches of all epochs, or a fraction."
        )


def require_elastic_parts(trainer: Any) -> None:
    """Raise ``ParamError`` if a callback or a learning rate schedule prevents an elastic fit."""
    for callback in trainer.callbacks:
        name = _lightning_class(callback)
        if name is not None and name not in _SUPPORTED_CALLBACKS:
            raise ParamError(
                f"The callback {name} is not supported by an elastic fit, because its state cannot be transferred to "
                "new ranks within an epoch. Leave the callback or elastic=True out."
            )
    for config in trainer.lr_scheduler_configs:
        if isinstance(config.scheduler, torch.optim.lr_scheduler.OneCycleLR) and config.interval == "step":
            raise ParamError(
                "OneCycleLR with interval='step' is not supported by an elastic fit: it has a fixed number of steps, "
                "but an epoch has more steps with fewer ranks. Step it by epochs, or use another schedule."
            )


def _lightning_class(callback: object) -> str | None:
    """Return the class of Lightning's own that implements a callback; None if there is none but ``Callback``."""
    for kind in type(callback).__mro__:
        if flavour_of(kind) is not None and kind.__module__.startswith(("lightning.", "pytorch_lightning.")):
            return None if kind.__name__ in {"Callback", "Checkpoint"} else kind.__name__
    return None


def _with_elastic_sampler(trainer: Any, loader: Any) -> tuple[DataLoader[Any], ElasticSampler]:
    """Return a training loader with an ``ElasticSampler``, and this sampler.

    Raises:
        ParamError: the rows of the loader cannot be divided again when the ranks change.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        kind = "has an IterableDataset" if isinstance(loader, DataLoader) else f"is a {type(loader).__name__} object"
        raise ParamError(
            f"The training loader of an elastic fit {kind}, whose remaining rows cannot be divided again when the "
            "ranks change. Use a torch DataLoader of a dataset with a length."
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise ParamError(
            "The training loader of an elastic fit has a batch sampler of its own or no batch size, so the remaining "
            "rows cannot be divided again when the ranks change. Pass batch_size to the DataLoader instead."
        )
    if loader.drop_last:
        raise ParamError(
            "The training loader of an elastic fit has drop_last=True, but the rows at the end of an epoch depend on "
            "the number of ranks. Leave drop_last out."
        )
    sampler: Any = loader.sampler
    if isinstance(sampler, ElasticSampler):
        return loader, sampler
    is_random = type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None  # noqa: SLF001
    adds_sampler = trainer._accelerator_connector.use_distributed_sampler  # noqa: SLF001
    if not adds_sampler or not (is_random or type(sampler) is InOrderSampler):
        reason = f"has a {type(sampler).__name__}" if adds_sampler else "has no ElasticSampler"
        raise ParamError(
            f"The training loader of an elastic fit {reason}, so the remaining rows cannot be divided again when the "
            "ranks change. Pass sampler=hvd.elastic.ElasticSampler(dataset), or leave sampler and "
            "use_distributed_sampler out."
        )
    elastic = ElasticSampler(loader.dataset, shuffle=is_random)  # type: ignore[arg-type]  # it has a length
    utilities = import_module(f"{flavour_of(trainer)}.utilities.data")
    return utilities._update_dataloader(loader, elastic), elastic  # noqa: SLF001


def renew_distributed_sampler(loader: Any, rank: int, size: int) -> None:
    """Let the ``DistributedSampler`` of a validation loader that outlives a change of the ranks use the new ranks."""
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler) and (sampler.rank, sampler.num_replicas) != (rank, size):
        DistributedSampler.__init__(
            sampler, sampler.dataset, size, rank, sampler.shuffle, sampler.seed, sampler.drop_last
        )


def _refuse_accumulating_metrics(trainer: Any) -> None:
    """Raise ``ParamError`` for torchmetrics that cover several training batches."""
    module = trainer.lightning_module
    names = {id(part): name for name, part in module.named_modules()}
    for metric in metrics_of((module, *trainer.callbacks)):
        if metric.update_count:
            name = names.get(id(metric), type(metric).__name__)
            raise ParamError(
                f"The torchmetrics metric {name!r} accumulates values over training batches, which an elastic fit "
                "would lose with a rank. Compute the value of each batch with torchmetrics.functional, and log it with "
                "self.log(..., on_epoch=True, sync_dist=True); reset metrics of validations after each validation."
            )


def _plain_attributes(value: object) -> dict[str, Any]:
    return {name: attribute for name, attribute in vars(value).items() if isinstance(attribute, _PLAIN)}
