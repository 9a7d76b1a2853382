"""The strategy behind ``Trainer(strategy="sparkhvd")``, as a mixin for the base class of either Lightning package.

``sparkhvd.run``, an estimator, ``sparkhvdrun`` or mpirun starts the ranks; the strategy starts no processes. Gradients
are averaged parameter by parameter while backward still runs. When Lightning accumulates batches, only the last
backward pass of a step exchanges gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self, cast

import torch

import sparkhvd.torch as hvd
from sparkhvd._util.counts import counted
from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.errors import ConfigError
from sparkhvd.lightning.elastic import (
    ElasticFit,
    ElasticLauncher,
    renew_distributed_sampler,
    require_elastic_parts,
)
from sparkhvd.lightning.normalization import ReplacedNormalizations
from sparkhvd.lightning.reductions import SharedMetrics, reduce_tensor, stack_over_ranks
from sparkhvd.torch.buffers import copies_of_buffers, synchronize_buffers, take_buffers
from sparkhvd.torch.compression import Compression, Compressor
from sparkhvd.torch.ops.transfer import ExchangeSettings
from sparkhvd.torch.optimizer.gradients import GradientExchange
from sparkhvd.torch.optimizer.parameters import members_of
from sparkhvd.torch.states import return_dtypes
from sparkhvd.torch.sync_batch_norm import synchronized_layers, without_nan
from sparkhvd.world import World

STRATEGY_NAME = "sparkhvd"


class RankStrategy:
    """Mixin with the strategy's behavior, which precedes ``ParallelStrategy`` in the bases.

    Args:
        compression: ``hvd.Compression.none``, ``.fp16``, ``.bf16`` or a ``Compressor`` of your own.
        groups: gradients that are sent together: a number of groups, or their parameters.
        gradient_predivide_factor: divisor of the gradients before their sum, against overflow in small floats.
        sparse_as_dense: whether sparse gradients are made dense before they are sent.
        elastic: whether ``Trainer.fit`` survives changes of the ranks in an elastic job.
        batches_per_commit: the number of batches after which an elastic fit commits its state in memory.
        **parts: arguments of ``ParallelStrategy``.
    """

    strategy_name: ClassVar[str] = STRATEGY_NAME
    environment_class: ClassVar[Any]

    # Attributes of Lightning's classes; their types differ between the two Lightnings.
    lightning_module: Any
    model: Any
    optimizers: Any
    parallel_devices: Any
    precision_plugin: Any
    _layer_sync: Any
    _launcher: Any

    def __init__(
        self,
        *,
        compression: Compressor = Compression.none,
        groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
        gradient_predivide_factor: float = 1.0,
        sparse_as_dense: bool = False,
        elastic: bool = False,
        batches_per_commit: int = 1,
        **parts: Any,
    ) -> None:
        if batches_per_commit < 1:
            raise ConfigError(f"batches_per_commit must be at least 1, got {batches_per_commit}.")
        super().__init__(**{"cluster_environment": self.environment_class(), **parts})
        self._groups = 0 if groups is None else groups
        self._settings = ExchangeSettings(
            ReduceOp.AVERAGE, 1, gradient_predivide_factor, compression, sparse_as_dense, None
        )
        self._exchange: GradientExchange | None = None
        self._metrics: SharedMetrics | None = None
        self._normalizations: ReplacedNormalizations | None = None
        self._blocked = False
        self._fitting = False
        self._elastic, self._batches_per_commit = elastic, batches_per_commit
        self.elastic_fit: ElasticFit | None = None  # while an elastic fit runs
        self._keeps_buffers = False  # see unsynchronized_buffers
        self._gathers_gradients = False  # whether all ranks must take part in every backward pass
        # Within an epoch, while the module has synchronized buffers: this rank's own ones, and the synchronized ones.
        self.own_buffers: dict[str, Any] | None = None
        self._agreed_buffers: Mapping[str, torch.Tensor] = {}

    # Ranks and devices.

    @property
    def world(self) -> World:
        """Return the ranks and sizes of this process; initializes sparkhvd if necessary."""
        session.init()
        return session.current().world

    @property
    def global_rank(self) -> int:
        return self.world.rank

    @property
    def local_rank(self) -> int:
        return self.world.local_rank

    @property
    def node_rank(self) -> int:
        return self.world.cross_rank

    @property
    def world_size(self) -> int:
        return self.world.size

    @property
    def is_global_zero(self) -> bool:
        return self.world.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Return whether Lightning partitions the rows of its loaders among ranks, and reduces logged values."""
        divides_rows = self.elastic_fit is not None and self.elastic_fit.divides_rows
        return self.world.size > 1 and not divides_rows

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world.size, "rank": self.world.rank}

    @property
    def root_device(self) -> torch.device:
        """Return the rank's own device; on a GPU host, the GPU with the index of the local rank."""
        first = self.parallel_devices[0]
        if first.type != "cuda" or self.world.local_size == 1:
            return torch.device(first)
        devices = self.parallel_devices
        if len(devices) == 1:  # Trainer(devices=1) means one device per rank
            devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        return torch.device(devices[self.world.local_rank % len(devices)])

    def set_world_ranks(self) -> None:
        """Set the rank that Lightning prints and writes by; the Trainer calls this when it is created."""
        from lightning_utilities.core import rank_zero  # noqa: PLC0415  (both Lightnings use this one)

        decorator: Any = rank_zero.rank_zero_only
        decorator.rank = self.world.rank

    # Setup and teardown.

    def setup_environment(self) -> None:
        self.set_world_ranks()
        super().setup_environment()  # type: ignore[misc]

    def setup(self, trainer: Any) -> None:
        """Broadcast the parameters of rank 0, and start to exchange gradients if this is a fit."""
        fitting = trainer.state.fn == "fit"
        if self.elastic_fit is not None:
            self.elastic_fit.load_modules()
        if fitting and self._layer_sync is not None:  # Trainer(sync_batchnorm=True)
            self._normalizations = ReplacedNormalizations(self.lightning_module)
        super().setup(trainer)  # type: ignore[misc]
        tensors = [*self.lightning_module.named_parameters(), *self.lightning_module.named_buffers()]
        hvd.broadcast_parameters(tensors, root_rank=0)
        self._metrics = SharedMetrics(self.lightning_module, *trainer.callbacks)
        self._fitting = fitting
        if fitting:
            self._refuse_unsupported_optimizers()
            if self._elastic:
                require_elastic_parts(trainer)
            self._begin_exchange()
            interval = getattr(trainer, "_val_check_time_interval", None)  # Lightning has it since version 2.6
            if interval is not None:
                trainer._val_check_time_interval = _CommonInterval(interval, self)  # noqa: SLF001

    def teardown(self) -> None:
        """Undo all changes of the strategy to the module; the ranks stay connected."""
        self._fitting = False
        self.own_buffers, self._agreed_buffers = None, {}  # of a validation that an exception has ended
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        if self._normalizations is not None:
            self._normalizations.close()
            self._normalizations = None
        super().teardown()  # type: ignore[misc]

    def _refuse_unsupported_optimizers(self) -> None:
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ConfigError(
                    "LBFGS decides from the loss of its own rank how many evaluations a step takes, so the ranks would "
                    "diverge. Use another optimizer."
                )

    def _configure_launcher(self) -> None:
        """Set the launcher to which Lightning passes ``fit``."""
        self._launcher = ElasticLauncher(self, self._batches_per_commit) if self._elastic else None

    def process_dataloader(self, dataloader: Any) -> Any:
        """Divide the rows of the training loader of an elastic fit among the ranks."""
        dataloader = super().process_dataloader(dataloader)  # type: ignore[misc]
        if self.elastic_fit is None:
            return dataloader
        if self.lightning_module.trainer.training:
            return self.elastic_fit.divided(dataloader)
        renew_distributed_sampler(dataloader, self.world.rank, self.world.size)
        return dataloader

    def _begin_exchange(self) -> None:
        names = {parameter: f"gradient.{name}" for name, parameter in self.lightning_module.named_parameters()}
        if not names:
            return
        # Gradients of parameters that toggle_model() has frozen do not belong to this step.
        self._exchange = GradientExchange(self._settings, with_frozen=False)
        self._exchange.track(names)
        self._exchange.group(members_of(self._groups, names))

    # Gradients.

    def weight_of_pass(self) -> float:
        """Return the factor for the loss of the next backward pass; with 0 the rank contributes only zeros."""
        return 1.0

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute gradients and wait for all ranks, so that hooks and clipping see the averaged gradients."""
        weight = self.weight_of_pass()
        loss = closure_loss if weight == 1.0 else closure_loss * weight
        loss = self.precision_plugin.pre_backward(loss, self.lightning_module)
        if weight != 0.0:
            self.precision_plugin.backward(loss, self.lightning_module, optimizer, *args, **kwargs)
        elif self._gathers_gradients or synchronized_layers(self.lightning_module):
            with _finite_gradients(self.lightning_module):
                self.precision_plugin.backward(loss, self.lightning_module, optimizer, *args, **kwargs)
        if self._exchange is not None and not self._blocked:
            self._synchronize(self._exchange)
        result: torch.Tensor = self.precision_plugin.post_backward(loss, self.lightning_module)
        return result

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run an optimizer step.

        Raises:
            ConfigError: gradients are still being exchanged, because ``loss.backward()`` computed them; or the
                optimizer has parameters that were not in the module when training began.
        """

        def run() -> Any:
            result = self._run_closure(closure)
            if self.world_size > 1:
                self._require_exchanged(optimizer)
            return result

        return super().optimizer_step(optimizer, run, model, **kwargs)  # type: ignore[misc]

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients on the rank within this block, without exchanging them."""
        if self._exchange is None:
            yield
            return
        self._exchange.close()  # removes its hooks from the parameters
        self._blocked = True
        try:
            yield
        finally:
            self._blocked = False
            self._exchange.reset()

    def _run_closure(self, closure: Callable[[], Any]) -> Any:
        result = closure()
        if self._exchange is not None:
            try:
                self._exchange.require_idle("optimizer.step() was called")
            except AssertionError as error:
                raise ConfigError(
                    "Gradients were computed by loss.backward(); with manual optimization call "
                    "self.manual_backward(loss), which also waits for the gradients of the other ranks."
                ) from error
        return result

    def _require_exchanged(self, optimizer: Any) -> None:
        trained = [
            parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None
        ]
        unknown = [parameter for parameter in trained if self._exchange is None or not self._exchange.tracks(parameter)]
        if unknown:
            raise ConfigError(
                f"The optimizer has {counted(len(unknown), 'parameter')} that the module did not have when training "
                "began. Their gradients are not exchanged, so the ranks would diverge. Create all layers in __init__() "
                "or configure_model()."
            )

    @staticmethod
    def _synchronize(exchange: GradientExchange) -> None:
        exchange.synchronize()

    # Buffers, such as running statistics.

    def weight_of_buffers(self) -> float:
        """Return the weight of this rank's buffers in the mean over ranks."""
        return 1.0

    def module_with_buffers(self) -> torch.nn.Module:
        """Return the module whose buffers are synchronized."""
        module: torch.nn.Module = self.lightning_module
        return module

    def can_synchronize(self) -> bool:
        """Return whether all ranks are training and reach this point together."""
        return self._fitting and not self._is_ending()

    def synchronize_buffers(self) -> dict[str, torch.Tensor]:
        """Average the buffers over the ranks, so that the validated model is the saved one; collective.

        Returns this rank's own values of the buffers that differed.
        """
        if not self.can_synchronize():
            return {}
        return synchronize_buffers(self.module_with_buffers(), self.weight_of_buffers())

    def synchronize_within_epoch(self) -> None:
        """Synchronize buffers until ``take_own_buffers()``, for a validation or checkpoint; collective.

        Training continues with each rank's own buffers, because the variance of all rows is not linear in the ranks'
        variances: otherwise, the model would depend on the number of validations and checkpoints. After the last batch
        of an epoch, the buffers stay synchronized.
        """
        own = self.synchronize_buffers()
        if self.own_buffers is None and self.can_synchronize() and not _is_epoch_over(self.lightning_module.trainer):
            self.own_buffers = {"values": own}
            self._agreed_buffers = copies_of_buffers(self.module_with_buffers(), own)

    def take_own_buffers(self) -> None:
        """Continue with this rank's own buffers, except those that have changed since ``synchronize_within_epoch``."""
        own, self.own_buffers = self.own_buffers, None
        agreed, self._agreed_buffers = self._agreed_buffers, {}
        if own is not None:
            take_buffers(self.module_with_buffers(), own["values"], unless_changed_since=agreed)

    def on_train_start(self) -> None:
        """Include the metrics that the hooks before the training have created."""
        super().on_train_start()  # type: ignore[misc]
        if self._metrics is not None:
            self._metrics.include((self.lightning_module, *self.lightning_module.trainer.callbacks))

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Synchronize buffers before the first batch of an epoch, so that they do not depend on what ended the last."""
        super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]
        if batch_idx == 0:
            self.synchronize_buffers()

    def on_validation_start(self) -> None:
        """Synchronize buffers, to validate the model that a checkpoint would contain."""
        super().on_validation_start()  # type: ignore[misc]
        self.synchronize_within_epoch()

    def on_validation_end(self) -> None:
        """Continue with this rank's own buffers."""
        super().on_validation_end()  # type: ignore[misc]
        self.take_own_buffers()

    def on_train_end(self) -> None:
        """Synchronize buffers, so that all ranks have the same model."""
        super().on_train_end()  # type: ignore[misc]
        self.synchronize_buffers()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights for a checkpoint; Lightning calls this on all ranks, and then ``save_checkpoint``."""
        if not self._keeps_buffers:
            self.synchronize_within_epoch()
        return cast("dict[str, Any]", super().lightning_module_state_dict())  # type: ignore[misc]

    @contextmanager
    def unsynchronized_buffers(self) -> Iterator[None]:
        """Leave the buffers of the ranks as they are in the checkpoints of this block."""
        self._keeps_buffers = True
        try:
            yield
        finally:
            self._keeps_buffers = False

    def save_checkpoint(self, checkpoint: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint, and continue with this rank's own buffers, unless a validation still runs."""
        super().save_checkpoint(checkpoint, *args, **kwargs)  # type: ignore[misc]
        if self.can_synchronize() and not self.lightning_module.trainer.validating:
            self.take_own_buffers()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of the optimizers with their dtypes."""
        super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            return_dtypes(optimizer, state)

    # Collectives.

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the reduction of a tensor over the ranks; other values are returned unchanged."""
        return reduce_tensor(tensor, reduce_op, group) if isinstance(tensor, torch.Tensor) else tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  (Lightning's name)
        """Return whether the decision is true on all ranks, or on any; this rank's own if an exception is ending it."""
        if self._is_ending():
            return decision
        yes = int(reduce_tensor(torch.tensor(int(decision)), "sum"))
        return yes == self.world.size if all else yes > 0

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensors of all ranks along a new first dimension."""
        self._gathers_gradients = self._gathers_gradients or (sync_grads and torch.is_grad_enabled())
        gathered = stack_over_ranks(tensor, group, sync_grads=sync_grads)
        if gathered.requires_grad and self.weight_of_pass() == 0.0:
            gathered.register_hook(without_nan)  # type: ignore[no-untyped-call]
        return gathered

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src``; this rank's own if an exception is ending it."""
        return obj if self._is_ending() else hvd.broadcast_object(obj, root_rank=src)

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank calls this; return at once if an exception is ending this rank."""
        if self.elastic_fit is not None and name == "train_dataloader()":
            self.elastic_fit.divides_rows = True  # Lightning calls this right before it processes the training loader
        if not self._is_ending():
            hvd.barrier()

    def _is_ending(self) -> bool:
        """Return whether an exception is ending this rank: its callbacks may save checkpoints without other ranks."""
        trainer = getattr(self.lightning_module, "_trainer", None)
        return trainer is not None and bool(trainer.interrupted)

    def model_to_device(self) -> None:
        self.model.to(self.root_device)


def _is_epoch_over(trainer: Any) -> bool:
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


class _CommonInterval(float):
    """Seconds between validations. The ranks agree on whether they have passed, because their clocks differ."""

    def __new__(cls, seconds: float, _strategy: RankStrategy) -> Self:
        return super().__new__(cls, seconds)

    def __init__(self, _seconds: float, strategy: RankStrategy) -> None:
        self._strategy = strategy

    def __le__(self, elapsed: float) -> bool:
        """Return whether the interval has passed on any rank; Python calls this for ``elapsed >= interval``."""
        return self._strategy.reduce_boolean_decision(super().__le__(elapsed), all=False)


@contextmanager
def _finite_gradients(module: torch.nn.Module) -> Iterator[None]:
    """Replace NaN and infinity with 0 in the gradients that backward passes compute within this block."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    hooks = [parameter.register_hook(without_nan) for parameter in parameters]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
