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
NO_LAUNCHER_PARTS = (
    "sparkhvd does not have the parts of Horovod's launcher. Start jobs with horovod.run or horovodrun. If hosts come "
    "and go, pass a script as host_discovery_script, or a function to sparkhvd.run_elastic(discovery=...)."
)
NO_RAY_PARTS = (
    "sparkhvd does not have the parts of Horovod's launcher on Ray. Start jobs with horovod.ray.RayExecutor, or with "
    "sparkhvd.run(launcher='ray')."
)
NO_STATE_HANDLERS = (
    "sparkhvd does not call state handlers. TorchState handles models, optimizers, samplers and all objects with "
    "state_dict() and load_state_dict(); for other objects, derive a class from hvd.elastic.State."
)
