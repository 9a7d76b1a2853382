"""Elastic fits of Lightning's Trainer on this machine: the rows of each epoch, the weights, and the callbacks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

import sparkhvd
from tests.launch import elastic_lightning as fits

pytestmark = pytest.mark.usefixtures("warm_ranks")

PRELOAD = ("torch._dynamo", "lightning.pytorch")
FAST = {"launcher": "local", "start_timeout": 60, "elastic_timeout": 60, "verbose": 0, "preload": PRELOAD}
REJOIN = FAST | {"cooldown_range": (0.5, 5)}
ALONE = FAST | {"cooldown_range": (60, 60)}  # no new rank starts in time


def batches(folder: Path) -> dict[tuple[int, int], list[int]]:
    """Return the rows of all ranks by epoch and batch; those of the last attempt if a batch was repeated."""
    lines = [json.loads(line) for path in folder.glob("log-*") for line in path.read_text().splitlines()]
    sizes = {(line[0], line[1]): line[3] for line in sorted(lines, key=lambda line: line[5])}
    used: dict[tuple[int, int], list[int]] = {}
    for epoch, index, _, size, rows, _ in sorted(lines, key=lambda line: line[2]):
        if sizes[epoch, index] == size:
            used.setdefault((epoch, index), []).extend(rows)
    return dict(sorted(used.items()))


def trained_on(used: dict[tuple[int, int], list[int]], accumulate: int = 1) -> list[torch.Tensor]:
    """Return the weights of one process that trains on these batches."""
    model = torch.nn.Linear(1, 1)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    _, features, labels = fits.rows()
    last = dict(used.keys())
    for (epoch, index), rows in used.items():
        optimizer.param_groups[0]["lr"] = 0.1 * 0.9**epoch
        loss = torch.nn.functional.mse_loss(model(features[rows]), labels[rows])
        (loss / accumulate).backward()
        if (index + 1) % accumulate == 0 or index == last[epoch]:
            optimizer.step()
            optimizer.zero_grad()
    return list(model.state_dict().values())


def require_exact(folder: Path, results: list[dict], accumulate: int = 1) -> dict[tuple[int, int], list[int]]:
    """Require that each epoch has used each row once, and that all ranks have the weights, counts and values for it."""
    used = batches(folder)
    epochs = results[0]["epoch"]
    for epoch in range(epochs):
        counts = Counter(row for (of, _), rows in used.items() if of == epoch for row in rows)
        assert counts == dict.fromkeys(range(fits.ROWS), 1), f"epoch {epoch}"
    steps = sum((index + 1) % accumulate == 0 or (epoch, index + 1) not in used for epoch, index in used)
    for result in results:
        assert (result["epoch"], result["step"], result["training"]) == (epochs, steps, True)
        assert result["lr"] == pytest.approx(0.1 * 0.9**epochs)
        assert [epoch for epoch, _, _ in result["epochs"]] == list(range(epochs))
        for weights, expected in zip(result["weights"], trained_on(used, accumulate), strict=True):
            assert torch.allclose(torch.tensor(weights), expected, atol=1e-5)
    return used


def test_a_fit_survives_a_lost_rank_and_takes_in_a_new_one_within_epochs(tmp_path):
    events = {("training_step", 1, 3, 1): "killed"}
    arguments = (str(tmp_path), events), {"sizes": (2, 1, 2)}
    results = sparkhvd.run_elastic(fits.train, *arguments, num_proc=2, min_num_proc=1, **REJOIN)
    used = require_exact(tmp_path, results)
    assert [result["sizes"] for result in results] == [[2, 1, 2]] * 2
    survivor = [json.loads(line)[3] for line in Path(tmp_path, results[0]["process"]).read_text().splitlines()]
    assert (survivor[0], 1 in survivor, survivor[-1]) == (2, True, 2), "the survivor has become rank 0"
    assert results[0]["epochs"] == results[1]["epochs"]
    lost = [index for epoch, index in used if epoch == 1]
    assert lost == list(range(9)), "three batches of two ranks and six of one"
    losses = [values["loss"] for _, _, values in results[0]["epochs"]]
    for epoch in (1, len(losses) - 1):
        assert losses[epoch] == pytest.approx(mean_loss(used, epoch), rel=1e-4), f"epoch {epoch}"


SOAK = pytest.mark.soak
KILLED = {"events": {("training_step", 1, 3, 1): "killed"}}


def saver(lightning):
    return lightning.callbacks.ModelCheckpoint(monitor="val", save_top_k=1, save_last=True)


def stopper(lightning):
    return lightning.callbacks.EarlyStopping("val", patience=1, min_delta=0.2)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param({"events": {("training_step", 1, 5, 1): "killed"}}, id="last batch", marks=SOAK),
        pytest.param(
            {"events": {("on_train_batch_end", 0, 5, 0): "killed"}}, id="end of last batch, rank 0", marks=SOAK
        ),
        pytest.param({"events": {("validation_step", 1, 1, 1): "killed"}}, id="validation"),
        pytest.param({"events": {("validation_step", 2, 0, 0): "killed"}}, id="last validation, rank 0", marks=SOAK),
        pytest.param({"events": {("on_train_epoch_end", 0, -1, 0): "killed"}}, id="end of epoch", marks=SOAK),
        pytest.param({"events": {("on_train_end", 3, -1, 1): "killed"}}, id="end of fit", marks=SOAK),
        pytest.param({"events": {("on_train_batch_start", 0, 0, 1): "killed"}}, id="first batch", marks=SOAK),
        pytest.param(
            {"events": {("training_step", 1, 3, 1): "a", ("training_step", 1, 3, 2): "b"}, "ranks": 3},
            id="two at once",
            marks=SOAK,
        ),
        pytest.param(
            {"events": {("training_step", 1, 1, 2): "a", ("training_step", 1, 3, 1): "b"}, "ranks": 3},
            id="two in turn",
            marks=SOAK,
        ),
        pytest.param(
            KILLED | {"options": {"accumulate_grad_batches": 2}, "accumulate": 2}, id="accumulated", marks=SOAK
        ),
        pytest.param(KILLED | {"options": {"accumulate_grad_batches": 4}, "accumulate": 4}, id="accumulated, 4"),
        pytest.param(KILLED | {"strategy": {"batches_per_commit": 4}}, id="commits every 4 batches", marks=SOAK),
        pytest.param(KILLED | {"options": {"val_check_interval": 0.5}}, id="validations within epochs", marks=SOAK),
        pytest.param(
            KILLED | {"options": {"val_check_interval": 4, "check_val_every_n_epoch": None}}, id="every 4", marks=SOAK
        ),
        pytest.param(KILLED | {"options": {"max_epochs": -1, "max_steps": 27}}, id="max_steps", marks=SOAK),
        pytest.param(KILLED | {"options": {"build": [stopper], "max_epochs": 9}}, id="early stopping", marks=SOAK),
        pytest.param(KILLED | {"options": {"build": [saver], "enable_checkpointing": True}}, id="checkpoints"),
        pytest.param(KILLED | {"shuffle": False}, id="in order", marks=SOAK),
        pytest.param(KILLED | {"flavour": "pytorch_lightning"}, id="pytorch_lightning", marks=SOAK),
    ],
)
def test_a_loss_anywhere_costs_no_row_and_no_count(tmp_path, case):
    options = {"default_root_dir": str(tmp_path), **case.get("options", {})}
    arguments = {name: case[name] for name in ("strategy", "flavour", "shuffle") if name in case}
    results = sparkhvd.run_elastic(
        fits.train,
        (str(tmp_path), case["events"]),
        {"options": options, **arguments},
        num_proc=case.get("ranks", 2),
        min_num_proc=1,
        **ALONE,
    )
    assert len(results) == 1
    assert results[0]["sizes"][-1] == 1, "no rank has joined"
    used = require_exact(tmp_path, results, case.get("accumulate", 1))
    losses = [values["loss"] for _, _, values in results[0]["epochs"]]
    if case.get("accumulate", 1) == 1:
        assert losses == pytest.approx([mean_loss(used, epoch) for epoch in range(len(losses))], rel=1e-4)
    if saver in options.get("build", ()):
        files = sorted(str(path) for path in (tmp_path / "checkpoints").iterdir())
        assert [results[0]["best"]] == [[tuple(files)]], "the best and the last checkpoint, and no others"
        assert torch.load(files[0])["epoch"] == min(results[0]["epochs"], key=lambda epoch: epoch[2]["val"])[0]
    if stopper in options.get("build", ()):
        assert (results[0]["stopped"], results[0]["epoch"]) == ([2], 3)


def mean_loss(used: dict[tuple[int, int], list[int]], epoch: int) -> float:
    """Return the mean over the rows of an epoch of the loss before each step."""
    _, features, labels = fits.rows()
    total = 0.0
    for (of, index), rows in used.items():
        if of == epoch:
            weight, bias = trained_on({key: value for key, value in used.items() if key < (of, index)} or {})
            total += float(((features[rows] * weight + bias) - labels[rows]).square().sum())
    return total / fits.ROWS
