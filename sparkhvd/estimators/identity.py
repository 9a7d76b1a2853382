"""What a fit is about, so that a later one with the same content finds its run: ``resume="auto"``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparkhvd.data.fingerprint import fingerprint
from sparkhvd.data.selection import Selection
from sparkhvd.errors import ParamError
from sparkhvd.estimators.content import described

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# What may change while a run goes on: where and how long it trains, what it shows and keeps.
_NO_MATTER = frozenset(
    {
        "num_proc", "backend", "backend_env", "use_gpu", "mp_start_method", "store", "data", "keep_data", "epochs",
        "verbose", "log_every_n_steps", "checkpoints", "early_stopping", "run_id", "resume", "callbacks", "reader",
        "checkpoint_callback", "logger", "output_cols", "output_types",
        "train_reader_num_workers", "val_reader_num_workers", "partitions_per_process", "inmemory_cache_all",
        "local_cache", "compress_sparse_cols", "terminate_on_nan",
    }
)  # fmt: skip


def run_id_by_content(kind: str, df: DataFrame, selection: Selection, params: Mapping[str, Any]) -> str:
    """A run id that only fits with the same rows, parameters, model and optimizer share.

    Of the model count its code, its structure and the shapes of its weights, not their values: those that a script
    draws anew every time it starts would hide its own run from it. Of an optimizer counts its state, too.

    Raises:
        ParamError: it cannot be told what the rows, or a parameter, are made of.
    """
    rows = fingerprint(df, selection, caches=False)
    if rows is None:
        raise ParamError(
            "resume='auto' recognises a run by its rows, and what these are made of cannot be told: there is a "
            "user-defined function, a cache or something random in the DataFrame, or Spark Connect before it. Give the "
            "run a run_id instead."
        )
    content = {name: described(value, name) for name, value in params.items() if name not in _NO_MATTER}
    identity = json.dumps([kind, rows.text, sorted(content.items())])
    return f"auto-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"
