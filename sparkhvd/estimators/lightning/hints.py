"""Hints about the batch for errors in a user's step."""

from __future__ import annotations

from collections.abc import Mapping

from sparkhvd.estimators.training.user_errors import describe_error

_UNPACKING_ERRORS = ("not str", "'str' object", "values to unpack")


def _is_key(value: object, batch: Mapping[object, object]) -> bool:
    return any(value == key for key in batch)


def batch_hint(step: str, error: Exception, batch: object) -> str | None:
    """Return a hint if a step seems to have expected a batch of the other format, else None.

    Args:
        step: the method's name.
        error: the error that it raised.
        batch: the batch of the step: tensors by column, or a tuple.
    """
    text = str(error)
    if isinstance(batch, Mapping):
        keys = ", ".join(map(repr, batch))
        missing = isinstance(error, KeyError) and error.args and not _is_key(error.args[0], batch)
        unpacked = isinstance(error, TypeError | AttributeError | ValueError) and any(
            s in text for s in _UNPACKING_ERRORS
        )
        if missing or unpacked:
            return (
                f"{step}: {describe_error(error)} If the batch is the cause: it is a dict of tensors by column, with "
                f"the keys {keys}. Access them by name, or set batch_format='tuple' for a batch of features and "
                "labels, as in x, y = batch."
            )
    elif isinstance(batch, tuple) and isinstance(error, TypeError) and "tuple indices" in text:
        return (
            f"{step}: {describe_error(error)} With batch_format='tuple' the batch is a tuple of features and labels, "
            "as in x, y = batch; with batch_format='dict' it is a dict of tensors by column."
        )
    return None
