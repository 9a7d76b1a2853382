"""Sums of sparse (COO) tensors over the ranks: every rank's entries go to all, and each rank adds them up.

A rank's entries travel as bytes: a header (number of entries, sparse dimensions), the indices, the values. A rank with
nothing to add may send nothing at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from sparkhvd.comm.raw import Gathered
from sparkhvd.errors import MismatchError

_HEADER_BYTES = 16


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """The entries of a sparse tensor as contiguous bytes on the CPU; entries with the same index are added up."""
    entries = tensor.detach().coalesce().cpu()
    indices, values = entries.indices(), entries.values()
    header = torch.tensor([values.shape[0], indices.shape[0]])
    return torch.cat([_bytes_of(header), _bytes_of(indices), _bytes_of(values)])


def nothing() -> torch.Tensor:
    """What a rank sends that has no entries, and perhaps does not even know how many dimensions are sparse."""
    return torch.empty(0, dtype=torch.uint8)


def summed(gathered: Gathered, like: torch.Tensor, scale: float, what: str) -> torch.Tensor:
    """The sum of the ranks' entries times ``scale``, as a coalesced sparse tensor.

    Args:
        gathered: what the ranks packed.
        like: a dense or sparse tensor of the result's shape, dtype and device.
        scale: multiplies every value.
        what: says in errors which tensor it is.

    Raises:
        MismatchError: the ranks' tensors are of different types or shapes.
    """
    ends = list(accumulate(gathered.first_dims))
    starts = [0, *ends[:-1]]
    parts = [
        _entries(gathered.content[start:end], like, f"{what} of rank {rank}")
        for rank, (start, end) in enumerate(zip(starts, ends, strict=True))
        if end > start
    ]
    if not parts:
        return torch.zeros(like.shape, dtype=like.dtype, device=like.device, layout=torch.sparse_coo)
    if len({indices.shape[0] for indices, _ in parts}) > 1:
        raise MismatchError(f"{what} has {[i.shape[0] for i, _ in parts]} sparse dimensions on the ranks that have it.")
    indices, values = (torch.cat(tensors, dim) for tensors, dim in zip(zip(*parts, strict=True), (1, 0), strict=True))
    joined = torch.sparse_coo_tensor(indices, values * scale, like.shape, check_invariants=True)
    return joined.coalesce().to(like.device)


def _entries(content: memoryview, like: torch.Tensor, what: str) -> tuple[torch.Tensor, torch.Tensor]:
    received = torch.frombuffer(content, dtype=torch.uint8)
    count, sparse_dimensions = _view(received[:_HEADER_BYTES], torch.int64, (2,)).tolist()
    split = _HEADER_BYTES + 8 * count * sparse_dimensions
    shape = (count, *like.shape[sparse_dimensions:])
    expected = split + torch.Size(shape).numel() * like.element_size()
    if sparse_dimensions > like.dim() or expected != len(received):
        raise MismatchError(
            f"{what} came with {len(received)} bytes; {count} entries of a {like.dtype} tensor of shape "
            f"{tuple(like.shape)} are {expected}. All ranks must pass the same shape and dtype."
        )
    indices = _view(received[_HEADER_BYTES:split], torch.int64, (sparse_dimensions, count))
    return indices, _view(received[split:], like.dtype, shape)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else nothing()


def _view(content: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A copy of bytes as a tensor: what lies after the indices of a part has the address that it happens to have."""
    if not content.numel():
        return torch.empty(*shape, dtype=dtype)
    return content.clone().view(dtype).reshape(*shape)
