"""``SparkHvdStrategy(elastic=True)`` without changes of the ranks: what it trains, and what it refuses."""

from __future__ import annotations

import lightning.pytorch as lightning
import pytest
import torch
import torchmetrics
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import sparkhvd.torch as hvd
from sparkhvd.errors import MismatchError, ParamError
from sparkhvd.lightning import SparkHvdStrategy
from sparkhvd.lightning.elastic import LoggedSum, combined_sums
from tests.ranks import LIGHTNING, RankGroup

ROWS = 24
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@pytest.fixture(scope="module")
def group():
    with RankGroup(2, imports=LIGHTNING) as started:
        yield started


def dataset(length=ROWS):
    features = torch.linspace(-1, 1, length).reshape(-1, 1)
    return TensorDataset(torch.arange(length), features, 3 * features)


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.rows = []

    def training_step(self, batch, _index):
        self.rows.append((self.current_epoch, batch[0].tolist()))
        return torch.nn.functional.mse_loss(self.layer(batch[1]), batch[2])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WithMetric(Line):
    def __init__(self):
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()

    def training_step(self, batch, index):
        self.error(self.layer(batch[1]), batch[2])
        return super().training_step(batch, index)


class Manual(Line):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class OneCycle(Line):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(dataset())


def fit(module=None, loader=None, **options):
    module = Line() if module is None else module
    trainer = lightning.Trainer(strategy=SparkHvdStrategy(elastic=True), **QUIET | {"max_epochs": 2} | options)
    trainer.fit(module, DataLoader(dataset(), 4) if loader is None else loader)
    return module, trainer


def train_in_a_fixed_job(shuffle):
    trained, trainer = fit(loader=DataLoader(dataset(), 4, shuffle=shuffle))
    weights = [value.tolist() for value in trained.layer.state_dict().values()]
    return trained.rows, trainer.current_epoch, trainer.global_step, weights


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_job_with_fixed_ranks_uses_each_row_once_per_epoch(group, shuffle):
    results = group.run(train_in_a_fixed_job, shuffle)
    for epoch in range(2):
        used = [row for rows, *_ in results for of, batch in rows if of == epoch for row in batch]
        assert sorted(used) == list(range(ROWS))
    first = [sorted(a + b) for (_, a), (_, b) in zip(results[0][0], results[1][0], strict=True)]
    assert (first[0] == list(range(8))) is not shuffle, "the ranks divide each global batch"
    assert results[0][1:] == results[1][1:]
    assert results[0][1:3] == (2, 6)


def refusals():
    """Return the messages of all refused fits."""
    rows = dataset()
    loaders = {
        "iterable": DataLoader(Stream(), 4),
        "no DataLoader": Rows(),
        "two": [DataLoader(rows, 4), DataLoader(rows, 4)],
        "batch sampler": DataLoader(rows, batch_sampler=Halves(RandomSampler(rows), 4, drop_last=False)),
        "no batch size": DataLoader(rows, batch_size=None),
        "drop_last": DataLoader(rows, 4, drop_last=True),
        "weighted": DataLoader(rows, 4, sampler=WeightedRandomSampler([1.0] * ROWS, ROWS)),
        "replacement": DataLoader(rows, 4, sampler=RandomSampler(rows, replacement=True)),
    }
    callbacks = lightning.callbacks
    options = {
        "fraction": {"limit_train_batches": 0.5},
        "overfit": {"overfit_batches": 2},
        "reload": {"reload_dataloaders_every_n_epochs": 1},
        "interval": {"val_check_interval": 2},
        "own sampling": {"use_distributed_sampler": False},
        "averaging": {"callbacks": [callbacks.StochasticWeightAveraging(1e-2)]},
        "accumulation": {"callbacks": [callbacks.GradientAccumulationScheduler({1: 2})]},
        "finder": {"callbacks": [callbacks.LearningRateFinder()]},
    }
    modules = {"manual": Manual(), "metric": WithMetric(), "one cycle": OneCycle()}
    messages = {}
    cases = [
        *({"loader": loader} | {"name": name} for name, loader in loaders.items()),
        *(option | {"name": name} for name, option in options.items()),
        *({"module": module, "name": name} for name, module in modules.items()),
    ]
    for case in cases:
        name = case.pop("name")
        with pytest.raises(ParamError) as caught:
            fit(**case)
        messages[name] = str(caught.value)
    with pytest.raises(MismatchError) as mismatch:
        fit(loader=DataLoader(dataset(ROWS + hvd.rank()), 4))
    return messages | {"lengths": str(mismatch.value)}


class Rows:
    """Batches that no DataLoader makes."""

    def __len__(self):
        return ROWS

    def __iter__(self):
        return iter(DataLoader(dataset(), 1))


class Halves(BatchSampler):
    pass


EXPECTED = {
    "iterable": "has an IterableDataset, whose remaining rows",
    "no DataLoader": "is a Rows object, whose remaining rows",
    "two": "takes one training DataLoader, got several",
    "batch sampler": "has a batch sampler of its own or no batch size",
    "no batch size": "has a batch sampler of its own or no batch size",
    "drop_last": "has drop_last=True",
    "weighted": "has a WeightedRandomSampler, so the remaining rows",
    "replacement": "has a RandomSampler, so the remaining rows",
    "fraction": "limit_train_batches=0.5 is not supported by an elastic fit",
    "overfit": "overfit_batches=2 is not supported",
    "reload": "reload_dataloaders_every_n_epochs=1 is not supported",
    "interval": "val_check_interval=2 counts the batches of an epoch",
    "own sampling": "has no ElasticSampler",
    "averaging": "The callback StochasticWeightAveraging is not supported",
    "accumulation": "The callback GradientAccumulationScheduler is not supported",
    "finder": "The callback LearningRateFinder is not supported",
    "manual": "An elastic fit needs automatic optimization",
    "metric": "The torchmetrics metric 'error' accumulates",
    "one cycle": "OneCycleLR with interval='step'",
    "lengths": "The training datasets of the ranks have [24, 25] rows",
}


def test_what_an_elastic_fit_cannot_do_is_refused_on_all_ranks(group):
    for messages in group.run(refusals):
        assert messages.keys() == EXPECTED.keys()
        for name, message in messages.items():
            assert EXPECTED[name] in message, name


def test_sums_of_an_epoch_count_once_whatever_ranks_continue_it():
    shared = [{"loss": LoggedSum("mean", value, 4, is_shared=True)} for value in (2.0, 3.0, 4.0)]
    for size in (1, 2, 4):
        parts = [combined_sums(shared, rank, size)["loss"] for rank in range(size)]
        assert (sum(part.value for part in parts), sum(part.weight for part in parts)) == (9.0, 12)
    own = [{"loss": LoggedSum("mean", value, 4, is_shared=False)} for value in (2.0, 4.0)]
    for rank in range(3):
        part = combined_sums(own, rank, 3)["loss"]
        assert part.value / part.weight == pytest.approx(0.75)
    for operation, value in (("max", 4.0), ("min", 2.0)):
        extremes = [{"x": LoggedSum(operation, value, 0, is_shared=True)} for value in (2.0, 4.0)]
        assert {combined_sums(extremes, rank, 2)["x"].value for rank in range(2)} == {value}
    only_first = combined_sums([{"x": LoggedSum("sum", 5.0, 0, is_shared=False)}, {}], 0, 2)
    assert only_first["x"].value == 5.0
    assert not combined_sums([], 0, 1)
