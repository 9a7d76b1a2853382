"""``horovod.spark``: runs functions on the executors of a Spark cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sparkhvd
from sparkhvd import run

__all__ = ["run", "run_elastic"]


def run_elastic(  # noqa: PLR0917  the order of the arguments is Horovod's
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    *others: Any,
    min_np: int | None = None,
    max_np: int | None = None,
    **options: Any,
) -> list[Any]:
    """See ``sparkhvd.run_elastic``; ``min_np`` and ``max_np`` are former names of the limits."""
    return sparkhvd.run_elastic(
        fn,
        args,
        kwargs,
        num_proc,
        min_num_proc if min_np is None else min_np,
        max_num_proc if max_np is None else max_np,
        *others,
        **options,
    )
