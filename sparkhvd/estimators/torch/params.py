"""The parameters of ``TorchEstimator`` and ``LightningEstimator`` as the plug-ins read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sparkhvd.data.schema.data_schema import DataSchema
from sparkhvd.estimators.params.named_inputs import NamedInput
from sparkhvd.estimators.torch.callbacks import TorchCallback
from sparkhvd.estimators.torch.schedule import LRSchedule


def uncompiled(_name: str, value: object) -> object:
    """Return the original module of a ``torch.compile``, whose result adds a prefix to the names of the weights."""
    return vars(value)["_modules"]["_orig_mod"] if type(value).__name__ == "OptimizedModule" else value


@dataclass(frozen=True)
class InputParams:
    """The parameters that map columns to inputs; see ``TorchEstimator``."""

    model: torch.nn.Module
    input_shapes: Sequence[Sequence[int]] | None
    inputs: Mapping[str, NamedInput] | None


@dataclass(frozen=True)
class TorchParams(InputParams):
    """The parameters of ``TorchEstimator``, after their types have been checked."""

    optimizer: torch.optim.Optimizer
    lr_scheduler: LRSchedule | None
    callbacks: Sequence[TorchCallback] | None
    schema: DataSchema
