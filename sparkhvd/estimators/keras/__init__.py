"""``KerasEstimator``: train Keras 3 models on Spark DataFrames.

The names are imported on first use (PEP 562), so that ranks can import their modules of this package without pyspark,
and Keras is imported only after its backend is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkhvd._util.frameworks import Framework
from sparkhvd._util.lazy_names import lazy_names

if TYPE_CHECKING:
    from sparkhvd.estimators.keras.estimator import KerasEstimator as KerasEstimator
    from sparkhvd.estimators.keras.estimator import KerasModel as KerasModel

FRAMEWORK = Framework(
    title="Keras",
    estimator="KerasEstimator",
    packages=("keras",),
    libraries=("tensorflow",),
    versions={"tensorflow": ("tensorflow-cpu",), "keras": ()},
    describe="sparkhvd.estimators.keras.serialization.canonical:describe",
    seeding="keras.utils.set_random_seed",
    tensor_errors=("tensorflow",),
)

__all__ = ["KerasEstimator", "KerasModel"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "KerasEstimator": "sparkhvd.estimators.keras.estimator",
        "KerasModel": "sparkhvd.estimators.keras.estimator",
    },
)
