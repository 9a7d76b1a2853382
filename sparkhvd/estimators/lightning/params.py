"""The parameters of ``LightningEstimator`` as its plug-in reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sparkhvd.estimators.params.policies import Checkpoints
from sparkhvd.estimators.torch.params import InputParams


@dataclass(frozen=True)
class LightningParams(InputParams):
    """The parameters of ``LightningEstimator``."""

    label_shapes: Sequence[Sequence[int]] | None
    callbacks: Sequence[object] | None
    trainer_args: Mapping[str, object] | None
    data_module: Callable[..., object] | None
    checkpoints: Checkpoints
