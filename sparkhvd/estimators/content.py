"""What a parameter is made of, in words that every process finds for it: no addresses, hashes or orders of a set."""

from __future__ import annotations

import copyreg
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, ClassVar

import numpy as np

from sparkhvd.driver.pickling import is_installed
from sparkhvd.errors import ParamError

# Keras' at the end of a name, or of one in the path of a variable.
AUTOMATIC_NUMBER = re.compile(r"_\d+(?=/|$)")


def described(value: Any, name: str = "a parameter") -> Any:
    """What JSON can say of a value, the same in every process.

    Of models count structure, code, plain attributes and the shapes of weights, not the weights themselves; of
    optimizers what they keep of the steps that they have taken, too.

    Args:
        value: the value.
        name: what it is called in the message.

    Raises:
        ParamError: it holds something that cannot be told.
    """
    return _Description(name).of(value)


class _Description:
    """One description; what comes in it a second time is named by its place."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # an id is one object's own only while that lives

    def of(self, value: Any) -> Any:
        """The description of a value."""
        if value is None or isinstance(value, bool | int | float | str):
            return value if type(value).__module__ == "builtins" else [_name(type(value)), str(value)]
        if isinstance(value, np.generic | np.ndarray) or _is_tensor(value):
            return self._of_array(value)
        if id(value) in self._seen:
            return ["seen", self._seen[id(value)]]
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        for kind, describe in self._by_type.items():
            if isinstance(value, kind):
                return describe(self, value)
        return self._of_object(value)

    def _of_mapping(self, value: Mapping[Any, Any]) -> Any:
        pairs = [(key if isinstance(key, str) else json.dumps(self.of(key)), item) for key, item in value.items()]
        return ["mapping", [(key, self.of(item)) for key, item in sorted(pairs, key=lambda pair: pair[0])]]

    def _of_set(self, value: set[Any]) -> Any:
        # Each by itself: the order in which they come differs between processes.
        return ["set", sorted(json.dumps(described(item, self._name)) for item in value)]

    def _of_sequence(self, value: Sequence[Any]) -> Any:
        return [self.of(item) for item in value]

    def _of_array(self, value: Any) -> Any:
        """Numbers, by their digest; a scalar as it is."""
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
            shapes = [[list(each.shape) for each in group["params"]] for group in groups]
            plain = [{name: item for name, item in group.items() if name != "params"} for group in groups]
            return [self.of(type(value)), shapes, self.of(plain), *self._of_torch_state(value, groups)]
        if callable(getattr(value, "get_config", None)):
            return self._of_keras(value)
        return self._of_parts(value)

    def _of_torch_state(self, value: Any, groups: list[dict[str, Any]]) -> list[Any]:
        """What an optimizer keeps of each parameter, once it has trained; nothing before."""
        state = getattr(value, "state", None) or {}
        return [[self.of(state.get(each)) for group in groups for each in group["params"]]] if state else []

    def _of_parts(self, value: Any) -> Any:
        """Any other object, by what pickle would make it of again."""
        try:
            by_table = copyreg.dispatch_table.get(type(value))
            parts = by_table(value) if by_table is not None else value.__reduce_ex__(2)
        except Exception as error:
            raise ParamError(
                f"resume='auto' recognises a run by its parameters, and {self._name} holds a {_name(type(value))}, of "
                f"which cannot be told what is in it ({type(error).__name__}: {error}). Give the run a run_id instead."
            ) from error
        if isinstance(parts, str):
            return [_name(type(value)), parts]
        items = [list(part) if isinstance(part, Iterator) else part for part in parts]
        return [self.of(type(value)), self.of(items)]

    def _of_function(self, value: FunctionType) -> Any:
        code = value.__code__
        # What its code takes from its module: numbers, texts, and what the user wrote; all else counts by name.
        found = {name: value.__globals__.get(name) for name in _names(code) if not name.startswith("__")}
        taken = {name: item for name, item in found.items() if _is_plain(item) or _is_written(item)}
        return [
            value.__module__,
            value.__qualname__,
            _code(code),
            self.of(taken),
            self.of(value.__defaults__),
            self.of(value.__kwdefaults__),
            [self._of_cell(cell) for cell in value.__closure__ or ()],
        ]

    def _of_cell(self, cell: CellType) -> Any:
        try:
            content = cell.cell_contents
        except ValueError:  # what the name stands for comes later, or never
            return []
        return [self.of(content)]

    def _of_class(self, value: type) -> Any:
        """The name of what is installed, the code of what the user wrote."""
        if _is_installed(value.__module__):
            return _name(value)
        parts: list[Any] = []
        for name, item in sorted(vars(value).items()):
            found = [getattr(item, "__func__", item), *(getattr(item, each, None) for each in _ACCESSORS)]
            ours = [part for part in found if part is not None and (_is_plain(part) or isinstance(part, FunctionType))]
            parts += [[name, self.of(part)] for part in ours if callable(part) or not name.startswith("__")]
        return [_name(value), parts, [self.of(base) for base in value.__bases__]]

    def _of_torch_module(self, value: Any) -> Any:
        weights = [(name, list(w.shape), str(w.dtype), w.requires_grad) for name, w in value.named_parameters()]
        # A loss has no weights, and numbers that matter; a model's may be drawn anew whenever a script starts.
        exact = not weights
        buffers = [(name, self._of_tensor(buffer, exact=exact)) for name, buffer in value.named_buffers()]
        modules = [(name, self._of_one_module(module, exact=exact)) for name, module in value.named_modules()]
        return [modules, weights, buffers]

    def _of_one_module(self, module: Any, *, exact: bool) -> Any:
        found = {}
        for name, item in sorted(vars(module).items()):
            if name == "training" or (name.startswith("_") and name != "_hparams" and not _is_plain(item)):
                continue
            found[name] = self._of_tensor(item, exact=exact) if _is_tensor(item) else self.of(item)
        script = getattr(module, "code", None)
        forward = getattr(type(module), "forward", None)
        code = script if isinstance(script, str) else forward.__code__ if isinstance(forward, FunctionType) else None
        return [self.of(type(module)), _code(code) if isinstance(code, CodeType) else code, sorted(found.items())]

    def _of_tensor(self, value: Any, *, exact: bool) -> Any:
        return self._of_array(value) if exact else [str(value.dtype), list(value.shape)]

    def _of_keras(self, value: Any) -> Any:
        """The configuration, and what it leaves out: the function of a loss or a layer and its arguments."""
        try:
            config = value.get_config()
        except NotImplementedError as error:
            raise ParamError(
                f"resume='auto' recognises a run by its parameters, and of {_name(type(value))} in {self._name} cannot "
                "be told what is in it: it has no get_config. Write one, or give the run a run_id instead."
            ) from error
        own = vars(value)
        layers = [each for each in _layers(value) if each is not value]
        return [
            self.of(type(value)),
            self.of(_numbered({"class_name": type(value).__name__, "config": config})),
            [self.of(own.get(name)) for name in ("fn", "_fn", "_fn_kwargs", "function")],
            [self.of(getattr(value, name, None)) for name in ("optimizer", "loss") if layers],
            [[self.of(type(each)), self.of(vars(each).get("function"))] for each in layers],
            [(list(each.shape), str(each.dtype), bool(each.trainable)) for each in getattr(value, "weights", ())],
            *self._of_keras_state(value),
        ]

    def _of_keras_state(self, value: Any) -> list[Any]:
        """The variables of an optimizer, once it has trained; nothing before."""
        trained = callable(getattr(value, "apply_gradients", None)) and int(value.iterations.numpy()) > 0
        return [[self._of_array(each) for each in value.variables]] if trained else []

    _by_type: ClassVar[dict[Any, Callable[[_Description, Any], Any]]] = {
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


_ACCESSORS = ("fget", "fset", "func")  # of a property, and of functools' cached one


def _numbered(config: Any) -> Any:
    """A Keras configuration whose automatic names begin at 0: Keras counts on in a process."""
    names: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for name, base in _automatic_names(config):
        if name not in names:
            names[name] = f"{base}#{counts[base]}"
            counts[base] += 1

    def put(part: Any) -> Any:
        if isinstance(part, Mapping):
            if part.get("class_name") == "__lambda__":
                return "lambda"  # its bytes name the file and the line; the function itself is described beside it
            return {key: put(item) for key, item in part.items()}
        if isinstance(part, list | tuple):
            return [put(item) for item in part]
        return names.get(part, part) if isinstance(part, str) else part

    return put(config)


def _automatic_names(part: Any) -> Iterator[tuple[str, str]]:
    """The names that Keras made from those of classes, in order, and what they are without their number."""
    if isinstance(part, Mapping):
        own = part.get("config")
        name = str(own.get("name")) if isinstance(own, Mapping) else ""
        base = AUTOMATIC_NUMBER.sub("", name)
        if base.replace("_", "").lower() == str(part.get("class_name")).lower():
            yield name, base
    items = part.values() if isinstance(part, Mapping) else part if isinstance(part, list | tuple) else ()
    for item in items:
        yield from _automatic_names(item)


def _layers(value: Any) -> list[Any]:
    found = getattr(value, "_flatten_layers", None)  # Keras has no public way to walk
    return list(found()) if callable(found) else []


def _code(code: CodeType) -> list[Any]:
    constants = [_code(item) if isinstance(item, CodeType) else _constant(item) for item in code.co_consts]
    return [code.co_code.hex(), constants, code.co_names, code.co_argcount, code.co_kwonlyargcount]


def _constant(value: Any) -> Any:
    # The order of a set of texts differs between processes.
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


def _names(code: CodeType) -> list[str]:
    inner = [name for item in code.co_consts if isinstance(item, CodeType) for name in _names(item)]
    return [*code.co_names, *inner]


def _is_plain(value: Any) -> bool:
    """Whether it is a number or a text, or made of such."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, bool | int | float | str)


def _is_written(value: Any) -> bool:
    """Whether it is a function or a class of the user's."""
    return isinstance(value, FunctionType | type) and not _is_installed(value.__module__)


def _is_tensor(value: Any) -> bool:
    """Whether it is a tensor of torch or TensorFlow, or a variable of Keras."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in ("numpy", "dtype", "shape"))


def _is_installed(module: str) -> bool:
    """Whether a module comes with Python, from a package, or from here; its version counts no more than theirs."""
    package = module.partition(".")[0]
    found = sys.modules.get(module) or sys.modules.get(package)
    if found is None or module == "__main__":
        return False
    file = getattr(found, "__file__", None)
    if file is None or package == __name__.partition(".")[0]:
        return True
    return is_installed(Path(file))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
