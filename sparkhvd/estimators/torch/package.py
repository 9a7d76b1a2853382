"""The user's torch objects on their way to the ranks."""

from __future__ import annotations

import inspect
import io
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import cloudpickle
import torch

from sparkhvd.driver.user_code.pickling import Code, CodePickler, dumps_with
from sparkhvd.errors import ParamError
from sparkhvd.estimators.params.named_inputs import NamedInput
from sparkhvd.estimators.torch import parametrizations
from sparkhvd.estimators.torch.callbacks import TorchCallback
from sparkhvd.estimators.torch.objective import Objective
from sparkhvd.estimators.torch.schedule import LRSchedule


@dataclass(frozen=True)
class Stepping:
    """How a step is computed.

    Attributes:
        clip_norm: the gradient's largest norm over all parameters; None leaves it.
        clip_value: the largest absolute value of its elements; None leaves them.
        mixed_precision: ``bf16`` or ``fp16``: what the model computes in; None leaves it.
        compile: arguments of ``torch.compile``; None does not compile.
        compression: what gradients travel as; None leaves them.
        minibatch_fn: takes the steps in place of the trainer.
    """

    clip_norm: float | None = None
    clip_value: float | None = None
    mixed_precision: str | None = None
    compile: Mapping[str, Any] | None = None
    compression: Any = None
    minibatch_fn: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Package:
    """The user's objects, pickled together so that the optimizer keeps the model's own parameters."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    objective: Objective
    input_shapes: Sequence[Sequence[int]] | None = None
    named_inputs: Mapping[str, NamedInput] | None = None
    schedule: LRSchedule | None = None
    stepping: Stepping = field(default_factory=Stepping)
    callbacks: tuple[TorchCallback, ...] = ()

    def with_losses(self) -> Package:
        """The package with the losses that its constructors make."""
        if not self.objective.constructors:
            return self
        known = {"model": self.model, "optimizer": self.optimizer, "label_cols": self.objective.label_cols}
        losses = tuple(_constructed(make, known) for make in self.objective.constructors)
        return replace(self, objective=replace(self.objective, losses=losses, constructors=()))


class HasModel(Protocol):
    """What travels with a model."""

    @property
    def model(self) -> torch.nn.Module: ...


def dumps(package: HasModel) -> bytes:
    """The package as bytes; modules of TorchScript travel in their own format."""
    return dumps_with(PicklerWithScripts, package, package.model)


def loads(payload: bytes) -> Package:
    """The package of ``dumps``, with its losses made."""
    return cast("Package", cloudpickle.loads(payload)).with_losses()


def dumps_params(params: Mapping[str, Any]) -> bytes:
    """An estimator's parameters as bytes for ``cloudpickle.loads``; modules of TorchScript in their own format."""
    model = params.get("model")
    return dumps_with(PicklerWithScripts, params, torch.nn.Module() if model is None else model)


class PicklerWithScripts(CodePickler):
    """A pickler that knows TorchScript, whose parameters stay those of their module, and parametrized modules."""

    def __init__(self, file: io.BytesIO, model: torch.nn.Module, *, code: Code) -> None:
        super().__init__(file, code=code)
        self._parameters: dict[int, tuple[torch.jit.ScriptModule, str]] = {}
        self._held: list[torch.nn.Parameter] = []  # TorchScript makes new objects for parameters that nobody holds
        for module in _outermost_scripts(model):
            self._held += module.parameters()
            self._parameters |= {id(p): (module, name) for name, p in module.named_parameters()}

    def reducer_override(self, value: Any) -> Any:
        """How pickle asks."""
        if isinstance(value, torch.jit.ScriptModule):
            return script_of, (script_bytes(value),)
        if isinstance(value, torch.nn.Parameter) and id(value) in self._parameters:
            return _parameter_of, self._parameters[id(value)]
        if parametrizations.is_parametrized(value):
            return parametrizations.reduced(value)
        return super().reducer_override(value)


def _outermost_scripts(model: torch.nn.Module) -> Iterable[torch.jit.ScriptModule]:
    if isinstance(model, torch.jit.ScriptModule):
        yield model
        return
    for child in model.children():
        yield from _outermost_scripts(child)


def script_bytes(module: torch.jit.ScriptModule) -> bytes:
    """A module of TorchScript as the content of a file for ``torch.jit.load``."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(module, buffer)
    return buffer.getvalue()


def script_of(content: bytes) -> torch.jit.ScriptModule:
    """The inverse of ``script_bytes``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found = torch.jit.load(io.BytesIO(content), map_location="cpu")  # type: ignore[no-untyped-call]
        return cast("torch.jit.ScriptModule", found)


def _parameter_of(module: torch.jit.ScriptModule, name: str) -> torch.nn.Parameter:
    return dict(module.named_parameters())[name]


def _constructed(make: Callable[..., Any], known: Mapping[str, object]) -> Any:
    """A loss, made with those of the known arguments that its constructor takes."""
    signature = inspect.signature(make)
    parameters = signature.parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return make(**known)
    names = {parameter.name for parameter in parameters if parameter.default is parameter.empty}
    taken = {name: value for name, value in known.items() if name in names}
    try:
        signature.bind(**taken)
    except TypeError as error:
        raise ParamError(
            f"loss_constructors: {getattr(make, '__name__', make)}{signature} cannot be called: {error}. It may "
            f"take the arguments {', '.join(known)}, which are passed by name."
        ) from error
    return make(**taken)
