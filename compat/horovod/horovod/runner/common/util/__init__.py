"""Helpers of Horovod's launcher that programs use; its other modules raise ``ImportError``."""

from __future__ import annotations

from typing import NoReturn

from horovod._refusals import NO_LAUNCHER_PARTS

_PARTS = frozenset({"host_hash", "network", "safe_shell_exec", "secret", "settings", "timeout", "tiny_shell_exec"})


def __getattr__(name: str) -> NoReturn:
    if name in _PARTS:
        raise ImportError(NO_LAUNCHER_PARTS)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
