"""The forms in which every collective is offered, made from one description of it.

A collective is described once, by a function with the user's parameters and their documentation that returns a
``Call``. From it come the blocking form, which takes part in autograd, the asynchronous form, and the two that write
into the tensors they are given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

import torch

from sparkhvd.comm.handle import Handle

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

Tensors = tuple[torch.Tensor, ...]
Rows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a collective came to.

    Attributes:
        tensors: its outputs.
        rows: for each input, the rows that every rank gave or took, where that differs between ranks.
    """

    tensors: Tensors
    rows: Rows = ()


class Collective(Protocol):
    """A collective on some tensors, described and not started."""

    @property
    def tensors(self) -> Tensors:
        """The inputs."""

    def start(self, *, in_place: bool, waits: bool) -> Handle[Outcome]:
        """Submit it.

        Args:
            in_place: write the outputs into the inputs.
            waits: whether the caller waits for the handle at once.
        """

    def gradients(self, gradients: Tensors, rows: Rows) -> Tensors:
        """The gradients of the inputs from those of the outputs; collective too."""


@dataclass(frozen=True, slots=True)
class Call(Generic[R]):
    """A collective with what the user gets from its outputs."""

    collective: Collective
    result: Callable[[Tensors], R]

    def run(self) -> R:
        """Wait for the result, on the way of autograd where an input needs a gradient."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.collective.tensors):
            return self.result(_apply(self.collective, *self.collective.tensors))
        return self.result(self.collective.start(in_place=False, waits=True).wait().tensors)

    def start(self, *, in_place: bool, waits: bool = False) -> Handle[R]:
        """Submit it."""
        return self.collective.start(in_place=in_place, waits=waits).then(lambda outcome: self.result(outcome.tensors))


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collective: Collective, *_tensors: torch.Tensor) -> Tensors:
        outcome = collective.start(in_place=False, waits=True).wait()
        ctx.collective, ctx.rows = collective, outcome.rows
        ctx.mark_non_differentiable(*(each for each in outcome.tensors if not each.is_floating_point()))
        return outcome.tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.collective.gradients(gradients, ctx.rows)


# torch leaves `Function.apply` without types.
_apply: Callable[..., Tensors] = _Differentiable.apply


def of_gradient(name: str | None) -> str | None:
    """The name of the collective that computes the gradient of another one."""
    return None if name is None else f"{name}.gradient"


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


def in_place(describe: Callable[P, Call[R]]) -> Callable[P, R]:
    """The form that waits and writes the result into the tensors it is given."""

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return describe(*args, **kwargs).start(in_place=True, waits=True).wait()

    doc = f"Do what ``{describe.__name__}`` does in the own memory of contiguous tensors. Autograd passes it by."
    return _dressed(run, describe, f"{describe.__name__}_", "{}", doc)


def asynchronous_in_place(describe: Callable[P, Call[R]]) -> Callable[P, Handle[R]]:
    """The form that returns a handle and writes the result into the tensors it is given."""

    def start(*args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        return describe(*args, **kwargs).start(in_place=True)

    doc = (
        f"Start what ``{describe.__name__}_`` does: the tensors, which must be contiguous, hold the result once "
        "``synchronize(handle)`` has returned it."
    )
    return _dressed(start, describe, f"{describe.__name__}_async_", "Handle[{}]", doc)


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
