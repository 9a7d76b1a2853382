"""The state of an optimizer in a file of the format ``.h5``."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sparkhvd.errors import ConfigError


def restore_legacy_state(model: Any, filepath: str) -> None:
    """Give a model that was loaded from an ``.h5`` file an optimizer with its state.

    Keras 3 builds the optimizer of such a model without variables for the model's weights, so that its first step fails
    (``Unknown variable``). Does nothing for other models.

    Raises:
        ConfigError: the file has the state of another optimizer or model.
    """
    loaded = model.optimizer
    if not loaded.built or len(loaded._trainable_variables) == len(model.trainable_variables):  # noqa: SLF001
        return
    values = _values_in(str(filepath))
    if values is None:
        return
    optimizer = type(loaded).from_config(loaded.get_config())
    unbuilt = len(optimizer.variables)  # an optimizer that was saved before its first step has only these
    optimizer.build(model.trainable_variables)
    variables = optimizer.variables
    shapes = [tuple(variable.shape) for variable in variables]
    if [value.shape for value in values] not in (shapes, shapes[:unbuilt]):
        raise ConfigError(
            f"The optimizer of {filepath} has {len(variables)} variables, but the file has {len(values)}, or some of "
            "other shapes, so its state cannot be restored. Save the model as a .keras file."
        )
    for variable, value in zip(variables, values, strict=False):
        variable.assign(value)
    model.optimizer = optimizer


def _values_in(path: str) -> list[npt.NDArray[np.generic]] | None:
    """Return the values of the optimizer's variables, in their order; None if the file has another format."""
    import h5py  # type: ignore[import-untyped]  # noqa: PLC0415  (a requirement of Keras)

    if not h5py.is_hdf5(path):
        return None
    with h5py.File(path, "r") as file:
        if "optimizer_weights" not in file:
            return []
        group = file["optimizer_weights"]
        # Keras splits a list of names that is too long for one attribute.
        parts = ["weight_names"] if "weight_names" in group.attrs else []
        parts += [name for number in range(len(group.attrs)) if (name := f"weight_names{number}") in group.attrs]
        names = [name for part in parts for name in group.attrs[part]]
        return [np.asarray(group[name.decode() if isinstance(name, bytes) else name]) for name in names]
