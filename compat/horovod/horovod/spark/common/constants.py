"""The constants of Horovod's estimators."""

from __future__ import annotations

PETASTORM_HDFS_DRIVER = "libhdfs"
ARRAY = "array"
CUSTOM_SPARSE = "custom_sparse_format"
NOCHANGE = "nochange"
MIXED_SPARSE_DENSE_VECTOR = "mixed_sparse_dense_vector"
SPARSE_VECTOR = "sparse_vector"
DENSE_VECTOR = "dense_vector"
METRIC_PRINT_FREQUENCY = 100
BYTES_PER_GIB = 2**30
TOTAL_BUFFER_MEMORY_CAP_GIB = 4
