"""The state of elastic jobs."""

from __future__ import annotations

from typing import Never

from horovod._refusals import NO_STATE_HANDLERS
from sparkhvd.torch.elastic import TorchState

__all__ = ["StateHandler", "TorchState", "get_handler_registry", "set_handler_registry"]


class StateHandler:
    """Cannot be created, as no state would call it; programs may derive a class from it."""

    def __init__(self, *_: object) -> None:
        raise NotImplementedError(NO_STATE_HANDLERS)


def get_handler_registry() -> Never:
    """Refuse, because there is no registry."""
    raise NotImplementedError(NO_STATE_HANDLERS)


def set_handler_registry(registry: object) -> Never:
    """Refuse, because there is no registry."""
    raise NotImplementedError(NO_STATE_HANDLERS)
