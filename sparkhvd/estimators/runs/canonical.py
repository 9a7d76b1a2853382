"""The canonical form of a parameter, equal in every process: free of addresses, hashes and the order of sets."""

from __future__ import annotations

import copyreg
import functools
import hashlib
import inspect
import json
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, ClassVar, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from sparkhvd._util.frameworks import frameworks
from sparkhvd.errors import ParamError
from sparkhvd.estimators.runs.function_globals import (
    code_names,
    digests_of,
    globals_of,
    imports_of,
    module_is_installed,
    passed_globals,
)


def canonical_form(value: object, name: str = "a parameter", *, weights: bool = False) -> object:
    """Return the JSON form of a value, equal in every process.

    A model is represented by its structure, code, plain attributes and the shapes of its weights; an optimizer also by
    the state of its past steps.

    Args:
        value: the value.
        name: its name in the error message.
        weights: whether the values of a model's weights count, too.

    Raises:
        ParamError: the content of an object in the value cannot be determined.
    """
    return canonical_forms({name: value}, weights=weights)[name]


def canonical_forms(values: Mapping[str, object], *, weights: bool = False) -> dict[str, object]:
    """Return the JSON form of every value by name, where a value may refer to parts of the model in another one.

    Args:
        values: the values by their names in the error message; the forms of ``model`` and its parts come first.
        weights: as for ``canonical_form``.

    Raises:
        ParamError: see ``canonical_form``.
    """
    form, forms = CanonicalForm(weights=weights), dict[str, object]()
    for name in sorted(values, key=lambda name: (name != "model", name)):
        form.parameter, value = name, values[name]
        forms[name] = form.of(list(value) if type(value) is tuple else value)
    return forms


class Tensor(Protocol):
    """A tensor of any framework."""

    @property
    def dtype(self) -> object: ...
    @property
    def shape(self) -> Iterable[int]: ...


@dataclass(frozen=True)
class TensorContent:
    """The content of a tensor.

    Attributes:
        dtype: the type of its elements.
        shape: its shape.
        elements: the bytes of its elements.
        kind: its class and other properties, if it is not a plain tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    elements: bytes
    kind: str = ""


def _content_form(content: TensorContent) -> list[object]:
    digest = hashlib.sha256(content.elements).hexdigest()
    return [content.dtype, list(content.shape), digest, *([content.kind] if content.kind else [])]


_SCALARS = (bool, int, float, str)
# Immutable values, in which no cycle can begin.
_IMMUTABLE_TYPES = (tuple, frozenset, bytes, complex, range, slice)


class CanonicalForm:
    """The form of values; an object that occurs again is represented by the index of its first occurrence.

    Every framework describes its own objects, see ``Framework.describe``.

    Args:
        weights: whether the values of a model's weights count.

    Attributes:
        parameter: the current parameter, for messages.
        parts: the weights and layers of the models so far, which other objects may refer to.
    """

    def __init__(self, *, weights: bool) -> None:
        self.parameter = ""
        self.weights = weights
        self.parts: list[object] = []
        self._part_indices: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._kept_alive: list[object] = []  # an id is unique only while its object lives
        self._seen_attributes: set[tuple[int, str]] = set()  # names in the user's modules, by the module's id

    def of(self, value: object) -> object:
        """Return the form of a value."""
        if value is None or type(value) in _SCALARS:
            return value
        if (reference := self.reference(value)) is not None:
            return reference
        if isinstance(value, np.generic | np.ndarray) or is_tensor(value):
            return self._array_form(value)
        if type(value) in _IMMUTABLE_TYPES:  # Python shares equal ones, but not in every process
            return self._described(value)
        if id(value) in self._seen:
            return ["seen", self._seen[id(value)]]
        self._seen[id(value)] = len(self._seen)
        self._kept_alive.append(value)
        return self._described(value)

    def add_parts(self, parts: Iterable[object]) -> None:
        """Represent weights or layers of a model by their index from now on."""
        for part in parts:
            if id(part) not in self._part_indices:
                self._part_indices[id(part)] = len(self.parts)
                self.parts.append(part)

    def reference(self, value: object) -> object:
        """Return the form of a part of a model; None for any other object."""
        index = self._part_indices.get(id(value))
        return None if index is None else {"part": index}

    def _described(self, value: object) -> object:
        for types, describe in self._by_type.items():
            if isinstance(value, types):
                return describe(self, value)
        return self._object_form(value)

    def _scalar_form(self, value: float | str) -> object:
        """Return the form of a number or string whose class is not Python's own, such as a member of an enum."""
        plain = next(base.__repr__(value) for base in _SCALARS if isinstance(value, base))
        return [plain, *self._class_forms(value)]

    def _mapping_form(self, value: Mapping[object, object]) -> object:
        if isinstance(value, WeakKeyDictionary | WeakValueDictionary):
            return {"class": qualified_name(type(value))}  # a cache, whose content depends on its use
        content = [(self.of(key), self.of(item)) for key, item in value.items()]
        factory = getattr(value, "default_factory", None)
        return ["mapping", content, *([] if factory is None else [self.of(factory)]), *self._class_forms(value)]

    def _set_form(self, value: set[object]) -> object:
        # Each item gets a form of its own, because the iteration order of a set differs between processes.
        items = sorted(json.dumps(item if _is_constant(item) else self._copy().of(item)) for item in value)
        return ["set", items, *self._class_forms(value)]

    def _copy(self) -> CanonicalForm:
        """Return a form that knows the same objects; the objects that it sees do not count here."""
        form = CanonicalForm(weights=self.weights)
        form.parameter = self.parameter
        form.add_parts(self.parts)
        form._seen, form._kept_alive = dict(self._seen), list(self._kept_alive)
        form._seen_attributes = set(self._seen_attributes)
        return form

    def _sequence_form(self, value: Sequence[object]) -> object:
        items = [self.of(item) for item in value]
        if isinstance(value, deque) and value.maxlen is not None:
            items.append({"maxlen": value.maxlen})
        if isinstance(value, array):
            items.append({"typecode": value.typecode})
        return [*items, *self._class_forms(value)]

    def _class_forms(self, value: object) -> list[object]:
        """Return the class of a value unless it is a usual one; the code and attributes of a user's class, too."""
        value_class = type(value)
        if value_class in _USUAL_CLASSES:
            return []
        attributes = _attributes(value)
        if not module_is_installed(value_class.__module__):
            return [{"class": self.of(value_class), "attributes": self._attributes_form(attributes)}]
        fields = {"fields": self._attributes_form(attributes)} if attributes and isinstance(value, tuple) else {}
        return [{"class": qualified_name(value_class), **fields}]  # a Row of Spark keeps the names of its fields

    def _attributes_form(self, attributes: Mapping[str, object]) -> object:
        """Return the form of an object's attributes, whose order does not count."""
        return [(name, self.of(item)) for name, item in sorted(attributes.items())]

    def _array_form(self, value: object) -> object:
        """Return the digest of an array's numbers, with the mask and the class of an unusual one."""
        try:
            for read_content in self._content_readers:
                if (content := read_content(value)) is not None:
                    return [*_content_form(content), *self.tensor_attribute_forms(value)]
        except Exception as error:
            raise self._unknown_error(value, error) from error
        plain = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
        if plain.dtype.hasobject:
            form: list[object] = [str(plain.dtype), plain.shape, self.of(plain.tolist())]
        else:
            form = _content_form(TensorContent(str(plain.dtype), plain.shape, plain.tobytes()))
        if isinstance(value, np.ma.MaskedArray):
            return [
                *form,
                {"mask": self._array_form(np.ma.getmaskarray(value)), "fill": self._array_form(value.fill_value)},
            ]
        return [*form, *self._class_forms(value)] if isinstance(value, np.ndarray) else form

    def _method_form(self, value: MethodType) -> object:
        return ["method", self.of(value.__func__), self.of(value.__self__)]

    def _builtin_form(self, value: BuiltinFunctionType) -> object:
        owner = value.__self__
        return [value.__module__, value.__qualname__, None if isinstance(owner, ModuleType) else self.of(owner)]

    @functools.cached_property
    def _describers(self) -> list[Callable[[object, CanonicalForm], object]]:
        return [resolve_name(framework.describe) for framework in frameworks() if framework.describe]

    @functools.cached_property
    def _content_readers(self) -> list[Callable[[object], TensorContent | None]]:
        return [resolve_name(framework.contents) for framework in frameworks() if framework.contents]

    def _object_form(self, value: object) -> object:
        for describe in self._describers:
            if (form := describe(value, self)) is not None:
                return form
        return self._parts_form(value)

    def _parts_form(self, value: object) -> object:
        """Return the form of any other object, from the parts that pickle would use to rebuild it."""
        try:
            by_table = copyreg.dispatch_table.get(type(value))
            parts = by_table(value) if by_table is not None else value.__reduce_ex__(2)
        except Exception as error:
            raise self._unknown_error(value, error) from error
        if isinstance(parts, str):
            wrapped = getattr(value, "__wrapped__", None)  # the function in an lru_cache
            return [qualified_name(type(value)), parts, *([] if wrapped is None else [self.of(wrapped)])]
        items: list[Any] = [list(part) if isinstance(part, Iterator) else part for part in parts]
        # Where pickle sets attributes from the state, their order does not count.
        states = [items.pop(2)] if len(items) > 2 and type(items[2]) is dict and all(map(_is_name, items[2])) else []
        return [self.of(type(value)), self.of(items), *map(self._attributes_form, states)]

    def _unknown_error(self, value: object, error: Exception) -> ParamError:
        return ParamError(
            f"resume='auto' identifies a run by its parameters, but {self.parameter} holds a "
            f"{qualified_name(type(value))}, whose content cannot be determined ({type(error).__name__}: "
            f"{error}). Pass a run_id instead."
        )

    def _function_form(self, value: FunctionType) -> object:
        """Return the name and arguments of a function; for a user's function also its code and everything it uses."""
        if (original := vars(value).get(_COMPILED_FUNCTION)) is not None:
            return ["compiled", self.of(original)]
        code: list[object] = []
        if not module_is_installed(value.__module__):
            passed = passed_globals(value)
            used_globals = {
                name: self.of(item) if name in passed else self._global_form(item, value.__code__)
                for name, item in globals_of(value).items()
            }
            attributes = {name: self.if_describable(item) for name, item in sorted(vars(value).items())}
            code = [code_form(value.__code__), sorted(used_globals.items()), imports_of(value), attributes]
        return [
            value.__module__,
            value.__qualname__,
            code,
            self.of(value.__defaults__),
            self.of(value.__kwdefaults__),
            [self._cell_form(cell) for cell in value.__closure__ or ()],
        ]

    def _global_form(self, value: object, code: CodeType) -> object:
        """Return the form of a global that code reads; for a user's module also the attributes that the code names."""
        if not isinstance(value, ModuleType) or module_is_installed(value.__name__):
            return self.of(value)
        module_form = ["module", value.__name__]
        named = [name for name in code_names(code) if name in vars(value)]
        attributes = {name: vars(value)[name] for name in named if (id(value), name) not in self._seen_attributes}
        self._seen_attributes |= {(id(value), name) for name in attributes}
        return [module_form, [(name, self._global_form(item, code)) for name, item in sorted(attributes.items())]]

    def _cell_form(self, cell: CellType) -> object:
        try:
            content = cell.cell_contents
        except ValueError:  # an empty cell: its variable is assigned later, or never
            return []
        return [self.of(content)]

    def _class_form(self, value: type) -> object:
        """Return the name of an installed class, and the code of a class that the user wrote."""
        if module_is_installed(value.__module__):
            return qualified_name(value)
        parts: list[object] = []
        for name, item in sorted(vars(value).items()):
            functions = [
                part for accessor in _FUNCTION_ATTRIBUTES if (part := getattr(item, accessor, None)) is not None
            ]
            for part in functions if functions and isinstance(item, _FUNCTION_DESCRIPTORS) else [item]:
                is_own = callable(part) or isinstance(part, functools.partialmethod) or not name.startswith("__")
                if is_own and name not in _CHANGING_NAMES:
                    parts += [[name, form] for form in self.if_describable(part)]
        metaclass = [] if module_is_installed(type(value).__module__) else [self.of(type(value))]
        return [qualified_name(value), parts, [self.of(base) for base in value.__bases__], *metaclass]

    def if_describable(self, value: object) -> list[object]:
        """Return a list with the form of an attribute, or an empty list for a lock or a cache, which do not count."""
        try:
            return [self.of(value)]
        except ParamError:
            return []

    def tensor_attribute_forms(self, value: object) -> list[tuple[str, list[object]]]:
        """Return the names and forms of the attributes that code has set on a tensor, such as a weight."""
        attributes = sorted(_attributes(value).items())
        return [(name, self.if_describable(item)) for name, item in attributes if not name.startswith(_COMPILER_PREFIX)]

    def of_tensor(self, value: Tensor, *, exact: bool) -> object:
        """Return the form of a tensor: its values, or only its type and shape."""
        return self._array_form(value) if exact else [str(value.dtype), list(value.shape)]

    _by_type: ClassVar[dict[Any, Callable[[CanonicalForm, Any], Any]]] = {
        _SCALARS: _scalar_form,
        (complex, range, slice, bytes, bytearray, type(...)): lambda _, value: repr(value),
        Mapping: _mapping_form,
        (set, frozenset): _set_form,
        Sequence: _sequence_form,
        type: _class_form,
        FunctionType: _function_form,
        MethodType: _method_form,
        BuiltinFunctionType: _builtin_form,
        ModuleType: lambda _, value: ["module", value.__name__, digests_of([value.__name__])],
        CodeType: lambda _, value: code_form(value),
        CellType: _cell_form,
    }


# The descriptors that wrap functions in a class, and their attributes with the functions; only the functions count.
_FUNCTION_DESCRIPTORS = (property, classmethod, staticmethod, functools.cached_property)
_FUNCTION_ATTRIBUTES = ("__func__", "fget", "fset", "fdel", "func")


# The prefix of the attributes that torch.compile sets on tensors.
_COMPILER_PREFIX = "_dynamo_"

# The attribute of a function from torch.compile that contains the user's function.
_COMPILED_FUNCTION = "_torchdynamo_orig_callable"

# The members of an enum by value; combinations of flags are added when code computes them.
_CHANGING_NAMES = frozenset({"_value2member_map_", "_hashable_values_", "_unhashable_values_"})


# The classes of collections and arrays that the rest of a form implies or that behave alike.
_USUAL_CLASSES = frozenset(
    {list, dict, OrderedDict, defaultdict, MappingProxyType, set, frozenset, deque, array, np.ndarray, np.memmap}
)


def names_of_installed_bases(kind: type) -> frozenset[str]:
    """Return the names of the attributes that installed base classes set on their objects."""
    codes = (
        init.__code__
        for base in kind.__mro__
        if module_is_installed(base.__module__) and isinstance(init := vars(base).get("__init__"), FunctionType)
    )
    return frozenset(name for code in codes for name in (*code_names(code), *code.co_consts) if isinstance(name, str))


def _is_name(value: object) -> bool:
    return isinstance(value, str)


def _is_constant(value: object) -> bool:
    """Return whether a value is its own form, so that no earlier object matters."""
    return value is None or type(value) in _SCALARS


def _attributes(value: object) -> dict[str, object]:
    """Return the attributes of an object by name, including those in slots."""
    names = [name for base in type(value).__mro__ for name in _slots_of(base)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)} | getattr(value, "__dict__", {})


def _slots_of(base: type) -> list[str]:
    slots = vars(base).get("__slots__", ())
    private = base.__name__.lstrip("_")
    names = [slots] if isinstance(slots, str) else [name for name in slots if name not in {"__dict__", "__weakref__"}]
    return [f"_{private}{name}" if name.startswith("__") and not name.endswith("__") else name for name in names]


def code_form(code: CodeType) -> list[object]:
    """Return the form of compiled code."""
    constants = [code_form(item) if isinstance(item, CodeType) else _constant(item) for item in code.co_consts]
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]  # some are passed by name
    return [
        code.co_code.hex(),
        constants,
        code.co_names,
        arguments,
        code.co_argcount,
        code.co_kwonlyargcount,
        code.co_flags & _KINDS_OF_CODE,
        getattr(code, "co_exceptiontable", b"").hex(),
    ]


# Flags of properties that no other part of a form shows: generators, coroutines, *args and **kwargs.
_KINDS_OF_CODE = (
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)


def _constant(value: object) -> object:
    # The order of a set of strings differs between processes.
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


def is_plain(value: object) -> bool:
    """Return whether a value is a number, a string, or a collection of these."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    return value is None or isinstance(value, bool | int | float | str)


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor or a variable of a framework."""
    return not isinstance(value, type | ModuleType) and all(
        hasattr(value, name) for name in ("numpy", "dtype", "shape")
    )


def qualified_name(kind: type) -> str:
    """Return the name of a class with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"
