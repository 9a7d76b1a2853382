"""``DistributedOptimizer``: an optimizer that applies the gradients of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar, cast

import torch

from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.collectives.options import require_compressor
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.errors import ConfigError, UnsupportedError
from sparkhvd.torch.compression import Compression, Compressor
from sparkhvd.torch.ops.transfer import ExchangeSettings
from sparkhvd.torch.optimizer.delta import DeltaOptimizer, DeltaSettings
from sparkhvd.torch.optimizer.exchange import ExchangingOptimizer
from sparkhvd.torch.optimizer.gradients import GradientExchange
from sparkhvd.torch.optimizer.loss_scaling import make_scalers_wait
from sparkhvd.torch.optimizer.parameters import (
    checked_passes,
    members_of,
    named_by_user,
    names_by_position,
    select_groups,
)

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741


def DistributedOptimizer(  # noqa: N802, PLR0917  the name and the order of the arguments are Horovod's
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet | None = None,
) -> ExchangingOptimizer:
    """Wrap ``optimizer`` so that ``step()`` applies the gradients of all ranks.

    The result is an instance of the optimizer's own class (of a subclass with its name) and shares its ``param_groups``
    and ``state``. Create learning rate schedulers from the result. The exchange of a gradient starts as soon as
    backward has computed it. The averaged gradients of several ranks have no graph, even after
    ``backward(create_graph=True)``, because a rank knows only the graph of its own gradient.

    Args:
        optimizer: the optimizer to wrap; use only the result afterwards.
        named_parameters: ``model.named_parameters()``, which names the gradients; None names them by position. Several
            optimizers with gradients from one backward pass need names that are unique among them.
        compression: ``Compression.none``, ``.fp16``, ``.bf16`` or a ``Compressor`` of your own, for dense gradients.
        backward_passes_per_step: backward passes that are summed on the rank before gradients are exchanged. The sum is
            not divided: divide the loss if you want the mean.
        op: how the ranks' gradients are combined: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``. With
            ``Adasum`` every rank takes a step from its own gradients, and the steps are combined.
        gradient_predivide_factor: with ``Average``, divides before the sum and multiplies after it.
        num_groups: deprecated, use ``groups``.
        groups: gradients that are sent together once the whole group is computed: a number of groups of neighboring
            parameters, or lists of parameters. A parameter in no list is sent alone.
        sparse_as_dense: convert sparse gradients to dense tensors before they are sent. Otherwise all ranks receive the
            entries of all ranks and add them up.
        process_set: the ranks whose gradients are combined, all by default. Other ranks train on their own gradients.

    Raises:
        ConfigError: duplicate or missing names, or settings that contradict each other.

    Examples:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    """
    _check_settings(optimizer, op, gradient_predivide_factor)
    require_compressor(compression)
    groups = select_groups(num_groups, groups)
    names = names_by_position(optimizer.param_groups)
    if named_parameters is not None:
        names = named_by_user(optimizer.param_groups, list(named_parameters))
    passes = checked_passes(backward_passes_per_step)
    if op is ReduceOp.ADASUM:
        if groups:
            raise UnsupportedError(
                "groups= sends gradients together, but op=Adasum sends the step of each parameter alone; remove groups."
            )
        adasum_optimizer = _wrap(optimizer, DeltaOptimizer)
        adasum_optimizer.begin(names, DeltaSettings(compression, process_set))
        return adasum_optimizer
    settings = ExchangeSettings(
        ReduceOp(op), passes, gradient_predivide_factor, compression, sparse_as_dense, process_set
    )
    wrapped = _wrap(optimizer, ExchangingOptimizer)
    wrapped._skip = False  # noqa: SLF001
    wrapped._exchange = GradientExchange(settings)  # noqa: SLF001
    wrapped._exchange.track(names)  # noqa: SLF001
    wrapped._exchange.group(members_of(groups, names))  # noqa: SLF001
    return wrapped


def _check_settings(optimizer: torch.optim.Optimizer, op: ReduceOp, predivide: float) -> None:
    if isinstance(optimizer, ExchangingOptimizer):
        raise ConfigError("This optimizer is already distributed; wrap the original optimizer instead.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS decides from its rank's own loss how often to evaluate, so the ranks would diverge; use another "
            "optimizer."
        )
    if predivide != 1.0 and op is not ReduceOp.AVERAGE:
        raise ConfigError(f"gradient_predivide_factor={predivide} needs op=Average, not {op}.")
    if not predivide > 0:
        raise ConfigError(f"gradient_predivide_factor must be positive, got {predivide}.")


def _wrap(optimizer: torch.optim.Optimizer, mixin: type[O]) -> O:
    """Return an optimizer with the same class name and state, whose class adds ``mixin`` to that of ``optimizer``."""
    make_scalers_wait()
    kind = type(optimizer)
    wrapped = cast("O", object.__new__(type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})))
    # An earlier scheduler has set its own `step` on the original optimizer, which would bypass the step of `mixin`.
    wrapped.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    return wrapped
