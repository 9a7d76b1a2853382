"""MkDocs hook: create the tables of the estimators' parameters from their declarations.

A line ``<!-- parameters of every estimator -->`` becomes a table of the parameters that all three estimators have.
A line ``<!-- parameters of NAME -->`` becomes a table of the other parameters of the estimator NAME.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

_ESTIMATORS = ("TorchEstimator", "KerasEstimator", "LightningEstimator")
_LINE = re.compile(r"^<!-- parameters of (.+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the page with its tables; called by MkDocs for every page."""
    return _LINE.sub(lambda line: _table(line[1]), markdown) if _LINE.search(markdown) else markdown


def _table(name: str) -> str:
    import sparkhvd  # noqa: PLC0415  (slow, and only pages with tables need it)

    declared = {name: getattr(sparkhvd, name).declarations for name in _ESTIMATORS}
    shared = set.intersection(*(set(parameters) for parameters in declared.values()))
    if name == "every estimator":
        rows: Iterable[Any] = (parameter for key, parameter in declared[_ESTIMATORS[0]].items() if key in shared)
    else:
        rows = (parameter for key, parameter in declared[name].items() if key not in shared)
    lines = [f"| `{parameter.name}` | {_default(parameter.default)} | {parameter.doc} |" for parameter in rows]
    return "\n".join(["| parameter | default | meaning |", "| --- | --- | --- |", *lines])


def _default(value: object) -> str:
    if value is None or value == ():
        return ""
    is_literal = isinstance(value, bool | int | float | str)
    return f"`{value!r}`" if is_literal else f"`{type(value).__name__}()`"
