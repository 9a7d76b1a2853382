"""``DistributedOptimizer``: a Keras optimizer that applies the gradients of all ranks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import keras

from sparkhvd._util.keras_layers import variables_of_layers
from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.process_sets import ProcessSet, exchanges_with
from sparkhvd.errors import ConfigError, UnsupportedError
from sparkhvd.keras.batches import BatchWeight, GradientAccumulation
from sparkhvd.keras.exchange import (
    Exchange,
    gradient_exchange,
    is_overwritten,
    maximum_exchange,
    scaled,
    set_size,
    supported_backend,
)
from sparkhvd.keras.loss_scaling import make_ranks_skip_together


@dataclass(frozen=True)
class _Settings:
    """The arguments of ``DistributedOptimizer``, which describes them."""

    name: str | None = None
    compression: Any = None
    sparse_as_dense: bool = False
    backward_passes_per_step: int = 1
    op: ReduceOp = ReduceOp.AVERAGE
    gradient_predivide_factor: float = 1.0
    average_aggregated_gradients: bool = False
    process_set: ProcessSet | None = None
    scale_local_gradients: bool = True

    @property
    def factor(self) -> int:
        """Return the factor for the gradients, which Keras has averaged over the accumulated batches."""
        return 1 if self.average_aggregated_gradients else self.backward_passes_per_step

    def exchange(self, name: str) -> Exchange:
        """Return the exchange under a name that is equal on all ranks.

        Raises:
            ConfigError: the settings contradict each other.
        """
        exchange = gradient_exchange(
            f"DistributedOptimizer.{name}",
            self.compression,
            self.sparse_as_dense,
            self.op,
            self.gradient_predivide_factor,
            self.process_set,
        )
        return _multiplied(exchange, self.factor) if self.factor > 1 and self.op != ReduceOp.ADASUM else exchange


@dataclass
class _LocalVariables:
    """The variables whose gradients are not exchanged.

    Attributes:
        scale: whether their gradients are divided by the number of ranks.
        passes: factor of their gradients where the gradients of accumulated batches are summed.
        process_set: the ranks that are counted.
        variables: the variables by their ids.
    """

    scale: bool
    passes: int
    process_set: ProcessSet | None
    variables: dict[int, Any] = field(default_factory=dict)

    def factor(self) -> Any:
        """Return the factor of their gradients, a number or a tensor."""
        if not self.scale or not exchanges_with(self.process_set):
            return self.passes
        return self.passes / set_size(self.process_set)


class _Variables(list[Any]):
    """A list that may be called: ``optimizer.variables`` was a method before Keras 3."""

    def __call__(self) -> list[Any]:
        return self


class ExchangingOptimizer:
    """A mixin that ``DistributedOptimizer`` adds to the class of the optimizer that it wraps.

    The new class belongs to one optimizer and holds its settings. So an optimizer that Keras makes from the class and a
    configuration exchanges gradients, too.
    """

    _settings: _Settings  # an attribute of the class, like the next two
    _plain_class: type[keras.optimizers.Optimizer]
    _local: _LocalVariables
    _exchange: Exchange
    _sum_over_ranks: Exchange
    _maximum_of_ranks: Exchange
    _applied_to: Sequence[Any]  # the variables of the gradients that are being applied
    _computed: Sequence[Any]  # the gradients that _compute_gradients has exchanged
    _applies_computed: bool  # whether these are being applied
    _weight: BatchWeight | None
    _accumulation: GradientAccumulation | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._reject_local_variables()
        super().__init__(*args, **kwargs)
        if self.gradient_accumulation_steps != self._settings.backward_passes_per_step:  # type: ignore[attr-defined]
            _set_accumulation(self, self._settings.backward_passes_per_step)
        self._begin()

    def _begin(self) -> None:
        """Set the attributes of an optimizer that is otherwise complete."""
        make_ranks_skip_together()
        self.exchange_as(self._settings.name or _name_without_number(self))
        # object.__setattr__ bypasses Keras' tracking of attributes, which is for variables and layers.
        object.__setattr__(self, "_weight", None)
        object.__setattr__(self, "_accumulation", None)
        object.__setattr__(self, "_computed", ())
        object.__setattr__(self, "_applies_computed", False)

    def __copy__(self) -> Self:
        """Return an optimizer that exchanges gradients with the same settings, and is not built yet."""
        self._check_copy()
        copied: Self = type(self).from_config(self.get_config())  # type: ignore[attr-defined]
        return copied

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return the same as ``__copy__``."""
        return self.__copy__()

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        """Pickle the class of the original optimizer, the configuration and the settings."""
        self._check_copy()
        settings, process_set = self._settings, self._settings.process_set
        if process_set is session.global_process_set:
            settings = replace(settings, process_set=None)
        elif process_set is not None:
            raise ConfigError(
                f"An optimizer with process_set={process_set} cannot be pickled: other processes do not know the "
                "process set. Pickle the original optimizer, and wrap it there."
            )
        return _rebuilt, (self._plain_class, self.get_config(), settings)  # type: ignore[attr-defined]

    def _check_copy(self) -> None:
        self._reject_local_variables()
        if self._weight is not None:
            raise ConfigError(
                "This optimizer cannot be copied: it weights the batches of a running fit. Copy its get_config()."
            )
        if self.built:  # type: ignore[attr-defined]
            warnings.warn(
                "The copy of this optimizer has its settings, but not its state (such as momentum): like the copy of "
                "any Keras optimizer, it is not built.",
                stacklevel=4,
            )

    def _reject_local_variables(self) -> None:
        if self._local.variables:
            raise ConfigError(
                "A copy of this optimizer would exchange the gradients of its local variables, which belong to one "
                "model. Wrap a new optimizer with PartialDistributedOptimizer instead."
            )

    def weight_by(self, share: Callable[[], float], position: Callable[[], tuple[bool, float]] | None = None) -> None:
        """Weight every batch by its share of a step's rows, instead of weighting all ranks equally.

        Args:
            share: called during a batch, whenever gradients are applied. Returns the number of rows of this rank's
                batch, divided by the number of rows of all batches of all ranks in the step; 0 for a rank without rows.
            position: returns whether the current batch is the last one of its step, and the factor for the gradients of
                the step's earlier batches. None if every batch is a step. Otherwise the optimizer must be built.
        """
        object.__setattr__(self, "_weight", BatchWeight(share))
        trained = self._trainable_variables  # type: ignore[attr-defined]
        accumulation = None if position is None else GradientAccumulation(position, trained)
        object.__setattr__(self, "_accumulation", accumulation)

    def exchange_as(self, name: str) -> None:
        """Exchange gradients under a name that is equal on all ranks.

        Keras numbers the names of optimizers in the order in which a process creates them, which may differ.
        """
        object.__setattr__(self, "_exchange", self._settings.exchange(name))
        total = gradient_exchange(
            f"DistributedOptimizer.{name}.infinite", None, False, ReduceOp.SUM, 1.0, self._settings.process_set
        )
        object.__setattr__(self, "_sum_over_ranks", total)
        maximum = maximum_exchange(f"DistributedOptimizer.{name}.maximum", self._settings.process_set)
        object.__setattr__(self, "_maximum_of_ranks", maximum)

    def finite_on_all_ranks(self, finite: Any) -> Any:
        """Return whether ``finite``, a scalar tensor of booleans, is true on all ranks; collective."""
        (infinite,) = self._sum_over_ranks([keras.ops.cast(keras.ops.logical_not(finite), "float32")])
        return keras.ops.equal(infinite, 0.0)

    def register_local_var(self, variable: Any) -> None:
        """Exclude a variable from the exchange: it belongs to a part of the model that is local to each rank."""
        self._local.variables[id(variable)] = variable

    def local_variables(self) -> list[Any]:
        """Return the variables whose gradients are not exchanged, and their state in the (built) optimizer."""
        trained = self._trainable_variables  # type: ignore[attr-defined]
        indices = [index for index, variable in enumerate(trained) if id(variable) in self._local.variables]
        # Keras stores the state in lists in the order of the variables, and has no other way to find it. The list of
        # all variables of the optimizer, which begins with its iterations, may have the same length.
        slots = [
            value
            for name, value in vars(self).items()
            if isinstance(value, list) and len(value) == len(trained) and name != "_variables"
        ]
        return [slot[index] for slot in slots for index in indices]

    @property
    def variables(self) -> list[Any]:
        """The variables of the optimizer, which programs for Horovod also read as ``variables()``."""
        return _Variables(super().variables)  # type: ignore[misc]  # a property of the optimizer's own class

    def scale_loss(self, loss: Any) -> Any:
        """Weight the loss, so that gradients that a layer exchanges in its backward pass are weighted, too."""
        if self._weight is not None:
            loss = self._weight.weighted_loss(loss)
        return super().scale_loss(loss)  # type: ignore[misc]  # a method of the optimizer's own class

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[tuple[Any, Any]]:
        """Return pairs of a gradient and its variable, as the optimizers of Keras 2 do; TensorFlow backend only.

        The gradients are those of all ranks, and ``apply_gradients`` does not exchange them again. With accumulated
        batches or ``op=Adasum`` they are those of this rank, because ``apply_gradients`` exchanges the accumulated
        gradients or the steps.

        Args:
            loss: a function that returns the loss, or a tensor that ``tape`` has recorded.
            var_list: the variables, which may be nested, or a function that returns them.
            tape: the tape to use, or None to record ``loss``.
        """
        return self._compute_gradients(loss, var_list, None, tape)

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        """Return the same as ``compute_gradients``, with factors for the loss; programs for Horovod call it."""
        if supported_backend() != "tensorflow":
            raise UnsupportedError(
                "compute_gradients needs Keras' TensorFlow backend. On other backends, pass the gradients to apply."
            )
        from sparkhvd.tensorflow.gradients import gradients_of  # noqa: PLC0415  (only the backend in use is imported)

        gradients, variables = gradients_of(loss, var_list, grad_loss, tape)
        if self._settings.backward_passes_per_step == 1 and self._settings.op != ReduceOp.ADASUM:
            gradients = self._combined(gradients, self._are_local(variables), self._exchange)
            object.__setattr__(self, "_computed", tuple(gradients))
        return list(zip(gradients, variables, strict=True))

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Apply the gradients of all ranks."""
        grads = list(grads)
        computed = {id(gradient) for gradient in self._computed}
        object.__setattr__(self, "_applies_computed", bool(computed) and computed.issuperset(map(id, grads)))
        object.__setattr__(self, "_computed", ())
        if self._weight is not None:
            variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)  # type: ignore[attr-defined]
            grads, trainable_variables = self._weight.weighted_gradients(grads, variables), variables
        apply = super().apply  # type: ignore[misc]  # a method of the optimizer's own class
        if self._accumulation is None:
            apply(grads, trainable_variables)
            return
        self._accumulation.begin_batch(grads)
        with self._accumulation.constraints_after_steps(trainable_variables):
            apply(grads, trainable_variables)
        steps: Any = self._iterations  # type: ignore[attr-defined]  # Keras counts every batch as a step
        steps.assign_sub(self._accumulation.skipped_steps(steps.dtype))

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        object.__setattr__(self, "_applied_to", trainable_variables)
        take_step = super()._backend_apply_gradients  # type: ignore[misc]
        if self._accumulation is None:
            take_step(grads, trainable_variables)
        else:
            self._accumulation.accumulate(grads, trainable_variables, take_step)

    def _overwrite_variables_directly_with_gradients(self, grads: Sequence[Any], variables: Sequence[Any]) -> Any:
        # In a float8 layer, the new values are the maxima over a rank's rows, and scales that grow with the maxima.
        grads = list(grads)
        indices = [
            index
            for index, variable in enumerate(variables)
            if is_overwritten(variable) and id(variable) not in self._local.variables
        ]
        if indices:
            values, overwritten = [grads[index] for index in indices], [variables[index] for index in indices]
            maxima = self._exchanged(values, overwritten, self._maximum_of_ranks)
            if self._accumulation is not None:
                maxima = self._accumulation.new_values(maxima, overwritten)
            for index, maximum in zip(indices, maxima, strict=True):
                grads[index] = maximum
        return super()._overwrite_variables_directly_with_gradients(grads, variables)  # type: ignore[misc]

    def _exchanged(
        self, values: Sequence[Any], variables: Sequence[Any], exchange: Exchange | None = None
    ) -> list[Any]:
        """Exchange a value for each variable, at the variable's position in the optimizer.

        Keras leaves out the variables that have no gradient, which may differ between ranks.
        """
        positions = {id(variable): index for index, variable in enumerate(self._trainable_variables)}  # type: ignore[attr-defined]
        all_values: list[Any] = [None] * len(positions)
        for value, variable in zip(values, variables, strict=True):
            all_values[positions[id(variable)]] = value
        combined = (exchange or self._exchange)(all_values)
        return [combined[positions[id(variable)]] for variable in variables]

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        # Keras calls this on the gradients of every step, after accumulation and before any other use of them. So
        # clipping sees the gradients that one process would see.
        clip = super()._clip_gradients  # type: ignore[misc]
        is_local = self._are_local(self._applied_to)
        if not self._applies_computed:
            grads = self._combined(grads, is_local, lambda values: self._exchanged(values, self._applied_to))
        if not any(is_local):
            return clip(grads)
        # Shared and local gradients are clipped separately: a norm over both would differ between the ranks, and so
        # would the shared gradients.
        shared = iter(clip([grad for grad, own in zip(grads, is_local, strict=True) if not own]))
        local = iter(clip([grad for grad, own in zip(grads, is_local, strict=True) if own]))
        return [next(local if own else shared) for own in is_local]

    def _combined(self, grads: Sequence[Any], is_local: Sequence[bool], exchange: Exchange) -> list[Any]:
        """Exchange the gradients of shared variables, and scale those of local variables."""
        combined = exchange([None if own else grad for grad, own in zip(grads, is_local, strict=True)])
        factor = self._local.factor() if any(is_local) else 1
        return [
            scaled(grad, factor) if own else shared for grad, shared, own in zip(grads, combined, is_local, strict=True)
        ]

    def _are_local(self, variables: Sequence[Any]) -> list[bool]:
        return [id(variable) in self._local.variables for variable in variables]


class DeltaOptimizer(ExchangingOptimizer):
    """A mixin that ``DistributedOptimizer(op=Adasum)`` adds to the class of the optimizer that it wraps.

    Every rank takes a step from its own gradients, and Adasum combines the steps; ``sparkhvd.torch.optimizer.delta``
    explains why. Each rank clips its own gradients. Weight decay needs no exchange, because it is the same on all
    ranks.
    """

    def weight_by(self, share: Callable[[], float], position: Callable[[], tuple[bool, float]] | None = None) -> None:
        """Raise ``ConfigError``: Adasum does not weight ranks by their rows."""
        del share, position
        raise ConfigError(
            "An estimator weights the ranks by their rows, which op=Adasum cannot do. Wrap the optimizer with "
            "op=Average, or train with sparkhvd.run."
        )

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        passes = self._local.passes  # Keras has averaged the gradients of accumulated batches
        return super(ExchangingOptimizer, self)._clip_gradients(  # type: ignore[misc]
            grads if passes == 1 else [scaled(grad, passes) for grad in grads]
        )

    def _backend_update_step(self, grads: Sequence[Any], trainable_variables: Sequence[Any], *args: Any) -> None:
        take_step = super()._backend_update_step  # type: ignore[misc]
        if not exchanges_with(self._local.process_set):
            take_step(grads, trainable_variables, *args)
            return
        shared = [variable for variable in trainable_variables if id(variable) not in self._local.variables]
        starts = [keras.ops.copy(variable) for variable in shared]
        take_step(grads, trainable_variables, *args)
        steps = [variable - start for variable, start in zip(shared, starts, strict=True)]
        for variable, start, step in zip(shared, starts, self._exchanged(steps, shared), strict=True):
            variable.assign(start + step)


def DistributedOptimizer(  # noqa: N802  the name is Horovod's
    optimizer: keras.optimizers.Optimizer,
    *,
    name: str | None = None,
    compression: Any = None,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet | None = None,
    scale_local_gradients: bool = True,
) -> keras.optimizers.Optimizer:
    """Make ``optimizer`` apply the gradients of all ranks, and return it.

    The optimizer keeps its state, its variables and the name of its class, so that a saved model loads without
    sparkhvd. Compile the model after wrapping, without ``jit_compile=True``.

    ``from_config`` of the optimizer, ``copy`` and ``pickle`` return optimizers that exchange gradients with the same
    settings. A copy of a compiled model (``clone_model``, ``copy.deepcopy``, ``pickle``) is made like a model loaded
    from a file: its optimizer has the original class. Wrap that optimizer and compile again.

    Args:
        optimizer: the optimizer, which is changed in place.
        name: distinguishes several optimizers of one program; equal on all ranks.
        compression: compresses gradients for transfer (``hvd.Compression`` of the backend).
        sparse_as_dense: whether the gradients of embeddings are converted to dense tensors; TensorFlow backend only.
        backward_passes_per_step: batches whose gradients are accumulated on the rank before they are exchanged.
        op: ``Average`` or ``Sum`` of the ranks' gradients, or ``Adasum`` of the steps that the ranks take.
        gradient_predivide_factor: with ``Average``, divides before the sum and multiplies after it.
        average_aggregated_gradients: whether the gradients of accumulated batches are averaged instead of summed.
        process_set: the ranks that train this model together, all by default.
        scale_local_gradients: whether gradients of local variables (``register_local_var``) are divided by the number
            of ranks, which makes them the gradients of the mean of all ranks' losses; not with ``Adasum``.

    Raises:
        ConfigError: the settings contradict each other, or the optimizer is already distributed.
    """
    if isinstance(optimizer, ExchangingOptimizer):
        raise ConfigError("This optimizer is already distributed; wrap the original optimizer instead.")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(f"{optimizer!r} is not a Keras optimizer; create one with keras.optimizers.")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigError("A LossScaleOptimizer cannot be distributed; wrap the optimizer inside it instead.")
    reject_multi_optimizer(optimizer)
    settings = _Settings(
        name,
        compression,
        sparse_as_dense,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        average_aggregated_gradients,
        process_set,
        scale_local_gradients,
    )
    settings.exchange(name or _name_without_number(optimizer))  # raises before the optimizer is changed
    _set_accumulation(optimizer, backward_passes_per_step)
    optimizer.__class__ = _exchanging_class(type(optimizer), settings)
    optimizer._begin()  # noqa: SLF001
    return optimizer


def _exchanging_class(kind: type[keras.optimizers.Optimizer], settings: _Settings) -> type[Any]:
    """Return a new subclass of an optimizer's class that exchanges gradients; its name is the same."""
    attributes = {
        "__module__": kind.__module__,
        "__signature__": inspect.signature(kind),
        "_plain_class": kind,
        "_settings": settings,
        "_local": _LocalVariables(settings.scale_local_gradients, settings.factor, settings.process_set),
    }
    mixin = DeltaOptimizer if settings.op == ReduceOp.ADASUM else ExchangingOptimizer
    return type(kind.__name__, (mixin, kind), attributes)


def _rebuilt(
    kind: type[keras.optimizers.Optimizer], config: Mapping[str, object], settings: _Settings
) -> keras.optimizers.Optimizer:
    return _exchanging_class(kind, settings).from_config(dict(config))


def PartialDistributedOptimizer(  # noqa: N802  the name is Horovod's
    optimizer: keras.optimizers.Optimizer, *, local_layers: Any = None, **options: Any
) -> keras.optimizers.Optimizer:
    """Make ``optimizer`` distributed, but keep the gradients of ``local_layers`` local to each rank, and return it.

    Args:
        optimizer: the optimizer, which is changed in place.
        local_layers: one Keras layer or several, already built.
        options: see ``DistributedOptimizer``.

    Raises:
        ConfigError: see ``DistributedOptimizer``; or a layer is not built.
    """
    variables = variables_of_layers(local_layers)
    DistributedOptimizer(optimizer, **options)
    for variable in variables:
        optimizer.register_local_var(variable)
    return optimizer


def reject_multi_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Reject an optimizer that consists of other optimizers, whose gradients would not be exchanged.

    Raises:
        ConfigError: it is a ``MultiOptimizer``.
    """
    # Keras has MultiOptimizer since 3.11.
    if isinstance(optimizer, getattr(keras.optimizers, "MultiOptimizer", ())):
        raise ConfigError("A MultiOptimizer cannot be distributed; use one optimizer for all layers.")


def _name_without_number(optimizer: Any) -> str:
    """Return the optimizer's name, without the number of an automatic name, which may differ between ranks.

    Keras counts the optimizers that a process makes. Optimizers with equal names exchange one after another.
    """
    name: str = optimizer.name
    base, _, number = name.rpartition("_")
    is_automatic = number.isdecimal() and base.replace("_", "") == type(optimizer).__name__.lower()
    return base if is_automatic else name


def _set_accumulation(optimizer: Any, passes: int) -> None:
    if passes < 1:
        raise ConfigError(f"backward_passes_per_step must be at least 1, got {passes}.")
    if passes == 1 or (optimizer.built and optimizer.gradient_accumulation_steps == passes):  # from a saved model
        return
    if optimizer.built:
        raise ConfigError(
            f"backward_passes_per_step={passes} needs an optimizer that is not built yet; create a new optimizer."
        )
    if optimizer.gradient_accumulation_steps:
        raise ConfigError(
            f"backward_passes_per_step={passes} and the optimizer's gradient_accumulation_steps="
            f"{optimizer.gradient_accumulation_steps} both accumulate gradients; set only one of them."
        )
    optimizer.gradient_accumulation_steps = passes


def _multiplied(exchange: Exchange, factor: float) -> Exchange:
    return lambda gradients: [scaled(gradient, factor) for gradient in exchange(gradients)]
