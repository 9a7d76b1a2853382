"""Keras 3 and Lightning 2 raise the messages that the page about them quotes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_PAGE = (Path(__file__).parents[2] / "docs" / "horovod" / "newer-frameworks.md").read_text()
# The first column of the page's table has the old code, and the second column has the message.
_ROWS = dict(re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", _PAGE, re.MULTILINE))


def _raises_the_quoted_message(before: str, call: Callable[[], object]) -> None:
    """Check that the old code raises the message of the page, apart from quotation marks."""
    with pytest.raises((AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError)) as caught:
        call()
    assert _without_quotes(_ROWS[before]) in _without_quotes(str(caught.value))


def _without_quotes(text: str) -> str:
    return re.sub(r"[`'\"]", "", text)


def test_every_message_of_the_page_is_tried() -> None:
    tried = Path(__file__).read_text()
    assert len(_ROWS) > 20
    assert [before for before in _ROWS if before not in tried] == []


@pytest.mark.filterwarnings("ignore")
def test_keras_3_rejects_the_code_of_keras_2(tmp_path: Path) -> None:
    import keras  # noqa: PLC0415
    import tensorflow as tf  # noqa: PLC0415

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    old: dict[str, Callable[[], object]] = {
        "SGD(lr=0.1)": lambda: keras.optimizers.SGD(lr=0.1),
        "optimizer.lr": lambda: keras.optimizers.SGD(0.1).lr,
        "model.fit_generator(...)": lambda: model.fit_generator,
        "model.predict_classes(x)": lambda: model.predict_classes,
        'model.save("folder")': lambda: model.save(tmp_path / "folder"),
        'load_model("folder")': lambda: keras.models.load_model(tmp_path),
        'ModelCheckpoint("best")': lambda: keras.callbacks.ModelCheckpoint("best"),
        "ModelCheckpoint(..., period=2)": lambda: keras.callbacks.ModelCheckpoint("best.keras", period=2),
        "keras.losses.Reduction.SUM": lambda: keras.losses.Reduction,
        "keras.backend.mean(x)": lambda: keras.backend.mean,
        "keras.backend.set_session(...)": lambda: keras.backend.set_session,
        "keras.preprocessing.text.Tokenizer": lambda: keras.preprocessing.text,
        "tf.reduce_sum(keras.Input((2,)))": lambda: tf.reduce_sum(keras.Input((2,))),
    }
    for before, call in old.items():
        _raises_the_quoted_message(before, call)
    keras.optimizers.SGD(0.1, decay=0.01)  # accepted


@pytest.mark.filterwarnings("ignore")
def test_lightning_2_rejects_the_code_of_lightning_1() -> None:
    import lightning.pytorch as lightning  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from lightning.pytorch.plugins.environments import LightningEnvironment  # noqa: PLC0415

    alone = LightningEnvironment()  # otherwise Lightning looks for other processes with mpi4py, which starts Open MPI
    rows = torch.utils.data.TensorDataset(torch.ones(2, 1))
    called = []

    class Line(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.layer(batch[0]).sum()

        def validation_step(self, batch: Any, index: int) -> None:
            pass

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    def fit(**methods: Any) -> None:
        quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
        trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", plugins=[alone], **quiet)
        loader = torch.utils.data.DataLoader(rows)
        trainer.fit(type("Old", (Line,), methods)(), loader, loader)

    def with_index(self: Line, batch: Any, index: int, optimizer_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).sum()

    def step(self, epoch, batch_idx, optimizer, optimizer_idx, optimizer_closure):  # noqa: PLR0917  (as in Lightning 1)
        raise AssertionError("Lightning passes one argument less")

    old: dict[str, Callable[[], object]] = {
        "def validation_epoch_end(self, outputs)": lambda: fit(validation_epoch_end=lambda self, outputs: None),
        "def training_epoch_end(self, outputs)": lambda: fit(training_epoch_end=lambda self, outputs: None),
        "training_step(self, batch, index, optimizer_idx)": lambda: fit(training_step=with_index),
        "optimizer_step(self, epoch, batch_idx, optimizer, optimizer_idx, optimizer_closure)": lambda: fit(
            optimizer_step=step
        ),
        "self.hparams = {...}": lambda: setattr(Line(), "hparams", {}),
        "pytorch_lightning.metrics": lambda: lightning.metrics,
        "Trainer(gpus=1)": lambda: lightning.Trainer(gpus=1),
        "Trainer(resume_from_checkpoint=...)": lambda: lightning.Trainer(resume_from_checkpoint="last.ckpt"),
        "Trainer(checkpoint_callback=...)": lambda: lightning.Trainer(checkpoint_callback=True),
        "Trainer(progress_bar_refresh_rate=...)": lambda: lightning.Trainer(progress_bar_refresh_rate=1),
        'Trainer(strategy="horovod")': lambda: lightning.Trainer(strategy="horovod", plugins=[alone]),
    }
    for before, call in old.items():
        _raises_the_quoted_message(before, call)
    fit(on_epoch_end=called.append)
    assert called == [], "Lightning does not call it"
