"""Make the frameworks import in about half the time, in every process of the tests.

TensorFlow, Keras and Lightning import JAX, Matplotlib, scikit-learn, SciPy, pandas and IPython if they are installed,
and Spark ML imports SciPy. The tests install them, and their imports take longer than those of the frameworks' own
modules. This module hides the packages from the frameworks; all other code can import them. PyTorch imports its
compiler, torch._dynamo, in the first step of an optimizer, and Lightning imports it for the class of compiled modules.
Here it is imported only when something is compiled.

`make` copies this file into the environment, where every process that the tests start runs it before anything else (see
``.venv/.lean-imports`` in the Makefile).
"""

from __future__ import annotations

import functools
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_FRAMEWORKS = frozenset(
    {"keras", "lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "tensorflow", "torchmetrics"}
)
_HIDDEN = frozenset({"IPython", "jax", "matplotlib", "pandas", "scipy", "sklearn"})
_COMPILER = "torch._dynamo"
_USERS_OF_COMPILED_MODULES = frozenset(
    {
        "lightning_fabric.wrappers",
        "lightning.fabric.wrappers",
        "pytorch_lightning.utilities.compile",
        "lightning.pytorch.utilities.compile",
    }
)


class _LeanFinder:
    """Refuses and changes imports before another finder is asked."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        package = name.partition(".")[0]
        # A framework that finds a package among the imported modules goes on to import its submodules.
        if package in _HIDDEN and package not in sys.modules and _is_hidden(package, _importer()):
            raise ModuleNotFoundError(f"The tests hide {package!r} from frameworks.", name=name)
        if name == _COMPILER and _importer().startswith("sparkhvd."):  # ranks import it because they train soon
            raise ModuleNotFoundError("The tests import no compiler before something is compiled.", name=name)
        if name in _USERS_OF_COMPILED_MODULES and _COMPILER not in sys.modules:
            spec = PathFinder.find_spec(name, path)
            if spec is not None and spec.origin is not None:
                spec.loader = _LoaderWithoutCompiler(name, spec.origin)
            return spec
        change = _CHANGES.get(name)
        spec = PathFinder.find_spec(name, path) if change is not None else None
        if spec is not None and spec.origin is not None:
            spec.loader = _ChangingLoader(name, spec.origin, change)
        return spec


class _ChangingLoader(SourceFileLoader):
    """Changes a module after its code has run."""

    def __init__(self, name: str, path: str, change: Callable[[Any], None]) -> None:
        super().__init__(name, path)
        self._change = change

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        self._change(module)


class _LoaderWithoutCompiler(SourceFileLoader):
    """Gives a module a stand-in for ``OptimizedModule``, which it would import from the compiler."""

    def exec_module(self, module: ModuleType) -> None:
        stand_in = ModuleType(_COMPILER)
        stand_in.OptimizedModule = _OptimizedModule  # type: ignore[attr-defined]
        sys.modules[_COMPILER] = stand_in
        try:
            super().exec_module(module)
        finally:
            del sys.modules[_COMPILER]


class _OptimizedModuleType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        compiler = sys.modules.get(_COMPILER)
        return compiler is not None and isinstance(instance, compiler.OptimizedModule)


class _OptimizedModule(metaclass=_OptimizedModuleType):
    """Stands for ``torch._dynamo.OptimizedModule`` in tests of an object's type."""


def _importer() -> str:
    """Return the package whose code is importing a module."""
    frame = sys._getframe(2)
    while frame is not None:
        package: str = frame.f_globals.get("__package__") or frame.f_globals.get("__name__", "")
        if package.partition(".")[0] not in {"importlib", "_frozen_importlib"}:
            return package
        frame = frame.f_back
    return ""


def _is_hidden(package: str, importer: str) -> bool:
    return importer.partition(".")[0] in _FRAMEWORKS or (package == "scipy" and importer.startswith("pyspark.ml"))


def _hide_versions(module: Any) -> None:
    """Make Lightning's tests for installed packages miss the hidden ones; they look at metadata."""
    version_of = module._version

    def version(package: str) -> str:
        if package in _HIDDEN:
            raise module.PackageNotFoundError(package)
        return version_of(package)

    module._version = version


def _exempt_from_compilation(module: Any) -> None:
    """Let the decorator that exempts a function from compilation do nothing without a compiler."""
    exempt = module._disable_dynamo

    def exempt_lazily(function: Any = None, recursive: bool = True) -> Any:
        exempted = exempt(function, recursive)
        if function is None:
            return exempted  # a decorator, which calls `exempt_lazily` with a function
        return _with_compiler(exempted, without=function)

    module._disable_dynamo = exempt_lazily


def _disable_without_compiler(module: Any) -> None:
    """Let Lightning's functions that must not be compiled be plain functions without a compiler."""
    disable = module.disable

    def disable_lazily(function: Any = None, *args: Any, **options: Any) -> Any:
        if not isinstance(function, FunctionType):
            return disable(function, *args, **options)

        @functools.wraps(function)
        def disabled(*args_of_call: Any, **kwargs: Any) -> Any:
            return disable(function, *args, **options)(*args_of_call, **kwargs)

        return _with_compiler(disabled, without=function)

    module.disable = disable_lazily


def _step_without_compiler(module: Any) -> None:
    """Let the steps of optimizers set the mode of gradients without breaks for a compiler."""
    wrap = module._use_grad_for_differentiable

    def wrap_lazily(step: Any) -> Any:
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            with module.torch.set_grad_enabled(self.defaults["differentiable"]):
                return step(self, *args, **kwargs)

        return _with_compiler(wrap(step), without=wrapped)

    module._use_grad_for_differentiable = wrap_lazily


def _with_compiler(function: Any, without: Any) -> Any:
    """Return a function that calls one of the two, depending on whether the compiler has been imported."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if _COMPILER in sys.modules else without)(*args, **kwargs)

    return call


_CHANGES: dict[str, Callable[[Any], None]] = {
    "lightning_utilities.core.imports": _hide_versions,
    "torch._compile": _exempt_from_compilation,
    "torch.compiler": _disable_without_compiler,
    "torch.optim.optimizer": _step_without_compiler,
}


def install() -> None:
    """Change the imports of this process."""
    if _LeanFinder not in sys.meta_path:
        sys.meta_path.insert(0, _LeanFinder)
