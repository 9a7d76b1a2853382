"""An estimator and a model that derive from Horovod's for Lightning 1, like those of other libraries."""

from __future__ import annotations

from typing import Any

import torch
from horovod.spark.lightning import TorchEstimator, TorchModel
from pyspark.ml.param import Param, Params
from pytorch_lightning import LightningModule
from pytorch_lightning.utilities import _module_available

assert _module_available("horovod")  # other libraries call this function, which Lightning 2 no longer defines


class Slope(LightningModule):
    """Learns a factor, and counts the outputs of its steps in hooks of Lightning 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.layer.weight)

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs["length"].float().reshape(-1, 1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0005)

    def training_step(self, batch: Any, _number: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self(**batch), batch["target"].reshape(-1, 1).float())

    def validation_step(self, batch: Any, number: int) -> dict[str, torch.Tensor] | None:
        return {"rows": torch.tensor(float(len(batch["target"])))} if number == 0 else None

    def training_epoch_end(self, outputs: list[Any]) -> None:
        self.log("steps", float(len(outputs)))
        assert all(output["loss"] >= 0 for output in outputs)

    def validation_epoch_end(self, outputs: list[Any]) -> None:
        self.log("batches", float(len(outputs)))
        assert outputs[0]["rows"] > 0


def length(row: Any) -> dict[str, Any]:
    """Return new columns in place of those of the row: the length of the word, and the label."""
    return {"length": float(len(row["word"])), "target": torch.tensor(row["y"])}


class LengthModel(TorchModel):
    """Predicts from the words themselves."""

    factor = Param(Params._dummy(), "factor", "multiplies the predictions")

    def __init__(
        self, *, history=None, model=None, optimizer=None, run_id=None, _metadata=None, factor=1.0, input_shapes=None
    ) -> None:
        super().__init__()
        self._setDefault(
            optimizer=None, loss=None, loss_constructors=None, input_shapes=None, outputCols=["output"], factor=1.0
        )
        self._set(
            history=history,
            model=model,
            optimizer=optimizer,
            run_id=run_id,
            _metadata=_metadata,
            factor=factor,
            input_shapes=input_shapes,
        )

    def get_prediction_fn(self) -> Any:
        factor = self.getOrDefault(self.factor)

        def predict(model: Any, row: Any) -> torch.Tensor:
            with torch.no_grad():
                return model(length=torch.tensor([[float(len(row["word"]))]])) * factor

        return predict

    def _transform(self, dataset: Any) -> Any:
        self.setFeatureColumns(["word"])
        self.setLabelColoumns(["y"])
        return super()._transform(dataset).withColumnRenamed(self.getOutputCols()[0], "predicted")


class LengthEstimator(TorchEstimator):
    """Learns from the length of words."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self._setDefault(feature_cols=["word"], label_cols=["y"])
        self._set(**values)
        self.setTransformationFn(length)
        self.setTransformationEditFields([("length", float, None, False), ("target", float, None, False)])
        self.setTransformationRemovedFields(["word", "y"])
        self._set(model=Slope())

    def _get_or_create_backend(self) -> Any:
        return self.getBackend()

    def get_model_class(self) -> type[LengthModel]:
        return LengthModel

    def _get_model_kwargs(self, model: Any, history: Any, optimizer: Any, run_id: str, metadata: Any) -> dict[str, Any]:
        assert self.getLoss() is None
        assert self.getLossConstructors() is None
        return {
            "model": model,
            "history": history,
            "optimizer": optimizer,
            "run_id": run_id,
            "_metadata": metadata,
            "factor": 2.0,
            "input_shapes": self.getInputShapes(),
        }
