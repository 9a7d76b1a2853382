"""``LightningEstimator``: train LightningModules on Spark DataFrames.

The names resolve on first use (PEP 562), so that ranks do not import pyspark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkhvd._util.frameworks import Framework
from sparkhvd._util.lazy_names import lazy_names

if TYPE_CHECKING:
    from sparkhvd.estimators.lightning.estimator import LightningEstimator as LightningEstimator
    from sparkhvd.estimators.lightning.estimator import LightningModel as LightningModel

FRAMEWORK = Framework(
    title="Lightning",
    estimator="LightningEstimator",
    packages=("lightning", "pytorch_lightning"),
    versions={"lightning": ("pytorch_lightning",)},
)

__all__ = ["LightningEstimator", "LightningModel"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "LightningEstimator": "sparkhvd.estimators.lightning.estimator",
        "LightningModel": "sparkhvd.estimators.lightning.estimator",
    },
)
