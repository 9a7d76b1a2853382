"""Gathers over the ranks for torchmetrics."""

from __future__ import annotations

import pytest
import torch

from sparkhvd.comm import session
from sparkhvd.lightning.reductions import SharedMetrics, gather_over_ranks
from tests.ranks import RankGroup


@pytest.fixture(scope="module")
def group():
    with RankGroup(2, imports=("sparkhvd.lightning", "torchmetrics")) as started:
        yield started


def area_of_rows_of_one_rank(owner):
    from torchmetrics import AUROC  # noqa: PLC0415

    metric = AUROC("binary")
    if session.current().world.rank == owner:
        metric.update(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
    shared = SharedMetrics(metric)
    try:
        return metric.compute().item()
    finally:
        shared.close()


@pytest.mark.parametrize("owner", [0, 1])
def test_a_metric_that_keeps_its_rows_is_computed_although_a_rank_has_none(group, owner):
    assert group.run(area_of_rows_of_one_rank, owner) == [0.75, 0.75]


def gathered(parts):
    tensors = gather_over_ranks(parts[session.current().world.rank])
    return [(str(tensor.dtype), tensor.tolist()) for tensor in tensors]


@pytest.mark.parametrize("empty", [torch.zeros(0), torch.zeros(2, 0), torch.zeros(0, 3, dtype=torch.int32)])
def test_an_empty_tensor_gets_the_type_of_the_other_ranks(group, empty):
    numbers = torch.tensor([[1, 2, 3]])
    expected = [("torch.int64", empty.tolist()), ("torch.int64", [[1, 2, 3]])]
    assert group.run(gathered, [empty, numbers]) == [expected] * 2
    assert group.run(gathered, [numbers, empty]) == [expected[::-1]] * 2
    assert group.run(gathered, [empty, empty]) == [[(str(empty.dtype), empty.tolist())] * 2] * 2


def test_empty_tensors_of_different_types_get_the_type_of_the_first(group):
    parts = [torch.zeros(0, dtype=torch.int64), torch.zeros(0)]
    assert group.run(gathered, parts) == [[("torch.int64", [])] * 2] * 2
