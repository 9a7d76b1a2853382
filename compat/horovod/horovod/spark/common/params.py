"""The parameters of estimators and of models."""

from __future__ import annotations

from sparkhvd.estimators.models.model import TrainedModel as ModelParams
from sparkhvd.estimators.params.params import EstimatorParams

__all__ = ["EstimatorParams", "ModelParams"]
