"""The options of a collective, apart from its tensors."""

from __future__ import annotations

from typing import NamedTuple, TypedDict, Unpack

from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.errors import ConfigError

# These are created for every submitted tensor; a named tuple takes a third of the time of a frozen dataclass.


class SubmitOptions(NamedTuple):
    """The options that match an operation with those of the other ranks, and that decide when it begins.

    Attributes:
        name: the name by which the ranks match their submissions; numbered automatically if None.
        process_set: the ranks that take part, all by default.
        with_waiter: whether the operation begins only when a thread waits for its handle. It then runs on that thread,
            which saves a context switch if the caller waits immediately.
    """

    name: str | None = None
    process_set: ProcessSet | None = None
    with_waiter: bool = False

    def waiting(self) -> SubmitOptions:
        """Return these options for a caller that waits immediately."""
        return SubmitOptions(self.name, self.process_set, True)


class Reduction(NamedTuple):
    """How the values of the ranks are combined.

    Attributes:
        op: the operator.
        prescale: multiplies this rank's values before the reduction; may differ among ranks.
        postscale: multiplies the result; equal on all ranks.
    """

    op: ReduceOp = ReduceOp.AVERAGE
    prescale: float = 1.0
    postscale: float = 1.0


def require_compressor(compression: object) -> None:
    """Raise ``ConfigError`` if an object cannot compress tensors."""
    if not callable(getattr(compression, "compress", None)) or not callable(getattr(compression, "decompress", None)):
        raise ConfigError(
            "compression must be one of hvd.Compression, such as hvd.Compression.fp16, or an object with the methods "
            f"compress and decompress, got {compression!r}."
        )


class SubmitKeywords(TypedDict, total=False):
    """``SubmitOptions`` as keywords."""

    name: str | None
    process_set: ProcessSet | None
    with_waiter: bool


class ReduceKeywords(SubmitKeywords, total=False):
    """``SubmitOptions`` and the scales of ``Reduction`` as keywords."""

    prescale: float
    postscale: float


def reduction_options(
    op: ReduceOp, *, prescale: float = 1.0, postscale: float = 1.0, **options: Unpack[SubmitKeywords]
) -> tuple[Reduction, SubmitOptions]:
    """Return the reduction and the options that the operator and the keywords describe."""
    return Reduction(ReduceOp(op), prescale, postscale), SubmitOptions(**options)
