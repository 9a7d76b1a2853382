"""Values that modules log, in real ranks, without Spark."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import binary_auroc

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.errors import ParamError
from sparkhvd.estimators.training.logs.history import average_over_ranks
from tests.unit.estimators.arrays import Hooks, spec
from tests.unit.estimators.interruptions import assert_equal_values, values_of_epochs
from tests.unit.estimators.lightning.networks import DATA, EVEN, SOME_EMPTY, module, rows, source, trainer_of


def logged_by_rank_0():
    """Return the record of an epoch in which only rank 0 logs, and the interval of logging."""
    kind = type(module())

    class Alone(kind):
        def training_step(self, batch, index):
            if self.trainer.is_global_zero:
                self.log("first", 3.0 + index, rank_zero_only=True, on_step=False, on_epoch=True)
            return super().training_step(batch, index)

        def on_validation_epoch_end(self):
            if self.trainer.is_global_zero:
                self.log("val_first", 5.0, rank_zero_only=True)

    rank = session.current().world.rank
    trainer, hooks = trainer_of(Alone(), how={"log_every_n_steps": 7}), Hooks()
    trainer.fit(source(EVEN, rank), source(EVEN, rank), hooks)
    return average_over_ranks(hooks.reports[-1], session.current()), trainer._trainer.log_every_n_steps


def test_values_that_only_rank_0_logs_are_in_the_history(group):
    for record, every in group.run(logged_by_rank_0):
        assert (round(record.train["first"], 4), record.validation["first"]) == (8.5, 5.0)
        assert set(record.train) == {"loss", "accuracy", "twice", "first"}
        assert every == 7


def logged_with_positions(sizes):
    kind = type(module())

    class Positional(kind):
        def training_step(self, batch, index):
            self.log("rank", float(session.current().world.rank), False, None, False, True)
            return super().training_step(batch, index)

        def validation_step(self, batch, index):
            self.log("twice", 2.0)
            self.log("val_twice", 4.0)
            return super().validation_step(batch, index)

    rank = session.current().world.rank
    trainer, hooks = trainer_of(Positional()), Hooks()
    trainer.fit(source(sizes, rank), source(sizes, rank), hooks)
    return average_over_ranks(hooks.reports[-1], session.current())


def test_arguments_of_log_may_be_positional_and_no_name_of_a_validation_metric_replaces_another(group):
    for record in group.run(logged_with_positions, EVEN):
        assert record.train["rank"] == 0.5
        assert (record.validation["twice"], record.validation["val_twice"]) == (2.0, 4.0)
        assert math.isfinite(record.validation["loss"])


def losses_by_hand():
    class ByHand(type(module())):
        def training_step(self, batch, index):
            super().training_step(batch, index)
            if index == 3:
                self.manual_backward(math.nan * self(batch["x"]).sum())

    trainer, hooks = trainer_of(ByHand("by hand")), Hooks()
    trainer.fit(source(EVEN, session.current().world.rank), None, hooks)
    return [report.loss is not None and math.isnan(report.loss) for report in hooks.steps], hooks.reports[0].train


def test_a_nan_loss_is_reported_even_if_the_step_returns_no_loss(group):
    for steps, train in group.run(losses_by_hand):
        assert steps[:4] == [False, False, False, True]
        assert train["loss"] == (0.0, 0)


def counted_once(sizes):
    """Return the record of an epoch whose steps log sums and extremes, and the rows counted in a buffer."""
    seen = []

    class Counting(type(module())):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def training_step(self, batch, index):
            self.log("rows", float(len(batch["y"])), reduce_fx="sum", on_step=False, on_epoch=True)
            self.log("most", torch.tensor(len(batch["y"])), reduce_fx="max", on_step=False, on_epoch=True)
            self.seen = self.seen + len(batch["y"])
            return super().training_step(batch, index)

        def on_train_batch_end(self, *_):
            seen.append(self.seen.item())

        def validation_step(self, batch, index):
            self.log("val_rows", float(len(batch["y"])), reduce_fx=sum)
            self.log("val_fewest", batch["x"][:, 0].min(), reduce_fx="min")
            self.log("val_most", batch["x"][:, 0].max(), reduce_fx=torch.max)
            return super().validation_step(batch, index)

    rank = session.current().world.rank
    trainer, hooks = trainer_of(Counting()), Hooks()
    trainer.fit(source(sizes, rank), source(sizes, rank), hooks)
    return average_over_ranks(hooks.reports[-1], session.current()), seen[-1]


@pytest.mark.parametrize("sizes", [SOME_EMPTY, [(4, 0), (3, 0)]], ids=["some empty", "one without rows"])
def test_the_batch_of_a_rank_without_rows_does_not_count_in_logged_sums_and_extremes(group, sizes):
    count = sum(map(sum, sizes))
    column = rows(count)["x"][:, 0]
    for rank, (record, seen) in enumerate(group.run(counted_once, sizes)):
        assert seen == sum(step[rank] for step in sizes)
        assert record.train["rows"] == count
        assert record.train["most"] == max(map(max, sizes))
        assert record.validation["rows"] == count
        extremes = (record.validation["fewest"], record.validation["most"])
        assert extremes == pytest.approx((column.min(), column.max()))


def logged_by_step(sizes):
    """Return the values that steps log, as all ranks read them, and the means over the rows of all ranks."""
    from lightning.pytorch import Callback  # noqa: PLC0415

    class Reading(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            values.append((float(trainer.callback_metrics["twice_step"]), float(trainer.callback_metrics["count"])))
            rows_of_step = sizes[batch_idx][rank]
            own.append((rows_of_step * 2 * float(outputs["loss"]), rows_of_step))

    class Masking(type(module())):
        def training_step(self, batch, index):
            mask = batch["x"][:, 0] > 0
            self.log(
                "count", mask.sum().float(), batch_size=int(mask.sum()), on_step=True, on_epoch=False, sync_dist=True
            )
            return super().training_step(batch, index)

    rank, values, own = session.current().world.rank, [], []
    trainer_of(Masking(), callbacks=[Reading()]).fit(source(sizes, rank), None, Hooks())
    totals = session.current().allreduce(np.array(own), ReduceOp.SUM, name="wanted")
    return values, (totals[:, 0] / totals[:, 1]).tolist()


def test_a_value_that_is_logged_for_a_step_is_the_mean_over_the_rows_of_all_ranks(group):
    columns, masked, start = rows(sum(map(sum, SOME_EMPTY)))["x"][:, 0] > 0, [], 0
    for step in SOME_EMPTY:
        ends = np.cumsum((start, *step))
        counts = [int(columns[first:last].sum()) for first, last in pairwise(ends)]
        masked.append(np.average(counts, weights=counts) if any(counts) else 0.0)
        start = ends[-1]
    for values, wanted in group.run(logged_by_step, SOME_EMPTY):
        assert [value for value, _ in values] == pytest.approx(wanted, rel=1e-5)
        assert [value for _, value in values] == pytest.approx(masked)


def values_of_single_ranks(sizes):
    """Return what callbacks read of values that steps log only for themselves, step by step and after the epoch."""
    from lightning.pytorch import Callback  # noqa: PLC0415
    from torch.optim.lr_scheduler import ReduceLROnPlateau  # noqa: PLC0415

    class Reading(Callback):
        monitor = "monitored"

        def on_train_batch_end(self, trainer, *_):
            read.append([float(trainer.callback_metrics[name]) for name in ("monitored", "watched", "own")])

        def on_train_epoch_end(self, trainer, _module):
            read.append(
                [float(trainer.callback_metrics[name]) for name in ("own", "seldom", "largest", "smallest", "total")]
            )

    class Logging(type(module())):
        def training_step(self, batch, index):
            for name in ("monitored", "watched", "own", *(["seldom"] if index == 0 else [])):
                self.log(name, 100.0 * rank + index)
            for name, reduction in (("largest", "max"), ("smallest", torch.min), ("total", sum)):
                self.log(name, 100.0 * rank + index, reduce_fx=reduction)
            return super().training_step(batch, index)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "watched"},
            }

    rank, read = session.current().world.rank, []
    trainer_of(Logging(), callbacks=[Reading()]).fit(source(sizes, rank), None, Hooks())
    return read


def test_ranks_decide_by_the_mean_of_all_rows_in_a_step(group):
    """Otherwise a schedule that reads the value of its own rank would let the learning rates diverge."""
    found = group.run(values_of_single_ranks, [(2, 2), (5, 0), (3, 1)])
    means = [50.0, 1.0, 27.0]
    for own, read in zip(([0.0, 1.0, 2.0], [100.0, 100.0, 102.0]), found, strict=True):
        assert read[:-1] == [[mean, mean, value] for mean, value in zip(means, own, strict=True)]
        assert read[-1] == [27.0, 50.0, 102.0, 2.0, 104.0], "the epoch's last hooks read reductions of the last step"


def refusals_of_metrics():
    """Return the error of an epoch for each way to log a metric that a callback monitors; empty without an error."""
    from lightning.pytorch import Callback  # noqa: PLC0415
    from torchmetrics.aggregation import SumMetric  # noqa: PLC0415

    class Logging(type(module())):
        def __init__(self, is_synchronized, **options):
            super().__init__()
            self.total = SumMetric(dist_sync_on_step=is_synchronized)
            self.options = options

        def training_step(self, batch, index):
            self.total(float(len(batch["y"])))
            self.log("seen", self.total, **self.options)
            return super().training_step(batch, index)

    def refusal(monitor, is_synchronized, **options):
        callback = type("Monitoring", (Callback,), {"monitor": monitor})()
        try:
            network = Logging(is_synchronized, **options)
            trainer_of(network, callbacks=[callback]).fit(source(EVEN[:1], rank), None, Hooks())
        except ParamError as error:
            return str(error)
        return ""

    rank = session.current().world.rank
    return [
        refusal("seen", False),
        refusal("seen_step", False, on_epoch=True),
        refusal("seen", True),
        refusal("seen", False, on_step=False, on_epoch=True),
        refusal("other", False),
    ]


def test_a_decision_by_the_metric_of_a_single_rank_is_refused(group):
    for first, second, *others in group.run(refusals_of_metrics):
        assert first.startswith("A scheduler or callback monitors 'seen', a SumMetric that is logged per step.")
        assert second.startswith("A scheduler or callback monitors 'seen_step', a SumMetric that is logged per step.")
        assert others == [""] * 3


def values_of_metrics_in_steps(sizes):
    """Return the values that torchmetrics have in each step over all ranks, and their values for the epoch."""
    from torchmetrics import CatMetric, MeanMetric, MetricCollection, SumMetric  # noqa: PLC0415
    from torchmetrics.classification import BinaryAUROC  # noqa: PLC0415

    read = []

    class Reading(type(module())):
        def __init__(self):
            super().__init__()
            self.total, self.all = SumMetric(dist_sync_on_step=True), CatMetric(dist_sync_on_step=True)
            self.several = MetricCollection({"mean": MeanMetric(dist_sync_on_step=True)})
            self.updated, self.forwarded, self.area = SumMetric(), SumMetric(), BinaryAUROC(thresholds=None)
            self.computed_once = SumMetric()

        def training_step(self, batch, index):
            x, y = batch["x"][:, 0].float().sigmoid(), batch["y"].float()
            in_step = [self.total(y), self.all(y).sum(), self.several(y)["mean"]]
            self.updated.update(y)
            self.updated.update(2 * y)
            self.forwarded(y)
            self.area.update(x, batch["y"] > 0)
            so_far = [self.updated.compute(), self.forwarded.compute(), self.area.compute()]
            read.append([round(float(value), 4) for value in (*in_step, *so_far)])
            self.computed_once.update(y)
            if index == 0:
                self.computed_once.compute()
            return super().training_step(batch, index)

        def on_train_epoch_end(self):
            assert self.computed_once.compute() == self.forwarded.compute()
            values = (self.total, self.all, self.several["mean"], self.updated, self.forwarded, self.area)
            read.append([round(float(metric.compute().sum()), 4) for metric in values])

    trainer_of(Reading()).fit(source(sizes, session.current().world.rank), None, Hooks())
    return read


def test_metrics_that_are_synchronized_in_a_step_ignore_ranks_without_rows(group):
    sizes = [(0, 5), *SOME_EMPTY]
    data, ends = rows(sum(map(sum, sizes))), np.cumsum([0, *map(sum, sizes)])
    x, y = torch.tensor(data["x"][:, 0], dtype=torch.float32).sigmoid(), torch.tensor(data["y"])
    expected = []
    for begin, end in pairwise(ends):
        total, so_far = float(y[begin:end].sum()), float(y[:end].sum())
        area = float(binary_auroc(x[:end], (y[:end] > 0).long()))
        expected.append([total, total, total / (end - begin), 3 * so_far, so_far, area])
    expected.append([so_far, so_far, so_far / ends[-1], 3 * so_far, so_far, area])
    for read in group.run(values_of_metrics_in_steps, sizes):
        np.testing.assert_allclose(read, expected, atol=1e-3)


def metrics_of_batches():
    """Return a module with torchmetrics of all batches that are passed to its ``add``."""
    from torchmetrics import MeanMetric, MetricCollection, SumMetric  # noqa: PLC0415
    from torchmetrics.classification import BinaryAccuracy  # noqa: PLC0415

    class Metrics(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.total, self.mean = SumMetric(), MeanMetric(dist_sync_on_step=True)
            self.several = MetricCollection({"all": BinaryAccuracy(0.0), "none": BinaryAccuracy(1.0)})

        def add(self, batch):
            self.total.update(batch["y"])
            self.mean(batch["y"])
            self.several.update(torch.full((len(batch["y"]),), 0.5), batch["y"] > 0)

        def values(self):
            return [float(value.compute()) for value in (self.total, self.mean, *self.several.values())]

    return Metrics()


def values_of_metrics_in_hooks(sizes):
    """Return the values of torchmetrics that a module and callbacks update in hooks, over all ranks."""
    from lightning.pytorch import Callback  # noqa: PLC0415

    class AtStart(Callback):
        def __init__(self):
            self.metrics = metrics_of_batches()

        def on_train_batch_start(self, trainer, module, batch, index):
            self.metrics.add(batch)

    class InValidation(AtStart):
        def on_train_batch_start(self, *_):
            pass

        def on_validation_batch_end(self, trainer, module, outputs, batch, *indices):
            self.metrics.add(batch)

    class AtEnd(type(module())):
        def __init__(self):
            super().__init__()
            self.metrics = metrics_of_batches()

        def on_train_batch_end(self, outputs, batch, index):
            self.metrics.add(batch)

        def on_train_epoch_end(self):
            callbacks = [callback for callback in self.trainer.callbacks if isinstance(callback, AtStart)]
            counted.extend(owner.metrics.values() for owner in (self, *callbacks))

    counted, rank = [], session.current().world.rank
    trainer = trainer_of(AtEnd(), callbacks=[AtStart(), InValidation()])
    trainer.fit(source(sizes, rank), source(sizes, rank), Hooks())
    return counted


def test_metrics_that_hooks_update_ignore_ranks_without_rows(group):
    sizes = [(0, 5), *SOME_EMPTY]
    y = torch.tensor(rows(sum(map(sum, sizes)))["y"])
    positive = float((y > 0).float().mean())
    for counted in group.run(values_of_metrics_in_hooks, sizes):
        np.testing.assert_allclose(counted, [[y.sum(), y.float().mean(), positive, 1 - positive]] * 3, rtol=1e-5)


def names_in_each_epoch():
    class Early(type(module())):
        def training_step(self, batch, index):
            if self.current_epoch == 0:
                self.log("early", 1.0, on_epoch=True)
            return super().training_step(batch, index)

        def validation_step(self, batch, index):
            self.log("early" if self.current_epoch == 0 else "late", 1.0)

    rank, hooks = session.current().world.rank, Hooks()
    trainer_of(Early(), 2).fit(source(EVEN[:2], rank), source(EVEN[:2], rank), hooks)
    return [[sorted(report.train.keys() - {"loss"}), sorted(report.validation)] for report in hooks.reports]


def test_a_value_that_an_epoch_does_not_log_is_not_in_its_history(group):
    for first, second in group.run(names_in_each_epoch):
        assert first == [["accuracy", "early", "twice"], ["early", "loss"]]
        assert second == [["accuracy", "twice"], ["late", "loss"]]


class Wrapped:
    """A loader without a length, so that Lightning fetches a batch ahead to know which one is the last."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


def validated_with(loaders, sizes):
    """Return the record of an epoch whose validation uses the result of ``loaders`` for the rank's loader."""
    from lightning.pytorch import LightningDataModule  # noqa: PLC0415

    class Data(LightningDataModule):
        def __init__(self, train, validation):
            super().__init__()
            self.train_dataloader = lambda: train
            self.val_dataloader = lambda: loaders(validation)

    class Validated(type(module())):
        def validation_step(self, batch, index, dataloader_idx=0):
            self.log("rows", float(len(batch["y"])), reduce_fx="sum")
            return super().validation_step(batch, index)

    rank, hooks = session.current().world.rank, Hooks()
    trainer_of(Validated(), data_module=Data).fit(source(sizes, rank), source(sizes, rank), hooks)
    return average_over_ranks(hooks.reports[-1], session.current()).validation


def test_a_validation_loader_may_be_wrapped_without_a_length(group):
    for wanted, values in zip(
        group.run(validated_with, lambda loader: loader, SOME_EMPTY),
        group.run(validated_with, Wrapped, SOME_EMPTY),
        strict=True,
    ):
        assert values == pytest.approx(wanted, rel=1e-6)
        assert values["rows"] == sum(map(sum, SOME_EMPTY))


def and_other_rows(loader):
    others = [{"x": torch.ones(6), "y": 1}] * 5
    return [loader, torch.utils.data.DataLoader(others, batch_size=3)]


def test_a_validation_may_also_use_a_loader_of_other_rows(group):
    """On one rank, the last batch of the estimator's loader has no rows."""
    (wanted, _), (values, other_values) = (
        group.run(validated_with, loaders, SOME_EMPTY) for loaders in (lambda loader: loader, and_other_rows)
    )
    assert values == pytest.approx(other_values)
    assert values["loss/dataloader_idx_0"] == pytest.approx(wanted["loss"], rel=1e-6)
    assert values["rows/dataloader_idx_0"] == sum(map(sum, SOME_EMPTY))
    assert values["rows/dataloader_idx_1"] == 6, "Lightning gives each rank three of the five rows"
    sums = [values[f"loss/dataloader_idx_{index}"] * values[f"rows/dataloader_idx_{index}"] for index in (0, 1)]
    assert values["loss"] == pytest.approx(sum(sums) / (sum(map(sum, SOME_EMPTY)) + 6), rel=1e-5)


def error_without_a_length():
    from lightning.pytorch import LightningDataModule  # noqa: PLC0415

    class Data(LightningDataModule):
        def __init__(self, train, _validation):
            super().__init__()
            self.train_dataloader = lambda: Wrapped(train)

    with pytest.raises(ParamError) as error:
        trainer_of(module(), data_module=Data).fit(source(EVEN, session.current().world.rank), None, Hooks())
    return str(error.value)


def test_a_training_loader_without_a_length_is_refused_with_a_remedy(group):
    for message in group.run(error_without_a_length):
        assert message.startswith("The training loader of data_module has no length,")
        assert "Define __len__;" in message


def error_of_a_loader_read_twice():
    """Return the errors of a training loader and of a validation loader that a CombinedLoader contains twice."""
    from lightning.pytorch import LightningDataModule  # noqa: PLC0415
    from lightning.pytorch.utilities import CombinedLoader  # noqa: PLC0415

    def both(loader, mode):
        return CombinedLoader({"x": loader, "again": loader}, mode)

    class Training(LightningDataModule):
        def __init__(self, train, _validation):
            super().__init__()
            self.train_dataloader = lambda: both(train, "max_size_cycle")

    class Validation(LightningDataModule):
        def __init__(self, train, validation):
            super().__init__()
            self.train_dataloader = lambda: train
            self.val_dataloader = lambda: both(validation, "min_size")

    rank, messages = session.current().world.rank, []
    for data_module in (Training, Validation):
        with pytest.raises(ParamError) as error:
            trainer_of(module(), data_module=data_module).fit(source(EVEN, rank), source(EVEN, rank), Hooks())
        messages.append(str(error.value))
    return messages


def test_a_loader_that_is_read_twice_at_once_is_refused(group):
    for messages in group.run(error_of_a_loader_read_twice):
        for message in messages:
            assert message.startswith("data_module reads one of its loaders again before the first reading has ended")


def collected_by_hand(sizes):
    """Return the values that steps collected in attributes of the module, and their number of steps."""

    class Collecting(type(module())):
        def __init__(self):
            super().__init__()
            self.seen, self.by_kind, self.steps, self.total = {"train": [], "val": []}, {}, 0, torch.zeros(())

        def training_step(self, batch, index):
            self.steps += 1
            self.seen["train"].append(len(batch["y"]))
            self.total = self.total + len(batch["y"])
            return super().training_step(batch, index)

        def validation_step(self, batch, index):
            self.seen["val"].append(len(batch["y"]))
            for kind in batch["y"].tolist():
                self.by_kind.setdefault(kind, set()).add(index)
                self.by_kind["rows"] = self.by_kind.get("rows", 0) + 1
            return super().validation_step(batch, index)

        def on_fit_end(self):
            collected.update(self.seen, rows=self.by_kind["rows"], steps=self.steps, total=float(self.total))

    rank, collected = session.current().world.rank, {}
    trainer = trainer_of(Collecting(), how={}, trainer_args={"num_sanity_val_steps": 0})
    trainer.fit(source(sizes, rank), source(sizes, rank), Hooks())
    return collected


def test_values_that_steps_collect_by_hand_have_each_row_once(group):
    for rank, collected in enumerate(group.run(collected_by_hand, SOME_EMPTY)):
        own = [step[rank] for step in SOME_EMPTY if step[rank]]
        assert (collected["train"], collected["val"]) == (own, own)
        assert (collected["rows"], collected["total"]) == (sum(own), sum(own))
        assert collected["steps"] == len(SOME_EMPTY), "ranks with different step counts would diverge"


def accuracies_of_two_metrics(sizes):
    """Return the accuracy by a metric in a dict, which the module does not register, and by a registered metric."""

    class Hiding(type(module())):
        def on_fit_start(self):
            self.registered = self.accuracy.clone()
            self.metrics = {"registered": self.registered, "hidden": self.accuracy.clone()}

        def validation_step(self, batch, index):
            for metric in self.metrics.values():
                metric.update(self(batch["x"]), batch["y"])

        def on_validation_epoch_end(self):
            self.log_dict({name: metric.compute() for name, metric in self.metrics.items()})

    rank, hooks = session.current().world.rank, Hooks()
    trainer_of(Hiding()).fit(source(EVEN[:1], rank), source(sizes, rank), hooks)
    values = average_over_ranks(hooks.reports[-1], session.current()).validation
    return values["hidden"], values["registered"]


def test_a_metric_in_a_dict_covers_the_rows_of_all_ranks_once(group):
    for hidden, registered in group.run(accuracies_of_two_metrics, SOME_EMPTY):
        assert hidden == registered
        assert 0 < hidden < 1


def metrics_of_a_collection(sizes):
    """Return two metrics that differ for all rows, but not for the synthetic rows of zeros, which have no effect."""
    from torchmetrics import MetricCollection  # noqa: PLC0415
    from torchmetrics.classification import BinaryAccuracy  # noqa: PLC0415

    class Collecting(type(module())):
        def __init__(self):
            super().__init__()
            self.collection = MetricCollection({"low": BinaryAccuracy(0.5), "high": BinaryAccuracy(0.9)})

        def validation_step(self, batch, index):
            predicted = torch.where(batch["x"].any(dim=1), 0.7, 1.0)
            self.collection.update(predicted, torch.ones(len(predicted)))
            self.log_dict(self.collection)

    rank, hooks = session.current().world.rank, Hooks()
    trainer_of(Collecting()).fit(source(EVEN[:1], rank), source(sizes, rank), hooks)
    values = average_over_ranks(hooks.reports[-1], session.current()).validation
    return values["low"], values["high"]


def test_metrics_of_a_collection_stay_apart_although_the_first_batch_of_a_rank_has_no_rows(group):
    assert group.run(metrics_of_a_collection, [(5, 0), (3, 7), (4, 4)]) == [(1.0, 0.0)] * 2


def metric_with_a_graph(sizes):
    from torchmetrics import MaxMetric  # noqa: PLC0415

    class Largest(type(module())):
        def __init__(self):
            super().__init__()
            self.largest = MaxMetric()

        def training_step(self, batch, index):
            self.largest(self(batch["x"]).max())
            self.log("largest", self.largest, on_step=False, on_epoch=True)
            return super().training_step(batch, index)

    rank = session.current().world.rank
    trainer, hooks = trainer_of(Largest()), Hooks()
    trainer.fit(source(sizes, rank), None, hooks)
    return average_over_ranks(hooks.reports[-1], session.current()).train["largest"]


def test_a_metric_whose_state_has_a_graph_trains_on_ranks_without_rows(group):
    first, second = group.run(metric_with_a_graph, SOME_EMPTY)
    assert first == second
    assert math.isfinite(first)


def validated_twice(sizes, more):
    """Return the validation loss in the epoch's report, and the mean loss that the last validation returned."""
    returned = []

    class Returning(type(module())):
        def on_validation_epoch_start(self):
            returned.clear()

        def validation_step(self, batch, _index):
            loss = torch.nn.functional.cross_entropy(self(batch["x"]), batch["y"])
            returned.append(loss.item())
            return loss

    rank = session.current().world.rank
    trainer, hooks = trainer_of(Returning(), trainer_args=more), Hooks()
    trainer.fit(source(sizes, rank), source(sizes, rank), hooks)
    own = [(loss * step[rank], step[rank]) for loss, step in zip(returned, sizes, strict=True)]
    total = session.current().allreduce(np.array(own).sum(axis=0), ReduceOp.SUM, name="wanted")
    return average_over_ranks(hooks.reports[-1], session.current()).validation["loss"], total[0] / total[1]


@pytest.mark.parametrize("more", [{"val_check_interval": 0.25}, {"num_sanity_val_steps": 2}], ids=["often", "sanity"])
def test_the_loss_of_the_last_validation_of_an_epoch_is_reported(group, more):
    for loss, wanted in group.run(validated_twice, EVEN, more):
        assert loss == pytest.approx(wanted, rel=1e-6)


def values_read_by_rank_0(progress_bar):
    """Return the values of an epoch that a callback reads only on rank 0 while the module computes a metric."""
    from lightning.pytorch import Callback  # noqa: PLC0415

    class Reading(Callback):
        """Reads the values of an epoch on one rank."""

        def __init__(self):
            self.found = []

        def on_train_epoch_end(self, trainer, module):
            if trainer.is_global_zero:
                self.found.append({name: float(value) for name, value in trainer.callback_metrics.items()})

        def on_validation_epoch_end(self, trainer, module):
            self.on_train_epoch_end(trainer, module)

    class Computing(type(module())):
        def on_train_epoch_end(self):
            self.accuracy.compute()

        def on_validation_epoch_end(self):
            self.all_gather(torch.zeros(()))

    rank = session.current().world.rank
    more = {"trainer_args": {"enable_progress_bar": True}} if progress_bar else {"callbacks": [Reading()]}
    trainer, hooks = trainer_of(Computing(), **more), Hooks()
    trainer.fit(source(SOME_EMPTY, rank), source(SOME_EMPTY, rank), hooks)
    found = [] if progress_bar else trainer._package.callbacks[0].found
    return found, average_over_ranks(hooks.reports[-1], session.current())


@pytest.mark.parametrize("progress_bar", [False, True], ids=["callback", "progress bar"])
def test_a_single_rank_may_read_the_values_of_an_epoch(group, progress_bar):
    (values, record), (other, _) = group.run(values_read_by_rank_0, progress_bar)
    assert other == []
    assert record.train.keys() == {"loss", "accuracy", "twice"}
    if not progress_bar:
        of_validation, of_training = values
        assert of_validation["val_loss"] == pytest.approx(record.validation["loss"])
        assert of_training["twice_epoch"] == pytest.approx(record.train["twice"])
        assert of_training["accuracy"] == pytest.approx(record.train["accuracy"])


def logged_in_interrupted_epochs(interruptions):
    from torchmetrics import MetricCollection  # noqa: PLC0415
    from torchmetrics.classification import (  # noqa: PLC0415
        MulticlassAUROC,
        MulticlassF1Score,
        MulticlassPrecision,
        MulticlassRecall,
    )

    class Measured(type(module())):
        def __init__(self):
            super().__init__()
            self.f1, self.auroc = MulticlassF1Score(3), MulticlassAUROC(3)
            self.early = MulticlassF1Score(3)
            self.grouped = MetricCollection([MulticlassPrecision(3), MulticlassRecall(3)])  # they share their states

        def on_train_epoch_start(self):
            super().on_train_epoch_start()
            self.log("epoch", 1.0 + self.current_epoch, reduce_fx="sum")

        def training_step(self, batch, index):
            output = self(batch["x"]).detach()
            self.auroc.update(output, batch["y"])
            self.f1(output, batch["y"])
            self.grouped.update(output, batch["y"])
            self.log("f1", self.f1, on_step=True, on_epoch=True)
            self.log_dict(self.grouped, on_step=False, on_epoch=True)
            if index < 2:
                self.early(output, batch["y"])
                self.log("early", self.early, on_step=False, on_epoch=True)
            for reduction in ("sum", "max", "min", "mean"):
                self.log(reduction, output[0, 0], reduce_fx=reduction, on_step=False, on_epoch=True)
                if index == 0:  # the rest of the epoch does not log these
                    self.log(f"first {reduction}", output[0, 0], reduce_fx=reduction, on_step=False, on_epoch=True)
            if self.trainer.is_global_zero:
                self.log("of rank 0", float(index), rank_zero_only=True, on_step=False, on_epoch=True)
                if index == 0:
                    self.log("first of rank 0", output[0, 0], rank_zero_only=True, on_step=False, on_epoch=True)
            return super().training_step(batch, index)

        def on_train_epoch_end(self):
            self.log("auroc", self.auroc.compute())
            self.auroc.reset()

    how, rank = spec(DATA, 2), session.current().world.rank
    rows_of_rank = source([*SOME_EMPTY, *SOME_EMPTY], rank)
    return values_of_epochs(lambda: trainer_of(Measured(), 2), rows_of_rank, how, interruptions)


@pytest.mark.parametrize("interruptions", [[(0, 2)], [(1, 3), (1, 6)]], ids=["once", "twice in an epoch"])
def test_the_values_of_an_interrupted_epoch_are_over_all_of_its_rows(group, interruptions):
    for undisturbed, resumed in group.run(logged_in_interrupted_epochs, interruptions):
        assert_equal_values(undisturbed, resumed, rel=1e-5)
        assert {"f1", "auroc", "early", "sum", "first max", "first of rank 0", "MulticlassRecall"} <= set(resumed[0][0])


def values_with_early_validations(interruptions):
    class Validated(type(module())):
        def validation_step(self, batch, index):
            self.log("val_most", batch["x"].max(), reduce_fx="max")
            if self.trainer.is_global_zero:
                self.log("val_first", 1.0 + self.current_epoch, rank_zero_only=True)
            return super().validation_step(batch, index)

    how, rank = spec(DATA, 2), session.current().world.rank
    rows_of_rank = source([*SOME_EMPTY, *SOME_EMPTY], rank)
    arguments = {"val_check_interval": 5}
    return values_of_epochs(
        lambda: trainer_of(Validated(), 2, trainer_args=arguments), rows_of_rank, how, interruptions
    )


@pytest.mark.parametrize("interruptions", [[(0, 12)], [(1, 6), (1, 13)]], ids=["once", "twice in an epoch"])
def test_an_interrupted_epoch_has_the_values_of_a_validation_before_the_interruption(group, interruptions):
    """The epochs have 14 batches, and the last validation of each is after the tenth."""
    for undisturbed, resumed in group.run(values_with_early_validations, interruptions):
        assert_equal_values(undisturbed, resumed, rel=1e-5)
        assert set(resumed[1][1]) == {"loss", "most", "first"}
