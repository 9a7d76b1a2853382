"""Reading a prepared dataset: the batches of one rank, decoded ahead of their use."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from sparkhvd.data.batches import Batch
from sparkhvd.data.manifest import Manifest, SplitName
from sparkhvd.data.plan import Plan
from sparkhvd.data.schema import DataSchema
from sparkhvd.store.protocol import Store
from sparkhvd.world import World


class ParquetSource:
    """The rows of one split of a prepared dataset, as one rank sees them (a ``BatchSource``).

    Args:
        store: where the dataset lies.
        manifest: what it consists of.
        split: ``"train"`` or ``"validation"``.
        world: this rank and the number of ranks.
        batch_size: rows of one rank in a full step.
        seed: of the shuffling.
        shuffle: whether every epoch has an order of its own; otherwise the rows come in DataFrame order.
        steps_per_epoch: None means one pass over the rows. Fewer steps cut the pass short, more continue with
            further passes.
        prefetch_bytes: decoded bytes that may wait for the trainer.

    Raises:
        DataError: the dataset has no such split.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        split: SplitName,
        world: World,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool,
        steps_per_epoch: int | None = None,
        prefetch_bytes: int = 64 * 1024 * 1024,
    ) -> None:
        raise NotImplementedError

    @property
    def schema(self) -> DataSchema:
        raise NotImplementedError

    @property
    def plan(self) -> Plan:
        """The plan that the batches follow; ``plan.global_batches(epoch)`` tells the order of rows over all ranks."""
        raise NotImplementedError

    def steps(self) -> int:
        """Steps per epoch, the same on every rank and in every epoch."""
        raise NotImplementedError

    def rows(self) -> int:
        """Rows of the split over all ranks."""
        raise NotImplementedError

    def epoch(self, number: int) -> Iterator[Batch]:
        """The batches of epoch ``number`` (from 0). Closing the iterator ends the prefetching at once."""
        raise NotImplementedError


def head(store: Store, manifest: Manifest, rows: int) -> dict[str, npt.NDArray[np.generic]]:
    """The first training rows (at most ``rows``) by column, for checks on the driver."""
    raise NotImplementedError
