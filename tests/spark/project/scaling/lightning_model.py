from __future__ import annotations

import pytorch_lightning
import torch

from scaling.torch_model import Net, loss


class LitNet(pytorch_lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        return loss(self(batch["x"].reshape(-1, 1)), batch["y"].reshape(-1, 1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)
