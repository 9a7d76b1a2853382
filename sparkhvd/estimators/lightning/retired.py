"""Horovod's parameters that have no meaning in ``LightningEstimator``, with the reason that the error gives."""

from __future__ import annotations

LIGHTNING_RETIRED = {
    "num_gpus": "a rank trains on one GPU if it sees any; use_gpu=False trains on the CPU.",
    "profiler": "set it on the Trainer: trainer_args={'profiler': ...}.",
    "loader_num_epochs": "every epoch reads each row once; epochs sets the number of epochs.",
    "debug_data_loader": "getHistory() reports how long the ranks waited for rows.",
    "train_async_data_loader_queue_size": "every rank prefetches up to 256 MB of decoded rows.",
    "val_async_data_loader_queue_size": "every rank prefetches up to 256 MB of decoded rows.",
    "backward_passes_per_step": "set it on the Trainer: trainer_args={'accumulate_grad_batches': ...}.",
    "loss_constructors": "a LightningModule computes its own loss; for a plain module, pass loss.",
    "train_minibatch_fn": "a LightningModule defines its steps in training_step.",
}
