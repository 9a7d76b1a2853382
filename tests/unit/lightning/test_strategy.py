"""``Trainer(strategy="sparkhvd")`` in real ranks, compared with one process that trains on all rows."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import numpy as np
import pytest
import torch

from sparkhvd.comm import session
from sparkhvd.errors import ConfigError
from sparkhvd.lightning.normalization import ReplacedNormalizations
from sparkhvd.torch import SyncBatchNorm
from tests.ranks import LIGHTNING, RankGroup

SIZE = 2
ROWS, FEATURES = 48, 5
FLAVOURS = ("lightning.pytorch", "pytorch_lightning")


@pytest.fixture(scope="module")
def group():
    with RankGroup(SIZE, imports=LIGHTNING) as started:
        yield started


def rows():
    random = np.random.default_rng(3)
    x = torch.from_numpy(random.normal(size=(ROWS, FEATURES))).float()
    return torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True).sin())


def loader(batch_size, divided_by=1):
    """Return a loader of rows in order; each of ``divided_by`` ranks gets its part of every batch."""
    rank = session.current().world.rank if divided_by > 1 else 0
    sampler = torch.utils.data.DistributedSampler(rows(), divided_by, rank, shuffle=False)
    return torch.utils.data.DataLoader(rows(), batch_size=batch_size // divided_by, sampler=sampler)


def network():
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()]).numpy()


def simple(flavour, normalize=False):
    lightning = import_module(flavour)

    class Simple(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            layers = network()
            self.layers = layers if normalize else torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[2])

        def training_step(self, batch, _index):
            x, y = batch
            loss = torch.nn.functional.mse_loss(self.layers(x), y)
            self.log("train", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

        def validation_step(self, batch, _index):
            self.log("val", torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    return Simple()


def adversarial(flavour):
    lightning = import_module(flavour)

    class Adversarial(lightning.LightningModule):
        """Uses two manual optimizers; the second accumulates over two batches and is clipped."""

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            layers = network()
            self.first, self.second = layers[0], layers[2]

        def training_step(self, batch, index):
            one, two = self.optimizers()
            loss = torch.nn.functional.mse_loss(self.second(self.first(batch[0]).tanh()), batch[1])
            self.toggle_optimizer(one)
            one.zero_grad()
            self.manual_backward(loss)
            one.step()
            self.untoggle_optimizer(one)
            last = index % 2 == 1
            with two.toggle_model(sync_grad=last):
                again = torch.nn.functional.mse_loss(self.second(self.first(batch[0]).tanh()), batch[1])
                self.manual_backward(again)
                if last:
                    self.clip_gradients(two, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
                    two.step()
                    two.zero_grad()

        def configure_optimizers(self):
            return [
                torch.optim.SGD(self.first.parameters(), lr=0.1),
                torch.optim.SGD(self.second.parameters(), lr=0.3, momentum=0.9),
            ]

    return Adversarial()


def plugins(flavour):
    """Return a cluster environment; without one, Lightning searches for one and starts MPI if mpi4py is installed."""
    from sparkhvd.lightning.flavour import import_fabric  # noqa: PLC0415

    return [import_fabric(flavour).plugins.environments.LightningEnvironment()]


def trained(flavour, module, batch_size, strategy, **more):
    """Train; ``strategy`` "auto" is one process with all rows."""
    trainer = import_module(flavour).Trainer(
        strategy=strategy,
        plugins=plugins(flavour),
        accelerator="cpu",
        devices=1,
        logger=False,
        **{
            "max_epochs": 2,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **more,
        },
    )
    divided_by = 1 if strategy == "auto" else session.current().world.size
    trainer.fit(module, loader(batch_size, divided_by), loader(batch_size, divided_by))
    return trainer


def compared(flavour, kind, batch_size, more, arguments):
    """Return parameters and logged metrics with the strategy and in one process."""
    import sparkhvd.lightning  # noqa: PLC0415

    sparkhvd.lightning.register(flavour)
    results = []
    for strategy in ("sparkhvd", "auto"):
        module = kind(flavour, **arguments)
        trainer = trained(flavour, module, batch_size, strategy, **more)
        results.append((flat(module), {name: float(value) for name, value in trainer.callback_metrics.items()}))
    return results


def assert_close(results):
    start = flat(network())
    for (parameters, logged), (wanted, metrics) in results:
        assert np.linalg.norm(wanted[: len(parameters)] - start[: len(parameters)]) > 0.05  # parameters have changed
        assert np.linalg.norm(parameters - wanted) < 1e-5 * np.linalg.norm(wanted)
        assert logged == pytest.approx(metrics, rel=1e-4)
        assert np.array_equal(parameters, results[0][0][0]), "ranks have different parameters"


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_ranks_train_like_one_process_with_all_rows(group, flavour):
    assert_close(group.run(compared, flavour, simple, 8, {"gradient_clip_val": 0.05}, {}))


def test_accumulated_batches_are_exchanged_once_and_count_equally(group):
    """Six batches per epoch are one and a half steps."""
    assert_close(group.run(compared, FLAVOURS[0], simple, 8, {"accumulate_grad_batches": 4}, {}))


def test_two_manual_optimizers_train_like_in_one_process(group):
    assert_close(group.run(compared, FLAVOURS[0], adversarial, 8, {}, {}))


def test_sync_batchnorm_normalizes_over_all_ranks_and_keeps_the_users_layers(group):
    results = group.run(compared, FLAVOURS[0], simple, 16, {"sync_batchnorm": True}, {"normalize": True})
    bias = slice(8 * FEATURES, 8 * FEATURES + 8)  # its gradient consists of rounding errors
    for (found, _), (wanted, _) in results:
        assert np.linalg.norm(np.delete(found - wanted, bias)) < 1e-4 * np.linalg.norm(wanted)


def layers_after_sync_batchnorm():
    module = simple(FLAVOURS[0], normalize=True)
    before = [id(layer) for layer in module.layers]
    trained(FLAVOURS[0], module, 16, "sparkhvd", sync_batchnorm=True)
    return [id(layer) for layer in module.layers] == before, int(module.layers[1].num_batches_tracked)


def test_a_fit_with_sync_batchnorm_restores_the_modules_own_layers_with_the_new_statistics(group):
    assert group.run(layers_after_sync_batchnorm) == [(True, 6)] * SIZE


def test_sync_batchnorm_replaces_a_layer_under_all_of_its_names():
    layer = torch.nn.BatchNorm1d(8)
    model = torch.nn.Sequential(layer, torch.nn.Linear(8, 8), layer, torch.nn.Sequential(layer))
    replaced = ReplacedNormalizations(model)
    assert isinstance(model[0], SyncBatchNorm)
    assert model[0] is model[2] is model[3][0]
    replaced.close()
    assert layer is model[0] is model[2] is model[3][0]


def in_bfloat16(strategy):
    module = simple(FLAVOURS[0])
    before = flat(module)
    trained(FLAVOURS[0], module, 8, strategy, precision="bf16-mixed")
    return flat(module), float(np.linalg.norm(flat(module) - before))


def test_mixed_precision_trains_the_same_parameters_on_all_ranks(group):
    found = group.run(in_bfloat16, "sparkhvd")
    assert np.array_equal(found[0][0], found[1][0])
    assert found[0][1] > 0.05


def monitored(folder):
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint  # noqa: PLC0415

    rank = session.current().world.rank
    module = simple(FLAVOURS[0])
    # The metric gets worse only on rank 1.
    module.on_train_epoch_end = lambda: module.log("odd", float(rank * (module.current_epoch + 1)))
    best = ModelCheckpoint(folder, monitor="val", filename="best")
    stop = EarlyStopping("odd", patience=0, check_on_train_epoch_end=True)
    trainer = trained(
        FLAVOURS[0], module, 8, "sparkhvd", max_epochs=9, callbacks=[best, stop], enable_checkpointing=True
    )
    again = simple(FLAVOURS[0])
    again.load_state_dict(torch.load(best.best_model_path, weights_only=True)["state_dict"])
    return trainer.current_epoch, best.best_model_path, float(best.best_model_score)


def test_early_stopping_and_the_best_checkpoint_agree_over_ranks(group, tmp_path):
    results = group.run(monitored, str(tmp_path))
    assert results[0] == results[1]
    assert results[0][0] == 2, "the request of one rank to stop was ignored"
    assert [file.name for file in tmp_path.iterdir()] == ["best.ckpt"]


def validated_by_time():
    """Return after which batches the ranks validate at an interval that passes much earlier on rank 0."""
    from lightning.pytorch import Callback  # noqa: PLC0415

    class Slow(Callback):
        """Makes the last validation seem long ago on one rank, like a rank that has waited for a slow disk."""

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if (trainer.current_epoch, batch_idx) == (0, 2) and trainer.global_rank == 0:
                trainer._last_val_time -= 7200.0

        def on_validation_start(self, trainer, module):
            validations.append((trainer.current_epoch, trainer.fit_loop.batch_idx))

    validations = []
    more = {"val_check_interval": {"hours": 1}, "num_sanity_val_steps": 0}
    trained(FLAVOURS[0], simple(FLAVOURS[0]), 8, "sparkhvd", callbacks=[Slow()], **more)
    return validations


def test_ranks_validate_together_if_an_interval_of_time_has_passed_on_one_of_them(group):
    assert group.run(validated_by_time) == [[(0, 2)]] * SIZE


def collected():
    import lightning.pytorch as lightning  # noqa: PLC0415
    from torchmetrics.classification import BinaryAccuracy  # noqa: PLC0415

    rank = session.current().world.rank
    strategy = lightning.Trainer(
        strategy="sparkhvd", accelerator="cpu", logger=False, plugins=plugins(FLAVOURS[0])
    ).strategy
    from sparkhvd.lightning.reductions import SharedMetrics  # noqa: PLC0415

    holder = torch.nn.ModuleList([BinaryAccuracy()])
    shared = SharedMetrics(holder)
    holder[0].update(torch.tensor([1.0] * (rank + 1)), torch.tensor([rank] * (rank + 1)))
    accuracy = float(holder[0].compute())
    shared.close()
    return {
        "mean": strategy.reduce(torch.tensor([1.0, rank])).tolist(),
        "whole": float(strategy.reduce(torch.tensor(rank), reduce_op="mean")),
        "sum": int(strategy.reduce(torch.tensor(rank + 1), reduce_op=torch.distributed.ReduceOp.SUM)),
        "gathered": strategy.all_gather(torch.full((1, 2), float(rank))).tolist(),
        "object": strategy.broadcast({"from": rank}, 1),
        "any": strategy.reduce_boolean_decision(rank == 1, all=False),
        "all": strategy.reduce_boolean_decision(rank == 1),
        "accuracy": accuracy,
        "alone": holder[0].dist_sync_fn is None,
        "sampler": strategy.distributed_sampler_kwargs["rank"] == rank,
    }


def test_collectives_of_the_strategy_combine_the_values_of_the_ranks(group):
    wanted = {
        "mean": [1.0, 0.5],
        "whole": 0.5,
        "sum": 3,
        "gathered": [[[0.0, 0.0]], [[1.0, 1.0]]],
        "object": {"from": 1},
    }
    wanted |= {"any": True, "all": False, "accuracy": pytest.approx(2 / 3), "alone": True, "sampler": True}
    assert group.run(collected) == [wanted] * SIZE


def gradient_of_gathered():
    import lightning.pytorch as lightning  # noqa: PLC0415

    rank = session.current().world.rank
    strategy = lightning.Trainer(
        strategy="sparkhvd", accelerator="cpu", logger=False, plugins=plugins(FLAVOURS[0])
    ).strategy
    value = torch.tensor([1.0, 2.0], requires_grad=True)
    factors = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    ((rank + 1) * factors * strategy.all_gather(value, sync_grads=True)).sum().backward()
    return value.grad.tolist(), strategy.all_gather(value).requires_grad


def test_the_gradient_of_gathered_tensors_is_the_sum_over_the_ranks(group):
    assert group.run(gradient_of_gathered) == [([3.0, 6.0], False), ([9.0, 12.0], False)]


def rows_seen():
    import sparkhvd.lightning  # noqa: PLC0415
    import sparkhvd.torch as hvd  # noqa: PLC0415

    module, seen = simple(FLAVOURS[0]), []
    module.on_train_batch_end = lambda outputs, batch, batch_idx: seen.extend(batch[0][:, 0].tolist())
    trainer = import_module(FLAVOURS[0]).Trainer(
        strategy=sparkhvd.lightning.SparkHvdStrategy(compression=hvd.Compression.bf16),
        accelerator="cpu",
        max_epochs=1,
        barebones=True,
    )
    trainer.fit(module, torch.utils.data.DataLoader(rows(), batch_size=8))
    return seen


def test_lightning_divides_the_rows_of_a_loader_among_the_ranks(group):
    found = group.run(rows_seen)
    assert sorted(found[0] + found[1]) == sorted(rows().tensors[0][:, 0].tolist())


def backward_by_itself():
    module = adversarial(FLAVOURS[0])
    module.manual_backward = lambda loss: loss.backward()
    trained(FLAVOURS[0], module, 8, "sparkhvd")


def test_a_backward_pass_that_bypasses_the_strategy_is_an_error(group):
    for outcome in group.outcomes(backward_by_itself):
        assert "call self.manual_backward(loss)" in outcome.failure


ONE_OF_TWO = """
import sys
import pytorch_lightning
import sparkhvd.lightning
assert "sparkhvd" in pytorch_lightning.strategies.StrategyRegistry
assert "lightning" not in sys.modules, "both were imported"
"""


def test_the_import_registers_the_name_only_with_the_lightning_in_use():
    command = [sys.executable, "-c", ONE_OF_TWO]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def kept_and_validated(folder, flavour):
    """Return the validation losses by the file written after each, and the module's final buffers."""
    lightning = import_module(flavour)
    model = simple(flavour, normalize=True)
    # Every validation uses all rows on both ranks, so its loss depends only on the model.
    kept = lightning.callbacks.ModelCheckpoint(folder, save_top_k=-1, monitor="val", mode="min")
    trainer = lightning.Trainer(
        strategy="sparkhvd",
        plugins=plugins(flavour),
        accelerator="cpu",
        devices=1,
        callbacks=[kept],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        max_epochs=1,
        val_check_interval=2,
    )
    trainer.fit(model, loader(16, SIZE), loader(48))
    buffers = {name: value.numpy() for name, value in model.named_buffers()}
    return {path: score.item() for path, score in kept.best_k_models.items()}, buffers


def test_a_validation_measures_the_checkpoint_that_is_made_after_it(group, tmp_path):
    found = group.run(kept_and_validated, str(tmp_path), FLAVOURS[0])
    (kept, buffers), (_, others) = found
    for name, buffer in buffers.items():
        assert np.array_equal(buffer, others[name]), name
    x, y = rows().tensors
    assert len(kept) == 1
    for path, score in kept.items():
        model = simple(FLAVOURS[0], normalize=True)
        model.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
        with torch.no_grad():
            wanted = torch.nn.functional.mse_loss(model.eval().layers(x), y)
        assert score == pytest.approx(wanted.item(), rel=1e-5)


def with_checkpoints_and_validations(flavour, folder, more):
    """Return the state of the trained module, and the buffers in its last checkpoint within an epoch."""
    lightning = import_module(flavour)
    kept = lightning.callbacks.ModelCheckpoint(folder, filename="kept-{step}", save_top_k=-1, every_n_train_steps=4)
    model = simple(flavour, normalize=True)
    saves = {"callbacks": [kept], "enable_checkpointing": True} if folder is not None else {}
    trained(flavour, model, 8, "sparkhvd", **saves, **more)
    return {name: value.numpy() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("saves", "more"),
    [(True, {}), (False, {"val_check_interval": 2}), (True, {"val_check_interval": 3}), (True, {"max_steps": 10})],
    ids=["checkpoints", "validations", "both", "ends within an epoch"],
)
def test_checkpoints_and_validations_within_an_epoch_do_not_change_the_running_statistics(group, tmp_path, saves, more):
    undisturbed = {"limit_val_batches": 0, **({"max_steps": more["max_steps"]} if "max_steps" in more else {})}
    alone = group.run(with_checkpoints_and_validations, FLAVOURS[0], None, undisturbed)
    states = group.run(with_checkpoints_and_validations, FLAVOURS[0], str(tmp_path) if saves else None, more)
    for state in (*alone, *states):
        for name, value in alone[0].items():
            np.testing.assert_array_equal(state[name], value, err_msg=name)
    if saves:
        files = sorted(tmp_path.glob("*.ckpt"))
        assert len(files) == (2 if "max_steps" in more else 3)


def saved_by_an_exception(folder):
    """Fail in a fit whose callback saves a checkpoint only on rank 0."""
    import lightning.pytorch as lightning  # noqa: PLC0415
    from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: PLC0415

    class Failing(type(simple("lightning.pytorch", normalize=True))):
        def training_step(self, batch, index):
            if index == 1:
                raise ArithmeticError("no such step")
            return super().training_step(batch, index)

    first = session.current().world.rank == 0
    callbacks = [ModelCheckpoint(folder, filename="kept", save_on_exception=True, save_last=True)] if first else []
    more = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "default_root_dir": folder}
    how = {"strategy": "sparkhvd", "plugins": plugins("lightning.pytorch"), "accelerator": "cpu", "devices": 1}
    trainer = lightning.Trainer(**how, max_epochs=1, callbacks=callbacks, **more)
    with pytest.raises(ArithmeticError, match="no such step"):
        trainer.fit(Failing(), loader(4, SIZE))


def test_a_checkpoint_during_an_exception_does_not_wait_for_other_ranks(group, tmp_path):
    group.run(saved_by_an_exception, tmp_path)
    assert [path.name for path in tmp_path.glob("*.ckpt")]


def train_a_layer_that_is_added_late(flavour):
    lightning = import_module(flavour)
    module = simple(flavour)

    class Adding(lightning.Callback):
        def on_train_start(self, trainer, pl_module):
            pl_module.layers.append(torch.nn.Linear(1, 1))
            trainer.optimizers[0].add_param_group({"params": pl_module.layers[-1].parameters()})

    with pytest.raises(ConfigError, match=r"The optimizer has 2 parameters that the module did not have"):
        trained(flavour, module, 8, "sparkhvd", callbacks=[Adding()])


def test_layers_that_are_added_after_the_start_are_refused(group):
    group.run(train_a_layer_that_is_added_late, FLAVOURS[0])
