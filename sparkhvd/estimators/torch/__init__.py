"""``TorchEstimator``: train PyTorch modules on Spark DataFrames.

The names resolve on first use (PEP 562), so that a rank imports its half of this package without pyspark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from sparkhvd.estimators.params.frameworks import Framework

if TYPE_CHECKING:
    from sparkhvd.estimators.torch.callbacks import TorchCallback as TorchCallback
    from sparkhvd.estimators.torch.callbacks import TorchRun as TorchRun
    from sparkhvd.estimators.torch.estimator import TorchEstimator as TorchEstimator
    from sparkhvd.estimators.torch.estimator import TorchModel as TorchModel
    from sparkhvd.estimators.torch.schedule import LRSchedule as LRSchedule

_HOME_OF = {
    "LRSchedule": "sparkhvd.estimators.torch.schedule",
    "TorchCallback": "sparkhvd.estimators.torch.callbacks",
    "TorchRun": "sparkhvd.estimators.torch.callbacks",
    "TorchEstimator": "sparkhvd.estimators.torch.estimator",
    "TorchModel": "sparkhvd.estimators.torch.estimator",
}

FRAMEWORK = Framework(
    title="PyTorch",
    estimator="TorchEstimator",
    packages=("torch",),
    libraries=("torchmetrics",),
    describe="sparkhvd.estimators.torch.canonical:describe",
)

__all__ = ["LRSchedule", "TorchCallback", "TorchEstimator", "TorchModel", "TorchRun"]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'sparkhvd.estimators.torch' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
