"""The variables of a Keras model and its optimizer: which ones the ranks share, and a broadcast that equalizes them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import as_bytes, from_bytes
from sparkhvd.keras.optimizer import ExchangingOptimizer


def is_built(model: Any) -> bool:
    """Return whether all layers of a model have their variables."""
    # A subclassed model may report that it is built although its layers are not.
    return all(layer.built for layer in model._flatten_layers())  # noqa: SLF001  (no public way to list nested layers)


def seed_states(model: Any) -> list[Any]:
    """Return the states of the random generators of a model's layers (dropout, noise), each once."""
    layers = [model, *model._flatten_layers(include_self=False)]  # noqa: SLF001
    generators = [generator for layer in layers for generator in layer._seed_generators]  # noqa: SLF001
    return list({id(generator.state): generator.state for generator in generators}.values())


def refresh_constants(model: Any) -> None:
    """Recompute the constants that layers derive from their variables, after these have been assigned."""
    for layer in model._flatten_layers():  # noqa: SLF001
        if isinstance(layer, keras.layers.Normalization):  # computes with copies of the variables that adapt() assigns
            layer.finalize_state()


def shared_variables(model: Any, optimizer: Any) -> list[Any]:
    """Return the variables of a built model and of its optimizer, without those that are local to a rank.

    The states of random generators are local, too: ranks with equal states would all drop the same units.

    Args:
        model: the model.
        optimizer: its optimizer, or None. If it is not built yet, this function builds it.
    """
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else [])]
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    local = inner.local_variables() if isinstance(inner, ExchangingOptimizer) else []
    local_ids = {id(variable) for variable in [*local, *seed_states(model)]}
    return [variable for variable in variables if id(variable) not in local_ids]


def broadcast_variables(variables: list[Any], root_rank: int = 0) -> None:
    """Overwrite Keras variables with those of ``root_rank``, on any backend.

    Args:
        variables: the variables, which must be the same on all ranks, in the same order.
        root_rank: the rank whose values are sent.
    """
    communicator = session.current()
    handles = []
    for index, variable in enumerate(variables):
        value = np.require(keras.ops.convert_to_numpy(variable), requirements="C")
        # Values are sent as bytes, because collectives do not support all dtypes, such as the uint32 of random seeds.
        handle = communicator.broadcast_async(as_bytes(value), root_rank, name=f"keras_variable.{index}")
        handles.append((variable, value, handle))
    for variable, value, handle in handles:
        variable.assign(from_bytes(handle.wait(), value))
