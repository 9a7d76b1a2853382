"""``TorchEstimator``: train PyTorch modules on Spark DataFrames.

The names resolve on first use (PEP 562), so that a rank imports only the modules that do not need pyspark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkhvd._util.frameworks import Framework
from sparkhvd._util.lazy_names import lazy_names

if TYPE_CHECKING:
    from sparkhvd.estimators.torch.callbacks import TorchCallback as TorchCallback
    from sparkhvd.estimators.torch.callbacks import TorchRun as TorchRun
    from sparkhvd.estimators.torch.estimator import TorchEstimator as TorchEstimator
    from sparkhvd.estimators.torch.estimator import TorchModel as TorchModel
    from sparkhvd.estimators.torch.schedule import LRSchedule as LRSchedule

FRAMEWORK = Framework(
    title="PyTorch",
    estimator="TorchEstimator",
    packages=("torch",),
    libraries=("torchmetrics",),
    versions={"torch": ()},
    describe="sparkhvd.estimators.torch.serialization.canonical:describe",
    contents="sparkhvd.estimators.torch.serialization.canonical:contents",
    seeding="torch.manual_seed",
)

__all__ = ["LRSchedule", "TorchCallback", "TorchEstimator", "TorchModel", "TorchRun"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "LRSchedule": "sparkhvd.estimators.torch.schedule",
        "TorchCallback": "sparkhvd.estimators.torch.callbacks",
        "TorchRun": "sparkhvd.estimators.torch.callbacks",
        "TorchEstimator": "sparkhvd.estimators.torch.estimator",
        "TorchModel": "sparkhvd.estimators.torch.estimator",
    },
)
