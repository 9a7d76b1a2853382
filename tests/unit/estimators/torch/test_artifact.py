from __future__ import annotations

import cloudpickle
import pytest
import torch
from torch.nn.utils import parametrizations, parametrize

from sparkhvd.estimators.lightning.plugin import PLUGIN as LIGHTNING
from sparkhvd.estimators.torch import artifact
from sparkhvd.estimators.torch.inputs import ModelInput
from sparkhvd.estimators.torch.plugin import PLUGIN
from tests.unit.estimators.arrays import schema


class Tied(torch.nn.Module):
    """Two layers with one weight, a buffer that is saved and one that is not, and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.left = torch.nn.Linear(40, 40, bias=False)
        self.right = torch.nn.Linear(40, 40, bias=False)
        self.right.weight = self.left.weight
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("kept", torch.tensor([1.0]))
        self.register_buffer("scratch", torch.tensor([2.0]), persistent=False)

    def forward(self, x):
        return self.right(self.left(x)) + self.kept + self.scratch


@pytest.fixture
def saved(tmp_path):
    model = Tied()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.25)
    model(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    artifact.save(tmp_path, model, optimizer, [ModelInput(("a", "b"), (2,), torch.float32)])
    return tmp_path, model, optimizer


def test_the_model_comes_back_with_ties_buffers_and_frozen_parameters(saved):
    folder, model, _ = saved
    loaded = artifact.load_model(folder)
    assert torch.equal(loaded(torch.ones(2, 40)), model(torch.ones(2, 40)))
    assert loaded.right.weight is loaded.left.weight
    assert (loaded.left.weight.requires_grad, loaded.frozen.requires_grad) == (True, False)
    assert not loaded.training


def test_the_weights_open_without_running_code_and_lie_in_one_file_only(saved):
    folder, model, _ = saved
    weights = torch.load(folder / "state_dict.pt", weights_only=True)
    assert torch.equal(weights["left.weight"], model.left.weight)
    assert (folder / "module.pkl").stat().st_size < model.left.weight.nbytes


def test_the_optimizer_comes_back_over_the_loaded_parameters(saved):
    folder, model, optimizer = saved
    loaded = artifact.load_model(folder)
    again = artifact.load_optimizer(folder, loaded)
    assert again.param_groups[0]["params"][0] is loaded.left.weight
    assert again.param_groups[0]["lr"] == 0.25
    assert torch.equal(again.state[loaded.left.weight]["exp_avg"], optimizer.state[model.left.weight]["exp_avg"])


def test_the_inputs_come_back(saved):
    assert artifact.load_inputs(saved[0]) == (ModelInput(("a", "b"), (2,), torch.float32),)


class Symmetric(torch.nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


def normalized(kind):
    torch.manual_seed(2)
    layer = torch.nn.Linear(4, 4)
    if kind == "shared and nested":
        parametrize.register_parametrization(layer, "weight", Symmetric())
        parametrizations.weight_norm(layer, "bias", dim=None)
        return torch.nn.Sequential(layer, torch.nn.Sequential(torch.nn.Tanh(), layer))
    of_kind = {
        "weight_norm": parametrizations.weight_norm,
        "spectral_norm": parametrizations.spectral_norm,
        "orthogonal": parametrizations.orthogonal,
        "old weight_norm": torch.nn.utils.weight_norm,
        "old spectral_norm": torch.nn.utils.spectral_norm,
    }
    return torch.nn.Sequential(of_kind[kind](layer))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    "kind",
    ["weight_norm", "spectral_norm", "orthogonal", "shared and nested", "old weight_norm", "old spectral_norm"],
)
@pytest.mark.parametrize("plugin", [PLUGIN, LIGHTNING], ids=["torch", "lightning"])
def test_parametrized_models_travel_train_and_come_back(tmp_path, kind, plugin):
    model, x = normalized(kind), torch.randn(5, 4)
    names = ("callbacks", "logger", "trainer_args", "input_shapes", "label_shapes", "data_module")
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loss": torch.nn.MSELoss()}
    data = schema(x=("feature", "float32", (4,), "array"), y=("label", "float32", (4,), "array"))
    package = cloudpickle.loads(
        plugin.pack({**dict.fromkeys(names), **given, "batch_format": "dict", "label_cols": ("y",), "schema": data})
    )
    sent, optimizer = package.model, getattr(package, "optimizer", None) or package.optimizers[0]
    assert torch.equal(sent.eval()(x), model.eval()(x))
    sent.train()(x).square().mean().backward()
    optimizer.step()
    assert not torch.allclose(sent.eval()(x), model.eval()(x))
    artifact.save(tmp_path, sent, optimizer, [])
    loaded = artifact.load_model(tmp_path)
    assert torch.equal(loaded(x), sent(x))
    assert [*loaded.state_dict()] == [*model.state_dict()]
    again = artifact.load_optimizer(tmp_path, loaded)
    again.zero_grad()
    loaded.train()(x).square().mean().backward()
    again.step()
    assert not torch.allclose(loaded.eval()(x), sent(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_model_is_a_file_that_torch_opens(tmp_path):
    model = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Dropout(0.9)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    artifact.save(tmp_path, model, optimizer, [])
    x = torch.ones(3, 2)
    wanted = model.eval()(x)
    assert torch.equal(torch.jit.load(tmp_path / "module.pt").eval()(x), wanted)
    loaded = artifact.load_model(tmp_path)
    assert torch.equal(loaded(x), wanted)
    artifact.load_optimizer(tmp_path, loaded).param_groups[0]["params"][0].data.zero_()
    assert not torch.equal(loaded(x), wanted), "the optimizer has the parameters of the loaded module"
