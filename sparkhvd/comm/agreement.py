"""Agreement of all ranks on arrays that each rank changes locally, such as the running statistics of a model."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from sparkhvd.comm import objects
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.communicator import Communicator

Arrays = Mapping[str, npt.NDArray[np.generic]]

_OPERATIONS = {"min": ReduceOp.MIN, "max": ReduceOp.MAX}


@dataclass(frozen=True)
class _ArraySummary:
    """A rank's published description of one array; equal summaries mean equal arrays.

    Attributes:
        shape: the shape of the array.
        dtype: its type, as NumPy writes it.
        digest: the digest of its content.
        has_mean: whether its mean over ranks makes sense.
        mean: for a variance, the name of the array of its means; otherwise empty.
        extreme: "min" or "max" if the array holds extremes; otherwise empty.
    """

    shape: tuple[int, ...]
    dtype: str
    digest: bytes
    has_mean: bool
    mean: str
    extreme: str


@dataclass(frozen=True)
class _AgreementPlan:
    """The plan by which the ranks agree on the arrays that differ.

    Attributes:
        source: the rank whose arrays are copied if there is no mean.
        averaged: names of arrays that become their weighted mean.
        copied: names of arrays that are copied from ``source``.
        means: the name of the means of each averaged variance.
        extremes: names of arrays that become the least values, by "min", and the greatest ones, by "max".
    """

    source: int
    averaged: tuple[str, ...]
    copied: tuple[str, ...]
    means: Mapping[str, str]
    extremes: Mapping[str, tuple[str, ...]]


def agree(
    communicator: Communicator,
    arrays: Arrays,
    weight: float,
    *,
    means_of_variances: Mapping[str, str] | None = None,
    never_averaged: Collection[str] = (),
    extremes: Mapping[str, str] | None = None,
    name: str = "agreement",
) -> dict[str, npt.NDArray[np.generic]]:
    """Return the arrays that this rank must adopt so that all ranks hold the same values; collective.

    A floating-point or complex array becomes the weighted mean over ranks. A variance becomes the variance of all
    ranks' values together, which includes the spread of the ranks' means. An array of any other type becomes that of
    the first rank with a weight, as does an array whose shape or type differs among the ranks with a weight. If no rank
    has a weight, all ranks count equally. Arrays that are equal on all ranks stay bit-identical; only their digests are
    sent.

    Args:
        communicator: the ranks that take part.
        arrays: the values of this rank by name; ranks may have different names.
        weight: the weight of this rank's values in means, such as the number of rows behind them; 0 or more.
        means_of_variances: maps the names of variances to the names of their means.
        never_averaged: names of floating-point arrays that are copied, such as unit vectors.
        extremes: maps the names of real floating-point arrays to "min" or "max", which they become over all ranks.
        name: the operation's name, equal on all ranks.
    """
    if communicator.world.size == 1:
        return {}
    means, extremes = means_of_variances or {}, extremes or {}
    summaries = {
        key: _summary(array, key not in never_averaged, means.get(key, ""), extremes.get(key, ""))
        for key, array in arrays.items()
    }
    gathered = objects.allgather_object(communicator, (float(weight), summaries), name=f"{name} outlines")
    weights = _effective_weights([own_weight for own_weight, _ in gathered])
    plan = _plan_agreement(weights, [of_rank for _, of_rank in gathered])
    differing = [*plan.averaged, *plan.copied, *chain.from_iterable(plan.extremes.values())]
    if not differing:
        return {}
    own_arrays = {key: arrays[key] for key in differing} if communicator.world.rank == plan.source else {}
    base = objects.broadcast_object(communicator, own_arrays, plan.source, name=f"{name} base")
    for extreme, keys in plan.extremes.items():
        base = {**base, **_extremes(communicator, extreme, {key: base[key] for key in keys}, arrays, name)}
    if not plan.averaged:
        return base
    share = weights[communicator.world.rank] / sum(weights)
    shifts = {key: _shift(arrays[key], base[key]) if share else _zeros(base[key]) for key in plan.averaged}
    squares = {variance: shifts[mean] ** 2 for variance, mean in plan.means.items()}
    summed = _sum_over_ranks(
        communicator, [part * share for part in (*shifts.values(), *squares.values())], f"{name} shifts"
    )
    shifts = dict(zip(plan.averaged, summed, strict=False))
    for (variance, mean), square in zip(plan.means.items(), summed[len(shifts) :], strict=True):
        shifts[variance] = shifts[variance] + np.maximum(square - shifts[mean] ** 2, 0.0)
    return {**base, **{key: _add_shift(base[key], shift) for key, shift in shifts.items()}}


def _effective_weights(weights: Sequence[float]) -> list[float]:
    return list(weights) if sum(weights) > 0 else [1.0] * len(weights)


def _summary(array: npt.NDArray[np.generic], has_mean: bool, mean: str, extreme: str) -> _ArraySummary:
    digest = hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=16).digest()
    return _ArraySummary(array.shape, array.dtype.str, digest, has_mean and array.dtype.kind in "fc", mean, extreme)


def _plan_agreement(weights: Sequence[float], summaries: Sequence[Mapping[str, _ArraySummary]]) -> _AgreementPlan:
    """Plan the agreement from the summaries of all ranks; a pure function."""
    counting = [rank for rank, weight in enumerate(weights) if weight > 0]
    source = summaries[counting[0]]
    differing = [key for key, summary in source.items() if any(other.get(key) != summary for other in summaries)]

    def is_alike(key: str) -> bool:
        others = [summaries[rank].get(key) for rank in counting]
        return all(other and (other.shape, other.dtype) == (source[key].shape, source[key].dtype) for other in others)

    alike = [key for key in differing if source[key].has_mean and is_alike(key)]
    averaged = tuple(key for key in alike if not source[key].extreme)
    copied = tuple(key for key in differing if key not in alike)
    extremes = {
        extreme: keys for extreme in _OPERATIONS if (keys := tuple(k for k in alike if source[k].extreme == extreme))
    }
    means = {key: source[key].mean for key in averaged if source[key].mean in averaged}
    return _AgreementPlan(counting[0], averaged, copied, means, extremes)


def _extremes(communicator: Communicator, extreme: str, base: Arrays, arrays: Arrays, name: str) -> Arrays:
    """Return the extremes over all ranks; the source's values in ``base`` stand for an array of another form."""
    own = {key: arrays[key] if key in arrays and arrays[key].shape == base[key].shape else base[key] for key in base}
    parts = [_as_floats(array) for array in own.values()]
    found = communicator.allreduce(np.concatenate(parts), _OPERATIONS[extreme], name=f"{name} {extreme}")
    split = np.split(found, np.cumsum([part.size for part in parts])[:-1])
    return {key: part.astype(base[key].dtype).reshape(base[key].shape) for key, part in zip(base, split, strict=True)}


def _as_floats(array: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    """Return the array as float64, with the real and imaginary parts of complex numbers interleaved."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.kind == "c":
        return flat.astype(np.complex128).view(np.float64)
    return flat.astype(np.float64)


def _zeros(like: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    return np.zeros(like.size * (2 if like.dtype.kind == "c" else 1), np.float64)


def _shift(array: npt.NDArray[np.generic], base: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    """Return the difference of an array from the base; 0 where both are the same infinity or NaN."""
    own, other = _as_floats(array), _as_floats(base)
    with np.errstate(invalid="ignore"):
        return np.where((own == other) | (np.isnan(own) & np.isnan(other)), 0.0, own - other)


def _add_shift(base: npt.NDArray[np.generic], shift: npt.NDArray[np.float64]) -> npt.NDArray[np.generic]:
    numbers = _as_floats(base) + shift
    whole = numbers.view(np.complex128) if base.dtype.kind == "c" else numbers
    return whole.astype(base.dtype).reshape(base.shape)


def _sum_over_ranks(
    communicator: Communicator, parts: Sequence[npt.NDArray[np.float64]], name: str
) -> list[npt.NDArray[np.float64]]:
    together = communicator.allreduce(np.concatenate(parts), ReduceOp.SUM, name=name)
    ends = np.cumsum([part.size for part in parts])[:-1]
    return [np.asarray(part, np.float64) for part in np.split(together, ends)]
