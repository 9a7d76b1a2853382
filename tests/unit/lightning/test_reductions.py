"""Gathers over the ranks for torchmetrics."""

from __future__ import annotations

import pytest
import torch

from sparkhvd.comm import session
from sparkhvd.lightning.reductions import SharedMetrics, gather_over_ranks
from tests.ranks import LIGHTNING, RankGroup


@pytest.fixture(scope="module")
def group():
    with RankGroup(2, imports=LIGHTNING) as started:
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


def precision_of_queries(updates):
    """Return the metric over all ranks, each of which makes its own number of updates, and the lists that remain."""
    from torchmetrics.retrieval import RetrievalMAP  # noqa: PLC0415

    metric = RetrievalMAP()
    for preds, target, indexes in updates[session.current().world.rank]:
        metric.update(torch.tensor(preds), torch.tensor(target), torch.tensor(indexes))
    shared = SharedMetrics(metric)
    try:
        copied = metric.clone().compute().item()
        return metric.compute().item(), copied, len(metric.preds), set(metric._reductions.values())
    finally:
        shared.close()
        assert "_sync_dist" not in vars(metric)


@pytest.mark.parametrize("first", [0, 1])
def test_a_metric_with_lists_is_computed_although_the_ranks_have_updated_it_unequally_often(group, first):
    """torchmetrics does not concatenate these lists before it gathers them."""
    from torchmetrics.retrieval import RetrievalMAP  # noqa: PLC0415

    often = [([0.2, 0.3, 0.5], [False, True, False], [0, 0, 0]), ([0.9, 0.1], [True, True], [1, 1])]
    for seldom in ([([0.7, 0.4], [False, True], [2, 2])], []):
        whole = RetrievalMAP()
        for preds, target, indexes in (*often, *seldom):
            whole.update(torch.tensor(preds), torch.tensor(target), torch.tensor(indexes))
        updates = [often, seldom] if first == 0 else [seldom, often]
        wanted = pytest.approx(whole.compute().item())
        for rank, result in enumerate(group.run(precision_of_queries, updates)):
            assert result == (wanted, wanted, len(updates[rank]), {None})


class Owner:
    """Like a callback, or a module that does not register the metrics in its dicts and lists."""

    def __init__(self):
        from torchmetrics import MeanMetric  # noqa: PLC0415

        self.own, self.by_name, self.inner = MeanMetric(), {"one": [MeanMetric()]}, torch.nn.Module()
        self.inner.__dict__["hidden"] = self.by_name
        self.by_name["itself"] = self.by_name


def means_of_owned_metrics():
    owner, rank = Owner(), session.current().world.rank
    metrics = [owner.own, owner.by_name["one"][0]]
    for metric in metrics:
        metric.update(torch.full((1 + 2 * rank,), float(rank)))
    shared = SharedMetrics(owner)
    try:
        return [metric.compute().item() for metric in metrics]
    finally:
        shared.close()
        assert all(metric.dist_sync_fn is None for metric in metrics)


def test_metrics_that_no_module_registers_are_computed_over_the_rows_of_all_ranks(group):
    assert group.run(means_of_owned_metrics) == [[0.75, 0.75]] * 2
