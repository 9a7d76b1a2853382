"""The canonical form of a parameter, equal in every process: without addresses, hashes or the order of a set."""

from __future__ import annotations

import copyreg
import functools
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, ClassVar

import numpy as np

from sparkhvd.errors import ParamError
from sparkhvd.estimators.runs.function_globals import code_names, globals_of, imports_of, module_is_installed

# The number that Keras appends to a name, or to a name in the path of a variable.
AUTOMATIC_NUMBER = re.compile(r"_\d+(?=/|$)")


def canonical_form(value: Any, name: str = "a parameter", *, weights: bool = False) -> Any:
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
    return _CanonicalForm(name, weights=weights).of(value)


class _CanonicalForm:
    """The form of one value; an object that occurs again is represented by its index."""

    def __init__(self, name: str, *, weights: bool) -> None:
        self._parameter = name
        self._weights = weights
        self._seen: dict[int, int] = {}
        self._kept_alive: list[Any] = []  # an id is unique only while its object lives
        self._seen_attributes: set[tuple[int, str]] = set()  # names in the user's modules, by the module's id

    def of(self, value: Any) -> Any:
        """Return the form of a value."""
        if value is None or isinstance(value, bool | int | float | str):
            return value if type(value).__module__ == "builtins" else [_qualified_name(type(value)), str(value)]
        if isinstance(value, np.generic | np.ndarray) or _is_tensor(value):
            return self._of_array(value)
        if id(value) in self._seen:
            return ["seen", self._seen[id(value)]]
        self._seen[id(value)] = len(self._seen)
        self._kept_alive.append(value)
        for kind, describe in self._by_type.items():
            if isinstance(value, kind):
                return describe(self, value)
        return self._of_object(value)

    def _of_mapping(self, value: Mapping[Any, Any]) -> Any:
        pairs = [(key if isinstance(key, str) else json.dumps(self.of(key)), item) for key, item in value.items()]
        content = [(key, self.of(item)) for key, item in sorted(pairs, key=lambda pair: pair[0])]
        factory = getattr(value, "default_factory", None)
        return ["mapping", content, *([] if factory is None else [self.of(factory)]), *self._of_own_kind(value)]

    def _of_set(self, value: set[Any]) -> Any:
        # Each item gets a form of its own, because the iteration order of a set differs between processes.
        return [
            "set",
            sorted(json.dumps(canonical_form(item, self._parameter, weights=self._weights)) for item in value),
        ]

    def _of_sequence(self, value: Sequence[Any]) -> Any:
        return [*(self.of(item) for item in value), *self._of_own_kind(value)]

    def _of_own_kind(self, value: Any) -> list[Any]:
        """Return the code and attributes of a collection whose class the user wrote."""
        kind = type(value)
        return [] if module_is_installed(kind.__module__) else [["kind", self.of(kind), self.of(_attributes(value))]]

    def _of_array(self, value: Any) -> Any:
        """Return the digest of an array's numbers; a scalar unchanged."""
        if callable(dense := getattr(value, "to_dense", None)):
            value = dense()
        if callable(detach := getattr(value, "detach", None)):
            torch = sys.modules["torch"]
            kind, value = str(value.dtype), detach().cpu().contiguous()
            shape, array = tuple(value.shape), value.flatten().view(torch.uint8).numpy()
        else:
            array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
            kind, shape = str(array.dtype), array.shape
            if array.dtype.hasobject:
                return [kind, shape, self.of(array.tolist())]
            if not shape and array.dtype.kind in "biuf":
                return array.item()
        return [kind, list(shape), hashlib.sha256(array.tobytes()).hexdigest()]

    def _of_method(self, value: MethodType) -> Any:
        return ["method", self.of(value.__func__), self.of(value.__self__)]

    def _of_builtin(self, value: BuiltinFunctionType) -> Any:
        owner = value.__self__
        return [value.__module__, value.__qualname__, None if isinstance(owner, ModuleType) else self.of(owner)]

    def _of_object(self, value: Any) -> Any:
        if callable(getattr(value, "named_parameters", None)):
            return self._of_torch_module(value)
        if isinstance(groups := getattr(value, "param_groups", None), list):
            shapes = [[list(weight.shape) for weight in group["params"]] for group in groups]
            plain = [{name: item for name, item in group.items() if name != "params"} for group in groups]
            own = self._of_optimizer_attributes(value)
            return [self.of(type(value)), shapes, self.of(plain), *self._of_torch_state(value, groups), *own]
        if callable(getattr(value, "get_config", None)):
            return self._of_keras(value)
        return self._of_parts(value)

    def _of_torch_state(self, value: Any, groups: list[dict[str, Any]]) -> list[Any]:
        """Return an optimizer's state of each parameter; empty before its first step."""
        state = getattr(value, "state", None) or {}
        return [[self.of(state.get(weight)) for group in groups for weight in group["params"]]] if state else []

    def _of_optimizer_attributes(self, value: Any) -> list[Any]:
        """Return the attributes and hooks of an optimizer in a list; empty if it has only those of PyTorch's class."""
        installed = module_is_installed(type(value).__module__)
        attributes = {
            name: self._if_describable(item)
            for name, item in sorted(vars(value).items())
            if name not in _OF_OPTIMIZERS and not name.endswith("_hooks") and not (installed and name.startswith("_"))
        }
        hooks = self._of_hooks(value, "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        return [sorted({**attributes, **hooks}.items())] if attributes or hooks else []

    def _of_hooks(self, value: Any, *names: str) -> dict[str, Any]:
        """Return the form of the registered hooks by the names of the attributes that hold them."""
        registered = {name: list((getattr(value, name, None) or {}).values()) for name in names}
        return {name: [self._if_describable(hook) for hook in hooks] for name, hooks in registered.items() if hooks}

    def _of_parts(self, value: Any) -> Any:
        """Return the form of any other object, by the parts from which pickle would rebuild it."""
        try:
            by_table = copyreg.dispatch_table.get(type(value))
            parts = by_table(value) if by_table is not None else value.__reduce_ex__(2)
        except Exception as error:
            raise ParamError(
                f"resume='auto' identifies a run by its parameters, but {self._parameter} holds a "
                f"{_qualified_name(type(value))}, whose content cannot be determined ({type(error).__name__}: "
                f"{error}). Pass a run_id instead."
            ) from error
        if isinstance(parts, str):
            wrapped = getattr(value, "__wrapped__", None)  # of a function with an lru_cache
            return [_qualified_name(type(value)), parts, *([] if wrapped is None else [self.of(wrapped)])]
        items = [list(part) if isinstance(part, Iterator) else part for part in parts]
        return [self.of(type(value)), self.of(items)]

    def _of_function(self, value: FunctionType) -> Any:
        """Return the name of an installed function; for a user's function also its code and all that this refers to."""
        code: list[Any] = []
        if not module_is_installed(value.__module__):
            taken = {name: self._of_global(item, value.__code__) for name, item in globals_of(value).items()}
            code = [_code(value.__code__), sorted(taken.items()), imports_of(value)]
        return [
            value.__module__,
            value.__qualname__,
            code,
            self.of(value.__defaults__),
            self.of(value.__kwdefaults__),
            [self._of_cell(cell) for cell in value.__closure__ or ()],
        ]

    def _of_global(self, value: Any, code: CodeType) -> Any:
        """Return the form of a global that code reads; for a user's module also its attributes that the code names."""
        if not isinstance(value, ModuleType) or module_is_installed(value.__name__):
            return self.of(value)
        module_form = self.of(value)
        named = [name for name in code_names(code) if name in vars(value)]
        attributes = {name: vars(value)[name] for name in named if (id(value), name) not in self._seen_attributes}
        self._seen_attributes |= {(id(value), name) for name in attributes}
        return [module_form, [(name, self._of_global(item, code)) for name, item in sorted(attributes.items())]]

    def _of_cell(self, cell: CellType) -> Any:
        try:
            content = cell.cell_contents
        except ValueError:  # an empty cell: its variable is assigned later, or never
            return []
        return [self.of(content)]

    def _of_class(self, value: type) -> Any:
        """Return the name of an installed class, and the code of a class that the user wrote."""
        if module_is_installed(value.__module__):
            return _qualified_name(value)
        parts: list[Any] = []
        for name, item in sorted(vars(value).items()):
            functions = [part for accessor in _ACCESSORS if (part := getattr(item, accessor, None)) is not None]
            for part in functions if functions and isinstance(item, _HOLDERS) else [item]:
                if isinstance(part, FunctionType) or not name.startswith("__"):
                    parts += [[name, form] for form in self._if_describable(part)]
        kind = [] if module_is_installed(type(value).__module__) else [self.of(type(value))]
        return [_qualified_name(value), parts, [self.of(base) for base in value.__bases__], *kind]

    def _if_describable(self, value: Any) -> list[Any]:
        """Return the form of an attribute in a list; empty for a lock or a cache, whose content does not count."""
        try:
            return [self.of(value)]
        except ParamError:
            return []

    def _of_torch_module(self, value: Any) -> Any:
        weights = [
            (
                name,
                self._of_tensor(weight, exact=self._weights),
                weight.requires_grad,
                *self._of_hooks(weight, "_backward_hooks", "_post_accumulate_grad_hooks").items(),
            )
            for name, weight in value.named_parameters()
        ]
        # Without weights it is a loss, whose buffers matter; a model's buffers may differ whenever a script starts.
        exact = self._weights or not weights
        buffers = [(name, self._of_tensor(buffer, exact=exact)) for name, buffer in value.named_buffers()]
        modules = [(name, self._of_one_module(module, exact=exact)) for name, module in value.named_modules()]
        return [modules, weights, buffers]

    def _of_one_module(self, module: Any, *, exact: bool) -> Any:
        forms: dict[str, Any] = {}
        inner = _names_of_frameworks(type(module))
        for name, item in sorted(vars(module).items()):
            if name == "training" or (name in inner and name != "_hparams" and not _is_plain(item)):
                continue
            if _is_tensor(item):
                forms[name] = self._of_tensor(item, exact=exact)
            elif name.startswith("_"):
                forms[name] = self._if_describable(item)
            else:
                forms[name] = self.of(item)
        forms |= self._of_hooks(
            module, "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
        )
        script = getattr(module, "code", None)
        forward = getattr(type(module), "forward", None)
        code = script if isinstance(script, str) else forward.__code__ if isinstance(forward, FunctionType) else None
        return [self.of(type(module)), _code(code) if isinstance(code, CodeType) else code, sorted(forms.items())]

    def _of_tensor(self, value: Any, *, exact: bool) -> Any:
        return self._of_array(value) if exact else [str(value.dtype), list(value.shape)]

    def _of_keras(self, value: Any) -> Any:
        """Return the configuration and what it leaves out: the function of a loss or a layer and its arguments."""
        try:
            config = value.get_config()
        except NotImplementedError as error:
            raise ParamError(
                "resume='auto' identifies a run by its parameters, but the content of the "
                f"{_qualified_name(type(value))} in {self._parameter} cannot be determined: it has no get_config. "
                "Define get_config, or pass a run_id instead."
            ) from error
        own = vars(value)
        layers = [layer for layer in _layers(value) if layer is not value]
        return [
            self.of(type(value)),
            self.of(_renumbered({"class_name": type(value).__name__, "config": config})),
            [self.of(own.get(name)) for name in ("fn", "_fn", "_fn_kwargs", "function")],
            [self.of(getattr(value, name, None)) for name in ("optimizer", "loss") if layers],
            [
                [self.of(type(layer)), self.of(vars(layer).get("function")), self._of_user_code(layer)]
                for layer in layers
            ],
            self._of_user_code(value),
            self.of(getattr(own.get("_compile_metrics"), "_user_metrics", None)),
            [
                (self._of_tensor(weight, exact=self._weights), bool(weight.trainable))
                for weight in getattr(value, "weights", ())
            ],
            *self._of_keras_state(value),
        ]

    def _of_user_code(self, value: Any) -> list[Any]:
        """Return the user's code in a Keras object, which a configuration names at most."""
        attributes = {name: item for name, item in sorted(vars(value).items()) if _is_user_code(item)}
        if not module_is_installed(type(value).__module__):
            inner = _names_of_frameworks(type(value))
            attributes |= {
                name: item
                for name, item in sorted(vars(value).items())
                if not name.startswith("_") and name not in inner and _is_plain(item)
            }
        return [(name, self._if_describable(item)) for name, item in sorted(attributes.items())]

    def _of_keras_state(self, value: Any) -> list[Any]:
        """Return the variables of a Keras optimizer after its first step, and what it excludes from weight decay."""
        if not callable(getattr(value, "apply_gradients", None)):
            return []
        pattern = getattr(value, "_exclude_from_weight_decay_pattern", None)
        names = [] if pattern is None else sorted(pattern.pattern.split("|"))  # Keras joins the names of a set
        excluded = [*names, *([count] if (count := len(getattr(value, "_exclude_from_weight_decay", ()))) else [])]
        trained = int(value.iterations.numpy()) > 0
        state = [self._of_array(variable) for variable in value.variables] if trained else []
        return [part for part in (state, excluded) if part]

    _by_type: ClassVar[dict[Any, Callable[[_CanonicalForm, Any], Any]]] = {
        (complex, range, slice, bytes, bytearray, type(...)): lambda _, value: repr(value),
        Mapping: _of_mapping,
        (set, frozenset): _of_set,
        Sequence: _of_sequence,
        type: _of_class,
        FunctionType: _of_function,
        MethodType: _of_method,
        BuiltinFunctionType: _of_builtin,
        ModuleType: lambda _, value: ["module", value.__name__],
        CodeType: lambda _, value: _code(value),
        CellType: _of_cell,
    }


# The attributes of every optimizer of PyTorch that are described otherwise; a scheduler replaces ``step``.
_OF_OPTIMIZERS = frozenset({"defaults", "param_groups", "state", "step"})
# The descriptors that hold functions in a class, and the attributes that hold them; only the functions count.
_HOLDERS = (property, classmethod, staticmethod, functools.cached_property)
_ACCESSORS = ("__func__", "fget", "fset", "fdel", "func")


def _names_of_frameworks(kind: type) -> frozenset[str]:
    """Return the names of the attributes that installed base classes set on their objects."""
    codes = (
        init.__code__
        for base in kind.__mro__
        if module_is_installed(base.__module__) and isinstance(init := vars(base).get("__init__"), FunctionType)
    )
    return frozenset(name for code in codes for name in (*code_names(code), *code.co_consts) if isinstance(name, str))


def _renumbered(config: Any) -> Any:
    """Return a Keras configuration whose automatic names begin at 0, because Keras counts per process."""
    names: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for name, base in _automatic_names(config):
        if name not in names:
            names[name] = f"{base}#{counts[base]}"
            counts[base] += 1

    def put(part: Any) -> Any:
        if isinstance(part, Mapping):
            if part.get("class_name") == "__lambda__":
                return "lambda"  # its bytes name the file and the line; the function itself is part of the form as well
            return {key: put(item) for key, item in part.items()}
        if isinstance(part, list | tuple):
            return [put(item) for item in part]
        return names.get(part, part) if isinstance(part, str) else part

    return put(config)


def _automatic_names(part: Any) -> Iterator[tuple[str, str]]:
    """Yield the names that Keras derived from class names, in order, with and without their number."""
    if isinstance(part, Mapping):
        own = part.get("config")
        name = str(own.get("name")) if isinstance(own, Mapping) else ""
        base = AUTOMATIC_NUMBER.sub("", name)
        if base.replace("_", "").lower() == str(part.get("class_name")).lower():
            yield name, base
    items = part.values() if isinstance(part, Mapping) else part if isinstance(part, list | tuple) else ()
    for item in items:
        yield from _automatic_names(item)


def _attributes(value: Any) -> dict[str, Any]:
    return dict(getattr(value, "__dict__", {}))


def _is_user_code(value: Any) -> bool:
    """Return whether the user wrote the code of a value; Keras layers have forms of their own."""
    if isinstance(value, functools.partial):
        return _is_user_code(value.func)
    if isinstance(value, list | tuple):
        return any(map(_is_user_code, value))
    if isinstance(value, dict):
        return any(map(_is_user_code, value.values()))
    if isinstance(value, FunctionType | type):
        return not module_is_installed(value.__module__)
    return not module_is_installed(type(value).__module__) and not hasattr(value, "_flatten_layers")


def _layers(value: Any) -> list[Any]:
    flatten = getattr(value, "_flatten_layers", None)  # Keras has no public iterator over nested layers
    return list(flatten()) if callable(flatten) else []


def _code(code: CodeType) -> list[Any]:
    constants = [_code(item) if isinstance(item, CodeType) else _constant(item) for item in code.co_consts]
    return [code.co_code.hex(), constants, code.co_names, code.co_argcount, code.co_kwonlyargcount]


def _constant(value: Any) -> Any:
    # The order of a set of strings differs between processes.
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number, a string, or a collection of these."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, bool | int | float | str)


def _is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor of PyTorch or TensorFlow, or a Keras variable."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in ("numpy", "dtype", "shape"))


def _qualified_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
