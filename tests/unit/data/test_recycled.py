from __future__ import annotations

import numpy as np
import pytest
import torch

from sparkhvd.data.recycled import Recycled
from sparkhvd.data.schema import ColumnSpec, DataSchema

NUMBERS = ColumnSpec("numbers", "float32", (3,), "feature", "array")
TEXTS = ColumnSpec("texts", "str", (), "feature", "scalar")


@pytest.fixture
def memory() -> Recycled:
    return Recycled(DataSchema((NUMBERS, TEXTS)))


def place(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_memory_that_nobody_holds_is_used_again(memory):
    first = memory.empty(NUMBERS, 100)
    assert (first.shape, first.dtype) == ((100, 3), np.float32)
    where = place(first)
    del first
    smaller = memory.empty(NUMBERS, 60)
    assert smaller.shape == (60, 3)
    assert place(smaller) == where


@pytest.mark.parametrize(
    "holder",
    [lambda array: array[10:20], lambda array: torch.from_numpy(array[5:]), lambda array: memoryview(array[1:2])],
    ids=["view", "tensor", "buffer"],
)
def test_memory_that_a_part_refers_to_is_left_alone(holder, memory):
    first = memory.empty(NUMBERS, 100)
    where = place(first)
    held = holder(first)
    del first
    other = memory.empty(NUMBERS, 100)
    assert place(other) != where
    del held, other
    assert where in {place(one) for one in [memory.empty(NUMBERS, 100), memory.empty(NUMBERS, 100)]}


def test_what_is_too_small_is_not_used(memory):
    memory.empty(NUMBERS, 10)
    assert memory.empty(NUMBERS, 11).shape == (11, 3)


def test_objects_are_not_kept_alive(memory):
    class Text:
        alive = 0

        def __init__(self):
            Text.alive += 1

        def __del__(self):
            Text.alive -= 1

    array = memory.empty(TEXTS, 2)
    array[:] = [Text(), Text()]
    assert Text.alive == 2
    del array
    assert Text.alive == 0


def test_what_is_kept_is_bounded(memory):
    held = [memory.empty(NUMBERS, 1000) for _ in range(50)]
    places = {place(array) for array in held}
    del held
    again = [memory.empty(NUMBERS, 1000) for _ in range(50)]
    assert len(places) == 50
    assert len(memory._known[(np.dtype(np.float32), (3,))]) == 4
    assert len({place(array) for array in again}) == 50
