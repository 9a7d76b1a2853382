"""Whether a rank still has the whole state of its last complete step, for the commits of an elastic fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from sparkhvd.estimators.keras.serialization.omissions import Omissions
from sparkhvd.estimators.keras.statistics import LayerStatistics
from sparkhvd.keras.exchange import is_overwritten

SumFunction = Callable[[Sequence[Any]], list[Any]]


def can_keep_state(
    model: keras.Model, statistics: LayerStatistics, callbacks: Sequence[keras.callbacks.Callback]
) -> bool:
    """Return whether the ranks have the whole state of a step until the next step has exchanged its gradients.

    Statistics change in every forward pass, and lost ranks have a part of them. PyTorch counts the changes of its
    tensors, see ``version_of``. TensorFlow does not, and it runs the operations of a graph in any order that their data
    allow. There, only Keras' own step, layers and optimizers are known to wait for the gradients of all ranks before
    they change a weight; its weight decay does not wait, and accumulated gradients do not either. A user's callback may
    change weights before a step.
    """
    if statistics.exist():
        return False
    if keras.config.backend() != "tensorflow":
        return True
    optimizer = model.optimizer
    layers = model._flatten_layers()  # noqa: SLF001  (no public way to list nested layers)
    kinds = (getattr(optimizer, "_plain_class", object), *map(type, layers))
    return (
        all(kind.__module__.startswith("keras.") for kind in kinds)
        and not optimizer.weight_decay
        and not optimizer.gradient_accumulation_steps
        and not any(map(is_overwritten, model.trainable_variables))
        and not any(map(_acts_before_steps, callbacks))
    )


def _acts_before_steps(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback calls the user's code before each step."""
    if isinstance(callback, keras.callbacks.LambdaCallback):
        return "on_train_batch_begin" in vars(callback)
    hooks = (type(callback).on_train_batch_begin, type(callback).on_batch_begin)
    return not all(hook.__module__.startswith(("keras.", "sparkhvd.")) for hook in hooks)


def sum_function() -> SumFunction:
    """Return a function that returns the sum of each of its tensors; on TensorFlow, it is one graph."""

    def sums(values: Sequence[Any]) -> list[Any]:
        return [keras.ops.sum(keras.ops.cast(value, "float32")) for value in values]

    if keras.config.backend() != "tensorflow":
        return sums
    import tensorflow as tf  # noqa: PLC0415  (only the backend in use is imported)

    graph: SumFunction = tf.function(sums, autograph=False)
    return graph


def version_of(model: keras.Model, variables: Sequence[keras.Variable], sums: SumFunction) -> object:
    """Return a value that differs if variables or ``trainable`` flags have changed.

    PyTorch counts the changes of a tensor, except for changes through ``Tensor.data``. TensorFlow counts none: a
    function of the user, such as that of a ``Lambda`` layer or a loss, may assign weights in the forward pass. The sums
    of the variables show such changes of whole variables.
    """
    values = [variable.value for variable in variables]
    flags = Omissions.of_training(model)
    if keras.config.backend() == "tensorflow":
        return flags, sums(values)
    return flags, [value._version for value in values], sums([value.detach() for value in values])  # noqa: SLF001  (PyTorch documents it)
