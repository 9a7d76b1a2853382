"""Files of a trained torch model.

=================  ======================================================================================
``state_dict.pt``  the weights; ``torch.load(..., weights_only=True)`` opens it without running any code
``module.pkl``     the module without its weights, a cloudpickle
``module.pt``      replaces ``module.pkl`` if the whole module is TorchScript; ``torch.jit.load`` opens it
``optimizer.pkl``  the optimizer, or a list of several; it refers to the module's parameters by name
``inputs.json``    the columns of each input
=================  ======================================================================================
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sparkhvd._util.framework_imports import keep_triton_from_tensorflow
from sparkhvd.driver.user_code.pickling import Code, dumps_with
from sparkhvd.errors import ParamError
from sparkhvd.estimators.torch.inputs import ModelInput
from sparkhvd.estimators.torch.serialization.package import PicklerWithScripts, script_bytes, script_of

STATE, MODULE, SCRIPT = "state_dict.pt", "module.pkl", "module.pt"
OPTIMIZER, INPUTS = "optimizer.pkl", "inputs.json"

# A tensor's name, whether it requires gradients (None for a buffer), and the attributes that the user gave it.
_Reference = tuple[str, bool | None, dict[str, Any]]
# A LightningModule may have several optimizers.
Optimizers = torch.optim.Optimizer | list[torch.optim.Optimizer]


def save(folder: Path, model: torch.nn.Module, optimizer: Optimizers | None, inputs: Sequence[ModelInput]) -> None:
    """Write a model, its optimizer if it has one, and its inputs to ``folder``."""
    state = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    with (folder / STATE).open("wb") as file:  # unlike PyTorch's own writer, Python names the reason of a failure
        torch.save(state, file)
    # Hooks of the model may replace entries of the state; a tensor whose entry differs stays in the pickle.
    unchanged = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    names: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if unchanged.get(name) == id(tensor) and type(tensor) in {torch.nn.Parameter, torch.Tensor}:
            names.setdefault(id(tensor), name)
    if isinstance(model, torch.jit.ScriptModule):
        (folder / SCRIPT).write_bytes(script_bytes(model))
    else:
        (folder / MODULE).write_bytes(_dump(model, model, names))
    if optimizer is not None:
        parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        (folder / OPTIMIZER).write_bytes(_dump(optimizer, model, parameters))
    entries = [{**asdict(part), "dtype": str(part.dtype).removeprefix("torch.")} for part in inputs]
    (folder / INPUTS).write_text(json.dumps(entries))


def load_model(folder: Path) -> torch.nn.Module:
    """Return the saved module in evaluation mode.

    Loading runs the code in ``module.pkl``, so open only files that you trust.
    """
    keep_triton_from_tensorflow()  # the process may have loaded a Keras model before
    if (folder / SCRIPT).exists():
        return script_of((folder / SCRIPT).read_bytes()).eval()
    weights: Mapping[str, torch.Tensor] = torch.load(folder / STATE, weights_only=True, map_location="cpu")
    with (folder / MODULE).open("rb") as file:
        model: torch.nn.Module = _TensorReferenceUnpickler(file, lambda reference: _tensor(weights, reference)).load()
    return model.eval()


def load_inputs(folder: Path) -> tuple[ModelInput, ...]:
    """Return the inputs of the saved module."""
    return tuple(
        ModelInput(
            columns=tuple(part["columns"]),
            shape=None if part["shape"] is None else tuple(part["shape"]),
            dtype=getattr(torch, part["dtype"]),
            sparse_size=part["sparse_size"],
            keyword=part.get("keyword", ""),
        )
        for part in json.loads((folder / INPUTS).read_text())
    )


def load_optimizer(folder: Path, model: torch.nn.Module) -> Optimizers:
    """Return the saved optimizer over the parameters of ``model``, the result of ``load_model``.

    Raises:
        ParamError: the model was saved without an optimizer.
    """
    if not (folder / OPTIMIZER).exists():
        raise ParamError(
            "The model was saved without an optimizer: from_model keeps none, and some Lightning optimizers cannot be "
            "pickled. Create one from getModel().parameters(), or let configure_optimizers of a LightningModule do it."
        )
    parameters = dict(model.named_parameters())
    with (folder / OPTIMIZER).open("rb") as file:
        optimizer: Optimizers = _TensorReferenceUnpickler(file, lambda reference: parameters[reference[0]]).load()
    return optimizer


def _tensor(weights: Mapping[str, torch.Tensor], reference: _Reference) -> torch.Tensor:
    name, requires_grad, attributes = reference
    tensor = weights[name] if requires_grad is None else torch.nn.Parameter(weights[name], requires_grad)
    vars(tensor).update(attributes)
    return tensor


def _dump(value: object, model: torch.nn.Module, names: Mapping[int, str]) -> bytes:
    return dumps_with(_TensorReferencePickler, value, model, names)


class _TensorReferencePickler(PicklerWithScripts):
    """Pickles named tensors as references."""

    def __init__(self, file: io.BytesIO, model: torch.nn.Module, names: Mapping[int, str], *, code: Code) -> None:
        super().__init__(file, model, code=code)
        self._names = names

    def persistent_id(self, value: object) -> _Reference | None:
        if not isinstance(value, torch.Tensor) or id(value) not in self._names:
            return None
        requires_grad = value.requires_grad if isinstance(value, torch.nn.Parameter) else None
        return self._names[id(value)], requires_grad, vars(value)


class _TensorReferenceUnpickler(pickle.Unpickler):
    """Unpickles the output of ``_TensorReferencePickler``; equal references become the same tensor."""

    def __init__(self, file: Any, resolve: Callable[[_Reference], torch.Tensor]) -> None:
        super().__init__(file)
        self._resolve = resolve
        self._resolved: dict[str, torch.Tensor] = {}

    def persistent_load(self, reference: _Reference) -> torch.Tensor:
        if reference[0] not in self._resolved:
            self._resolved[reference[0]] = self._resolve(reference)
        return self._resolved[reference[0]]
