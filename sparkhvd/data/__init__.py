"""From a DataFrame to the batches of a rank: select, prepare, plan, read.

``sparkhvd.data.prepare`` is a package; the function is ``sparkhvd.data.prepare.prepare.prepare``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkhvd._util.lazy_names import lazy_names

if TYPE_CHECKING:
    from sparkhvd.data.loaders.parquet_loaders import tf_dataset as tf_dataset
    from sparkhvd.data.loaders.parquet_loaders import torch_loader as torch_loader
    from sparkhvd.data.loaders.user_loaders import AsyncDataLoaderMixin as AsyncDataLoaderMixin
    from sparkhvd.data.loaders.user_loaders import BaseDataLoader as BaseDataLoader
    from sparkhvd.data.loaders.user_loaders import DataContext as DataContext
    from sparkhvd.data.loaders.user_loaders import DataModule as DataModule
    from sparkhvd.data.prepare.prepared_data import PreparedData as PreparedData
    from sparkhvd.data.prepare.prepared_data import clean as clean
    from sparkhvd.data.prepare.prepared_data import prepare_data as prepare_data
    from sparkhvd.data.read.batches import Batch as Batch
    from sparkhvd.data.read.batches import BatchSource as BatchSource
    from sparkhvd.data.read.plan import Plan as Plan
    from sparkhvd.data.read.readers import ParquetSource as ParquetSource
    from sparkhvd.data.read.readers import head as head
    from sparkhvd.data.schema.data_schema import ColumnSpec as ColumnSpec
    from sparkhvd.data.schema.data_schema import DataSchema as DataSchema
    from sparkhvd.data.schema.manifest import Manifest as Manifest
    from sparkhvd.data.schema.manifest import load as load
    from sparkhvd.data.schema.selection import Selection as Selection
    from sparkhvd.data.schema.selection import expressions as expressions
    from sparkhvd.data.schema.selection import schema_of as schema_of
    from sparkhvd.data.schema.selection import select as select

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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "AsyncDataLoaderMixin": "sparkhvd.data.loaders.user_loaders",
        "BaseDataLoader": "sparkhvd.data.loaders.user_loaders",
        "DataContext": "sparkhvd.data.loaders.user_loaders",
        "DataModule": "sparkhvd.data.loaders.user_loaders",
        "Batch": "sparkhvd.data.read.batches",
        "BatchSource": "sparkhvd.data.read.batches",
        "ColumnSpec": "sparkhvd.data.schema.data_schema",
        "DataSchema": "sparkhvd.data.schema.data_schema",
        "Manifest": "sparkhvd.data.schema.manifest",
        "ParquetSource": "sparkhvd.data.read.readers",
        "PreparedData": "sparkhvd.data.prepare.prepared_data",
        "clean": "sparkhvd.data.prepare.prepared_data",
        "prepare_data": "sparkhvd.data.prepare.prepared_data",
        "Plan": "sparkhvd.data.read.plan",
        "Selection": "sparkhvd.data.schema.selection",
        "expressions": "sparkhvd.data.schema.selection",
        "head": "sparkhvd.data.read.readers",
        "load": "sparkhvd.data.schema.manifest",
        "schema_of": "sparkhvd.data.schema.selection",
        "select": "sparkhvd.data.schema.selection",
        "tf_dataset": "sparkhvd.data.loaders.parquet_loaders",
        "torch_loader": "sparkhvd.data.loaders.parquet_loaders",
    },
)
