from __future__ import annotations

import torch

from . import modes
from .modes import MISSING, Mode


class Scale(torch.nn.Module):
    def __init__(self, mode: Mode) -> None:
        super().__init__()
        self.mode, self.bias = mode, MISSING
        self.weight = torch.nn.Parameter(torch.tensor(8.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from .late import is_times  # noqa: PLC0415 - as users do

        return x * self.weight if self.mode is Mode.TIMES and is_times(self.mode) else x + self.weight


class Net(torch.nn.Module):
    """Multiplies by 64 if every class and singleton keeps its identity."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Scale(modes.Mode.TIMES), Scale(modes.Mode.TIMES)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if isinstance(layer, Scale) and layer.bias is modes.MISSING else x * 0
        return x


def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    import scaling.late  # noqa: PLC0415 - as users do

    known = scaling.late.is_times(modes.Mode.TIMES)
    return torch.nn.functional.mse_loss(output, label) + (0 if known else 1000)


def seen(rows: dict[str, object]) -> dict[str, object]:
    rows["x"] = rows["x"] if isinstance(Scale(Mode.TIMES), torch.nn.Module) else None
    return rows


def predicted(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    inner = getattr(model, "net", model)
    known = isinstance(inner, Net) and all(layer.mode is Mode.TIMES for layer in inner.layers)
    shared = modes.calls() == modes.CALLS
    return model(x) + (1000 if known and shared and inner.layers[0].bias is MISSING else 0)
