from __future__ import annotations

import math

import pytest

from sparkhvd.errors import ParamError
from sparkhvd.estimators.params.policies import Checkpoints, EarlyStopping, best_epoch
from sparkhvd.estimators.reports import EpochRecord


def history(*losses, accuracy=0.5):
    return [EpochRecord(i, {"loss": 0.0}, {"loss": loss, "accuracy": accuracy}) for i, loss in enumerate(losses)]


@pytest.mark.parametrize(
    ("losses", "ends"),
    [
        ((), False),
        ((3.0, 2.0, 1.0), False),
        ((1.0, 2.0), False),
        ((1.0, 2.0, 3.0), True),
        ((1.0, 2.0, 0.5, 0.6, 0.7), True),
        ((1.0, 1.0, 1.0), True),
        ((math.nan, math.nan), True),
        ((math.nan, 5.0, 4.0), False),
    ],
)
def test_early_stopping_ends_after_patience_epochs_without_an_improvement(losses, ends):
    assert EarlyStopping("val_loss", patience=2).ends(history(*losses)) is ends


def test_an_improvement_must_reach_min_delta():
    slow = history(1.0, 0.95, 0.9, 0.85)
    assert not EarlyStopping(patience=3, min_delta=0.01).ends(slow)
    assert EarlyStopping(patience=3, min_delta=0.5).ends(slow)


def test_mode_max_prefers_larger_values():
    assert best_epoch(history(1.0, 3.0, 2.0), "val_loss", "max") == 1
    assert best_epoch(history(3.0, 1.0, 2.0), "val_loss", "min") == 1
    assert Checkpoints(best="val_loss").best_epoch(history(2.0, 2.0)) == 0
    assert Checkpoints().best_epoch(history(2.0, 1.0)) is None
    assert Checkpoints(best="val_loss").best_epoch(history(1.0, 3.0, 2.0), lost_epochs={0}) == 2


def test_epochs_without_validation_do_not_count():
    some = history(2.0, 1.0, 3.0)
    partly = [EpochRecord(0, {"loss": 0.0}), *some, EpochRecord(4, {"loss": 0.0})]
    assert Checkpoints(best="val_loss").best_epoch(partly) == 2
    assert Checkpoints(best="val_loss").best_epoch(partly[:1]) is None
    assert not EarlyStopping("val_loss", patience=2).ends(partly)
    assert EarlyStopping("val_loss", patience=2).ends([*partly, *history(4.0)])
    assert not EarlyStopping("val_loss", patience=1).ends(partly[:1])


def test_invalid_policies_are_refused():
    with pytest.raises(ParamError, match=r"Unknown metric 'val_loos'; an epoch reports loss, val_loss, val_acc"):
        EarlyStopping("val_loos").ends(history(1.0))
    with pytest.raises(ParamError, match="mode must be 'auto', 'min' or 'max'"):
        EarlyStopping(mode="best")
    with pytest.raises(ParamError, match="patience must be at least 1"):
        EarlyStopping(patience=0)
    with pytest.raises(ParamError, match="both numbers must be at least 1"):
        Checkpoints(every_steps=0)


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        *((name, "max") for name in ("val_accuracy", "acc@1", "val_top5_acc", "auc_1", "mean_io_u", "val/f1")),
        *((name, "max") for name in ("MulticlassF1Score", "MeanIoU", "BinaryAUROC", "r2_score", "true_positives")),
        *((name, "max") for name in ("val_mAP", "mAP50", "mAP_small", "val_AP")),
        *((name, "min") for name in ("val_loss", "accuracy_loss", "rmse", "false_negatives", "wer", "perplexity")),
    ],
)
def test_the_name_of_a_metric_says_whether_higher_is_better(metric, mode):
    assert (Checkpoints(best=metric).mode, EarlyStopping(metric).mode) == (mode, mode)
    other = "min" if mode == "max" else "max"
    assert (Checkpoints(best=metric, mode=other).mode, EarlyStopping(metric, mode=other).mode) == (other, other)
    assert Checkpoints(best=metric) == Checkpoints(best=metric, mode=mode), "a run has the same identity with both"


def test_the_best_epoch_by_accuracy_is_that_with_the_highest():
    records = [EpochRecord(epoch, {"loss": 1.0, "accuracy": value}) for epoch, value in enumerate((0.2, 0.9, 0.5))]
    assert Checkpoints(best="accuracy").best_epoch(records) == 1
    assert EarlyStopping("accuracy", patience=1).ends(records)
    assert not EarlyStopping("accuracy", patience=1).ends(records[:2])
