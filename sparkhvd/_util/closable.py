"""A base class of closable resources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closable(ABC):
    """A context manager whose exit calls ``close``."""

    @abstractmethod
    def close(self) -> None:
        """Release its resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
