"""Names and hooks that Lightning 2 removed; programs use them because Horovod 0.28 supported only Lightning 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from sparkhvd.estimators.lightning.package import LightningPackage
from sparkhvd.lightning.flavour import flavour_of, import_lightning

_EPOCH_END_METHODS = ("training_epoch_end", "validation_epoch_end")


def restore_names() -> None:
    """Restore names that Lightning 2 has removed, if Lightning is installed as ``pytorch_lightning``."""
    if find_spec("pytorch_lightning") is None:
        return
    from lightning_utilities.core.imports import module_available  # noqa: PLC0415 - with Lightning only
    from pytorch_lightning import utilities  # noqa: PLC0415

    vars(utilities).setdefault("_module_available", module_available)


def with_epoch_end_methods(package: LightningPackage) -> LightningPackage:
    """Return the package with a callback that calls ``training_epoch_end`` and ``validation_epoch_end``.

    Lightning 2 refuses modules with these methods, so they are hidden from it. As in Lightning 1, they receive the
    outputs of this rank's steps in the epoch that are not None.
    """
    model, flavour = package.model, flavour_of(package.model)
    functions = {name: getattr(model, name) for name in _EPOCH_END_METHODS if callable(getattr(model, name, None))}
    if flavour is None or not functions:
        return package
    for name in functions:
        setattr(model, name, None)  # hides the method of the class from Lightning
    callback_type = type("EpochEndCallback", (_EpochEndCallback, import_lightning(flavour).Callback), {})
    return replace(package, callbacks=(*package.callbacks, callback_type(functions)))


class _EpochEndCallback:
    """Passes the outputs of an epoch's steps to functions; precedes Lightning's ``Callback`` in the bases."""

    def __init__(self, functions: dict[str, Callable[[list[Any]], None]]) -> None:
        super().__init__()
        self._functions = functions
        self._outputs: dict[str, list[Any]] = {name: [] for name in functions}

    def on_train_batch_end(self, _trainer: Any, _module: Any, outputs: Any, *_batch: Any) -> None:
        self._collect("training_epoch_end", outputs)

    def on_train_epoch_end(self, _trainer: Any, _module: Any) -> None:
        self._end("training_epoch_end")

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
