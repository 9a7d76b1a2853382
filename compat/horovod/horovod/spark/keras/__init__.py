"""``KerasEstimator`` with Horovod's meaning, and its model."""

from __future__ import annotations

from typing import ClassVar

from horovod.spark.common.estimator import HorovodParams
from sparkhvd.estimators import keras as _ours
from sparkhvd.estimators.models.model import TrainedModel

__all__ = ["KerasEstimator", "KerasModel"]


class KerasModel(_ours.KerasModel):
    """See ``sparkhvd.KerasModel``."""

    def getHistory(self) -> dict[str, list[float]]:  # type: ignore[override]  # noqa: N802  (Horovod's name)
        """Return the value of each metric by epoch, as Keras' ``History.history``."""
        history = super().getHistory()
        table = history.to_pandas()
        timing_columns = {"rows_per_second", "step_seconds", *(phase for entry in history for phase in entry["shares"])}
        return {str(name): table[name].tolist() for name in table if name not in timing_columns}


class KerasEstimator(HorovodParams, _ours.KerasEstimator):
    """See ``sparkhvd.KerasEstimator``."""

    model_class: ClassVar[type[TrainedModel]] = KerasModel
