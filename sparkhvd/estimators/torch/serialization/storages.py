"""Pickles the memory of tensors once, so that tensors that share it still do when they are loaded."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


class Storages:
    """The memory that one pickle contains.

    PyTorch pickles the memory of each tensor separately, because the object that describes it is new for each tensor.
    """

    def __init__(self) -> None:
        self._pickled: dict[tuple[int, int], torch.UntypedStorage] = {}  # by address and size

    def reduced(self, storage: torch.storage.TypedStorage | torch.UntypedStorage) -> Any:
        """Return the reduced form of a storage, see ``pickle.Pickler.reducer_override``."""
        if isinstance(storage, torch.UntypedStorage):
            return _memory_of, (_bytes_in(storage).tobytes(),)
        memory: torch.UntypedStorage = storage._untyped_storage  # noqa: SLF001  (the public method warns)
        if memory.device.type != "cpu" or memory.nbytes() == 0:
            return NotImplemented
        return _typed, (self._pickled.setdefault((memory.data_ptr(), memory.nbytes()), memory), storage.dtype)


def _bytes_in(memory: torch.UntypedStorage) -> npt.NDArray[np.uint8]:
    on_cpu: torch.UntypedStorage = memory.cpu()  # type: ignore[no-untyped-call]
    array: npt.NDArray[np.uint8] = torch.empty(0, dtype=torch.uint8).set_(on_cpu).numpy()
    return array


def _memory_of(content: bytes) -> torch.UntypedStorage:
    memory = torch.UntypedStorage(len(content))  # type: ignore[no-untyped-call]
    _bytes_in(memory)[:] = np.frombuffer(content, np.uint8)
    return memory


def _typed(memory: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=memory, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]
