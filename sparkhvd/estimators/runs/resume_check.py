"""Whether a run can go on with the model that is given: said on the driver, before any job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sparkhvd.errors import ParamError

Shape = tuple[int, ...] | None  # None where it becomes known in the training


@dataclass(frozen=True)
class ModelFacts:
    """What a checkpoint and the model that goes on from it must have in common.

    Attributes:
        framework: that trains it.
        optimizer: its class; empty where the ranks alone know.
        weights: the shape of every one, by name.
    """

    framework: str
    optimizer: str = ""
    weights: Mapping[str, Shape] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON knows it."""
        return asdict(self)


def facts_from_json(content: dict[str, Any]) -> ModelFacts:
    """The inverse of ``ModelFacts.to_json``."""
    shapes = {name: None if shape is None else tuple(shape) for name, shape in content["weights"].items()}
    return ModelFacts(content["framework"], content["optimizer"], shapes)


def check_continued(run_id: str, where: str, before: ModelFacts, now: ModelFacts) -> None:
    """Refuse to go on from a checkpoint of another model.

    Args:
        run_id: of the run.
        where: the checkpoint.
        before: what was trained.
        now: what is to be trained.

    Raises:
        ParamError: they differ.
    """
    if said := _difference(before, now):
        raise ParamError(
            f"Run {run_id!r} goes on from its checkpoint {where}, which is of another model: {said}. Give the model "
            "and the optimizer that the run began with, or choose another run_id to train anew."
        )


def _difference(before: ModelFacts, now: ModelFacts) -> str:
    if before.framework != now.framework:
        return f"it was trained with {before.framework}, and this is a model of {now.framework}"
    there, here = before.weights, now.weights
    found = [
        *(f"it has no weight {name!r}, which the given one has" for name in here if name not in there),
        *(f"it has a weight {name!r}, which the given one has not" for name in there if name not in here),
        *(
            f"its weight {name!r} has the shape {list(old)}, that of the given one {list(new)}"
            for name, old in there.items()
            if old is not None and (new := here.get(name)) is not None and old != new
        ),
    ]
    if found:
        return found[0] + (f" (and {len(found) - 1} more weights differ)" if len(found) > 1 else "")
    if before.optimizer != now.optimizer:
        return f"its optimizer is {before.optimizer}, and {now.optimizer} is given"
    return ""
