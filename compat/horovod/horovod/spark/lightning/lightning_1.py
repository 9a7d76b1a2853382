"""Names and hooks that Lightning 2 removed; programs use them because Horovod 0.28 supported only Lightning 1."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from sparkhvd.errors import ParamError
from sparkhvd.estimators.lightning.package import LightningPackage
from sparkhvd.lightning.flavour import flavour_of, import_lightning

_EPOCH_END_METHODS = ("training_epoch_end", "validation_epoch_end")
_HOOKS_OF_MODULES = ("on_epoch_start", "on_epoch_end", "on_pretrain_routine_start", "on_pretrain_routine_end")
_HOOKS_OF_CALLBACKS = (
    *_HOOKS_OF_MODULES,
    "on_init_start",
    "on_init_end",
    "on_before_accelerator_backend_setup",
    "on_batch_start",
    "on_batch_end",
)


def restore_names() -> None:
    """Restore names that Lightning 2 has removed, if Lightning is installed as ``pytorch_lightning``."""
    if find_spec("pytorch_lightning") is None:
        return
    from lightning_utilities.core.imports import module_available  # noqa: PLC0415 - with Lightning only
    from pytorch_lightning import utilities  # noqa: PLC0415

    vars(utilities).setdefault("_module_available", module_available)


def refuse_removed_steps(model: object) -> None:
    """Raise ``ParamError`` if a LightningModule defines steps that Lightning 2 would ignore or refuse on the ranks."""
    if flavour_of(model) is None:
        return
    name = type(model).__name__
    for step in ("training_step", "validation_step"):
        if callable(getattr(model, f"{step}_end", None)):
            raise ParamError(
                f"{name} defines {step}_end, which Lightning 2 does not call. Move its code to the end of {step}."
            )
    for method in ("training_step", "optimizer_step"):
        if "optimizer_idx" in inspect.signature(getattr(model, method)).parameters:
            raise ParamError(
                f"{method} of {name} takes optimizer_idx, which Lightning 2 does not pass. Remove the parameter. A "
                "module with several optimizers sets self.automatic_optimization = False and steps them in "
                "training_step."
            )


def with_lightning_1_hooks(package: LightningPackage) -> LightningPackage:
    """Return the package with callbacks that call the hooks of Lightning 1 in the order of Lightning 1.

    Lightning 2 refuses modules with ``training_epoch_end`` and ``validation_epoch_end``, so they are hidden from it. As
    in Lightning 1, they receive the outputs of this rank's steps in the epoch that are not None.
    """
    model, names = package.model, () if package.plain else _EPOCH_END_METHODS
    functions = {name: getattr(model, name) for name in names if _has_any(model, [name])}
    hooks = _Hooks(package.callbacks)
    if not functions and not hooks.exist(None if package.plain else model):
        return package
    for name in functions:
        setattr(model, name, None)  # hides the method of the class from Lightning
    callbacks = import_lightning(package.flavour).callbacks
    first_type = type("FirstCallback", (_FirstCallback, callbacks.Callback), {})
    # Lightning calls Checkpoint callbacks after all others, and at the end of an epoch also after the module.
    last_type = type("LastCallback", (_LastCallback, callbacks.Checkpoint), {})
    return replace(package, callbacks=(first_type(hooks, functions), *package.callbacks, last_type(hooks)))


def _has_any(owner: object, names: Sequence[str]) -> bool:
    return any(callable(getattr(owner, name, None)) for name in names)


class _Hooks:
    """Calls the hooks of Lightning 1 that the user's callbacks and LightningModule define."""

    def __init__(self, callbacks: Sequence[object]) -> None:
        self._callbacks = callbacks

    def exist(self, module: object) -> bool:
        """Return whether there is any such hook."""
        return _has_any(module, _HOOKS_OF_MODULES) or any(
            _has_any(callback, _HOOKS_OF_CALLBACKS) for callback in self._callbacks
        )

    def call(self, name: str, *arguments: Any) -> None:
        """Call the callbacks with ``arguments``, the Trainer and perhaps the module, and then the module."""
        for callback in self._callbacks:
            if _has_any(callback, [name]):
                getattr(callback, name)(*arguments)
        module = arguments[-1]
        if name in _HOOKS_OF_MODULES and _has_any(module, [name]):
            getattr(module, name)()


class _FirstCallback:
    """Calls hooks that precede those of Lightning 2; precedes Lightning's ``Callback`` in the bases."""

    def __init__(self, hooks: _Hooks, functions: dict[str, Callable[[list[Any]], None]]) -> None:
        super().__init__()
        self._hooks = hooks
        self._functions = functions
        self._outputs: dict[str, list[Any]] = {name: [] for name in functions}

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        del stage
        self._hooks.call("on_init_start", trainer)
        self._hooks.call("on_init_end", trainer)
        self._hooks.call("on_before_accelerator_backend_setup", trainer, module)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._hooks.call("on_epoch_start", trainer, module)

    def on_train_batch_start(self, trainer: Any, module: Any, *_batch: Any) -> None:
        self._hooks.call("on_batch_start", trainer, module)

    def on_train_batch_end(self, _trainer: Any, _module: Any, outputs: Any, *_batch: Any) -> None:
        self._collect("training_epoch_end", outputs)

    def on_train_epoch_end(self, _trainer: Any, _module: Any) -> None:
        self._end("training_epoch_end")

    def on_validation_epoch_start(self, trainer: Any, module: Any) -> None:
        self._hooks.call("on_epoch_start", trainer, module)

    def on_validation_batch_end(self, _trainer: Any, _module: Any, outputs: Any, *_batch: Any) -> None:
        self._collect("validation_epoch_end", outputs)

    def on_validation_epoch_end(self, _trainer: Any, _module: Any) -> None:
        self._end("validation_epoch_end")

    def on_fit_end(self, _trainer: Any, module: Any) -> None:
        """Make the methods of the module visible again."""
        for name in self._functions:
            delattr(module, name)

    def _collect(self, name: str, outputs: Any) -> None:
        if name in self._functions and outputs is not None:
            self._outputs[name].append(outputs)

    def _end(self, name: str) -> None:
        if name in self._functions:
            outputs, self._outputs[name] = self._outputs[name], []
            self._functions[name](outputs)


class _LastCallback:
    """Calls hooks that follow those of Lightning 2; precedes Lightning's ``Checkpoint`` in the bases."""

    def __init__(self, hooks: _Hooks) -> None:
        super().__init__()
        self._hooks = hooks

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self._hooks.call("on_pretrain_routine_start", trainer, module)
        self._hooks.call("on_pretrain_routine_end", trainer, module)

    def on_train_batch_end(self, trainer: Any, module: Any, *_batch: Any) -> None:
        self._hooks.call("on_batch_end", trainer, module)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._hooks.call("on_epoch_end", trainer, module)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self._hooks.call("on_epoch_end", trainer, module)
