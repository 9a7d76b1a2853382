"""The forms in which every collective is offered, made from one description of it.

A collective is described once, by a function with the user's parameters and their documentation that returns a
``Call``. From it come the blocking form, which takes part in autograd, the asynchronous form, and the two that write
into the tensors they are given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, ParamSpec, Protocol, TypeVar, cast

import torch

from sparkhvd.comm.collectives.options import SubmitOptions
from sparkhvd.comm.handle import Handle

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

Tensors = tuple[torch.Tensor, ...]
Rows = tuple[tuple[int, ...], ...]


# What is made of the outputs of a collective, and of the rows that every rank gave or took (for each input; nothing
# where ranks do not differ in that).
Finish = Callable[[Tensors, Rows], T]


class Collective(Protocol):
    """A collective on some tensors, described and not started."""

    @property
    def tensors(self) -> Tensors:
        """The inputs."""

    def start(self, finish: Finish[T], *, in_place: bool, waits: bool) -> Handle[T]:
        """Submit it.

        Args:
            finish: makes the handle's result.
            in_place: write the outputs into the inputs.
            waits: whether the caller waits for the handle at once.
        """

    def gradients(self, gradients: Tensors, rows: Rows) -> Tensors:
        """The gradients of the inputs from those of the outputs; collective too."""


class Call(NamedTuple, Generic[R]):
    """A collective with what the user gets from its outputs."""

    collective: Collective
    result: Finish[R]

    def run(self) -> R:
        """Wait for the result, on the way of autograd where an input needs a gradient."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.collective.tensors):
            return self.result(_apply(self.collective, *self.collective.tensors), ())
        return self.start(in_place=False, waits=True).wait()

    def start(self, *, in_place: bool, waits: bool = False) -> Handle[R]:
        """Submit it."""
        return self.collective.start(self.result, in_place=in_place, waits=waits)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collective: Collective, *_tensors: torch.Tensor) -> Tensors:
        tensors, rows = collective.start(_with_rows, in_place=False, waits=True).wait()
        ctx.collective, ctx.rows = collective, rows
        ctx.mark_non_differentiable(*(each for each in tensors if not each.is_floating_point()))
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.collective.gradients(gradients, ctx.rows)


def _with_rows(tensors: Tensors, rows: Rows) -> tuple[Tensors, Rows]:
    return tensors, rows


def first(tensors: Tensors, _rows: Rows) -> torch.Tensor:
    """The one tensor there is."""
    return tensors[0]


def every(tensors: Tensors, _rows: Rows) -> Tensors:
    """All tensors."""
    return tensors


def as_list(tensors: Tensors, _rows: Rows) -> list[torch.Tensor]:
    """All tensors, as users get them."""
    return list(tensors)


# torch leaves `Function.apply` without types.
_apply: Callable[..., Tensors] = _Differentiable.apply


def of_gradient(options: SubmitOptions) -> SubmitOptions:
    """Return the options of the collective that computes the gradient of another one."""
    return options if options.name is None else options._replace(name=f"{options.name}.gradient")


def blocking(describe: Callable[P, Call[R]]) -> Callable[P, R]:
    """The form that waits for its result, new tensors, and takes part in autograd."""

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return describe(*args, **kwargs).run()

    return _dressed(run, describe, describe.__name__, "{}", "")


def asynchronous(describe: Callable[P, Call[R]]) -> Callable[P, Handle[R]]:
    """The form that returns a handle."""

    def start(*args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        return describe(*args, **kwargs).start(in_place=False)

    doc = f"Start what ``{describe.__name__}`` does; ``synchronize(handle)`` returns its result. Autograd passes it by."
    return _dressed(start, describe, f"{describe.__name__}_async", "Handle[{}]", doc)


def in_place(describe: Callable[P, Call[R]], run: Callable[..., R] | None = None) -> Callable[P, R]:
    """The form that waits and writes into the tensors it is given; ``run`` is that form where it is quicker."""

    def run_described(*args: P.args, **kwargs: P.kwargs) -> R:
        return describe(*args, **kwargs).start(in_place=True, waits=True).wait()

    doc = f"Do what ``{describe.__name__}`` does in the own memory of contiguous tensors. Autograd passes it by."
    return _dressed(run or run_described, describe, f"{describe.__name__}_", "{}", doc)


def asynchronous_in_place(
    describe: Callable[P, Call[R]], start: Callable[..., Handle[R]] | None = None
) -> Callable[P, Handle[R]]:
    """The form that returns a handle and writes into the tensors; ``start`` is that form where it is quicker."""

    def start_described(*args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        return describe(*args, **kwargs).start(in_place=True)

    doc = (
        f"Start what ``{describe.__name__}_`` does: the tensors, which must be contiguous, hold the result once "
        "``synchronize(handle)`` has returned it."
    )
    return _dressed(start or start_described, describe, f"{describe.__name__}_async_", "Handle[{}]", doc)


def _dressed(
    form: Callable[P, S], describe: Callable[P, Call[Any]], name: str, result: str, lead: str
) -> Callable[P, S]:
    """``form`` with a name, and with the parameters and the documentation of the description."""
    form.__name__ = form.__qualname__ = name
    form.__module__ = "sparkhvd.torch"  # where users find it, and pickle too
    form.__doc__ = "\n\n".join(part for part in (lead, inspect.getdoc(describe)) if part)
    signature = inspect.signature(describe)
    described = str(signature.return_annotation).removeprefix("Call[").removesuffix("]")
    cast("Any", form).__signature__ = signature.replace(return_annotation=result.format(described))
    return form
