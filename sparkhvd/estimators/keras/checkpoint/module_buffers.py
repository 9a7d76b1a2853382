"""The buffers of PyTorch modules in a Keras model. Keras tracks only the parameters of such modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import keras
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Arrays = dict[str, npt.NDArray[np.generic]]


class ModuleBuffers:
    """The buffers of a model, such as the statistics of a ``BatchNorm1d`` in a ``TorchModuleWrapper``.

    Only models on the torch backend have buffers.

    Args:
        model: the model, built.
    """

    def __init__(self, model: keras.Model) -> None:
        self._layers: torch.nn.ModuleDict | None = None
        if keras.config.backend() == "torch":
            import torch  # noqa: PLC0415  (only the backend in use is imported)

            layers = model._flatten_layers()  # noqa: SLF001  (no public way to list nested layers)
            layers_by_index = torch.nn.ModuleDict({str(index): layer for index, layer in enumerate(layers)})
            if any(True for _ in layers_by_index.buffers()):
                self._layers = layers_by_index

    def values(self) -> Arrays:
        """Return copies of the buffers, by names that are the same in all processes."""
        if self._layers is None:
            return {}
        from sparkhvd.torch.buffers import buffer_arrays  # noqa: PLC0415

        return {name: np.array(array) for name, array in buffer_arrays(self._layers).items()}

    def restore(self, values: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Set the buffers to the result of ``values``."""
        if self._layers is None:
            return
        import torch  # noqa: PLC0415

        from sparkhvd.torch.buffers import take_buffers  # noqa: PLC0415

        take_buffers(self._layers, {name: torch.from_numpy(np.array(value)) for name, value in values.items()})

    def equalize(self, rows: int, name: str) -> None:
        """Average the buffers over the ranks, weighted by ``rows``; collective."""
        if self._layers is None:
            return
        from sparkhvd.torch.buffers import synchronize_buffers  # noqa: PLC0415

        synchronize_buffers(self._layers, rows, name)
