"""By what a rank knows whether it still has the whole state of its last complete step."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from sparkhvd.estimators.keras.serialization.omissions import Omissions
from sparkhvd.estimators.keras.statistics import LayerStatistics
from sparkhvd.keras.exchange import is_overwritten


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


def version_of(model: keras.Model, variables: Sequence[keras.Variable]) -> object:
    """Return a value that differs if variables or ``trainable`` flags have changed; on TensorFlow, only for flags."""
    flags = Omissions.of_training(model)
    if keras.config.backend() == "tensorflow":
        return flags
    # A change through ``Tensor.data`` has no version. The sums show such changes of whole tensors.
    sums = [keras.ops.sum(keras.ops.cast(variable.value.detach(), "float32")) for variable in variables]
    return flags, [variable.value._version for variable in variables], sums  # noqa: SLF001  (PyTorch documents it)
