"""Sums of sparse (COO) tensors: all ranks receive the entries of all ranks, and each rank adds them up.

A rank's entries are sent as bytes: a header (number of entries, number of sparse dimensions, length of the text), a
text that describes the operation, the indices, the values. A rank without entries may send no bytes at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.collectives.raw import Gathered
from sparkhvd.errors import MismatchError

_HEADER_BYTES = 24


def no_bytes() -> torch.Tensor:
    """Return the content of a rank without entries, which may not know the number of sparse dimensions."""
    return torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class SparseSum:
    """This rank's view of one sum over the ranks.

    Attributes:
        like: a dense or sparse tensor with the result's shape, dtype and device.
        op: ``AVERAGE`` or ``SUM``.
        ranks: the participating ranks, ascending.
        what: names the tensor in error messages.
    """

    like: torch.Tensor
    op: ReduceOp
    ranks: tuple[int, ...]
    what: str

    @property
    def description(self) -> str:
        """Describe the operation, which must be the same on all ranks."""
        return f"{self.op} of {self.like.dtype} {list(self.like.shape)}"

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the entries of a sparse tensor as contiguous bytes on the CPU; duplicate indices are added up."""
        entries = tensor.detach().coalesce().cpu()
        indices, values = entries.indices(), entries.values()
        description = torch.frombuffer(bytearray(self.description, "utf-8"), dtype=torch.uint8)
        header = torch.tensor([values.shape[0], indices.shape[0], len(description)])
        return torch.cat([_bytes_of(header), description, _bytes_of(indices), _bytes_of(values)])

    def combine(self, gathered: Gathered) -> torch.Tensor:
        """Combine the packed entries of all ranks into a coalesced sparse tensor.

        Raises:
            MismatchError: the ranks disagree on dtype, shape or reduction.
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
            raise MismatchError(
                f"{self.what} has different numbers of sparse dimensions on the ranks: {dimensions}. Create the tensor "
                "with the same number on all ranks."
            )
        indices = torch.cat([indices for indices, _ in parts], 1)
        values = torch.cat([values for _, values in parts])
        has_fractions = values.is_floating_point() or values.is_complex()
        if self.op is ReduceOp.AVERAGE and has_fractions:
            values = values * (1.0 / len(self.ranks))
        joined = torch.sparse_coo_tensor(indices, values, self.like.shape, check_invariants=True).coalesce()
        if self.op is ReduceOp.AVERAGE and not has_fractions:  # truncated, like dense means of integers
            means = torch.div(joined.values(), len(self.ranks), rounding_mode="trunc")
            joined = torch.sparse_coo_tensor(joined.indices(), means, joined.shape, is_coalesced=True)
        return joined.to(self.like.device)

    def _entries(self, content: memoryview, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        received = torch.frombuffer(content, dtype=torch.uint8)
        count, dimensions, length = _view(received[:_HEADER_BYTES], torch.int64, (3,)).tolist()
        first = _HEADER_BYTES + length
        requested = bytes(content[_HEADER_BYTES:first]).decode()
        if requested != self.description:
            raise MismatchError(
                f"{self.what}: rank {rank} requests the {requested}, but this rank requests the {self.description}."
            )
        split = first + 8 * count * dimensions
        indices = _view(received[first:split], torch.int64, (dimensions, count))
        return indices, _view(received[split:], self.like.dtype, (count, *self.like.shape[dimensions:]))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else no_bytes()


def _view(content: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a copy of bytes as a tensor; it is copied because the bytes may not be aligned for the dtype."""
    if not content.numel():
        return torch.empty(*shape, dtype=dtype)
    return content.clone().view(dtype).reshape(*shape)
