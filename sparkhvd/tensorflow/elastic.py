"""Elastic training for TensorFlow: ``hvd.elastic.run``, ``hvd.elastic.TensorFlowState``.

Keras models have a state of their own, ``sparkhvd.keras.elastic.KerasState``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, Concatenate

import numpy as np
import tensorflow as tf

from sparkhvd.comm.elastic import loop
from sparkhvd.comm.elastic.loop import P, Result, S
from sparkhvd.comm.elastic.state import ObjectState, State, copied_arrays
from sparkhvd.errors import ConfigError, HorovodInternalError, HostsUpdatedInterrupt
from sparkhvd.tensorflow.states import broadcast_variables
from sparkhvd.tensorflow.tensors import own_failures

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TensorFlowState",
    "run",
]


def run(func: Callable[Concatenate[S, P], Result]) -> Callable[Concatenate[S, P], Result]:
    """Decorate a training function so that it survives changes of the ranks; see ``sparkhvd.torch.elastic.run``.

    It also recognizes a collective that fails inside a ``tf.function``, which TensorFlow reports as an error of its
    own. A ``tf.function`` may be defined outside of ``func``; it keeps working when the ranks change.

    Args:
        func: the training function; its first argument is the state.
    """

    @wraps(func)
    def translated(state: S, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        with own_failures():
            return func(state, *args, **kwargs)

    return loop.run(translated)


class TensorFlowState(ObjectState):
    """The state of an elastic TensorFlow training.

    Args:
        variables: the ``tf.Variable`` objects to keep, in the same order on all ranks, those of the optimizer included.
        session: must be None; accepted so that calls written for Horovod work.
        **kwargs: plain values, such as the epoch, which become attributes.

    Raises:
        ConfigError: there are no variables, or there is a session of TensorFlow 1.

    Examples:
        >>> state = hvd.elastic.TensorFlowState([*model_variables, *optimizer.variables], epoch=0)
    """

    def __init__(self, variables: Iterable[tf.Variable] | None = None, session: None = None, **kwargs: Any) -> None:
        if session is not None:
            raise ConfigError("TensorFlowState takes no session: the graphs of TensorFlow 1 are not supported.")
        self.variables = list(variables or ())
        if not self.variables:
            raise ConfigError(
                "TensorFlowState needs the variables to keep: TensorFlow 2 has no list of all variables. Pass those of "
                "the model and of the optimizer."
            )
        self._saved_variables: list[Any] = []
        super().__init__(**kwargs)

    def save(self) -> None:
        """Keep a copy of the variables and values in memory."""
        values = [_array_of(variable) for variable in self.variables]
        super().save()
        self._saved_variables = copied_arrays(values, self._saved_variables)

    def restore(self) -> None:
        """Return to the last commit or ``sync``."""
        for variable, value in zip(self.variables, self._saved_variables, strict=True):
            variable.assign(value.copy())  # the variable may use the memory of the array, which commits overwrite
        super().restore()

    def _describe_parts(self) -> list[str]:
        variables = (f"a variable of {_dtype_name(variable)}{list(variable.shape)}" for variable in self.variables)
        return [*variables, *super()._describe_parts()]

    def _broadcast(self) -> None:
        broadcast_variables(self.variables)
        super()._broadcast()

    def _saved_copy(self) -> dict[str, Any]:
        return {"variables": self._saved_variables, **super()._saved_copy()}

    def _set_saved_copy(self, saved: dict[str, Any]) -> None:
        self._saved_variables = saved["variables"]
        super()._set_saved_copy(saved)


def _dtype_name(variable: Any) -> str:
    """Return the dtype of a variable of TensorFlow or Keras."""
    return str(getattr(variable.dtype, "name", variable.dtype))


def _array_of(variable: tf.Variable) -> Any:
    """Return the value of a variable as an array, which shares the memory of a variable on the CPU."""
    tensor = tf.convert_to_tensor(variable)
    # ``numpy()`` copies; but TensorFlow makes no array of a single bfloat16 otherwise.
    return np.asarray(tensor if tensor.shape.rank else tensor.numpy())
