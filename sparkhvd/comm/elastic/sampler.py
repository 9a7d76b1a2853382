"""``ElasticSampler``: partitions the samples of an epoch that are not processed yet among the current ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import numpy as np

from sparkhvd.comm import session
from sparkhvd.errors import ConfigError


def epoch_order(length: int, shuffle: bool, seed: int, epoch: int) -> list[int]:
    """Return the order of the samples in an epoch, equal on all ranks."""
    if not shuffle:
        return list(range(length))
    return [int(index) for index in np.random.default_rng([seed, epoch]).permutation(length)]


def share_of_rank(remaining: Sequence[int], rank: int, size: int) -> list[int]:
    """Return every ``size``-th sample, from the ``rank``-th; samples are repeated until all ranks have equally many."""
    if not remaining:
        return []
    count = -(-len(remaining) // size)
    return [remaining[(rank + index * size) % len(remaining)] for index in range(count)]


class ElasticSampler:
    """A sampler for ``torch.utils.data.DataLoader`` that continues an epoch after the number of ranks has changed.

    Record each batch, then commit: after a reset, the ranks iterate over the samples of the epoch that no committed
    batch contains, each sample once. Only at the end of an epoch, up to ``size - 1`` samples are repeated so that all
    ranks have equally many. The ranks must record batches of equal size in the same steps.

    Args:
        dataset: the dataset; only its length is used.
        shuffle: whether to shuffle the samples in each epoch.
        seed: the seed of the shuffle, equal on all ranks.

    Examples:
        >>> sampler = hvd.elastic.ElasticSampler(dataset)
        >>> loader = DataLoader(dataset, batch_size=32, sampler=sampler)
        >>> state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
        >>> for batch_index, batch in enumerate(loader):
        ...     ...
        ...     state.sampler.record_batch(batch_index, 32)
        ...     state.commit()
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, in which no sample is processed yet.

        Call this method at the *end* of an epoch, with the number of the next one. A call at the beginning of
        the training function would forget the processed samples after a reset.
        """
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def reset(self) -> None:
        """Partition the remaining samples among the current ranks."""
        self.rank, self.num_replicas = 0, 1
        if session.is_initialized():
            self.rank, self.num_replicas = session.rank(), session.size()
        self._base = self.processed_num
        order = epoch_order(len(self.dataset), self.shuffle, self.seed, self.epoch)
        self.remaining_indices = order[self._base :]
        self.indices = share_of_rank(self.remaining_indices, self.rank, self.num_replicas)
        self._recorded = 0

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that all ranks have processed batch ``batch_idx``, counted from the start of this iteration.

        Args:
            batch_idx: the number of the batch since the sampler was last partitioned.
            batch_size: the number of samples of a full batch on each rank.
        """
        self._record((batch_idx + 1) * batch_size)

    def record_indices(self, indices: Sequence[int]) -> None:
        """Record that all ranks have processed ``len(indices)`` samples each; ``indices`` are this rank's next ones.

        Raises:
            ConfigError: ``indices`` are not the next samples that this sampler has returned.
        """
        expected = self.indices[self._recorded : self._recorded + len(indices)]
        if list(indices) != expected:
            raise ConfigError(
                f"record_indices() takes the samples in the order of the sampler; expected {expected[:8]}, got "
                f"{list(indices)[:8]}."
            )
        self._record(self._recorded + len(indices))

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the number of its processed samples."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a ``state_dict()``, with the current ranks."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)

    def _record(self, count: int) -> None:
        self._recorded = min(count, len(self.indices))
        self.processed_num = min(self._base + self._recorded * self.num_replicas, len(self.dataset))
