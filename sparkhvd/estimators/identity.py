"""What a fit is about, so that a later one with the same content finds its run: ``resume="auto"``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

from sparkhvd.data.fingerprint import fingerprint
from sparkhvd.data.selection import Selection
from sparkhvd.errors import ParamError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# What may change while a run goes on: where and how long it trains, what it shows and keeps.
_NO_MATTER = frozenset(
    {
        "num_proc", "backend", "backend_env", "use_gpu", "mp_start_method", "store", "data", "keep_data", "epochs",
        "verbose", "log_every_n_steps", "checkpoints", "early_stopping", "run_id", "resume", "callbacks", "reader",
        "checkpoint_callback",
        "train_reader_num_workers", "val_reader_num_workers", "partitions_per_process", "inmemory_cache_all",
        "local_cache", "compress_sparse_cols", "terminate_on_nan",
    }
)  # fmt: skip


def run_id_by_content(kind: str, df: DataFrame, selection: Selection, params: Mapping[str, Any]) -> str:
    """A run id that only fits with the same rows, parameters, model and optimizer share.

    Of the model count its structure and the shapes of its weights, not their values: those that a script draws anew
    every time it starts would hide its own run from it.

    Raises:
        ParamError: it cannot be told what the rows are made of.
    """
    rows = fingerprint(df, selection)
    if rows is None:
        raise ParamError(
            "resume='auto' recognises a run by its rows, and what these are made of cannot be told: there is a "
            "user-defined function, a cache or something random in the DataFrame, or Spark Connect before it. Give the "
            "run a run_id instead."
        )
    content = {name: described(value) for name, value in params.items() if name not in _NO_MATTER}
    identity = json.dumps([kind, rows, sorted(content.items())], default=str)
    return f"auto-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"


def described(value: Any) -> Any:
    """What JSON can say of a parameter, the same in every process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return sorted((str(key), described(item)) for key, item in value.items())
    if isinstance(value, Sequence):
        return [described(item) for item in value]
    if isinstance(code := getattr(value, "__code__", None), CodeType):
        return [value.__module__, value.__qualname__, _code(code)]
    return [f"{type(value).__module__}.{type(value).__qualname__}", _of_object(value)]


def _of_object(value: Any) -> Any:
    if callable(weights := getattr(value, "named_parameters", None)):
        return [repr(value), [(name, list(item.shape), str(item.dtype)) for name, item in weights()]]
    if callable(config := getattr(value, "get_config", None)):
        return described(config())
    shown = repr(value)
    return "" if " at 0x" in shown else shown


def _code(code: CodeType) -> list[Any]:
    return [code.co_code.hex(), [_constant(item) for item in code.co_consts], code.co_names]


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _code(value)
    # The order of a set of texts differs between processes.
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)
