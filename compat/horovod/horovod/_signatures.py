"""Horovod's argument order and scopes of names, where sparkhvd has others."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any

# sparkhvd uses the device that holds the tensor, chooses which gradients to fuse, assigns broadcast variables in place,
# finds out without output what it was built with, and does not support TensorFlow 1 and Keras 2.
_IGNORED = frozenset(
    {
        "device_dense",
        "device_sparse",
        "groups",
        "ignore_name_scope",
        "inplace",
        "legacy_opts",
        "num_groups",
        "session",
        "use_locking",
        "verbose",
    }
)


def with_parameters(names: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with Horovod's parameters; parameters without an effect in sparkhvd are ignored.

    Parameters of ``function`` that Horovod does not have can be passed by keyword.

    Args:
        names: Horovod's parameters, in Horovod's order, separated by spaces.
        function: receives the other parameters by keyword.
    """
    order = tuple(names.split())

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > len(order):
            raise TypeError(f"{function.__name__}() takes at most {len(order)} arguments, got {len(args)}.")
        by_name = dict(zip(order, args, strict=False))
        for name in by_name.keys() & kwargs.keys():
            raise TypeError(f"{function.__name__}() got multiple values for argument {name!r}.")
        arguments = by_name | kwargs
        return function(**{name: value for name, value in arguments.items() if name not in _IGNORED})

    own = signature(function).parameters
    parameters = [own.get(name, Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None)) for name in order]
    call.__signature__ = Signature(  # type: ignore[attr-defined]  # programs inspect it
        [parameter.replace(kind=Parameter.POSITIONAL_OR_KEYWORD) for parameter in parameters]
    )
    return call


def with_scope(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with Horovod's names of operations: ``x`` of an allreduce is ``allreduce.x``.

    Operations of different kinds may therefore have one name.

    Args:
        kind: Horovod's word for the operation.
        function: has a parameter ``name``.
    """
    position = list(signature(function).parameters).index("name")

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], _scoped(kind, args[position]), *args[position + 1 :])
        elif "name" in kwargs:
            kwargs["name"] = _scoped(kind, kwargs["name"])
        return function(*args, **kwargs)

    return call


def _scoped(kind: str, name: Any) -> Any:
    """Return the name with its kind; sparkhvd names operations without a name, and refuses other objects."""
    return f"{kind}.{name}" if name and isinstance(name, str) else name
