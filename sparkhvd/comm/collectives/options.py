"""What is asked of a collective beside its tensors."""

from __future__ import annotations

from typing import NamedTuple, TypedDict, Unpack

from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.process_sets import ProcessSet

# These are made for every tensor that is submitted, and a named tuple takes a third of a frozen dataclass's time.


class SubmitOptions(NamedTuple):
    """How an operation finds those of the other ranks, and when it begins.

    Attributes:
        name: by which the ranks match their submissions; made by counting when None.
        process_set: the ranks that take part, all by default.
        with_waiter: begin when the handle is waited for, on the thread that waits, which saves handing the operation
            over to another thread; for callers who wait at once.
    """

    name: str | None = None
    process_set: ProcessSet | None = None
    with_waiter: bool = False

    def waiting(self) -> SubmitOptions:
        """The same for a caller who waits at once."""
        return SubmitOptions(self.name, self.process_set, True)


class Reduction(NamedTuple):
    """How the ranks' values are combined.

    Attributes:
        op: the operator.
        prescale: multiplies this rank's values before; may differ among ranks.
        postscale: multiplies the result; equal on all ranks.
    """

    op: ReduceOp = ReduceOp.AVERAGE
    prescale: float = 1.0
    postscale: float = 1.0


class SubmitKeywords(TypedDict, total=False):
    """The same as ``SubmitOptions``, as keywords."""

    name: str | None
    process_set: ProcessSet | None
    with_waiter: bool


class ReduceKeywords(SubmitKeywords, total=False):
    """The same as ``SubmitOptions`` and the scales of ``Reduction``, as keywords."""

    prescale: float
    postscale: float


def reduction_options(
    op: ReduceOp, *, prescale: float = 1.0, postscale: float = 1.0, **options: Unpack[SubmitKeywords]
) -> tuple[Reduction, SubmitOptions]:
    """What the operator and the keywords describe."""
    return Reduction(ReduceOp(op), prescale, postscale), SubmitOptions(**options)
