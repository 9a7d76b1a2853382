"""The callbacks of ``horovod.keras``; those of tf.keras take one more argument."""

from __future__ import annotations

from horovod.keras import callbacks
from horovod.keras.callbacks import *  # noqa: F403  its __all__ lists the names

__all__ = callbacks.__all__


class BestModelCheckpoint(callbacks.BestModelCheckpoint):  # type: ignore[no-redef]  # replaces the imported one
    """See ``horovod.keras``. ``save_weights_only`` has no effect: the file is only for the estimator that writes it."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,  # noqa: ARG002
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        super().__init__(monitor, verbose, mode, save_freq)
