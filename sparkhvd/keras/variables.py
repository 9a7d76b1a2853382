"""The variables of a Keras model and of its optimizer: which ones the ranks share, and how they become equal."""

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
    return list({id(g.state): g.state for layer in layers for g in layer._seed_generators}.values())  # noqa: SLF001


def shared_variables(model: Any, optimizer: Any) -> list[Any]:
    """Return the variables of a built model and of its optimizer, without those that are local to a rank.

    The states of random generators are local, too: ranks with equal states would all drop the same units.

    Args:
        model: the model.
        optimizer: its optimizer, which is built first; None if there is none.
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
        variables: the same on all ranks in the same order.
        root_rank: the rank whose values are sent.
    """
    communicator = session.current()
    handles = []
    for index, variable in enumerate(variables):
        value = np.require(keras.ops.convert_to_numpy(variable), requirements="C")
        # Random seeds have uint32, for example, which collectives do not support.
        handle = communicator.broadcast_async(as_bytes(value), root_rank, name=f"keras_variable.{index}")
        handles.append((variable, value, handle))
    for variable, value, handle in handles:
        variable.assign(from_bytes(handle.wait(), value))
