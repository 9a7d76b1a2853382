"""Describe errors that user code or a framework raised, for the user who has to fix them."""

from __future__ import annotations

import dis
import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

from sparkhvd._util.frameworks import frameworks
from sparkhvd.errors import ParamError, SparkHvdError

_TENSOR_ERRORS = (RuntimeError, ValueError, IndexError)
_CODE_ERRORS = (NotImplementedError, RecursionError)  # subclasses of RuntimeError that are not about tensors
_RAISE = dis.opmap["RAISE_VARARGS"]


def with_full_stop(text: object) -> str:
    """Return ``text`` with a full stop, so that another sentence may follow."""
    sentence = str(text).strip()
    return sentence if sentence.endswith((".", "!", "?", ":")) else f"{sentence}."


@contextmanager
def pickling(what: str, receivers: str = "the ranks", advice: str = "") -> Iterator[None]:
    """Raise a ``ParamError`` if the user's objects cannot be pickled in this block.

    Args:
        what: the objects, as the subject of the message.
        receivers: the processes that the pickle is for.
        advice: the last sentence of the message.
    """
    try:
        yield
    except SparkHvdError:
        raise
    except Exception as error:
        reason = f"{what} cannot be pickled for {receivers}: {with_full_stop(error)}"
        raise ParamError(f"{reason} {advice}".rstrip()) from error


def is_tensor_error(error: BaseException) -> bool:
    """Return whether a framework rejected the shapes, types or values of tensors, and not a check in user code."""
    if isinstance(error, _CODE_ERRORS):
        return False
    framework_packages = {package for framework in frameworks() for package in framework.tensor_errors}
    if not isinstance(error, _TENSOR_ERRORS) and type(error).__module__.partition(".")[0] not in framework_packages:
        return False
    innermost, installed = list(_steps(error))[-1:], _installed_packages()
    return not any(_package(step.tb_frame) not in installed and _raises(step) for step in innermost)


def describe_error(error: BaseException) -> str:
    """Return the type and text of an error, and the innermost line of user code in its traceback, if there is any."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    foreign_packages = _installed_packages() | sys.stdlib_module_names
    user_steps = [step for step in _steps(error) if _package(step.tb_frame) not in foreign_packages]
    if not user_steps:
        return with_full_stop(text)
    code = user_steps[-1].tb_frame.f_code
    line = linecache.getline(code.co_filename, user_steps[-1].tb_lineno).strip()
    location = f"line {user_steps[-1].tb_lineno} of {Path(code.co_filename).name}, in {code.co_name}"
    return f"{text} ({location}{f': {line}' if line else ''})."


def _installed_packages() -> set[str]:
    """Return the packages whose code the user did not write."""
    return {"sparkhvd", "numpy"}.union(*((*framework.packages, *framework.libraries) for framework in frameworks()))


def _steps(error: BaseException) -> Iterator[TracebackType]:
    step = error.__traceback__
    while step is not None:
        yield step
        step = step.tb_next


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _raises(step: TracebackType) -> bool:
    """Return whether a ``raise`` statement ended the frame, rather than a call into compiled code."""
    return step.tb_frame.f_code.co_code[step.tb_lasti] == _RAISE
