"""The strategy behind ``Trainer(strategy="sparkhvd")``, without the base class, of which Lightning has two.

A rank is a process that was started by ``sparkhvd.run``, an estimator, ``sparkhvdrun`` or mpirun; the strategy starts
none. Gradients are averaged parameter by parameter while backward still runs; where Lightning accumulates batches, only
the last backward pass of a step exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, cast

import torch

import sparkhvd.torch as hvd
from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.errors import ConfigError
from sparkhvd.lightning.normalization import ReplacedNormalizations
from sparkhvd.lightning.reductions import SharedMetrics, reduced, stacked
from sparkhvd.torch.buffers import synchronize_buffers
from sparkhvd.torch.compression import Compression, Compressor
from sparkhvd.torch.ops.transfer import ExchangeSettings
from sparkhvd.torch.optimizer.gradients import GradientExchange
from sparkhvd.torch.optimizer.parameters import members_of
from sparkhvd.torch.sync_batch_norm import synchronized_layers
from sparkhvd.world import World

STRATEGY_NAME = "sparkhvd"


class RankStrategy:
    """What the strategy adds to ``ParallelStrategy``, which has to come after it among the bases.

    Args:
        compression: ``hvd.Compression.none``, ``.fp16``, ``.bf16`` or a ``Compressor`` of your own.
        groups: gradients that are sent together: a number of groups, or their parameters.
        gradient_predivide_factor: divides gradients before they are added up, against overflow in small floats.
        sparse_as_dense: whether sparse gradients are made dense before they are sent.
        **parts: of ``ParallelStrategy``.
    """

    strategy_name: ClassVar[str] = STRATEGY_NAME
    environment_class: ClassVar[Any]

    # Of Lightning's classes, which have their types twice.
    lightning_module: Any
    model: Any
    optimizers: Any
    parallel_devices: Any
    precision_plugin: Any
    _layer_sync: Any

    def __init__(
        self,
        *,
        compression: Compressor = Compression.none,
        groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
        gradient_predivide_factor: float = 1.0,
        sparse_as_dense: bool = False,
        **parts: Any,
    ) -> None:
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

    # Who is who.

    @property
    def world(self) -> World:
        """This process's place among the ranks; connects it if nobody has done so."""
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
        """Whether Lightning divides the rows of its loaders among ranks, and reduces what is logged for all."""
        return self.world.size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world.size, "rank": self.world.rank}

    @property
    def root_device(self) -> torch.device:
        """The rank's own device: on a GPU host the one whose number is the local rank."""
        first = self.parallel_devices[0]
        if first.type != "cuda" or self.world.local_size == 1:
            return torch.device(first)
        devices = self.parallel_devices
        if len(devices) == 1:  # Trainer(devices=1) means one for each rank
            devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        return torch.device(devices[self.world.local_rank % len(devices)])

    def set_world_ranks(self) -> None:
        """Tell Lightning which process prints and writes; the Trainer calls it when it is made."""
        from lightning_utilities.core import rank_zero  # noqa: PLC0415  (both Lightnings use this one)

        says: Any = rank_zero.rank_zero_only
        says.rank = self.world.rank

    # Setting up and tearing down.

    def setup_environment(self) -> None:
        self.set_world_ranks()
        super().setup_environment()  # type: ignore[misc]

    def setup(self, trainer: Any) -> None:
        """Give all ranks the parameters of rank 0, and begin to exchange gradients if this is a fit."""
        fitting = trainer.state.fn == "fit"
        if fitting and self._layer_sync is not None:  # Trainer(sync_batchnorm=True)
            self._normalizations = ReplacedNormalizations(self.lightning_module)
        super().setup(trainer)  # type: ignore[misc]
        tensors = [*self.lightning_module.named_parameters(), *self.lightning_module.named_buffers()]
        hvd.broadcast_parameters(tensors, root_rank=0)
        self._metrics = SharedMetrics(self.lightning_module)
        self._fitting = fitting
        if fitting:
            self._refuse_what_cannot_work()
            self._begin_exchange()

    def teardown(self) -> None:
        """Take everything off the module that the strategy put on it; the ranks stay connected."""
        self._fitting = False
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

    def _refuse_what_cannot_work(self) -> None:
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ConfigError(
                    "LBFGS decides from the loss of its own rank how many evaluations a step takes, so the ranks would "
                    "diverge. Use another optimizer."
                )

    def _begin_exchange(self) -> None:
        names = {parameter: f"gradient.{name}" for name, parameter in self.lightning_module.named_parameters()}
        if not names:
            return
        self._exchange = GradientExchange(self._settings)
        self._exchange.track(names)
        self._exchange.group(members_of(self._groups, names))

    # Gradients.

    def weight_of_pass(self) -> float:
        """What the loss of the coming backward pass is multiplied by; with 0 the rank adds nothing but zeros."""
        return 1.0

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute gradients and wait for those of all ranks, so that hooks and clipping see the combined ones."""
        weight = self.weight_of_pass()
        loss = closure_loss if weight == 1.0 else closure_loss * weight
        loss = self.precision_plugin.pre_backward(loss, self.lightning_module)
        if weight != 0.0 or synchronized_layers(self.lightning_module):
            self.precision_plugin.backward(loss, self.lightning_module, optimizer, *args, **kwargs)
        if self._exchange is not None and not self._blocked:
            self._synchronize(self._exchange)
        result: torch.Tensor = self.precision_plugin.post_backward(loss, self.lightning_module)
        return result

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Let the optimizer step, once nothing is on its way any more."""
        return super().optimizer_step(  # type: ignore[misc]
            optimizer, partial(self._settled, closure), model, **kwargs
        )

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within this block gradients are only added up on the rank."""
        if self._exchange is None:
            yield
            return
        self._exchange.close()  # takes its hooks off the parameters
        self._blocked = True
        try:
            yield
        finally:
            self._blocked = False
            self._exchange.reset()

    def _settled(self, closure: Callable[[], Any]) -> Any:
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

    @staticmethod
    def _synchronize(exchange: GradientExchange) -> None:
        # Gradients that were set aside by Optimizer.toggle_model() are not this step's.
        aside = [(p, p.grad) for p in exchange.parameters() if not p.requires_grad and p.grad is not None]
        exchange.synchronize()
        for parameter, gradient in aside:
            parameter.grad = gradient

    # Buffers, such as running statistics.

    def weight_of_buffers(self) -> float:
        """What this rank's buffers count in the mean over ranks."""
        return 1.0

    def synchronize_buffers(self) -> None:
        """Give all ranks the same buffers, so that what is validated is what is saved; collective."""
        if self._fitting and not self._is_ending():
            synchronize_buffers(self.lightning_module, self.weight_of_buffers())

    def on_validation_start(self) -> None:
        """Validate the model that a checkpoint would hold."""
        super().on_validation_start()  # type: ignore[misc]
        self.synchronize_buffers()

    def on_train_end(self) -> None:
        """Leave the same model on all ranks."""
        super().on_train_end()  # type: ignore[misc]
        self.synchronize_buffers()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights for a checkpoint, which Lightning makes on all ranks."""
        self.synchronize_buffers()
        return cast("dict[str, Any]", super().lightning_module_state_dict())  # type: ignore[misc]

    # Values of all ranks.

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The reduction of a tensor over the ranks; anything else comes back as it is."""
        return reduced(tensor, reduce_op, group) if isinstance(tensor, torch.Tensor) else tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  (Lightning's name)
        """Whether all ranks, or any of them, say yes; this rank alone where an exception ends it."""
        if self._is_ending():
            return decision
        yes = int(reduced(torch.tensor(int(decision)), "sum"))
        return yes == self.world.size if all else yes > 0

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of all ranks along a new first dimension."""
        return stacked(tensor, group, sync_grads=sync_grads)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of rank ``src``; of an exception's callbacks, this rank's."""
        return obj if self._is_ending() else hvd.broadcast_object(obj, root_rank=src)

    def barrier(self, name: str | None = None) -> None:  # noqa: ARG002  (Lightning's signature)
        """Return once every rank has called it; at once where an exception ends this rank."""
        if not self._is_ending():
            hvd.barrier()

    def _is_ending(self) -> bool:
        """Whether an exception ends this rank, whose callbacks may save checkpoints; the others are elsewhere."""
        trainer = getattr(self.lightning_module, "_trainer", None)
        return trainer is not None and bool(trainer.interrupted)

    def model_to_device(self) -> None:
        self.model.to(self.root_device)
