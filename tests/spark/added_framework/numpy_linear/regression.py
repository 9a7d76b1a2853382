"""The model, without Spark."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sparkhvd.estimators.runs.canonical import CanonicalForm

Vector = npt.NDArray[np.float64]


class LinearRegression:
    """Predicts ``rows @ weights``; a column of ones, added here, gives the bias."""

    def __init__(self, features: int, rng: np.random.Generator) -> None:
        self.weights: Vector = rng.normal(size=features + 1)

    def __call__(self, rows: Vector) -> Vector:
        return _with_ones(rows) @ self.weights

    def gradient(self, rows: Vector, labels: Vector) -> Vector:
        """Return the gradient of half the sum of squared errors."""
        return _with_ones(rows).T @ (self(rows) - labels)


def _with_ones(rows: Vector) -> Vector:
    return np.column_stack([rows, np.ones(len(rows))])


def describe(value: object, form: CanonicalForm) -> list[object] | None:
    """Return the form of a model for the identity of a run; None for any other object."""
    if not isinstance(value, LinearRegression):
        return None
    return ["linear regression", form.of_tensor(value.weights, exact=form.weights)]
