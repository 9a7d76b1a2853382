"""What layers keep beside their weights, such as moving statistics, made equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.keras.callbacks import broadcast_variables


class Statistics:
    """The variables of a model's layers that change without gradients, which every rank changes by its own rows.

    Args:
        model: the model, built.
        own: variables that differ among ranks on purpose, such as the states of random numbers.
    """

    def __init__(self, model: Any, own: Iterable[Any]) -> None:
        layers = model._flatten_layers()  # noqa: SLF001  (no public way to walk)
        # The weights of a frozen layer are not trainable either, but equal on all ranks.
        weights = [each for layer in layers for each in layer._trainable_variables]  # noqa: SLF001
        left_out = {id(each) for each in (*weights, *own)}
        kept = [each for each in model.non_trainable_variables if id(each) not in left_out]
        self._floats = [each for each in kept if keras.backend.is_float_dtype(each.dtype)]
        self._others = [each for each in kept if not keras.backend.is_float_dtype(each.dtype)]

    def equalize(self, rows: int, name: str) -> None:
        """Average floating-point variables over the ranks, and take all others from rank 0; collective.

        Averages of exponential moving averages are those of the average updates, so it does not matter how often this
        is called.

        Args:
            rows: the rows that this rank has trained since the last call; its values count by them.
            name: of the collective.
        """
        broadcast_variables(self._others)
        if not self._floats:
            return
        values = [np.asarray(keras.ops.convert_to_numpy(each)) for each in self._floats]
        flat = np.concatenate([np.array([1.0]), *(value.reshape(-1).astype(np.float64) for value in values)])
        counted = flat * rows if rows else np.zeros_like(flat)
        total = session.current().allreduce(counted, ReduceOp.SUM, name=name)
        if not total[0]:
            return
        means = np.split(total[1:] / total[0], np.cumsum([value.size for value in values])[:-1])
        for variable, value, mean in zip(self._floats, values, means, strict=True):
            variable.assign(mean.reshape(value.shape).astype(value.dtype))
