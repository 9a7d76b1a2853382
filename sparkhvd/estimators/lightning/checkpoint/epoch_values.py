"""Values that torchmetrics and ``log`` have accumulated in an epoch, for the run that resumes within it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sparkhvd.estimators.torch.losses.metric_states import (
    States,
    can_continue,
    fits,
    from_bytes,
    merge_into,
    parts_of,
    state_of_part,
    states_of,
    to_bytes,
)

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

logger = logging.getLogger(__name__)

_NEUTRAL_ELEMENTS = {"max": -math.inf, "min": math.inf}  # of a reduction over the ranks, if it is not 0


class EpochValues:
    """The values of the current epoch, including the values of its part before an interruption.

    Args:
        earlier: the results of ``state`` on the ranks that trained the earlier part; empty if there is none.
        rank: this rank.
        size: the number of ranks.

    Attributes:
        validation: sum and number of the losses of the last validation before the interruption, for this rank to report
            unless the rest of the epoch is validated, too.
    """

    def __init__(self, earlier: Sequence[bytes], rank: int, size: int) -> None:
        self._earlier = [from_bytes(state) for state in earlier]
        self._rank = rank
        self._size = size
        # The logged values that are not added yet, by Lightning's keys; Lightning knows a value from its first use.
        self._logged: dict[str, list[dict[str, Any]]] = {}
        # How all ranks have logged the earlier values: arguments of Lightning's own ``log``, by the same keys.
        self._forms: dict[str, dict[str, Any]] = {
            key: form for state in self._earlier for key, form in state.get("forms", {}).items()
        }
        own = self._earlier[rank::size]
        for state in own:
            for key, values in state["logged"].items():
                self._logged.setdefault(key, []).extend(values)
        totals, rows = zip((0.0, 0), *(state.get("validation", (0.0, 0)) for state in own), strict=True)
        self.validation = (sum(totals), sum(rows))

    def state(self, trainer: Trainer, validation: tuple[float, int]) -> bytes:
        """Return the values of this rank in the epoch so far, with the values that it has taken over.

        Args:
            trainer: Lightning's Trainer.
            validation: sum and number of the losses of the last validation; zeros without a validation.
        """
        module = trainer.lightning_module
        modules: Iterator[Any] = module.modules()
        for part in modules:
            if hasattr(part, "compute_groups"):  # only one metric of a group in a MetricCollection is up to date
                list(part.values(copy_state=False))
        results = {
            key: value for key, value in _results(trainer).items() if _lasts_an_epoch(value) and not value.has_reset
        }
        tensors = {key: value for key, value in results.items() if value.is_tensor}
        return to_bytes(
            {
                "metrics": states_of(module),
                "logged": {**{key: [state_of_part(value)] for key, value in tensors.items()}, **self._logged},
                "forms": {**self._forms, **{key: _form_of(value.meta) for key, value in results.items()}},
                "validation": validation,
            }
        )

    def restore_metrics(self, module: LightningModule) -> None:
        """Continue the torchmetrics of the module with their earlier states; one rank takes each state."""
        states: list[States] = [state["metrics"] for state in self._earlier if fits(state["metrics"], module)]
        if not states:
            return
        parts = parts_of(module)
        lost = [not can_continue(part) and len(states) > self._size for part in parts]
        if any(lost) and self._rank == 0:
            names = sorted({type(part).__name__ for part, is_lost in zip(parts, lost, strict=True) if is_lost})
            logger.warning(
                "The epoch continues on fewer ranks, and these metrics cannot merge the states of several ranks: %s. "
                "Their values in this epoch cover only the rest of the epoch.",
                ", ".join(names),
            )
        own = [
            [None if is_lost else state for state, is_lost in zip(rank_states, lost, strict=True)]
            for rank_states in states[self._rank :: self._size]
        ]
        merge_into(module, own)

    def add_logged(self, trainer: Trainer) -> None:
        """Add the earlier values to the values that have been logged in the meantime."""
        results = _results(trainer)
        for key in self._logged.keys() & results.keys():
            value = results[key]
            for state in self._logged.pop(key):
                if value.is_tensor and _lasts_an_epoch(value):
                    _add(value, state)

    def add_missing(self, trainer: Trainer) -> list[dict[str, Any]]:
        """Add the earlier values that the rest of the epoch has not logged; call this at the end of the epoch.

        Torchmetrics have their earlier states since ``restore_metrics``.

        Returns:
            The forms of the added values. All ranks add the values of the ranks that log, because Lightning reduces
            them over all ranks.
        """
        results, added = _results(trainer), []
        for key, form in sorted(self._forms.items()):
            states = self._logged.pop(key, [])
            if key not in results and (states or not form["rank_zero_only"]):
                value: Any
                if (attribute := form.get("metric_attribute")) is not None:
                    value = trainer.lightning_module.get_submodule(attribute)
                else:
                    neutral = torch.tensor(_NEUTRAL_ELEMENTS.get(form["reduce_fx"], 0.0))
                    value = neutral.to(trainer.strategy.root_device)
                results.log(value=value, batch_size=0, sync_dist_fn=trainer.strategy.reduce, **form)
                for state in states:
                    _add(results[key], state)
                added.append(form)
        self._forms = {}
        return added


def within_step(hook: str) -> bool:
    """Return whether a Lightning hook belongs to one batch."""
    return not hook.startswith("on_") or any(part in hook for part in ("batch", "backward", "zero_grad", "step"))


def _results(trainer: Trainer) -> Any:
    return trainer.fit_loop.epoch_loop._results  # noqa: SLF001  (Lightning has no public access)


def _lasts_an_epoch(value: Any) -> bool:
    """Return whether Lightning accumulates a logged value, or a metric its state, over the batches of an epoch."""
    meta = value.meta
    return bool(meta.on_epoch and not meta.is_custom_reduction and within_step(meta.fx))


def _form_of(meta: Any) -> dict[str, Any]:
    """Return the arguments with which Lightning's collection of results has logged a value."""
    names = ("fx", "name", "prog_bar", "logger", "on_step", "add_dataloader_idx", "metric_attribute")
    return {
        **{name: getattr(meta, name) for name in names},
        "reduce_fx": meta.reduce_fx.__name__,
        "sync_dist": meta.sync.should,
        "rank_zero_only": meta.sync.rank_zero_only,
    }


def _add(value: Any, state: dict[str, Any]) -> None:
    earlier = state["value"].to(value.value.device)
    if value.meta.is_max_reduction or value.meta.is_min_reduction:
        value.value = value.meta.reduce_fx(value.value, earlier)
    else:
        value.value = value.value + earlier
    if value.meta.is_mean_reduction:
        value.cumulated_batch_size = value.cumulated_batch_size + state["cumulated_batch_size"].to(earlier.device)
    value._computed = None  # noqa: SLF001
