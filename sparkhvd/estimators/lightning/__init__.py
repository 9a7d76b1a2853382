"""``LightningEstimator``: train LightningModules on Spark DataFrames.

The names resolve on first use (PEP 562), so that a rank imports its half of this package without pyspark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from sparkhvd.estimators.params.frameworks import Framework

if TYPE_CHECKING:
    from sparkhvd.estimators.lightning.estimator import LightningEstimator as LightningEstimator
    from sparkhvd.estimators.lightning.estimator import LightningModel as LightningModel

_HOME_OF = {
    "LightningEstimator": "sparkhvd.estimators.lightning.estimator",
    "LightningModel": "sparkhvd.estimators.lightning.estimator",
}

# Files of a trained model in addition to those of a torch model.
CHECKPOINT, LOGS = "lightning.ckpt", "logs.zip"

FRAMEWORK = Framework(
    title="Lightning",
    estimator="LightningEstimator",
    packages=("lightning", "pytorch_lightning"),
)

__all__ = ["LightningEstimator", "LightningModel"]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'sparkhvd.estimators.lightning' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
