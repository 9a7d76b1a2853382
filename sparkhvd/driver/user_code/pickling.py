"""Pickles the user's objects so that ranks and executors can load them; each class has one identity in all pickles.

A module that the executors can import with the driver's content is pickled by reference. A module that they cannot
import is pickled by value, and so is every module that imports one, however indirectly: ``user_modules.sent_by_value``
decides. The decision depends on modules alone, so all pickles of a session agree: the model, its trained state, a
``prediction_fn`` and saved files.
"""

from __future__ import annotations

import functools
import importlib
import io
import sys
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle

from sparkhvd._util.class_pickling import Pickler, fingerprint, process_identity
from sparkhvd.driver.user_code.importable import importable_elsewhere
from sparkhvd.driver.user_code.user_modules import (
    UserModule,
    import_graph,
    imported_when_called,
    nested_code,
    sent_by_value,
    user_module,
)
from sparkhvd.errors import ParamError
from sparkhvd.task.user_code import importable, pickling

# Takes a mapping of module names to file digests; returns the modules that can be imported where a pickle is loaded.
Importable = Callable[[Mapping[str, str]], Collection[str]]

# cloudpickle's table of modules to pickle by value is global to the process; the lock protects it from other jobs.
_PICKLE_TABLE = threading.RLock()
_PLAIN = ("__new__", "__reduce__", "__reduce_ex__", "__getstate__")
_LRU_CACHE_TYPE = type(functools.lru_cache(len))
_MAIN_MODULES = frozenset({"__main__", "__mp_main__"})  # other modules have these names where a pickle is loaded


def dumps(value: object, importable_there: Importable = importable_elsewhere) -> bytes:
    """Pickle a value, with the code that cannot be imported where the pickle is loaded (``cloudpickle.loads``).

    Args:
        value: the value.
        importable_there: returns the modules that can be imported where the pickle is loaded.

    Raises:
        ParamError: code of a compiled module would have to be sent.
        Exception: an exception of pickle or of the value's own methods.
    """
    return dumps_with(CodePickler, value, importable_there=importable_there)


def dumps_with(
    kind: Callable[..., CodePickler],
    value: object,
    *arguments: Any,
    importable_there: Importable = importable_elsewhere,
) -> bytes:
    """Pickle a value like ``dumps``, with a subclass of ``CodePickler``.

    Args:
        kind: the class, called with a file, ``arguments`` and ``code``.
        value: the value.
        arguments: further arguments of ``kind``.
        importable_there: see ``dumps``.
    """
    code = Code(importable_there)

    def pickled() -> bytes:
        while True:
            buffer = io.BytesIO()
            kind(buffer, *arguments, code=code).dump(value)
            if not code.lacks_names():
                return buffer.getvalue()

    with code.registered():
        content = pickled()
        # Not in a loop: the pickles of some values always differ.
        return pickled() if code.has_changed() else content


class Code:
    """The code that one pickle contains by value."""

    def __init__(self, importable_there: Importable) -> None:
        self._importable = importable_there
        self._by_value: dict[str, UserModule | None] = {}  # by name; None is pickled by reference
        self._names: set[str] = set()  # used in the code that is pickled by value
        self._sent: dict[str, set[str]] = {}  # names of each module that were pickled, by module
        self._globals: dict[str, set[str]] = {}  # names of each module that its pickled functions use, by module
        self._registered: set[str] = set()
        self._digests: dict[str, str] = {}  # of modules pickled by value, with all their imports
        self._users = {"__main__"}  # the user's modules found so far

    @contextmanager
    def registered(self) -> Iterator[None]:
        """Allow registering modules to pickle by value with cloudpickle; restore its table when the block ends."""
        with _PICKLE_TABLE:
            try:
                yield
            finally:
                for name in self._registered & cloudpickle.list_registry_pickle_by_value():
                    cloudpickle.unregister_pickle_by_value(sys.modules[name])

    def lacks_names(self) -> bool:
        """Return whether a module was pickled before all the names that the pickled code uses from it were known."""
        return any(self._used_names(sys.modules[name]) - names for name, names in self._sent.items())

    def has_changed(self) -> bool:
        """Return whether a pickled value differs from the one that earlier pickles have under the same version."""
        values: dict[tuple[str, str], bytes] = {}
        for used in (self._sent, self._globals):
            for module, names in used.items():
                namespace = vars(sys.modules[module])
                values.update({(module, name): _fingerprint(namespace[name]) for name in names})
        return _VERSIONS.begin_if_changed(values)

    def version_of(self, module: ModuleType) -> str:
        """Return what identifies a module that is pickled by value: its code, and the values of its names."""
        if isinstance(module, pickling.SentModule):
            return _VERSIONS.version(module.sent_version)
        return _VERSIONS.version(self._digests.get(module.__name__, ""))

    def sent_module_of(self, function: FunctionType) -> ModuleType | None:
        """Return the module whose globals a function uses, if it is pickled by value; None otherwise."""
        name = function.__globals__.get("__name__")
        module = sys.modules.get(name) if isinstance(name, str) and name not in _MAIN_MODULES else None
        if module is None or getattr(module, "__dict__", None) is not function.__globals__:
            return None
        return module if self.module_by_value(module.__name__) else None

    def note_globals(self, module: ModuleType, names: Iterable[str]) -> None:
        """Record the names of a module that are pickled with one of its functions."""
        self._globals.setdefault(module.__name__, set()).update(names)

    def module_by_value(self, name: str) -> UserModule | None:
        """Return the module if it belongs to the user and is pickled by value; None otherwise."""
        if name not in self._by_value:
            self._decide(name)
        return self._by_value[name]

    def identify(self, value: object) -> None:
        """Give a class that is pickled by value the same identity in all pickles."""
        if isinstance(value, type) and value.__module__ in self._digests:
            attribute: Any = sys.modules[value.__module__]
            for part in value.__qualname__.split("."):
                attribute = getattr(attribute, part, None)
            if attribute is value:
                pickling.identify(value, self._digests[value.__module__])

    def single_of(self, value: object) -> tuple[Any, ...] | None:
        """Return how to pickle a stateless value by its name in one of the user's modules; None for other values.

        Such a value is compared by ``is``, but every pickle would create another object when it is loaded.
        """
        kind: Any = type(value)
        if not _is_stateless(value):
            return None
        if (known := pickling.known_single(value)) is not None:
            return known
        self.module_by_value(kind.__module__)
        users = [item for item in self._by_value.items() if item[0] in self._users]
        # The module of the class comes first: other modules may import the value from there.
        for name, sent in [(kind.__module__, self._by_value.get(kind.__module__)), *users, ("__main__", None)]:
            module = sys.modules.get(name)
            for attribute_name, attribute in list(vars(module).items()) if module is not None else ():
                if attribute is value:
                    by_name = sent is None and name != "__main__"
                    digest = self._digests.get(name, "")
                    return (
                        (getattr, (module, attribute_name))
                        if by_name
                        else pickling.reduced_single(value, name, attribute_name, digest)
                    )
        return None

    def note(self, code: CodeType) -> None:
        """Record the names that a function uses; modules are pickled with these names only."""
        for part in nested_code(code):
            self._names.update(part.co_names, (const for const in part.co_consts if isinstance(const, str)))

    def names_of(self, module: ModuleType) -> dict[str, Any]:
        """Return the attributes with which a module is pickled."""
        names = self._sent[module.__name__] = self._used_names(module)
        return {name: vars(module)[name] for name in sorted(names)}

    def _used_names(self, module: ModuleType) -> set[str]:
        return {name for name in self._names & vars(module).keys() if not name.startswith("__")}

    def _decide(self, name: str) -> None:
        self._by_value[name] = None
        if pickling.is_sent(name):
            self._send(UserModule(name, "", b"", is_package=False))
            return
        graph = import_graph([name])
        if name not in graph:
            return
        self._users.add(name)
        there = self._importable({name: module.digest for name, (module, _) in graph.items()})
        sent = sent_by_value({name: needed for name, (_, needed) in graph.items()}, there)
        if name in sent:
            parts = sorted(f"{name} {module.digest}" for name, (module, _) in graph.items())
            self._digests[name] = importable.digest("\n".join(parts).encode())
            self._send(graph[name][0])

    def _send(self, module: UserModule) -> None:
        self._by_value[module.name] = module
        if module.is_compiled:
            raise ParamError(
                f"The compiled module {module.name!r} ({module.file}) cannot be sent to the executors, and they cannot "
                "import it. Install it there, or send an environment that has it with spark.archives."
            )
        loaded = importlib.import_module(module.name)  # a function may import it only when it is called
        if module.name not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(loaded)
            self._registered.add(module.name)


class _Versions:
    """The versions of the modules that this process pickles by value.

    Pickles of one version share their modules where they are loaded. A version ends when this process has changed a
    value that it sent: code that has the old value must keep it, and code that is sent later needs the new one.
    """

    def __init__(self) -> None:
        self._number = 0
        self._values: dict[tuple[str, str], bytes] = {}  # fingerprints of values, by module and name

    def version(self, digest: str) -> str:
        """Return the current version of a module.

        Args:
            digest: identifies the code of the module.
        """
        return importable.digest(f"{digest} {process_identity()} {self._number}".encode())

    def begin_if_changed(self, values: Mapping[tuple[str, str], bytes]) -> bool:
        """Begin a new version if a value has changed, and return whether it has."""
        has_changed = any(self._values.get(key, value) != value for key, value in values.items())
        if has_changed:
            self._number += 1
            self._values.clear()
        self._values.update(values)
        return has_changed


_VERSIONS = _Versions()  # of the process, as the table of classes is; the lock above protects it


def _fingerprint(value: object) -> bytes:
    """Return the fingerprint of a value. A function whose content cannot be pickled has one as long as it exists."""
    try:
        return fingerprint(value)
    except Exception:  # noqa: BLE001  methods of the value may raise anything
        return (str(id(value)) if isinstance(value, FunctionType) else uuid.uuid4().hex).encode()


def _is_stateless(value: object) -> bool:
    """Return whether ``object.__new__`` creates an equivalent of the value."""
    kind: Any = type(value)
    plain = all(getattr(kind, name) is getattr(object, name) for name in _PLAIN)
    if not plain or kind.__getstate__(value):
        return False
    try:
        object.__reduce_ex__(value, 2)
    except TypeError:  # compiled code holds its state, as that of a regular expression or a lock
        return False
    return True


class CodePickler(Pickler):
    """Pickles by value the code that cannot be imported where the pickle is loaded; see ``dumps``."""

    def __init__(self, file: io.BytesIO, *, code: Code) -> None:
        super().__init__(file)
        self._code = code
        self._empty_modules: dict[str, pickling.EmptyModule] = {}  # one per module, so that the pickle contains it once

    def reducer_override(self, value: Any) -> Any:
        """Return how to pickle a value; pickle calls this."""
        if isinstance(value, ModuleType):
            sent = self._code.module_by_value(value.__name__)
            if sent is not None and sys.modules.get(value.__name__) is value:
                return pickling.reduced_module(self._empty_module(value), self._code.names_of(value))
            # cloudpickle sends only modules of Python's own type by name; torch.backends.cudnn has another type.
            has_name = sys.modules.get(value.__name__) is value and type(value).__reduce__ is object.__reduce__
            return (importlib.import_module, (value.__name__,)) if has_name else NotImplemented
        if type(value) is functools.cached_property:
            return pickling.cached_property, (value.func, value.attrname)
        if isinstance(value, _LRU_CACHE_TYPE) and self._is_by_value(value):
            return pickling.cached, (value.__wrapped__, *value.cache_parameters().values())
        if (single := self._code.single_of(value)) is not None:
            return single
        if isinstance(value, type | FunctionType | BuiltinFunctionType) and isinstance(value.__module__, str):
            self._code.module_by_value(value.__module__)
            self._code.identify(value)
        reduced = super().reducer_override(value)
        if isinstance(value, FunctionType) and isinstance(reduced, tuple):
            self._code.note(value.__code__)
            # cloudpickle lets a function carry modules. Its source lines and the modules that it imports when it is
            # called are sent the same way.
            reduced[2][1]["_cloudpickle_submodules"] += [
                *self._imported_when_called(value),
                pickling.SourceLines(value.__code__),
            ]
            reduced = self._with_globals(value, reduced)
        return reduced

    def _with_globals(self, function: FunctionType, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
        """Let a function of a module that is pickled by value use the module's globals instead of a copy of them.

        A function within a function is pickled by value even if its module is not. It keeps its copy, because the
        module may not be importable where the pickle is loaded.
        """
        module = self._code.sent_module_of(function)
        if module is None:
            return reduced
        self._code.note_globals(module, reduced[2][1]["__globals__"])
        return pickling.reduced_function(reduced, self._empty_module(module))

    def _empty_module(self, module: ModuleType) -> pickling.EmptyModule:
        if module.__name__ not in self._empty_modules:
            empty = pickling.EmptyModule(module, self._code.version_of(module))
            self._empty_modules[module.__name__] = empty
        return self._empty_modules[module.__name__]

    def _is_by_value(self, function: Any) -> bool:
        """Return whether a function that ``lru_cache`` wraps must carry its code."""
        is_local = "<locals>" in function.__qualname__
        return (
            function.__module__ == "__main__" or is_local or self._code.module_by_value(function.__module__) is not None
        )

    def _imported_when_called(self, function: FunctionType) -> list[ModuleType]:
        names = imported_when_called(function)
        users = (name for name in sorted(names) if pickling.is_sent(name) or user_module(name))
        sent = [name for name in users if self._code.module_by_value(name)]
        return [importlib.import_module(name) for name in sent]
