"""What code of the user's or of a framework raised, in words for whoever has to mend it."""

from __future__ import annotations

import dis
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

_FRAMEWORKS = frozenset(
    {"sparkhvd", "torch", "torchmetrics", "keras", "tensorflow", "lightning", "pytorch_lightning", "numpy"}
)
_OF_TENSORS = (RuntimeError, ValueError, IndexError)
_OF_CODE = (NotImplementedError, RecursionError)  # kinds of RuntimeError
_RAISE = dis.opmap["RAISE_VARARGS"]


def with_full_stop(text: object) -> str:
    """``text`` as a sentence that another one may follow."""
    said = str(text).strip()
    return said if said.endswith((".", "!", "?", ":")) else f"{said}."


def is_tensor_error(error: BaseException) -> bool:
    """Whether a framework refused the shapes, types or values of tensors; not where the user's code raised."""
    if isinstance(error, _OF_CODE):
        return False
    if not isinstance(error, _OF_TENSORS) and not type(error).__module__.startswith("tensorflow"):
        return False
    innermost = list(_steps(error))[-1:]
    return not any(_package(step.tb_frame) not in _FRAMEWORKS and _raises(step) for step in innermost)


def describe_error(error: BaseException) -> str:
    """Type and text of an error, and the line of the user's code where it was raised, if it went through any."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    others = _FRAMEWORKS | sys.stdlib_module_names
    users = [step for step in _steps(error) if _package(step.tb_frame) not in others]
    if not users:
        return with_full_stop(text)
    code = users[-1].tb_frame.f_code
    line = linecache.getline(code.co_filename, users[-1].tb_lineno).strip()
    place = f"line {users[-1].tb_lineno} of {Path(code.co_filename).name}, in {code.co_name}"
    return f"{text} ({place}{f': {line}' if line else ''})."


def _steps(error: BaseException) -> Iterator[TracebackType]:
    step = error.__traceback__
    while step is not None:
        yield step
        step = step.tb_next


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _raises(step: TracebackType) -> bool:
    """Whether it is a ``raise`` that ended the frame, and not a call into compiled code."""
    return step.tb_frame.f_code.co_code[step.tb_lasti] == _RAISE
