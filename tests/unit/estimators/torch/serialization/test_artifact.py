from __future__ import annotations

import subprocess
import sys

import cloudpickle
import pytest
import torch
from torch.nn.utils import parametrizations, parametrize

from sparkhvd.estimators.lightning.plugin import PLUGIN as LIGHTNING
from sparkhvd.estimators.torch.inputs import ModelInput
from sparkhvd.estimators.torch.plugin import PLUGIN
from sparkhvd.estimators.torch.serialization import artifact
from tests.unit.estimators.arrays import schema


class Tied(torch.nn.Module):
    """Two layers with one weight, a persistent and a non-persistent buffer, and a frozen parameter."""

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


EXPORT_TO_A_FULL_DISK = """
import resource, signal, sys
from pathlib import Path
import torch
from sparkhvd.errors import StoreError
from sparkhvd.estimators.torch.serialization import artifact
from sparkhvd.estimators.training.job_files import naming_full_disk
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    with naming_full_disk(sys.argv[1]):
        artifact.save(Path(sys.argv[1]), torch.nn.Linear(300, 300), None, ())
except StoreError as error:
    print(error)
"""


def test_an_export_to_a_full_disk_names_the_folder_and_the_reason(tmp_path):
    """Limit the size of files as a substitute for a full disk."""
    command = [sys.executable, "-c", EXPORT_TO_A_FULL_DISK, str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.startswith(f"Cannot write the model to the local folder {tmp_path}: File too large. Free space on")


@pytest.fixture
def saved(tmp_path):
    model = Tied()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.25)
    model(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    artifact.save(tmp_path, model, optimizer, [ModelInput(("a", "b"), (2,), torch.float32)])
    return tmp_path, model, optimizer


def test_the_loaded_model_has_ties_buffers_and_frozen_parameters(saved):
    folder, model, _ = saved
    loaded = artifact.load_model(folder)
    assert torch.equal(loaded(torch.ones(2, 40)), model(torch.ones(2, 40)))
    assert loaded.right.weight is loaded.left.weight
    assert (loaded.left.weight.requires_grad, loaded.frozen.requires_grad) == (True, False)
    assert not loaded.training


def test_the_weights_are_in_a_single_file_that_opens_without_running_code(saved):
    folder, model, _ = saved
    weights = torch.load(folder / "state_dict.pt", weights_only=True)
    assert torch.equal(weights["left.weight"], model.left.weight)
    assert (folder / "module.pkl").stat().st_size < model.left.weight.nbytes


def test_the_loaded_optimizer_has_the_loaded_parameters(saved):
    folder, model, optimizer = saved
    loaded = artifact.load_model(folder)
    again = artifact.load_optimizer(folder, loaded)
    assert again.param_groups[0]["params"][0] is loaded.left.weight
    assert again.param_groups[0]["lr"] == 0.25
    assert torch.equal(again.state[loaded.left.weight]["exp_avg"], optimizer.state[model.left.weight]["exp_avg"])


def test_the_inputs_are_loaded(saved):
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
def test_parametrized_models_are_sent_trained_and_loaded(tmp_path, kind, plugin):
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


class Scaled(torch.optim.SGD):
    """Scales gradients by an attribute, and counts its steps in another attribute."""

    factor = 1.0

    def __init__(self, parameters, lr, factor):
        super().__init__(parameters, lr)
        self.factor, self.steps = factor, 0

    def step(self, closure=None):
        self.steps += 1
        for parameter in self.param_groups[0]["params"]:
            parameter.grad *= self.factor * self.steps
        return super().step(closure)


def hooked():
    """Return a model and an optimizer whose steps depend on hooks and attributes that torch's own pickle omits."""

    def doubled(bias):
        bias.grad *= 2.0

    torch.manual_seed(2)
    model = torch.nn.Linear(3, 2)
    mask = torch.tensor([[1.0, 0.0, 1.0]])
    model.weight.register_hook(lambda gradient: gradient * mask)
    model.bias.register_post_accumulate_grad_hook(doubled)
    optimizer = Scaled(model.parameters(), 0.1, factor=0.5)
    optimizer.register_step_post_hook(lambda *_: model.weight.data.clamp_(-0.4, 0.4))
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.mark.parametrize("plugin", [PLUGIN, LIGHTNING], ids=["torch", "lightning"])
def test_hooks_and_attributes_of_optimizers_are_sent(tmp_path, plugin):
    model, optimizer, _ = hooked()
    names = ("callbacks", "logger", "trainer_args", "input_shapes", "label_shapes", "data_module")
    given = {"model": model, "optimizer": optimizer, "loss": torch.nn.MSELoss(), "label_cols": ("y",)}
    data = schema(x=("feature", "float32", (3,), "array"), y=("label", "float32", (2,), "array"))
    package = cloudpickle.loads(plugin.pack({**dict.fromkeys(names), **given, "batch_format": "dict", "schema": data}))
    sent, its = package.model, getattr(package, "optimizer", None) or package.optimizers[0]
    x = torch.randn(5, 3)
    for trained, steps in ((model, optimizer), (sent, its)):
        for _ in range(3):
            steps.zero_grad()
            (trained(x) - 1).square().mean().backward()
            steps.step()
    assert torch.equal(sent.weight, model.weight)
    assert torch.equal(sent.bias, model.bias)
    artifact.save(tmp_path, sent, its, [])
    again = artifact.load_optimizer(tmp_path, artifact.load_model(tmp_path))
    assert (again.factor, again.steps) == (0.5, 3)


class Gained(torch.nn.Linear):
    """Reads an attribute of its weight."""

    def forward(self, x):
        return super().forward(x) * self.weight.gain


def test_attributes_of_parameters_are_loaded(tmp_path):
    model, x = Gained(3, 2), torch.randn(5, 3)
    model.weight.gain = 3.0
    artifact.save(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.25), [])
    assert torch.equal(artifact.load_model(tmp_path)(x), model(x))


class Halved(torch.nn.Linear):
    """Saves half of its weight, in 16 bits."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight.detach().half() / 2


def test_a_model_is_loaded_unchanged_although_its_state_differs_from_its_weights(tmp_path):
    model, x = torch.nn.Sequential(Halved(3, 2), torch.nn.Linear(2, 1)), torch.randn(5, 3)
    artifact.save(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.25), [])
    loaded = artifact.load_model(tmp_path)
    assert torch.equal(loaded(x), model(x))
    again = artifact.load_optimizer(tmp_path, loaded)
    assert again.param_groups[0]["params"][0] is loaded[0].weight


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
