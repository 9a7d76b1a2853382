"""sparkhvd trains Keras, PyTorch and Lightning models directly on Spark DataFrames.

The public names resolve on first use (PEP 562), so ``import sparkhvd`` loads neither pyspark nor a framework.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from sparkhvd.compat.horovod import is_extra, missing, not_installed

if TYPE_CHECKING:
    from sparkhvd.data.prepare.prepared_data import prepare_data as prepare_data
    from sparkhvd.driver.elastic.run import run_elastic as run_elastic
    from sparkhvd.driver.preflight.preflight import preflight as preflight
    from sparkhvd.driver.run import run as run
    from sparkhvd.driver.spark.gang_queue import slots as slots
    from sparkhvd.estimators.keras import KerasEstimator as KerasEstimator
    from sparkhvd.estimators.keras import KerasModel as KerasModel
    from sparkhvd.estimators.lightning import LightningEstimator as LightningEstimator
    from sparkhvd.estimators.lightning import LightningModel as LightningModel
    from sparkhvd.estimators.params.backend import SparkBackend as SparkBackend
    from sparkhvd.estimators.params.policies import Checkpoints as Checkpoints
    from sparkhvd.estimators.params.policies import EarlyStopping as EarlyStopping
    from sparkhvd.estimators.torch import TorchEstimator as TorchEstimator
    from sparkhvd.estimators.torch import TorchModel as TorchModel
    from sparkhvd.store import Store as Store
    from sparkhvd.task.log_files import LogFiles as LogFiles

__version__ = "0.1.0"

_HOME_OF = {
    "Checkpoints": "sparkhvd.estimators.params.policies",
    "EarlyStopping": "sparkhvd.estimators.params.policies",
    "SparkBackend": "sparkhvd.estimators.params.backend",
    "KerasEstimator": "sparkhvd.estimators.keras",
    "KerasModel": "sparkhvd.estimators.keras",
    "LogFiles": "sparkhvd.task.log_files",
    "preflight": "sparkhvd.driver.preflight.preflight",
    "LightningEstimator": "sparkhvd.estimators.lightning",
    "LightningModel": "sparkhvd.estimators.lightning",
    "prepare_data": "sparkhvd.data.prepare.prepared_data",
    "run": "sparkhvd.driver.run",
    "run_elastic": "sparkhvd.driver.elastic.run",
    "slots": "sparkhvd.driver.spark.gang_queue",
    "Store": "sparkhvd.store",
    "TorchEstimator": "sparkhvd.estimators.torch",
    "TorchModel": "sparkhvd.estimators.torch",
}

__all__ = [
    "Checkpoints",
    "EarlyStopping",
    "KerasEstimator",
    "KerasModel",
    "LightningEstimator",
    "LightningModel",
    "LogFiles",
    "SparkBackend",
    "Store",
    "TorchEstimator",
    "TorchModel",
    "__version__",
    "preflight",
    "prepare_data",
    "run",
    "run_elastic",
    "slots",
]

# `from sparkhvd import *` provides the names of the installed frameworks only. `find_spec` imports none of them.
_PACKAGES = {"Keras": ("keras",), "Lightning": ("lightning", "pytorch_lightning"), "Torch": ("torch",)}
for _framework, _packages in _PACKAGES.items():
    if not any(map(find_spec, _packages)):
        for _kind in ("Estimator", "Model"):
            __all__.remove(f"{_framework}{_kind}")


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(missing("sparkhvd", name, __all__))
    # The modules of these names do not import Keras, so importing them would not show that Keras is missing.
    if name.startswith("Keras") and find_spec("keras") is None:
        raise ModuleNotFoundError(not_installed(f"sparkhvd.{name}", "keras"), name="keras")
    try:
        return getattr(import_module(_HOME_OF[name]), name)
    except ModuleNotFoundError as error:
        if error.name is None or not is_extra(error.name):
            raise
        raise ModuleNotFoundError(not_installed(f"sparkhvd.{name}", error.name), name=error.name) from error


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
