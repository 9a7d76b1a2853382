"""Declarations of the parameters of estimators and models, each with its doc, default and converter.

The typed keyword-only constructor, the setters and the getters are derived from the declaration::

    class MyParams(Declarations):
        batch_size: Declared[int] = declared("Rows per rank and step.", positive_integer, default=32)

gives ``MyParams(batch_size=64)``, ``setBatchSize(64)`` (which returns ``self``) and ``getBatchSize()``.
"""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, dataclass_transform, overload

from pyspark.ml.param import Param, Params

from sparkhvd._util.suggestions import did_you_mean
from sparkhvd.errors import ParamError
from sparkhvd.estimators.params.plain_values import plain

T = TypeVar("T")
_SHOWN_ITEMS = 6
Converter = Callable[[str, Any], object]  # (parameter's name, user's value) -> stored value, or ParamError


class Identity(Enum):
    """How a parameter contributes to a run's identity, by which ``resume="auto"`` finds an earlier run."""

    ALWAYS = "the parameter changes the returned model"
    IN_PARAM_MAPS = (
        "a run can resume with another value, but each value in the parameter maps of one fit is another run"
    )
    NEVER = "the parameter changes only the output, the kept files or the resources, not the model"


class Declared(Param[T], Generic[T]):
    """The declaration of a parameter; on an instance, the pyspark ``Param`` that keys a parameter map."""

    def __init__(
        self,
        default: T,
        doc: str,
        convert: Converter | None,
        *,
        accessor: str,
        aliases: tuple[str, ...],
        identity: Identity,
    ) -> None:
        super().__init__(Params._dummy(), "", doc, self._converted)  # noqa: SLF001  (pyspark's way to declare)
        self.default = default
        self.accessor = accessor
        self.aliases = aliases
        self.identity = identity
        self.convert = convert

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.accessor = self.accessor or "".join(word[:1].upper() + word[1:] for word in name.split("_"))

    def _copy_new_parent(self, parent: Params) -> Declared[T]:
        own = copy.copy(self)
        own.parent = parent.uid
        own.typeConverter = own._converted  # noqa: SLF001  (the copied method is still bound to the declaration)
        return own

    def _converted(self, value: object) -> Any:
        if value is None:
            return self.default
        value = plain(value)
        return value if self.convert is None else self.convert(self.name, value)

    if TYPE_CHECKING:  # dataclass_transform needs both types: one assigns a T and reads the Param

        @overload
        def __get__(self, instance: None, owner: type) -> Declared[T]: ...
        @overload
        def __get__(self, instance: object, owner: type) -> Declared[T]: ...
        def __get__(self, instance: object, owner: type) -> Declared[T]: ...
        def __set__(self, instance: object, value: T) -> None: ...


def declared(
    doc: str,
    convert: Converter | None = None,
    *,
    default: object,
    accessor: str = "",
    aliases: tuple[str, ...] = (),
    identity: Identity = Identity.ALWAYS,
) -> Any:
    """Declare a parameter.

    Args:
        doc: a short description, shown by ``explainParams()``.
        convert: converts the user's value to the stored value, or raises ``ParamError``; idempotent.
        default: the value of a parameter that is unset or set to None.
        accessor: the suffix of ``set`` and ``get``, if it is not the name in camel case.
        aliases: more suffixes, as Horovod spells them.
        identity: whether two fits that differ in the parameter are different runs.
    """
    return Declared(default, doc, convert, accessor=accessor, aliases=aliases, identity=identity)


def _setter(name: str) -> Callable[[Params, object], Params]:
    def set_value(self: Params, value: object) -> Params:
        return self._set(**{name: value})

    return set_value


def _getter(name: str) -> Callable[[Params], object]:
    def get_value(self: Params) -> object:
        value: object = self.getOrDefault(name)
        return value

    return get_value


def _add_accessor(cls: type, method: str, function: Callable[..., object], declaration: Declared[object]) -> None:
    if not hasattr(cls, method):
        function.__name__ = method
        function.__qualname__ = f"{cls.__qualname__}.{method}"
        function.__doc__ = f"{declaration.name}: {declaration.doc}"
        setattr(cls, method, function)


def _preview(value: object) -> str:
    """Return a short text for a value, without the content of dicts and other objects, which may be secret."""
    if value is None or isinstance(value, bool | int | float | str):
        return reprlib.repr(value)
    if isinstance(value, list | tuple):
        more = [", ..."] if len(value) > _SHOWN_ITEMS else []
        return f"[{', '.join(map(_preview, value[:_SHOWN_ITEMS]))}{''.join(more)}]"
    return str(getattr(value, "url", None) or getattr(value, "__name__", None) or f"<{type(value).__name__}>")


@dataclass_transform(kw_only_default=True, field_specifiers=(declared,))
class Declarations(Params):
    """Base class of estimators and models whose parameters are ``declared``."""

    declarations: ClassVar[dict[str, Declared[Any]]] = {}
    retired: ClassVar[Mapping[str, str]] = {}  # Horovod's names that have no meaning here, with the reason

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        attributes = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}
        cls.declarations = {name: value for name, value in attributes.items() if isinstance(value, Declared)}
        for name, declaration in cls.declarations.items():
            for accessor in (declaration.accessor, *declaration.aliases):
                _add_accessor(cls, f"set{accessor}", _setter(name), declaration)
                _add_accessor(cls, f"get{accessor}", _getter(name), declaration)

    def __init__(self, *unnamed: object, **values: object) -> None:
        if unnamed:
            cls_name, first = type(self).__name__, next(iter(type(self).declarations))
            raise TypeError(
                f"{cls_name} takes its parameters by keyword, as in {cls_name}({first}=...), but got {len(unnamed)} "
                f"positional argument{'' if len(unnamed) == 1 else 's'}."
            )
        super().__init__()
        self._setDefault(**{name: item.default for name, item in type(self).declarations.items()})
        self.setParams(**values)

    def setParams(self, **values: object) -> Declarations:  # noqa: N802  (pyspark's name)
        """Set several parameters by keyword; None restores a default.

        Raises:
            TypeError: a name is not a parameter.
            ParamError: a value is not accepted.
        """
        retired = type(self).retired.keys() - type(self).declarations.keys()
        values = {name: value for name, value in values.items() if value is not None or name not in retired}
        for name in values:
            if name not in type(self).declarations:
                if name in type(self).retired:
                    raise ParamError(self._retired_message(name))
                hint = did_you_mean(name, self.declarations, most=3, show=str)
                hint = hint or f"It takes {', '.join(self.declarations)}."
                raise TypeError(f"{type(self).__name__} has no parameter {name!r}. {hint}")
        self._set(**values)
        return self

    def _set(self, **values: object) -> Self:
        for name, value in values.items():
            if value is None:
                self._paramMap.pop(self.getParam(name), None)
        return super()._set(**{name: value for name, value in values.items() if value is not None})

    def copy(self, extra: Mapping[Param[Any], Any] | None = None) -> Self:
        """Return a copy with other values; ``extra`` may use a class's parameters: ``TorchEstimator.batch_size``."""
        return super().copy({self._own_param(param): value for param, value in (extra or {}).items()})

    def _resolveParam(self, param: str | Param[Any]) -> Param[Any]:  # noqa: N802  (pyspark's name)
        return super()._resolveParam(self._own_param(param))

    def explainParam(self, param: str | Param[Any]) -> str:  # noqa: N802  (pyspark's name)
        """Return a parameter's doc, default and value as text; pyspark's method fails if one of them is a tuple."""
        own = self._resolveParam(param)
        maps = {"default": self._defaultParamMap, "current": self._paramMap}
        values = [f"{kind}: {values[own]}" for kind, values in maps.items() if own in values]
        return f"{own.name}: {own.doc} ({', '.join(values) or 'undefined'})"

    def _own_param(self, param: Any) -> Any:
        """Return this object's parameter for a parameter of its class, which pyspark would ignore."""
        is_declaration = isinstance(param, Declared) and type(self).declarations.get(param.name) is param
        return self.getParam(param.name) if is_declaration else param

    def __repr__(self) -> str:
        values = {param.name: value for param, value in self._paramMap.items()}
        arguments = [f"{name}={_preview(values[name])}" for name in type(self).declarations if name in values]
        return f"{type(self).__name__}({', '.join(arguments)})"

    def values(self) -> dict[str, Any]:
        """Return the value of every parameter by name."""
        return {name: self.getOrDefault(name) for name in type(self).declarations}

    def is_identity(self, name: str, mapped: Collection[str]) -> bool:
        """Return whether a parameter is part of a run's identity; a parameter map sets the names in ``mapped``."""
        identity = type(self).declarations[name].identity
        return identity is Identity.ALWAYS or (identity is Identity.IN_PARAM_MAPS and name in mapped)

    def _retired_message(self, name: str) -> str:
        return f"{name} has no meaning in {type(self).__name__}: {type(self).retired[name]}"

    def _retired_setter(self, name: str) -> Callable[[object], Declarations]:
        """Return a setter that accepts None, like the keyword, and refuses any other value with the reason."""

        def set_default(value: object) -> Declarations:
            if value is not None:
                raise ParamError(self._retired_message(name))
            return self

        return set_default

    def _retired_getter(self, name: str) -> Callable[[], object]:
        raise AttributeError(self._retired_message(name))

    def __getattr__(self, name: str) -> Callable[..., object]:
        """Resolve the setters and getters of retired parameters; their errors name the alternative."""
        accessor = name[3:].lower() if name.startswith(("set", "get")) else ""
        for retired in type(self).retired:
            if accessor == retired.replace("_", ""):
                return self._retired_setter(retired) if name.startswith("set") else self._retired_getter(retired)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
