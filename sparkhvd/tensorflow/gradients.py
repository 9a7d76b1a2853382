"""The exchange of gradients, with one call into the core for all gradients of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from sparkhvd._util.keras_layers import variables_of_layers
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.collectives.options import Reduction, require_compressor
from sparkhvd.comm.process_sets import ProcessSet, exchanges_with
from sparkhvd.errors import ConfigError
from sparkhvd.tensorflow.compression import Compression, Compressor
from sparkhvd.tensorflow.operations import reduce_dense, reduce_slices
from sparkhvd.tensorflow.tensors import as_dtype, size_of, without_autograph


@dataclass(frozen=True)
class GradientExchange:
    """Combines the gradients of a step over the ranks.

    Attributes:
        name: distinguishes several exchanges of one program; must be equal on all ranks.
        compression: compresses dense gradients for transfer.
        sparse_as_dense: whether ``tf.IndexedSlices`` are converted to dense tensors; otherwise their rows are gathered
            and those with the same index are added up.
        op: ``Average``, ``Sum``, or ``Adasum`` for dense gradients.
        predivide: with ``Average``, gradients are divided by it before the sum, and the sum is multiplied by it.
        process_set: the ranks that take part, all by default.
    """

    name: str
    compression: Compressor = Compression.none
    sparse_as_dense: bool = False
    op: ReduceOp = ReduceOp.AVERAGE
    predivide: float = 1.0
    process_set: ProcessSet | None = None

    def __post_init__(self) -> None:
        require_compressor(self.compression)
        if self.op not in {ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM}:
            raise ConfigError(f"Gradients can be combined with op=Average, op=Sum or op=Adasum, not {self.op}.")
        if not self.predivide > 0:
            raise ConfigError(f"gradient_predivide_factor must be positive, got {self.predivide}.")
        if self.predivide != 1.0 and self.op is not ReduceOp.AVERAGE:
            raise ConfigError(f"gradient_predivide_factor={self.predivide} needs op=Average, not {self.op}.")

    @without_autograph
    def reduce(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the combined gradients in order; None stays None. Ranks outside the process set keep their own."""
        if not exchanges_with(self.process_set):
            return list(gradients)
        if self.sparse_as_dense:
            gradients = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        reduced = list(gradients)
        dense = [
            index for index, gradient in enumerate(gradients) if tf.is_tensor(gradient) and not _is_sparse(gradient)
        ]
        # The name contains the gradient's index, so it means the same variable on ranks that lack other gradients.
        results = reduce_dense(
            [gradients[index] for index in dense],
            Reduction(self.op, 1.0 / self.predivide, self.predivide),
            [f"{self.name}.{index}" for index in dense],
            self.compression,
            self.process_set,
        )
        for index, result in zip(dense, results, strict=True):
            reduced[index] = result
        slices = [index for index, gradient in enumerate(gradients) if _is_sparse(gradient)]
        reduced_slices = reduce_slices(
            [gradients[index] for index in slices], Reduction(self.op), f"{self.name}.sparse", self.process_set
        )
        for index, result in zip(slices, reduced_slices, strict=True):
            reduced[index] = result
        return reduced


def DistributedGradientTape(  # noqa: N802, PLR0917  the name and the order are Horovod's
    gradtape: tf.GradientTape,
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """Make ``gradtape.gradient()`` return the combined gradients of all ranks, and return the tape.

    The result has a method ``register_local_source(variable)``. Call it for the variables that are local to each rank:
    their gradients are not exchanged. ``get_local_and_global_gradients(target, sources)`` returns two lists of pairs
    (source, gradient): one for the local sources and one for all others. Each list has the order of ``sources``.

    Args:
        gradtape: the tape to wrap; use only the result afterwards.
        compression: compresses dense gradients for transfer.
        sparse_as_dense: whether the gradients of embeddings are converted to dense tensors first.
        op: ``Average``, ``Sum``, or ``Adasum`` for dense gradients.
        gradient_predivide_factor: with ``Average``, gradients are divided by it before the sum, and the sum is
            multiplied by it.
        process_set: the ranks that take part, all by default.
        scale_local_gradients: whether gradients of local variables are divided by the number of ranks, which makes them
            the gradients of the mean of all ranks' losses.

    Examples:
        >>> with tf.GradientTape() as tape:
        ...     loss = loss_of(model(features), labels)
        >>> tape = hvd.DistributedGradientTape(tape)
        >>> gradients = tape.gradient(loss, model.trainable_variables)
    """
    exchange = GradientExchange(
        "gradient_tape", compression, sparse_as_dense, op, gradient_predivide_factor, process_set
    )
    tape_class = type(gradtape)
    local_sources: dict[int, Any] = {}

    @without_autograph
    def gradient(
        self: tf.GradientTape,
        target: Any,
        sources: Any,
        *args: Any,
        use_generic_names: bool = False,  # noqa: ARG001  (Horovod's; gradients are named by their positions anyway)
        **kwargs: Any,
    ) -> Any:
        gradients = tape_class.gradient(self, target, sources, *args, **kwargs)
        if not exchanges_with(process_set):
            return gradients
        flat = tf.nest.flatten(gradients, expand_composites=False)
        is_local = [_key(source) in local_sources for source in tf.nest.flatten(sources)]
        reduced = exchange.reduce([None if local else grad for grad, local in zip(flat, is_local, strict=True)])
        factor = 1.0 / size_of(process_set) if scale_local_gradients else 1.0
        results = [
            tf.math.scalar_mul(as_dtype(factor, grad.dtype), grad) if local and grad is not None else combined
            for grad, combined, local in zip(flat, reduced, is_local, strict=True)
        ]
        return tf.nest.pack_sequence_as(gradients, results)

    def get_local_and_global_gradients(
        self: tf.GradientTape, target: Any, sources: Any, *args: Any, **kwargs: Any
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        gradients = self.gradient(target, sources, *args, **kwargs)
        pairs = list(zip(tf.nest.flatten(sources), tf.nest.flatten(gradients, expand_composites=False), strict=True))
        local = [pair for pair in pairs if _key(pair[0]) in local_sources]
        return local, [pair for pair in pairs if _key(pair[0]) not in local_sources]

    def register_local_source(_: tf.GradientTape, source: Any) -> None:
        local_sources[_key(source)] = source

    methods = {
        "get_local_and_global_gradients": get_local_and_global_gradients,
        "gradient": gradient,
        "register_local_source": register_local_source,
        "__module__": tape_class.__module__,
    }
    gradtape.__class__ = type(tape_class.__name__, (tape_class,), methods)
    return gradtape


def PartialDistributedGradientTape(  # noqa: N802  the name is Horovod's
    gradtape: tf.GradientTape, *args: Any, local_layers: Any = None, **kwargs: Any
) -> tf.GradientTape:
    """Return a ``DistributedGradientTape`` that keeps the gradients of ``local_layers`` local to each rank.

    Args:
        gradtape: the tape to wrap; use only the result afterwards.
        args: see ``DistributedGradientTape``.
        local_layers: one Keras layer or several.
        kwargs: see ``DistributedGradientTape``.

    Raises:
        ConfigError: a layer has no variables yet, because it is not built.
    """
    variables = variables_of_layers(local_layers)
    tape = DistributedGradientTape(gradtape, *args, **kwargs)
    for variable in variables:
        tape.register_local_source(variable)
    return tape


def gradients_of(
    loss: Any, variables: Any, output_gradients: Any = None, tape: tf.GradientTape | None = None
) -> tuple[list[Any], list[Any]]:
    """Return this rank's gradients of a loss, and the variables that they belong to, without a nesting.

    Args:
        loss: a function that returns the loss, or a tensor that ``tape`` has recorded.
        variables: the variables, which may be nested, or a function that returns them.
        output_gradients: factors of the loss, or None.
        tape: the tape to use, or None to record ``loss``.

    Raises:
        ConfigError: the loss is a tensor, and there is no tape.
    """
    if callable(loss):
        with tape or tf.GradientTape() as tape:  # noqa: PLR1704
            if not callable(variables):
                tape.watch(tf.nest.flatten(variables))
            loss = loss()
    elif tape is None:
        raise ConfigError("The gradients of a tensor need the tape that recorded it. Pass tape, or loss as a function.")
    flat = tf.nest.flatten(variables() if callable(variables) else variables)
    return tape.gradient(loss, flat, output_gradients), flat


def _key(source: Any) -> int:
    """Identify a variable; a Keras variable and the TensorFlow variable inside it have the same key."""
    return id(getattr(source, "handle", source))


def _is_sparse(gradient: object) -> bool:
    return isinstance(gradient, tf.IndexedSlices)
