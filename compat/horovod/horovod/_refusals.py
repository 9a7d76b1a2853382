"""The errors of modules that sparkhvd does not provide."""

from __future__ import annotations

NO_DATA_SERVICE = (
    "sparkhvd does not start TensorFlow's data service. Read the rows of each rank with sparkhvd.data.tf_dataset, or "
    "start a tf.data service yourself."
)
NO_PETASTORM_MODULES = (
    "sparkhvd does not read with petastorm. Leave out data_module to read with sparkhvd, or see "
    "docs/how-to/data-module.md for a data module and docs/horovod/petastorm.md for loaders."
)
