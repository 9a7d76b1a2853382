"""Elastic fits of Lightning's Trainer that tests disturb; imported by their ranks."""

from __future__ import annotations

import itertools
import json
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.launch.elastic_training import MOST_STEPS, kill, once

ROWS, BATCH = 48, 4
_SECONDS_OF_A_BATCH = 0.02  # so that new ranks join before the fit is over


def rows():
    import torch  # noqa: PLC0415

    features = torch.linspace(-1, 1, ROWS).reshape(-1, 1)
    return torch.arange(ROWS), features, features.square() + 2 * features


def train(  # noqa: C901  (the parts of one program)
    folder: str,
    events: dict[tuple[str, int, int, int], str],
    *,
    sizes: tuple[int, ...] = (),
    flavour: str = "lightning.pytorch",
    strategy: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    shuffle: bool = True,
) -> dict[str, Any]:
    """Fit a line; every rank logs the rows of its completed batches into a file of its own.

    Args:
        folder: the folder of the files.
        events: by (hook, epoch, batch, rank), a name: the rank is killed there, once per name.
        sizes: with sizes, train until the job has had them, and then to the end of the epoch.
        flavour: the package of Lightning.
        strategy: options of the strategy.
        options: options of the Trainer.
        shuffle: whether the loader shuffles the rows.
    """
    import torch  # noqa: PLC0415

    import sparkhvd.torch as hvd  # noqa: PLC0415
    from sparkhvd.lightning import strategy_class  # noqa: PLC0415

    lightning = import_module(flavour)
    log = Path(folder, f"log-{time.monotonic_ns()}")
    seen_sizes: list[int] = []

    class Line(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            if not Path(folder, "first.pt").exists():  # new ranks begin with other weights
                torch.nn.init.zeros_(self.layer.weight)
                torch.nn.init.zeros_(self.layer.bias)

        def _note(self, hook: str, index: int) -> None:
            event = events.get((hook, self.current_epoch, index, hvd.rank()))
            if event and not self.trainer.sanity_checking and once(folder, event):
                kill()

        def training_step(self, batch, index):
            _, features, labels = batch
            self._note("training_step", index)
            loss = torch.nn.functional.mse_loss(self.layer(features), labels)
            self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

        def on_train_batch_start(self, batch, index):
            self._note("on_train_batch_start", index)

        def on_train_batch_end(self, outputs, batch, index):
            line = [self.current_epoch, index, hvd.rank(), hvd.size(), batch[0].tolist(), time.monotonic()]
            with log.open("a") as file:
                file.write(json.dumps(line) + "\n")
            self._note("on_train_batch_end", index)
            time.sleep(_SECONDS_OF_A_BATCH if sizes else 0.0)

        def validation_step(self, batch, index):
            self._note("validation_step", index)
            assert not self.training
            loss = torch.nn.functional.mse_loss(self.layer(batch[1]), batch[2])
            self.log("val", loss, on_epoch=True, sync_dist=True)

        def on_train_epoch_end(self):
            assert self.training
            self._note("on_train_epoch_end", -1)
            if seen_sizes and sizes:
                self.trainer.should_stop = seen_sizes[-1:] == [len(sizes)]

        def on_train_end(self):
            self._note("on_train_end", -1)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    class History(lightning.Callback):
        """Keeps what a job has seen, in a state that Lightning saves."""

        def __init__(self) -> None:
            self.sizes: list[int] = []
            self.epochs: list[Any] = []

        def state_dict(self):
            return {"sizes": list(self.sizes), "epochs": list(self.epochs)}

        def load_state_dict(self, state):
            self.sizes, self.epochs = list(state["sizes"]), list(state["epochs"])

        def on_train_batch_start(self, trainer, module, batch, index):
            self.sizes = [size for size, _ in itertools.groupby([*self.sizes, hvd.size()])]
            if self.sizes == list(sizes):
                seen_sizes[:] = [len(sizes)]

        def on_train_epoch_end(self, trainer, module):
            values = {name: float(value) for name, value in trainer.callback_metrics.items()}
            self.epochs.append([trainer.current_epoch, trainer.global_step, values])

    hvd.init()
    history, module = History(), Line()
    arguments = {
        "max_epochs": MOST_STEPS if sizes else 3,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        **(options or {}),
    }
    arguments["callbacks"] = [history, *(build(lightning) for build in arguments.pop("build", ()))]
    made = strategy_class(flavour)(elastic=True, **(strategy or {}))
    trainer = lightning.Trainer(strategy=made, **arguments)
    dataset = torch.utils.data.TensorDataset(*rows())
    loader = torch.utils.data.DataLoader(dataset, BATCH, shuffle=shuffle)
    validation = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows()), 12)
    trainer.fit(module, loader, validation)
    return {
        "sizes": history.sizes,
        "epochs": history.epochs,
        "epoch": trainer.current_epoch,
        "step": trainer.global_step,
        "weights": [value.tolist() for value in module.state_dict().values()],
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "rank": hvd.rank(),
        "process": log.name,
        "best": [(one.best_model_path, one.last_model_path) for one in trainer.checkpoint_callbacks],
        "stopped": [getattr(one, "stopped_epoch", None) for one in trainer.early_stopping_callbacks],
        "training": module.training,
    }
