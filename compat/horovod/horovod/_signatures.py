"""Horovod's order of arguments, for functions whose arguments have another order in sparkhvd."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

# sparkhvd takes a tensor where it is, fuses the gradients of a step itself, and has no graphs of TensorFlow 1.
_WITHOUT_EFFECT = frozenset(
    {"device_dense", "device_sparse", "groups", "ignore_name_scope", "num_groups", "session", "use_locking"}
)


def with_parameters(names: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with these parameters; parameters that have no effect here are ignored.

    Args:
        names: the parameters that Horovod takes, in its order and separated by spaces.
        function: the function, which takes the other parameters by keyword.
    """
    order = tuple(names.split())

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > len(order):
            raise TypeError(f"{function.__name__}() takes at most {len(order)} arguments, got {len(args)}.")
        by_name = dict(zip(order, args, strict=False))
        for name in by_name.keys() & kwargs.keys():
            raise TypeError(f"{function.__name__}() got multiple values for argument {name!r}.")
        given = by_name | kwargs
        return function(**{name: value for name, value in given.items() if name not in _WITHOUT_EFFECT})

    return call
