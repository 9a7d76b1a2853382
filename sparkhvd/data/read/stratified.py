"""Stratified random orders: every part is a fair sample of the whole, whatever the order of the whole.

A plain permutation is fair on average; a stratified one is fair every time, which matters if there are few items.
Neighboring items go to different parts at random, so no period in the data can coincide with the number of parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

# The number of runs of neighboring rows, which are assigned as a whole. Long runs are copied faster; many runs sample
# more finely.
_RUNS = 4096
_RUNS_PER_PORTION = 256


def spread(count: int, bins: int, random: np.random.Generator) -> Indices:
    """Return an order of ``count`` items, bin after bin.

    Of every ``bins`` neighboring items, each bin gets one at random. The remaining items at the end go to random bins.
    The order within a bin is random.
    """
    strata = count // bins
    even = random.permuted(np.tile(np.arange(bins), (strata, 1)), axis=1).ravel()
    rest = random.permutation(bins)[: count - strata * bins]
    return np.lexsort((random.random(count), np.concatenate([even, rest])))


def in_portions(rows: int, portion: int, random: np.random.Generator) -> Indices:
    """Return an order of ``rows`` rows in which every portion is a fair sample in random order."""
    portions = max(1, -(-rows // portion))
    indices = _by_runs(rows, portions, min(_RUNS, portions * _RUNS_PER_PORTION), random)
    return _permuted(indices, portion, random)


def part_in_portions(
    rows: Sequence[int], part: int, portion: int, drawn: np.random.Generator, random: np.random.Generator
) -> Indices:
    """Return one part of a division of rows into fair samples, in an order like that of ``in_portions``.

    Args:
        rows: the rows of every part, almost the same number.
        part: which part to return.
        portion: rows that are permuted together.
        drawn: determines the division; the same stream for every part.
        random: determines the order within the part.
    """
    bins = len(rows) * -(-max(rows) // portion)
    start = sum(rows[:part])
    return _permuted(_by_runs(sum(rows), bins, _RUNS, drawn)[start : start + rows[part]], portion, random)


def _by_runs(rows: int, bins: int, runs: int, random: np.random.Generator) -> Indices:
    """Return an order of about ``runs`` runs of rows in which each of ``bins`` equal parts is a fair sample."""
    run = max(1, rows // runs)
    starts = np.arange(0, rows, run)
    ordered = starts[spread(len(starts), bins, random)]
    indices = (ordered[:, np.newaxis] + np.arange(run)).ravel()
    surplus = len(indices) - rows
    if surplus:  # the last run is shorter; closing the gap is faster than copying all others
        end = (int(np.argmax(ordered)) + 1) * run
        indices[end - surplus : rows] = indices[end:]
    return indices[:rows]


def _permuted(indices: Indices, portion: int, random: np.random.Generator) -> Indices:
    for start in range(0, len(indices), portion):
        random.shuffle(indices[start : start + portion])
    return indices
