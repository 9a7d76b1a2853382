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


def check_resumable(run_id: str, where: str, before: ModelFacts, now: ModelFacts) -> None:
    """Refuse to go on from a checkpoint of another model.

    Args:
        run_id: of the run.
        where: the checkpoint.
        before: what was trained.
        now: what is to be trained.

    Raises:
        ParamError: they differ.
    """
    if difference := _difference(before, now):
        raise ParamError(
            f"Run {run_id!r} cannot resume from its checkpoint {where}, which belongs to another model: {difference}. "
            "Pass the model and the optimizer that the run began with, or choose another run_id to start a new run."
        )


def _difference(before: ModelFacts, now: ModelFacts) -> str:
    if before.framework != now.framework:
        return f"it was trained with {before.framework}, but this fit uses {now.framework}"
    saved, current = before.weights, now.weights
    differences = [
        *(f"it lacks the weight {name!r} of this fit's model" for name in current if name not in saved),
        *(f"it has a weight {name!r}, which this fit's model lacks" for name in saved if name not in current),
        *(
            f"its weight {name!r} has the shape {list(old)}, but this fit's model has {list(new)}"
            for name, old in saved.items()
            if old is not None and (new := current.get(name)) is not None and old != new
        ),
    ]
    if differences:
        return differences[0] + (f" (and {len(differences) - 1} more weights differ)" if len(differences) > 1 else "")
    if before.optimizer != now.optimizer:
        return f"its optimizer is {before.optimizer}, but this fit has {now.optimizer}"
    return ""
