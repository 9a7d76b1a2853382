"""Models, rows and trainers that the tests of PyTorch's training share."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from sparkhvd.estimators.torch.plugin import PLUGIN
from tests.unit.estimators.arrays import ArraySource, schema, spec

DATA = schema(x=("feature", "float64", (6,), "array"), y=("label", "int64", (), "scalar"))


# The number of rows of every rank in each step of an epoch; with two ranks, those of the third are dropped.
EVEN = [(4, 4, 4)] * 20


class PreciseMomentum(torch.optim.Optimizer):
    """SGD whose momentum is more precise than its parameters, as that of float32 is for bfloat16."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter, dtype=torch.float64)
                state["momentum"].mul_(0.9).add_(parameter.grad)
                parameter.sub_((state["momentum"] * group["lr"]).to(parameter.dtype))
        return loss


OPTIMIZERS = {
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=np.float64(0.01)),  # like a value of numpy.logspace
}


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def rows(count):
    random = np.random.default_rng(5)
    return {"x": random.normal(size=(count, 6)), "y": random.integers(0, 3, count)}


def accuracy(output, label):
    return (output.argmax(dim=1) == label).float().mean()


def source(sizes, rank, world_size):
    """Return the rows of ``rank`` if rows are assigned in order, step by step and rank by rank."""
    sizes = [step[:world_size] for step in sizes]
    mine, start = [], 0
    for step in sizes:
        first = start + sum(step[:rank])
        mine.append(list(range(first, first + step[rank])))
        start += sum(step)
    return ArraySource(DATA, rows(start), mine, [sum(step) for step in sizes])


def make_trainer(optimizer, world, **more):
    model = network()
    params = {"model": model, "optimizer": optimizer(model), "loss": functional.cross_entropy, "label_cols": ("y",)}
    payload = PLUGIN.pack({**params, "metrics": [accuracy], "schema": DATA})
    return PLUGIN.trainer(payload, spec(DATA, **more), world)


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()


def as_one(sizes):
    return source([(sum(step),) for step in sizes], 0, 1)
