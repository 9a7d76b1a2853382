"""Pickles of the user's torch objects for the ranks."""

from __future__ import annotations

import inspect
import io
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import cloudpickle
import torch

from sparkhvd.driver.user_code.pickling import Code, CodePickler, dumps_with
from sparkhvd.errors import ParamError
from sparkhvd.estimators.params.named_inputs import NamedInput
from sparkhvd.estimators.torch.callbacks import TorchCallback
from sparkhvd.estimators.torch.losses.objective import Objective, refuse_lazy_loss
from sparkhvd.estimators.torch.schedule import LRSchedule
from sparkhvd.estimators.torch.serialization import omitted_state, parametrizations
from sparkhvd.estimators.torch.serialization.storages import Storages


@dataclass(frozen=True)
class Stepping:
    """Options of a training step.

    Attributes:
        clip_norm: the gradient's largest norm over all parameters; None does not clip.
        clip_value: the largest absolute value of the gradient's elements; None does not clip.
        mixed_precision: ``bf16`` or ``fp16``, the type in which the model computes; None keeps the model's own type.
        compile: arguments of ``torch.compile``; None does not compile.
        compression: compression of the gradients that ranks exchange; None does not compress.
        minibatch_fn: takes the steps instead of the trainer.
    """

    clip_norm: float | None = None
    clip_value: float | None = None
    mixed_precision: str | None = None
    compile: Mapping[str, Any] | None = None
    compression: Any = None
    minibatch_fn: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Package:
    """The user's objects, pickled together so that the optimizer still holds the model's parameters."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    objective: Objective
    input_shapes: Sequence[Sequence[int]] | None = None
    named_inputs: Mapping[str, NamedInput] | None = None
    schedule: LRSchedule | None = None
    stepping: Stepping = field(default_factory=Stepping)
    callbacks: tuple[TorchCallback, ...] = ()

    def with_losses(self) -> Package:
        """Return the package with the losses that its constructors create."""
        if not self.objective.constructors:
            return self
        known = {"model": self.model, "optimizer": self.optimizer, "label_cols": self.objective.label_cols}
        losses = tuple(_construct_loss(make, known) for make in self.objective.constructors)
        for loss in losses:
            refuse_lazy_loss(loss)
        return replace(self, objective=replace(self.objective, losses=losses))


class HasModel(Protocol):
    """Anything that holds a model."""

    @property
    def model(self) -> torch.nn.Module: ...


def dumps(package: HasModel) -> bytes:
    """Return the package as bytes; TorchScript modules are in their own format."""
    return dumps_with(PicklerWithScripts, package, package.model)


def loads(payload: bytes) -> Package:
    """Return the package from the result of ``dumps``, with its losses created.

    Raises:
        ParamError: the unpickled model has parameters that the optimizer does not hold.
    """
    package: Package = cloudpickle.loads(payload)
    refuse_separated(package.model, (package.optimizer,))
    return package.with_losses()


def refuse_separated(model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuse optimizers that do not hold the parameters of an unpickled model, and so would not train it.

    Raises:
        ParamError: an optimizer holds other parameters; the message names the classes that may be the reason.
    """
    model_ids = {id(parameter) for parameter in model.parameters()}
    optimized = {
        id(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
    }
    if optimized <= model_ids:
        return
    classes = {type(module) for module in model.modules()}
    names = sorted(module_class.__name__ for module_class in classes if _has_own_pickle(module_class))
    reason = f" Look at {', '.join(names)}." if names else ""
    raise ParamError(
        "Pickling the model creates new parameters, which the optimizer does not hold, so training would not change "
        "the model. A __reduce__, __getstate__ or __setstate__ of a module must keep the parameter objects themselves, "
        f"not copies of their values.{reason}"
    )


def _has_own_pickle(kind: type[torch.nn.Module]) -> bool:
    names = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")
    return any(getattr(kind, name, None) is not getattr(torch.nn.Module, name, None) for name in names)


def dumps_params(params: Mapping[str, Any]) -> bytes:
    """Return an estimator's parameters as bytes for ``cloudpickle.loads``; TorchScript is in its own format."""
    model = params.get("model")
    return dumps_with(PicklerWithScripts, params, torch.nn.Module() if model is None else model)


_REDUCERS: tuple[tuple[Callable[[Any], bool], Callable[[Any], Any]], ...] = (
    (parametrizations.is_parametrized, parametrizations.reduced),
    (omitted_state.has_hooks, omitted_state.reduced_parameter),
    (omitted_state.has_default_pickle, omitted_state.reduced_optimizer),
)


class PicklerWithScripts(CodePickler):
    """Pickles models that contain TorchScript modules, parametrized modules or hooks.

    When loaded, an optimizer still shares the parameters of a TorchScript module. Tensors that share memory, such as a
    weight and a buffer made from its ``data``, still share it, too.
    """

    def __init__(self, file: io.BytesIO, model: torch.nn.Module, *, code: Code) -> None:
        super().__init__(file, code=code)
        self._storages = Storages()
        self._parameters: dict[int, tuple[torch.jit.ScriptModule, str]] = {}
        self._held: list[torch.nn.Parameter] = []  # keeps ids valid: TorchScript recreates unreferenced parameters
        for module in _outermost_scripts(model):
            self._held += module.parameters()
            self._parameters |= {id(p): (module, name) for name, p in module.named_parameters()}

    def reducer_override(self, value: Any) -> Any:
        """See ``pickle.Pickler.reducer_override``."""
        if isinstance(value, torch.storage.TypedStorage | torch.UntypedStorage):
            return self._storages.reduced(value)
        if isinstance(value, torch.jit.ScriptModule):
            return script_of, (script_bytes(value),)
        if isinstance(value, torch.nn.Parameter) and id(value) in self._parameters:
            return _parameter_of, self._parameters[id(value)]
        for applies, reduced in _REDUCERS:
            if applies(value):
                return reduced(value)
        return super().reducer_override(value)


def _outermost_scripts(model: torch.nn.Module) -> Iterable[torch.jit.ScriptModule]:
    if isinstance(model, torch.jit.ScriptModule):
        yield model
        return
    for child in model.children():
        yield from _outermost_scripts(child)


def script_bytes(module: torch.jit.ScriptModule) -> bytes:
    """Return a TorchScript module as the content of a file for ``torch.jit.load``."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(module, buffer)
    return buffer.getvalue()


def script_of(content: bytes) -> torch.jit.ScriptModule:
    """Return the module from the result of ``script_bytes``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module: torch.jit.ScriptModule = torch.jit.load(io.BytesIO(content), map_location="cpu")  # type: ignore[no-untyped-call]
        return module


def _parameter_of(module: torch.jit.ScriptModule, name: str) -> torch.nn.Parameter:
    return dict(module.named_parameters())[name]


def _construct_loss(make: Callable[..., Any], known: Mapping[str, object]) -> Any:
    """Call a loss constructor with the known arguments that it takes."""
    signature = inspect.signature(make)
    parameters = signature.parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return make(**known)
    names = {parameter.name for parameter in parameters if parameter.default is parameter.empty}
    arguments = {name: value for name, value in known.items() if name in names}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ParamError(
            f"loss_constructors: {getattr(make, '__name__', make)}{signature} cannot be called: {error}. It may "
            f"take the arguments {', '.join(known)}, which are passed by name."
        ) from error
    return make(**arguments)
