from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from sparkhvd.errors import DataError
from sparkhvd.estimators.torch.inputs import ModelInput
from sparkhvd.estimators.torch.plugin import TorchPredictor
from sparkhvd.estimators.torch.steps import outputs_of

ONE, TWO = torch.zeros(3, 1), torch.ones(3, 2)


@dataclass
class Output(OrderedDict[str, Any]):
    """A result like those of Hugging Face's models: a dataclass, and a mapping of its fields that are not None."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    pooled: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.update({name: value for name, value in vars(self).items() if value is not None})


@dataclass
class Plain:
    prediction: torch.Tensor
    loss: torch.Tensor | None = None


@pytest.mark.parametrize(
    ("result", "outputs"),
    [
        (ONE, [ONE]),
        ((ONE, TWO), [ONE, TWO]),
        (Output(logits=TWO, hidden_states=(ONE,)), [TWO]),
        (Output(loss=torch.tensor(1.0), logits=TWO, pooled=ONE), [TWO]),
        (Output(logits=(ONE, TWO)), [ONE, TWO]),
        (Output(loss=torch.tensor(1.0), pooled=ONE), [ONE]),
        ({"prediction": ONE, "loss": torch.tensor(1.0)}, [ONE]),
        (Plain(ONE, torch.tensor(1.0)), [ONE]),
    ],
)
def test_outputs_of_a_result_are_its_tensors_its_logits_or_its_only_tensor(result, outputs):
    found = outputs_of(result)
    assert all(one is other for one, other in zip(found, outputs, strict=True))


def test_a_result_with_several_named_tensors_is_refused_with_a_remedy():
    with pytest.raises(DataError, match=r"returned dict with the fields \['a', 'b'\].*return_dict=False"):
        outputs_of({"a": ONE, "b": TWO})
    with pytest.raises(DataError, match="returned str; it must return a tensor"):
        outputs_of("nothing")


class Frequencies(torch.nn.Module):
    """Returns an imaginary part, whose values PyTorch negates only when they are read."""

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(signal).conj().imag


def test_outputs_that_pytorch_negates_lazily_are_predicted():
    signal = np.array([[1.0, 2.0, 4.0, 3.0]])
    inputs = (ModelInput(("x",), None, torch.float64, None),)
    assert Frequencies()(torch.from_numpy(signal)).is_neg()
    (output,) = TorchPredictor(Frequencies(), inputs, torch.device("cpu")).predict({"x": signal})
    assert np.allclose(output, -np.fft.fft(signal).imag)


def test_a_prediction_fn_calls_a_model_that_takes_columns_by_name_with_the_inputs():
    class Named(torch.nn.Module):
        scale = 2.0

        def forward(self, *, x):
            return x * 2

    model, columns = Named(), {"x": np.ones((3, 1), np.float32)}
    inputs = (ModelInput(("x",), None, torch.float32),)
    predictor = TorchPredictor(model, inputs, torch.device("cpu"), lambda model, *inputs: model(*inputs) * model.scale)
    (output,) = predictor.predict(columns)
    assert output.tolist() == [[4.0]] * 3
    assert not model._forward_pre_hooks
