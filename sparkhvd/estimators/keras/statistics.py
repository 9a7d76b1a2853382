"""Synchronization of the layers' variables that are not weights, such as moving statistics.

A checkpoint within an epoch holds the statistics of all ranks, but the training continues with each rank's own
statistics. Otherwise the model would depend on the number of checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable

import keras
import numpy as np

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.estimators.keras.checkpoint.arrays import value_of
from sparkhvd.estimators.keras.checkpoint.module_buffers import Arrays, ModuleBuffers
from sparkhvd.keras.variables import broadcast_variables

_BUFFER = "buffer."  # begins the names of buffers among the values of a rank
_SUM = "sum of gradients."


def without_sums(values: Arrays) -> Arrays:
    """Return the values of ``own_values`` without the sums of gradients, which are 0 after a step of the optimizer."""
    return {name: value for name, value in values.items() if not name.startswith(_SUM)}


class LayerStatistics:
    """The variables of a model's layers that change without gradients. Every rank updates them from its own rows.

    Args:
        model: the model, built.
        own: variables that differ between ranks on purpose, such as the states of random generators.
        buffers: the buffers of the model.
        sums: the optimizer's sums of gradients for a step that has not ended. The step uses their mean over the ranks,
            so every rank can continue from this mean.
    """

    def __init__(
        self,
        model: keras.Model,
        own: Iterable[keras.Variable],
        buffers: ModuleBuffers,
        sums: Iterable[keras.Variable | None] = (),
    ) -> None:
        self.buffers = buffers
        self._layers = layers = model._flatten_layers()  # noqa: SLF001  (no public way to list nested layers)
        # The weights of a frozen layer are non-trainable, too, but equal on all ranks.
        weights = [weight for layer in layers for weight in layer._trainable_variables]  # noqa: SLF001
        excluded = {id(variable) for variable in (*weights, *own)}
        statistics = [variable for variable in model.non_trainable_variables if id(variable) not in excluded]
        self._sums = [total for total in sums if total is not None]
        self._floats = [v for v in statistics if keras.backend.is_float_dtype(v.dtype)]
        self._others = [v for v in statistics if not keras.backend.is_float_dtype(v.dtype)]

    def equalize(self, rows: int, name: str) -> None:
        """Average floating-point variables and buffers over the ranks, and make all others equal; collective.

        Args:
            rows: the number of rows that this rank has trained on since the last call: the weight of its values.
            name: the name of the collective.
        """
        broadcast_variables(self._others)
        self._average(self._sums, 1, f"{name}, sums of gradients")
        self._average(self._floats, rows, name)
        self.buffers.equalize(rows, f"{name}, buffers")

    def exist(self) -> bool:
        """Return whether a step may change any of them; those of ``Normalization`` change only when it is adapted."""
        fixed = {
            id(v) for layer in self._layers if isinstance(layer, keras.layers.Normalization) for v in layer.variables
        }
        changing = [variable for variable in self._variables().values() if id(variable) not in fixed]
        return bool(changing or self.buffers.values())

    def own_values(self) -> Arrays:
        """Return copies of this rank's values, by names that are the same in all processes."""
        values = {name: value_of(variable) for name, variable in self._variables().items()}
        return values | {f"{_BUFFER}{name}": value for name, value in self.buffers.values().items()}

    def take(self, values: Arrays) -> None:
        """Set values that ``own_values`` has returned, in this process or in the one that saved them."""
        for name, variable in self._variables().items():
            if name in values:
                variable.assign(values[name].astype(value_of(variable).dtype))
        buffers = {name: value for name, value in values.items() if name.startswith(_BUFFER)}
        self.buffers.restore({name.removeprefix(_BUFFER): value for name, value in buffers.items()})

    def _variables(self) -> dict[str, keras.Variable]:
        sums = {f"{_SUM}{index}": variable for index, variable in enumerate(self._sums)}
        return sums | {str(index): variable for index, variable in enumerate([*self._floats, *self._others])}

    @staticmethod
    def _average(variables: list[keras.Variable], weight: int, name: str) -> None:
        """Replace variables with their weighted means over the ranks; collective."""
        if not variables:
            return
        values = [np.asarray(keras.ops.convert_to_numpy(variable)) for variable in variables]
        flat = np.concatenate([np.array([1.0]), *(value.reshape(-1).astype(np.float64) for value in values)])
        weighted = flat * weight if weight else np.zeros_like(flat)
        total = session.current().allreduce(weighted, ReduceOp.SUM, name=name)
        if not total[0]:
            return
        means = np.split(total[1:] / total[0], np.cumsum([value.size for value in values])[:-1])
        for variable, value, mean in zip(variables, values, means, strict=True):
            variable.assign(mean.reshape(value.shape).astype(value.dtype))


def variables_independent_of_rows(model: keras.Model) -> list[keras.Variable]:
    """Return the variables that every training step changes equally on all ranks, even on a rank without rows."""
    kind = keras.layers.SpectralNormalization
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, kind) and layer.built]  # noqa: SLF001
    return [variable for layer in layers for variable in (layer.vector_u, layer.kernel)]
