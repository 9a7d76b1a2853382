"""``KerasEstimator``: train Keras 3 models on Spark DataFrames.

The names are imported on first use (PEP 562), so that ranks can import their modules of this package without pyspark,
and Keras is imported only after its backend is known.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from sparkhvd.estimators.params.frameworks import Framework

if TYPE_CHECKING:
    from sparkhvd.estimators.keras.estimator import KerasEstimator as KerasEstimator
    from sparkhvd.estimators.keras.estimator import KerasModel as KerasModel

_MODULE_OF = {
    "KerasEstimator": "sparkhvd.estimators.keras.estimator",
    "KerasModel": "sparkhvd.estimators.keras.estimator",
}

FRAMEWORK = Framework(
    title="Keras",
    estimator="KerasEstimator",
    packages=("keras",),
    libraries=("tensorflow",),
    describe="sparkhvd.estimators.keras.canonical:describe",
)

__all__ = ["KerasEstimator", "KerasModel"]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'sparkhvd.estimators.keras' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
