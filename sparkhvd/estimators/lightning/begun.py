"""Lightning's checkpoint of a run that was interrupted within an epoch."""

from __future__ import annotations

import io

import torch


def after_batches(state: bytes, done: int) -> bytes:
    """A checkpoint that was made in the last hook of a batch, as one from which Lightning goes on with the next batch.

    Lightning counts a batch as completed after its hooks, and what it makes of one that is not differs among its
    versions.

    Args:
        state: the checkpoint.
        done: how many batches of the epoch Lightning is to count as done.
    """
    content = torch.load(io.BytesIO(state), weights_only=True, map_location="cpu")
    loop = content["loops"]["fit_loop"]
    progress = loop["epoch_loop.batch_progress"]
    progress["current"] = dict.fromkeys(progress["current"], done)
    progress["total"]["completed"] = progress["total"]["processed"]
    progress["is_last_batch"] = False
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()
