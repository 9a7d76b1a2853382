"""The errors that caused an error."""

from __future__ import annotations

from collections.abc import Iterator


def error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, each once: a cause may have been raised from the error that it caused."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
