"""The check on the driver, before any job, that a run can be resumed with this fit's model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

from sparkhvd._util.counts import counted
from sparkhvd.errors import ParamError
from sparkhvd.estimators.runs.canonical import canonical_forms

Groups = tuple[tuple[str, ...], ...]
Shape = tuple[int, ...] | None  # None if only the training determines it

# The parameters that determine the values in a history.
_MEASURES = ("loss", "loss_constructors", "loss_weights", "metrics")


@dataclass(frozen=True)
class ModelFacts:
    """The facts that a checkpoint and the model that resumes from it must share.

    Attributes:
        framework: the framework that trains the model.
        optimizer: the optimizer's class; empty if only the ranks know the optimizer.
        weights: the shape of every weight, by name.
        groups: the names of the weights that the optimizer trains, by parameter group, in the optimizer's order (its
            state has no names). Empty if only the ranks know them.
        measures: the digest of the loss and the metrics; empty if it is unknown. It must match only if the run resumes
            within an epoch.
        dtypes: the element type of every weight, by name; empty if they are unknown.
        adapted: the digest of what a layer has learned from rows besides weights (words, boundaries), by the layer's
            name; empty if it is unknown.
    """

    framework: str
    optimizer: str = ""
    weights: Mapping[str, Shape] = field(default_factory=dict)
    groups: Groups = ()
    measures: str = ""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    adapted: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the facts as JSON types."""
        return asdict(self)


def facts_from_json(content: dict[str, Any]) -> ModelFacts:
    """Create the facts from the output of ``ModelFacts.to_json``."""
    shapes = {name: None if shape is None else tuple(shape) for name, shape in content["weights"].items()}
    groups = tuple(tuple(group) for group in content.get("groups", ()))
    later = {name: content[name] for name in ("measures", "dtypes", "adapted") if name in content}
    return ModelFacts(content["framework"], content["optimizer"], shapes, groups, **later)


def measures_digest(params: Mapping[str, object]) -> str:
    """Return the digest of the loss and the metrics among the parameters; empty if their content is unknown."""
    chosen = {name: params[name] for name in _MEASURES if params.get(name) is not None}
    # A loss may refer to weights of the model, whose values differ. Not every model can be described.
    for described in ({"model": params.get("model"), **chosen}, chosen):
        try:
            forms = canonical_forms(described)
        except ParamError:
            continue
        form = [(name, forms[name]) for name in chosen]
        return hashlib.sha256(json.dumps(form).encode()).hexdigest()[:32]
    return ""


def check_resumable(
    run_id: str, url: str, before: ModelFacts, now: ModelFacts, interrupted_epoch: int | None = None
) -> None:
    """Refuse to resume from a checkpoint of another model, or from within an epoch with another loss or other metrics.

    Args:
        run_id: the run.
        url: the checkpoint's URL.
        before: the facts of the checkpoint.
        now: the facts of this fit's model.
        interrupted_epoch: the epoch, from 0, within which the checkpoint was taken; None for the end of an epoch.

    Raises:
        ParamError: the facts differ.
    """
    if difference := _difference(before, now):
        raise ParamError(
            f"Run {run_id!r} cannot resume from its checkpoint {url}, which belongs to another model: {difference}. "
            "Pass the model and the optimizer that the run began with, or choose another run_id to start a new run."
        )
    if interrupted_epoch is not None and before.measures and now.measures and before.measures != now.measures:
        raise ParamError(
            f"Run {run_id!r} was interrupted within epoch {interrupted_epoch + 1}, where its loss or its metrics "
            "differed from those of this fit, so their values cannot be combined over the epoch. Pass the loss and the "
            "metrics that the run began the epoch with, or choose another run_id to start a new run."
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
        *(
            f"its weight {name!r} has elements of type {kind}, but this fit's model has {now.dtypes[name]}"
            for name, kind in before.dtypes.items()
            if now.dtypes.get(name, kind) != kind
        ),
    ]
    if differences:
        more = len(differences) - 1
        verb = "differs" if more == 1 else "differ"
        return differences[0] + (f" (and {counted(more, 'more weight')} {verb})" if more else "")
    for name, digest in before.adapted.items():
        if now.adapted.get(name, digest) != digest:
            return f"its layer {name!r} has other words or boundaries than this fit's model"
    if before.optimizer != now.optimizer:
        return f"its optimizer is {before.optimizer}, but this fit has {now.optimizer}"
    return _group_difference(before.groups, now.groups) if before.groups and now.groups else ""


def _group_difference(saved: Groups, current: Groups) -> str:
    if len(saved) != len(current):
        return f"its optimizer has {counted(len(saved), 'parameter group')}, but this fit's has {len(current)}"
    for group, (olds, news) in enumerate(zip(saved, current, strict=True)):
        for index, (old, new) in enumerate(zip_longest(olds, news)):
            if old != new:
                return _parameter_difference(f"parameter {index} of group {group}", old, new)
    return ""


def _parameter_difference(where: str, old: str | None, new: str | None) -> str:
    """Describe two different parameters in one place of an optimizer: a name, "" outside the model, or None."""
    if old is None:
        return f"its optimizer has no {where}, but this fit's has {_quoted(new)} there"
    if new is None:
        return f"{where} of its optimizer is {_quoted(old)}, but this fit's has no such parameter"
    return f"{where} of its optimizer is {_quoted(old)}, but of this fit's {_quoted(new)}"


def _quoted(name: str | None) -> str:
    return repr(name or "outside the model")
