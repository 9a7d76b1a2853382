"""Sums of sparse (COO) tensors over the ranks: every rank's entries go to all, and each rank adds them up.

A rank's entries travel as bytes: a header (number of entries, sparse dimensions, length of what follows), what the rank
is doing in words, the indices, the values. A rank with nothing to add may send nothing at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.collectives.raw import Gathered
from sparkhvd.errors import MismatchError

_HEADER_BYTES = 24


def nothing() -> torch.Tensor:
    """What a rank sends that has no entries, and perhaps does not even know how many dimensions are sparse."""
    return torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class SparseSum:
    """One sum over ranks, as one of them sees it.

    Attributes:
        like: a dense or sparse tensor of the result's shape, dtype and device.
        op: ``AVERAGE`` or ``SUM``.
        ranks: those that take part, ascending.
        what: says in errors which tensor it is.
    """

    like: torch.Tensor
    op: ReduceOp
    ranks: tuple[int, ...]
    what: str

    @property
    def kind(self) -> str:
        """What has to be the same on all ranks, in words."""
        return f"{self.op} of {self.like.dtype} {list(self.like.shape)}"

    def packed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The entries of a sparse tensor as contiguous bytes on the CPU; entries with the same index are added up."""
        entries = tensor.detach().coalesce().cpu()
        indices, values = entries.indices(), entries.values()
        kind = torch.frombuffer(bytearray(self.kind, "utf-8"), dtype=torch.uint8)
        header = torch.tensor([values.shape[0], indices.shape[0], len(kind)])
        return torch.cat([_bytes_of(header), kind, _bytes_of(indices), _bytes_of(values)])

    def summed(self, gathered: Gathered) -> torch.Tensor:
        """What the ranks packed, combined to a coalesced sparse tensor.

        Raises:
            MismatchError: the ranks' tensors are of different types or shapes, or they combine them in different ways.
        """
        bounds = pairwise([0, *accumulate(gathered.first_dims)])
        parts = [
            self._entries(gathered.content[start:end], rank)
            for rank, (start, end) in zip(self.ranks, bounds, strict=True)
            if end > start
        ]
        if not parts:
            return torch.zeros(self.like.shape, dtype=self.like.dtype, device=self.like.device, layout=torch.sparse_coo)
        dimensions = [indices.shape[0] for indices, _ in parts]
        if len(set(dimensions)) > 1:
            raise MismatchError(f"{self.what} has {dimensions} sparse dimensions on the ranks that have it.")
        indices = torch.cat([indices for indices, _ in parts], 1)
        values = torch.cat([values for _, values in parts])
        scale = 1.0 / len(self.ranks) if self.op is ReduceOp.AVERAGE else 1.0
        joined = torch.sparse_coo_tensor(indices, values * scale, self.like.shape, check_invariants=True)
        return joined.coalesce().to(self.like.device)

    def _entries(self, content: memoryview, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        received = torch.frombuffer(content, dtype=torch.uint8)
        count, dimensions, length = _view(received[:_HEADER_BYTES], torch.int64, (3,)).tolist()
        first = _HEADER_BYTES + length
        kind = bytes(content[_HEADER_BYTES:first]).decode()
        if kind != self.kind:
            raise MismatchError(f"{self.what}: rank {rank} calls for the {kind}, this rank for the {self.kind}.")
        split = first + 8 * count * dimensions
        indices = _view(received[first:split], torch.int64, (dimensions, count))
        return indices, _view(received[split:], self.like.dtype, (count, *self.like.shape[dimensions:]))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else nothing()


def _view(content: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A copy of bytes as a tensor: what lies after the indices of a part has the address that it happens to have."""
    if not content.numel():
        return torch.empty(*shape, dtype=dtype)
    return content.clone().view(dtype).reshape(*shape)
