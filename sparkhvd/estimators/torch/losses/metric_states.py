"""States of torchmetrics as they are sent between ranks, and from an interrupted epoch to the resumed run."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from sparkhvd.estimators.torch.losses.objective import is_stateful

State: TypeAlias = dict[str, Any]  # tensors and lists of tensors by attribute
States: TypeAlias = list[State | None]  # one per part of a metric; None for a part that has seen no rows


def parts_of(metric: Any) -> list[Any]:
    """Return the metrics in a metric or another module, in the same order on every rank.

    Metrics that are composed of others (sums, wrappers) keep their state in their parts.
    """
    return [part for part in metric.modules() if is_stateful(part) and hasattr(part, "_reductions")]


def states_of(metric: Any) -> States:
    """Return the states of a metric's parts on this rank."""
    return [state_of_part(part) for part in parts_of(metric)]


def merge_into(metric: Any, states: Sequence[States]) -> None:
    """Set the states of a metric's parts to the union of ``states``."""
    parts = parts_of(metric)
    for part in parts:
        part.reset()
    for index, part in enumerate(parts):
        _merge(part, [state for rank_states in states if (state := rank_states[index]) is not None])


def fits(states: States, metric: Any) -> bool:
    """Return whether the states fit the metric, which a resumed run may have replaced with another one."""
    parts = parts_of(metric)
    return len(states) == len(parts) and all(
        state is None or state.keys() == part.metric_state.keys() for state, part in zip(states, parts, strict=True)
    )


def can_continue(part: Any) -> bool:
    """Return whether a part can be updated after the states of several ranks were merged into it.

    A merged state that is not a sum, an extreme value or a list can only be used to compute the metric's value.
    """
    names = {getattr(reduction, "__name__", None) for reduction in part._reductions.values()}  # noqa: SLF001
    lists = [isinstance(value, list) for value in part.metric_state.values()]
    return all(lists) or names <= {"dim_zero_sum", "dim_zero_max", "dim_zero_min", "dim_zero_cat"}


def to_bytes(content: object) -> bytes:
    """Return tensors and plain values in containers as bytes."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def from_bytes(content: bytes) -> Any:
    """Return the content from the result of ``to_bytes``, without running any code in it."""
    return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")


def state_of_part(part: Any) -> State | None:
    """Return the state of one part on this rank."""
    return {key: _on_cpu(value) for key, value in part.metric_state.items()} if part.update_called else None


def _merge(part: Any, states: Sequence[State]) -> None:
    part._update_count = len(states)  # noqa: SLF001
    part._computed = None  # noqa: SLF001
    if not states:
        return
    for attribute, reduction in part._reductions.items():  # noqa: SLF001  (its public sync needs torch.distributed)
        values = [state[attribute] for state in states]
        if len(values) == 1 and not isinstance(values[0], list):
            setattr(part, attribute, values[0].to(part.device))
        elif isinstance(values[0], list):
            setattr(part, attribute, [tensor.to(part.device) for value in values for tensor in value])
        else:
            stacked = torch.stack([value.to(part.device) for value in values])
            setattr(part, attribute, stacked if reduction is None else reduction(stacked))


def _on_cpu(value: Any) -> Any:
    return [tensor.cpu() for tensor in value] if isinstance(value, list) else value.cpu()
