"""From a DataFrame to the batches of a rank: select, prepare, plan, read.

The function that prepares is ``sparkhvd.data.prepare.prepare``; a package cannot offer it under the name of its module.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkhvd.data.batches import Batch as Batch
    from sparkhvd.data.batches import BatchSource as BatchSource
    from sparkhvd.data.loaders import tf_dataset as tf_dataset
    from sparkhvd.data.loaders import torch_loader as torch_loader
    from sparkhvd.data.manifest import Manifest as Manifest
    from sparkhvd.data.manifest import load as load
    from sparkhvd.data.plan import Plan as Plan
    from sparkhvd.data.prepared import PreparedData as PreparedData
    from sparkhvd.data.prepared import clean as clean
    from sparkhvd.data.prepared import prepare_data as prepare_data
    from sparkhvd.data.readers import ParquetSource as ParquetSource
    from sparkhvd.data.readers import head as head
    from sparkhvd.data.schema import ColumnSpec as ColumnSpec
    from sparkhvd.data.schema import DataSchema as DataSchema
    from sparkhvd.data.selection import Selection as Selection
    from sparkhvd.data.selection import expressions as expressions
    from sparkhvd.data.selection import schema_of as schema_of
    from sparkhvd.data.selection import select as select
    from sparkhvd.data.user_loaders import AsyncDataLoaderMixin as AsyncDataLoaderMixin
    from sparkhvd.data.user_loaders import BaseDataLoader as BaseDataLoader
    from sparkhvd.data.user_loaders import DataContext as DataContext
    from sparkhvd.data.user_loaders import DataModule as DataModule

_HOME_OF = {
    "AsyncDataLoaderMixin": "sparkhvd.data.user_loaders",
    "BaseDataLoader": "sparkhvd.data.user_loaders",
    "DataContext": "sparkhvd.data.user_loaders",
    "DataModule": "sparkhvd.data.user_loaders",
    "Batch": "sparkhvd.data.batches",
    "BatchSource": "sparkhvd.data.batches",
    "ColumnSpec": "sparkhvd.data.schema",
    "DataSchema": "sparkhvd.data.schema",
    "Manifest": "sparkhvd.data.manifest",
    "ParquetSource": "sparkhvd.data.readers",
    "PreparedData": "sparkhvd.data.prepared",
    "clean": "sparkhvd.data.prepared",
    "prepare_data": "sparkhvd.data.prepared",
    "Plan": "sparkhvd.data.plan",
    "Selection": "sparkhvd.data.selection",
    "expressions": "sparkhvd.data.selection",
    "head": "sparkhvd.data.readers",
    "load": "sparkhvd.data.manifest",
    "schema_of": "sparkhvd.data.selection",
    "select": "sparkhvd.data.selection",
    "tf_dataset": "sparkhvd.data.loaders",
    "torch_loader": "sparkhvd.data.loaders",
}

__all__ = [
    "AsyncDataLoaderMixin",
    "BaseDataLoader",
    "Batch",
    "BatchSource",
    "ColumnSpec",
    "DataContext",
    "DataModule",
    "DataSchema",
    "Manifest",
    "ParquetSource",
    "Plan",
    "PreparedData",
    "Selection",
    "clean",
    "expressions",
    "head",
    "load",
    "prepare_data",
    "schema_of",
    "select",
    "tf_dataset",
    "torch_loader",
]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'sparkhvd.data' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
