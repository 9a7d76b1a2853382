"""What has to be closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closable(ABC):
    """Something that the end of ``with`` closes."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what it has."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
