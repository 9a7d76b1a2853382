"""The history of a training run: one record per epoch, averaged over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.communicator import Communicator
from sparkhvd.errors import ConfigError, ParamError
from sparkhvd.estimators.reports import EpochRecord, EpochReport

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class History(list[dict[str, Any]]):
    """The records of a run: one entry per epoch in Horovod's form, the same for every framework."""

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per epoch: loss and metrics (with the prefix ``val_`` for validation), then the times.

        Examples:
            >>> model.getHistory().to_pandas()[["loss", "val_loss"]]  # doctest: +SKIP
        """
        import pandas as pd  # noqa: PLC0415  (ranks do not need it)

        rows = []
        for entry in self:
            row = {f"{prefix}{name}": value for prefix, part in _PARTS for name, value in _flat(entry[part]).items()}
            seconds = {"rows_per_second": entry["rows_per_second"], "step_seconds": entry["step_seconds"]}
            rows.append({**row, **seconds, **entry["shares"]})
        return pd.DataFrame(rows, index=pd.Index([entry["epoch"] for entry in self], name="epoch"))

    def plot(self) -> Figure:
        """Plot loss and metrics by epoch, training and validation in one chart; needs matplotlib.

        If the number of ranks has changed, another chart shows it.

        Raises:
            ConfigError: matplotlib is not installed.
            ParamError: the history is empty or has no metrics.
        """
        try:
            from matplotlib import pyplot  # noqa: PLC0415  (optional)
        except ImportError as error:
            raise ConfigError(
                "plot_history() needs matplotlib, which is not installed. Run pip install matplotlib."
            ) from error
        if not self:
            raise ParamError("This model has no history because from_model created it; it was not trained here.")
        names = list(dict.fromkeys(name for _, part in _PARTS for entry in self for name in _flat(entry[part])))
        if not names:
            raise ParamError("The history has no loss and no metrics: the steps of the training returned none.")
        table, sizes = self.to_pandas(), self._sizes()
        charts = len(names) + bool(sizes)
        figure, axes = pyplot.subplots(1, charts, figsize=(4.5 * charts, 3.5), layout="constrained", squeeze=False)
        if sizes:
            axes[0, -1].step(*zip(*sizes, strict=True), where="post")
            axes[0, -1].set(title="ranks", xlabel="epoch", ylim=(0, None))
            axes[0, -1].yaxis.get_major_locator().set_params(integer=True)
        for chart, name in zip(axes[0], names, strict=False):
            for prefix, part in _PARTS:
                if f"{prefix}{name}" in table:
                    chart.plot(table.index + 1, table[f"{prefix}{name}"], marker=".", label=part)
            chart.set(title=name, xlabel="epoch")
            chart.legend()
        pyplot.close(figure)  # else a notebook shows the figure twice
        return figure

    def _sizes(self) -> list[tuple[float, int]]:
        """Return when each generation began, in epochs, and its number of ranks; empty if all have the same number.

        The history does not say when the ranks changed within an epoch, so its generations get equal parts of it.
        """
        begins = [
            (entry["epoch"] + index / len(entry["sizes"]), size)
            for entry in self
            for index, size in enumerate(entry["sizes"])
        ]
        if len({size for _, size in begins}) < 2:
            return []
        return [*begins, (self[-1]["epoch"] + 1.0, begins[-1][1])]


_PARTS = (("", "train"), ("val_", "validation"))


def to_history(records: Iterable[EpochRecord]) -> History:
    """Return the records in Horovod's form."""
    return History(
        {**record.to_json(), "train": _as_groups(record.train), "validation": _as_groups(record.validation)}
        for record in records
    )


def _as_groups(values: Mapping[str, float]) -> dict[str, Any]:
    if not values:
        return {}
    loss = {"loss": values["loss"]} if "loss" in values else {}  # a user's validation step may return no loss
    return {**loss, "all_metrics": [{name: value} for name, value in values.items() if name != "loss"]}


def _flat(groups: Mapping[str, Any]) -> dict[str, float]:
    """Invert ``_as_groups``."""
    if not groups:
        return {}
    metrics = {name: value for group in groups["all_metrics"] for name, value in group.items()}
    return {**({"loss": groups["loss"]} if "loss" in groups else {}), **metrics}


def record_from_json(content: dict[str, Any]) -> EpochRecord:
    """Invert ``EpochRecord.to_json``."""
    return EpochRecord(**{**content, "sizes": tuple(content.get("sizes", ()))})


def average_over_ranks(
    report: EpochReport, communicator: Communicator, before: Mapping[str, tuple[float, float]] | None = None
) -> EpochRecord:
    """Return the record of an epoch from the reports of all ranks; collective, one small allreduce.

    Args:
        report: the report of this rank.
        communicator: the communicator of all ranks.
        before: sums and rows, over all ranks, of the epoch's steps before this rank resumed it.
    """
    times = report.times
    local = [
        *(number for pair in report.train.values() for number in pair),
        *(number for pair in report.validation.values() for number in pair),
        *(times.data_wait, times.compute, times.communication),
    ]
    total = communicator.allreduce(np.array(local, np.float64), ReduceOp.SUM, name=f"epoch {report.epoch} report")
    count = len(report.train)
    pairs = total[:-3].reshape(-1, 2)
    rows = float(pairs[list(report.train).index("loss"), 1]) if "loss" in report.train else 0.0
    spent = total[-3:].astype(np.float64) / communicator.world.size
    seconds = max(float(spent.sum()), 1e-9)
    phases = ("data_wait", "compute", "communication")
    return EpochRecord(
        epoch=report.epoch,
        train=_means(list(report.train), pairs[:count], before or {}),
        validation=_means(list(report.validation), pairs[count:], {}),
        rows_per_second=rows / seconds,
        step_seconds=seconds / max(1, report.steps),
        shares={phase: float(part) / seconds for phase, part in zip(phases, spent, strict=True)},
    )


def _means(names: list[str], pairs: Any, before: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return the means of (sum, rows) pairs, including the pairs in ``before``; omit metrics without rows."""
    means = {}
    for name, (total, rows) in zip(names, pairs, strict=True):
        earlier, earlier_rows = before.get(name, (0.0, 0.0))
        count = rows + earlier_rows
        if count:
            means[name] = float((total + earlier) / count)
    return means
