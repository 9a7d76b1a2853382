"""N ranks train like one process: plain PyTorch on the same global batches gives the same parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from sparkhvd import LightningEstimator, Store, TorchEstimator
from sparkhvd.data import ParquetSource
from sparkhvd.data.prepare.prepared_data import prepare_data
from sparkhvd.world import World

pytestmark = pytest.mark.spark

FEATURES = 5
BATCH = 8
SEED = 11


@pytest.fixture
def store(tmp_path):
    return Store.create(str(tmp_path / "store"))


def rows(count):
    random = np.random.default_rng(2)
    return random.normal(size=(count, FEATURES)), random.normal(size=count)


def frame(spark, count, partitions):
    """Return rows in partitions of uneven size."""
    x, y = rows(count)
    data = [([float(v) for v in features], float(label)) for features, label in zip(x, y, strict=True)]
    return spark.createDataFrame(data, "x array<double>, y double").repartition(partitions, "y")


def network():
    torch.manual_seed(4)
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 12), torch.nn.Tanh(), torch.nn.Linear(12, 1))


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()


def fit(spark, store, count, num_proc, *, epochs, shuffle):
    model = network()
    return TorchEstimator(
        num_proc=num_proc,
        store=store,
        model=model,
        optimizer=optimizer_of(model),
        loss=functional.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=BATCH,
        epochs=epochs,
        random_seed=SEED,
        shuffle=shuffle,
        verbose=0,
    ).fit(frame(spark, count, 3))


def plain(batches):
    """Train with plain PyTorch on batches of (features, labels)."""
    model = network()
    optimizer = optimizer_of(model)
    for x, y in batches:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(torch.from_numpy(x).float()), torch.from_numpy(y).float().reshape(-1, 1))
        loss.backward()
        optimizer.step()
    return flat(model)


def by_plan(spark, store, count, num_proc, epochs, *, shuffle):
    """Return the global batches of a fit in the order of its plan."""
    assert store.list("datasets") == [], "rows that no later fit can reuse are left after the fit"
    with prepare_data(num_proc, store, frame(spark, count, 3), ["y"], ["x"]) as data:  # the same row groups again
        return batches_of(store, data.manifest, num_proc, epochs, shuffle=shuffle)


def batches_of(store, manifest, num_proc, epochs, *, shuffle):
    all_rows = list(ParquetSource(store, manifest, "train", World(), 1000, seed=0, shuffle=False).epoch(0))
    x = np.concatenate([batch.columns["x"] for batch in all_rows])
    y = np.concatenate([batch.columns["y"] for batch in all_rows])
    world = World(size=num_proc)
    plan = ParquetSource(store, manifest, "train", world, BATCH, seed=SEED, shuffle=shuffle).plan
    ids = [[np.concatenate(step) for step in plan.global_batches(epoch)] for epoch in range(epochs)]
    for epoch in ids:
        assert sorted(np.concatenate(epoch)) == list(range(len(y)))
    if shuffle:
        assert list(np.concatenate(ids[0])) != list(np.concatenate(ids[1]))
    else:
        assert list(ids[0][0][:BATCH]) == list(range(BATCH))
    return [(x[step], y[step]) for epoch in ids for step in epoch]


def assert_equal(model, wanted):
    parameters = flat(model.getModel())
    assert np.linalg.norm(wanted - flat(network())) > 0.05 * np.linalg.norm(wanted)  # it has learned something
    assert np.linalg.norm(parameters - wanted) < 1e-5 * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("num_proc", "count", "epochs"),
    [
        # The last batch is partial and uneven.
        pytest.param(2, 20 * 2 * BATCH + 7, 1, marks=pytest.mark.soak),
        (3, 10 * 3 * BATCH + 2, 2),  # in the last step one rank has no row
    ],
)
def test_without_shuffling_each_rank_has_its_part_of_the_dataframe_in_order(spark, store, num_proc, count, epochs):
    model = fit(spark, store, count, num_proc, epochs=epochs, shuffle=False)
    assert_equal(model, plain(by_plan(spark, store, count, num_proc, epochs, shuffle=False)))


def test_with_shuffling_rows_come_in_the_order_of_the_plan_and_a_seed_repeats_the_run(spark, store, tmp_path):
    count, epochs = 10 * 2 * BATCH + 1, 2  # in the last step one rank has no row
    model = fit(spark, store, count, 2, epochs=epochs, shuffle=True)
    assert_equal(model, plain(by_plan(spark, store, count, 2, epochs, shuffle=True)))
    again = fit(spark, Store.create(str(tmp_path / "another store")), count, 2, epochs=epochs, shuffle=True)
    assert np.array_equal(flat(again.getModel()), flat(model.getModel()))


CLASSES, STEPS = 3, 4
FILL = {"y": -100}  # the label that losses ignore by default


def classifier():
    torch.manual_seed(4)
    return torch.nn.Sequential(torch.nn.Linear(1, 6), torch.nn.Tanh(), torch.nn.Linear(6, CLASSES))


@pytest.mark.filterwarnings("ignore:.*isinstance.treespec.*")  # within Lightning 2.6 with torch 2.13
@pytest.mark.parametrize(
    ("kind", "passes", "labels", "loss"),
    [
        (TorchEstimator, 1, "id % 3", torch.nn.CrossEntropyLoss(torch.tensor([1.0, 8.0, 0.2]), ignore_index=0)),
        # All labels of one rank are ignored, so its divisor is 0.
        (TorchEstimator, 2, "IF(id < 19, 0, id % 3)", torch.nn.CrossEntropyLoss(ignore_index=0)),
        pytest.param(
            LightningEstimator,
            1,
            "IF(id < 19, 0, id % 3)",
            torch.nn.CrossEntropyLoss(torch.tensor([1.0, 8.0, 0.2])),
            marks=pytest.mark.soak,
        ),
        (LightningEstimator, 2, "IF(id < 19, 0, id % 3)", torch.nn.CrossEntropyLoss(ignore_index=0)),
        (TorchEstimator, 1, "IF(id < 19 AND id != 2, NULL, id % 3)", torch.nn.CrossEntropyLoss()),
    ],
    ids=["torch-both", "torch-none_counts", "lightning-weights", "lightning-none_counts", "torch-filled"],
)
def test_a_loss_over_counted_labels_divides_by_the_labels_of_all_ranks(spark, kind, passes, labels, loss):
    """Train with epochs of one step over all rows, however the ranks share them."""
    df = spark.range(37).selectExpr("id / 37.0D AS x", f"CAST({labels} AS INT) AS y").coalesce(2)
    rows = np.array(df.fillna(FILL).collect())
    x, y = torch.from_numpy(rows[:, :1]).float(), torch.from_numpy(rows[:, 1]).long()
    model, wanted = classifier(), classifier()
    accumulated = {"backward_passes_per_step": passes}
    if kind is LightningEstimator:
        accumulated = {"trainer_args": {"accumulate_grad_batches": passes}}
    trained = kind(
        num_proc=2,
        model=model,
        optimizer=optimizer_of(model),
        loss=loss,
        feature_cols=["x"],
        label_cols=["y"],
        fill=FILL,
        batch_size=20 // passes,
        epochs=STEPS,
        random_seed=SEED,
        shuffle=False,
        verbose=0,
        **accumulated,
    ).fit(df)
    optimizer, losses = optimizer_of(wanted), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss(wanted(x), y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert np.linalg.norm(flat(wanted) - flat(classifier())) > 0.05
    assert np.linalg.norm(flat(trained.getModel()) - flat(wanted)) < 1e-5
    assert [epoch["train"]["loss"] for epoch in trained.getHistory()] == pytest.approx(losses, rel=1e-5)
