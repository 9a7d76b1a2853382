"""``import horovod.torch as hvd`` on top of ``sparkhvd.torch``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from horovod.common.util import check_extension
from horovod.torch import elastic, functions, mpi_ops
from horovod.torch.compression import Compression
from horovod.torch.functions import *  # noqa: F403  its __all__ lists the names
from horovod.torch.mpi_ops import *  # noqa: F403
from horovod.torch.optimizer import DistributedOptimizer
from horovod.torch.sync_batch_norm import SyncBatchNorm
from sparkhvd.compat.horovod import missing

__all__ = ["Compression", "DistributedOptimizer", "SyncBatchNorm", "check_extension", "elastic"]
__all__ += functions.__all__
__all__ += mpi_ops.__all__


if not TYPE_CHECKING:  # with it, every name would exist for a type checker

    def __getattr__(name: str) -> object:
        raise AttributeError(missing("horovod.torch", name, __all__))
