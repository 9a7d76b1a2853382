"""Merged and continued states of torchmetrics have the values of one metric that sees all rows."""

from __future__ import annotations

import pytest
import torch
import torchmetrics
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

from sparkhvd.estimators.torch.losses.metric_states import (
    can_continue,
    fits,
    from_bytes,
    merge_into,
    states_of,
    to_bytes,
)

METRICS = {
    "lists": lambda: MulticlassAUROC(3),
    "sums": lambda: MulticlassF1Score(3),
    "composed": lambda: MulticlassF1Score(3) * 2,
    "moments": torchmetrics.PearsonCorrCoef,
}


def rows(kind, first, last):
    torch.manual_seed(1)
    outputs, labels = torch.randn(40, 3), torch.randint(3, (40,))
    if kind == "moments":
        outputs, labels = outputs[:, 0], outputs[:, 1]
    return outputs[first:last], labels[first:last]


def updated(kind, *spans):
    metric = METRICS[kind]()
    for span in spans:
        metric.update(*rows(kind, *span))
    return metric


def sent(metric):
    return from_bytes(to_bytes(states_of(metric)))


@pytest.mark.parametrize("kind", METRICS)
def test_merged_states_have_the_value_over_all_rows(kind):
    merged = METRICS[kind]()
    parts = [updated(kind, (0, 9)), updated(kind, (9, 25), (25, 40)), METRICS[kind]()]
    merge_into(merged, [sent(part) for part in parts])
    assert float(merged.compute()) == pytest.approx(float(updated(kind, (0, 40)).compute()), rel=1e-5)


@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("spans", [[(0, 25)], [(0, 9), (9, 25)]], ids=["one", "two"])
def test_a_metric_continues_from_earlier_states(kind, spans):
    metric = updated(kind, (3, 6))  # the earlier state replaces this one
    parts = [part for part in metric.modules() if hasattr(part, "_reductions")]
    if len(spans) > 1 and not all(map(can_continue, parts)):
        assert kind == "moments"
        return
    merge_into(metric, [sent(updated(kind, span)) for span in spans])
    metric.update(*rows(kind, 25, 40))
    assert float(metric.compute()) == pytest.approx(float(updated(kind, (0, 40)).compute()), rel=1e-5)


def test_states_fit_only_metrics_of_their_kind():
    states = sent(updated("sums", (0, 9)))
    assert fits(states, METRICS["sums"]())
    assert not fits(states, METRICS["lists"]())
    assert not fits(states, METRICS["composed"]())
    assert fits(sent(METRICS["sums"]()), METRICS["lists"]()), "no state fits all"
