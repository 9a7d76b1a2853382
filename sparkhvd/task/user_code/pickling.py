"""Pickles of user code: its modules, functions and stateless values."""

from __future__ import annotations

import functools
import hashlib
import linecache
import sys
import uuid
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_CLASS as _BY_CLASS
from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_ID as _BY_ID

from sparkhvd._util.class_pickling import set_class_state
from sparkhvd.task.user_code.importable import locate

__all__ = ("set_class_state",)  # pickles in Stores, made by earlier versions, find it here

# The limit of characters per function; tracebacks elsewhere show no source lines of longer functions.
_MAX_SOURCE_CHARACTERS = 64 * 1024
# The state below belongs to the process, as cloudpickle's own table of classes does.
_PROCESS = uuid.uuid4().hex
_singles: dict[tuple[type, str, str, str], object] = {}  # stateless values that arrived in a pickle, see single()
_sources: dict[str, dict[int, str]] = {}  # lines by number, for files that this process lacks


class SentModule(ModuleType):
    """A module that arrived in a pickle, with the names that the code in that pickle uses."""

    __path__: list[str]
    sent_version: str
    sent_process: str
    sent_names: set[str]

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how a rank pickles the module: the other ranks have received it, too."""
        return sent_module, (self.__name__, self.__package__, self.sent_version, self.sent_process)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"The module {self.__name__!r} was sent from the driver without {name!r}, because no code that was sent "
            "with it uses that name. Make the module importable on the executors: SparkSession.addArtifacts(..., "
            "pyfile=True), --py-files, or install it there."
        )


class EmptyModule:
    """Stands in a pickle for a module that is pickled by value, before its names are set.

    Args:
        module: the module.
        version: identifies the module's code and the values of its names.
    """

    def __init__(self, module: ModuleType, version: str) -> None:
        self._arguments = (module.__name__, getattr(module, "__package__", None), version, _PROCESS)

    def __reduce__(self) -> tuple[Any, ...]:
        return sent_module, self._arguments


class Globals:
    """Stands in a pickle for the globals of a module's functions, so that they remain the attributes of the module."""

    def __init__(self, module: EmptyModule) -> None:
        self._module = module

    def __reduce__(self) -> tuple[Any, ...]:
        return vars, (self._module,)


def reduced_module(module: EmptyModule, names: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return how to pickle a module by value, with some of its names."""
    return filled_module, (module,), dict(names), None, None, set_names


def filled_module(module: ModuleType) -> ModuleType:
    """Return the module whose names ``set_names`` sets next."""
    return module


def reduced_function(reduced: tuple[Any, ...], module: EmptyModule) -> tuple[Any, ...]:
    """Return how to pickle a function by value that uses the globals of a module.

    Args:
        reduced: how cloudpickle pickles the function, with a copy of the globals that it uses.
        module: the module, which gets these globals.
    """
    make, (code, _, *arguments), state, *_, setter = reduced
    carried: Any = module  # loading the pickle replaces it with the module itself
    setter = functools.partial(set_function_state, setter, carried)
    return make, (code, Globals(module), *arguments), state, None, None, setter


def set_function_state(
    setter: Callable[[FunctionType, Any], Any], module: ModuleType, function: FunctionType, state: Any
) -> FunctionType:
    """Set the attributes that arrived with a function, and the names of its module that it uses."""
    attributes, slots = state
    set_names(module, slots["__globals__"])
    setter(function, (attributes, {**slots, "__globals__": {}}))
    return function


def sent_module(name: str, package: str | None, version: str, process: str) -> ModuleType:
    """Return the module of an ``EmptyModule``: one per process, shared by later pickles of the same version.

    ``import`` finds it if the process has no module of its own under that name.
    """
    existing = sys.modules.get(name)
    if process == _PROCESS and existing is not None:
        return existing
    if isinstance(existing, SentModule) and existing.sent_version == version:
        return existing
    module = _new_module(name, package, version, process)
    if isinstance(existing, SentModule) or (existing is None and locate(name) is None):
        _register(name, module)
    return module


def _new_module(name: str, package: str | None, version: str, process: str) -> SentModule:
    module = SentModule(name)
    module.__package__, module.__path__ = package, []
    module.sent_version, module.sent_process, module.sent_names = version, process, set()
    return module


def _register(name: str, module: ModuleType) -> None:
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        if parent not in sys.modules:
            _register(parent, _new_module(parent, parent, "", ""))
        setattr(sys.modules[parent], last, module)


def set_names(module: ModuleType, names: Mapping[str, Any]) -> ModuleType:
    """Set names of a module that was sent; a module of this process keeps its own.

    Names that an earlier pickle set keep their values, which this process may have changed since then.
    """
    if isinstance(module, SentModule):
        vars(module).update((name, value) for name, value in names.items() if name not in module.sent_names)
        module.sent_names.update(names)
    return module


def is_sent(name: str) -> bool:
    """Return whether a module of that name arrived in a pickle."""
    return isinstance(sys.modules.get(name), SentModule)


def reduced_single(value: object, module: str, name: str, digest: str) -> tuple[Any, ...]:
    """Return how to pickle a stateless value by its name in a module.

    Args:
        value: the stateless value.
        module: the module's name.
        name: the value's name there.
        digest: identifies the version of the module; empty if only this process has the module.
    """
    return single, (type(value), module, name, digest or _PROCESS)


def known_single(value: object) -> tuple[Any, ...] | None:
    """Return how to pickle a value that ``single`` returned; None for any other value."""
    return next(((single, key) for key, known in _singles.items() if known is value), None)


def single(kind: type, module: str, name: str, digest: str) -> object:
    """Return the one value that a process has for this class and name."""
    own = sys.modules.get(module)
    if own is not None and not isinstance(own, SentModule) and (module != "__main__" or digest == _PROCESS):
        value = getattr(own, name, None)
        if type(value) is kind:
            return value
    return _singles.setdefault((kind, module, name, digest), object.__new__(kind))


def identify(kind: type, digest: str) -> None:
    """Give a class of a module the same identity in every process, also in pickles from several processes.

    cloudpickle identifies a class by a random number that it draws when it first pickles the class.

    Args:
        kind: the class, which its module contains under its name.
        digest: the digest of the module and all its imports.
    """
    if kind not in _BY_CLASS:
        key = hashlib.sha256(f"{kind.__module__}:{kind.__qualname__}:{digest}".encode()).hexdigest()
        _BY_CLASS[kind] = key
        _BY_ID[key] = kind


def cached_property(function: Callable[[Any], Any], name: str | None) -> functools.cached_property[Any]:
    """Return a cached property; up to Python 3.11 it holds a lock, which cannot be pickled."""
    created = functools.cached_property(function)
    created.attrname = name
    return created


def cached(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Callable[..., Any]:
    """Return a function with an empty ``lru_cache``."""
    return functools.lru_cache(maxsize, typed)(function)


class SourceLines:
    """The source lines of one function alone; tracebacks show them in the process that loads the pickle."""

    def __init__(self, code: CodeType) -> None:
        first = code.co_firstlineno
        lines = linecache.getlines(code.co_filename)[max(0, first - 1) : _last_line(code)]
        is_short = sum(map(len, lines)) <= _MAX_SOURCE_CHARACTERS
        self._arguments = (code.co_filename, first, tuple(lines) if is_short else ())

    def __reduce__(self) -> tuple[Any, ...]:
        return keep_lines, self._arguments


def _last_line(code: CodeType) -> int:
    nested_lines = [_last_line(const) for const in code.co_consts if isinstance(const, CodeType)]
    return max([code.co_firstlineno, *nested_lines, *(line for _, _, line in code.co_lines() if line)])


def keep_lines(filename: str, first: int, lines: tuple[str, ...]) -> None:
    """Let tracebacks of this process show these lines, unless the process has the whole file."""
    if not lines or (filename not in _sources and linecache.getlines(filename)):
        return
    known = _sources.setdefault(filename, {})
    known.update(enumerate(lines, first))
    content = [known.get(number, "\n") for number in range(1, max(known) + 1)]
    # An entry without a modification time is never compared with a file.
    linecache.cache[filename] = (sum(map(len, content)), None, content, filename)
