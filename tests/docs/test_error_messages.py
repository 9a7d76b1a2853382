"""The index of error messages quotes messages of the package."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "how-to" / "error-messages.md"
_MESSAGES = re.findall(r"^\| `([^`]+)` \|", _PAGE.read_text(), re.MULTILINE)


def _text(node: ast.expr) -> str:
    """Return the text of a string in the source, with three dots for each value that an f-string inserts."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(_text, parts))
        case _:
            return "..."


@cache
def _texts() -> frozenset[str]:
    texts = set()
    for path in (_ROOT / "sparkhvd").rglob("*.py"):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts |= {
            re.sub(r"\{\w+\}", "...", _text(node))
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in docstrings
        }
    for path in (_ROOT / "core").rglob("*.cc"):  # for messages that consist of several literals
        texts |= set(re.findall(r'"((?:[^"\\\n]|\\.)*)"', path.read_text()))
    return frozenset(texts)


def test_the_index_has_messages_from_every_part_of_a_fit() -> None:
    assert len(_MESSAGES) > 40
    assert len(set(_MESSAGES)) == len(_MESSAGES)


@pytest.mark.parametrize("message", _MESSAGES)
def test_a_quoted_message_is_one_of_the_package(message: str) -> None:
    parts = ".*?".join(map(re.escape, message.split("...")))
    assert any(re.search(parts, text, re.DOTALL) for text in _texts()), "quote the message as it is now"
    assert max(map(len, message.split("..."))) >= 8, "a message is recognized by its words"


def test_a_quoted_message_that_the_package_does_not_have_is_noticed() -> None:
    assert not any("the flux capacitor is out of plutonium" in text for text in _texts())
    assert any("There is no active SparkSession." in text for text in _texts())
