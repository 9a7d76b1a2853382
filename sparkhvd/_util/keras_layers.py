"""The variables of Keras layers that are local to each rank, without an import of Keras."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sparkhvd.errors import ConfigError


def variables_of_layers(layers: Any) -> list[Any]:
    """Return the trainable variables of a layer or of several layers; none for None.

    Raises:
        ConfigError: a layer has no variables yet, because it is not built.
    """
    several = [] if layers is None else list(layers) if isinstance(layers, Iterable) else [layers]
    for layer in several:
        if not layer.built:
            raise ConfigError(
                f"The local layer {layer.name!r} has no variables before it is built. Build the model first."
            )
    return [variable for layer in several for variable in layer.trainable_weights]
