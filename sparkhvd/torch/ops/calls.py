"""Builds the public forms of a collective from one description.

A collective is described once, by a function with the user's parameters and their documentation that returns a
``Call``. The forms are built from it: the blocking form, which supports autograd, the asynchronous form, and the two
forms that write into their input tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Generic, NamedTuple, ParamSpec, Protocol, TypeVar, cast

import torch
from torch.autograd.forward_ad import unpack_dual
from torch.autograd.graph import increment_version

from sparkhvd.comm.collectives.options import SubmitOptions
from sparkhvd.comm.handle import Handle
from sparkhvd.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

Tensors = tuple[torch.Tensor, ...]
Rows = tuple[tuple[int, ...], ...]


# Makes a result from the outputs of a collective and the number of rows of every rank, per input. The numbers are empty
# if all ranks have the same number of rows.
Finish = Callable[[Tensors, Rows], T]


class Collective(Protocol):
    """A collective on some tensors that has not been submitted yet."""

    @property
    def tensors(self) -> Tensors:
        """Return the inputs."""

    def start(self, finish: Finish[T], *, in_place: bool, waits: bool) -> Handle[T]:
        """Submit the collective and return its handle.

        Args:
            finish: makes the handle's result.
            in_place: whether to write the outputs into the inputs.
            waits: whether the caller waits for the handle immediately.
        """

    def gradients(self, gradients: Tensors, rows: Rows) -> Tensors:
        """Compute the gradients of the inputs from those of the outputs; collective."""


class Call(NamedTuple, Generic[R]):
    """A collective, and the function that makes the user's result from its outputs."""

    collective: Collective
    result: Finish[R]

    def run(self) -> R:
        """Run the collective and return its result, through autograd where an input needs a gradient."""
        tensors = self.collective.tensors
        _require_tensors(tensors)
        is_recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        # PyTorch raises an error if an operation has no forward-mode gradient; without it, a tangent would be lost.
        if is_recorded or any(_has_tangent(tensor) for tensor in tensors):
            return self.result(_apply(self.collective, *tensors), ())
        return self.collective.start(self.result, in_place=False, waits=True).wait()

    def start(self, *, in_place: bool, waits: bool = False) -> Handle[R]:
        """Submit the collective and return its handle."""
        _require_tensors(self.collective.tensors)
        if in_place:
            for tensor in self.collective.tensors:
                increment_version(tensor)  # so that autograd refuses gradients that need the previous values
        return self.collective.start(self.result, in_place=in_place, waits=waits)


def _require_tensors(tensors: Tensors) -> None:
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"A collective of sparkhvd.torch takes tensors, got {tensor!r:.200}.")


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collective: Collective, *_tensors: torch.Tensor) -> Tensors:
        tensors, rows = collective.start(_with_rows, in_place=False, waits=True).wait()
        ctx.collective, ctx.rows = collective, rows
        ctx.mark_non_differentiable(*(tensor for tensor in tensors if not tensor.is_floating_point()))
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.collective.gradients(gradients, ctx.rows)


def _has_tangent(tensor: torch.Tensor) -> bool:
    return unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def _with_rows(tensors: Tensors, rows: Rows) -> tuple[Tensors, Rows]:
    return tensors, rows


def first(tensors: Tensors, _rows: Rows) -> torch.Tensor:
    """Return the only output."""
    return tensors[0]


def every(tensors: Tensors, _rows: Rows) -> Tensors:
    """Return all outputs."""
    return tensors


def as_list(tensors: Tensors, _rows: Rows) -> list[torch.Tensor]:
    """Return all outputs as a list, the form for users."""
    return list(tensors)


# torch does not annotate `Function.apply`.
_apply: Callable[..., Tensors] = _Differentiable.apply


def for_gradient(options: SubmitOptions) -> SubmitOptions:
    """Return the options of the collective that computes the gradient of a collective with these options."""
    return options if options.name is None else options._replace(name=f"{options.name}.gradient")


def blocking(describe: Callable[P, Call[R]]) -> Callable[P, R]:
    """Build the form that waits for its result in new tensors and supports autograd."""

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return describe(*args, **kwargs).run()

    return _documented(run, describe, describe.__name__, "{}", "")


def compression_at(position: int, describe: Callable[P, Call[R]]) -> Callable[P, Call[R]]:
    """Move ``compression``, the last parameter, to its position in the blocking forms of Horovod."""

    @wraps(describe)
    def described(*args: Any, **kwargs: Any) -> Call[R]:
        if len(args) > position:
            return describe(*args[:position], *args[position + 1 :], compression=args[position], **kwargs)
        return describe(*args, **kwargs)

    signature = inspect.signature(describe)
    parameters = list(signature.parameters.values())
    parameters.insert(position, parameters.pop())
    cast("Any", described).__signature__ = signature.replace(parameters=parameters)
    return cast("Callable[P, Call[R]]", described)


def asynchronous(describe: Callable[P, Call[R]]) -> Callable[P, Handle[R]]:
    """Build the form that returns a handle."""

    def start(*args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        return describe(*args, **kwargs).start(in_place=False)

    doc = f"Start ``{describe.__name__}``; ``synchronize(handle)`` returns its result. Autograd does not record it."
    return _documented(start, describe, f"{describe.__name__}_async", "Handle[{}]", doc)


def in_place(describe: Callable[P, Call[R]], run: Callable[..., R] | None = None) -> Callable[P, R]:
    """Build the form that waits and writes into its input tensors; ``run`` replaces it with a faster implementation."""

    def run_described(*args: P.args, **kwargs: P.kwargs) -> R:
        return describe(*args, **kwargs).start(in_place=True, waits=True).wait()

    doc = f"Run ``{describe.__name__}`` in place on contiguous tensors. Autograd does not record it."
    return _documented(run or run_described, describe, f"{describe.__name__}_", "{}", doc)


def asynchronous_in_place(
    describe: Callable[P, Call[R]], start: Callable[..., Handle[R]] | None = None
) -> Callable[P, Handle[R]]:
    """Build the form that returns a handle and writes into the tensors; ``start`` replaces it with a faster one."""

    def start_described(*args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        return describe(*args, **kwargs).start(in_place=True)

    doc = (
        f"Start ``{describe.__name__}_``: the tensors, which must be contiguous, hold the result once "
        "``synchronize(handle)`` has returned it."
    )
    return _documented(start or start_described, describe, f"{describe.__name__}_async_", "Handle[{}]", doc)


def _documented(
    form: Callable[P, S], describe: Callable[P, Call[Any]], name: str, result: str, lead: str
) -> Callable[P, S]:
    """Return ``form`` with the name, and with the signature and the documentation of the description."""
    form.__name__ = form.__qualname__ = name
    form.__module__ = "sparkhvd.torch"  # where users and pickle find it
    form.__doc__ = "\n\n".join(part for part in (lead, inspect.getdoc(describe)) if part)
    signature = inspect.signature(describe)
    annotation = str(signature.return_annotation).removeprefix("Call[").removesuffix("]")
    cast("Any", form).__signature__ = signature.replace(return_annotation=result.format(annotation))
    return form
