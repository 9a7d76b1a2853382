"""Linear regression in NumPy as a framework of sparkhvd, in a separate package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkhvd._util.frameworks import Framework
from sparkhvd._util.lazy_names import lazy_names

if TYPE_CHECKING:
    from numpy_linear.estimator import LinearEstimator as LinearEstimator
    from numpy_linear.estimator import LinearTransformer as LinearTransformer
    from numpy_linear.regression import LinearRegression as LinearRegression

FRAMEWORK = Framework(
    title="NumPy",
    estimator="LinearEstimator",
    packages=("numpy_linear",),
    versions={"numpy": ()},
    describe="numpy_linear.regression:describe",
    seeding="numpy.random.default_rng",
)

__all__ = ["LinearEstimator", "LinearRegression", "LinearTransformer"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "LinearEstimator": "numpy_linear.estimator",
        "LinearRegression": "numpy_linear.regression",
        "LinearTransformer": "numpy_linear.estimator",
    },
)
