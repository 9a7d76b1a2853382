"""The parameters of one fit as a typed value, which all steps of the fit read and no step changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from sparkhvd.data.read.batches import Arrays
from sparkhvd.data.schema.data_schema import Fill
from sparkhvd.estimators.params.backend import Placement
from sparkhvd.estimators.params.named_inputs import NamedInput
from sparkhvd.estimators.params.policies import Checkpoints, EarlyStopping
from sparkhvd.store import Store


@dataclass(frozen=True, kw_only=True)
class FitPlan(Placement):
    """The parameters of a fit; ``EstimatorParams`` declares and describes every one under the same name.

    A step that sets a value returns a new plan (``dataclasses.replace``).

    Attributes:
        own: the parameters that only this framework's estimator has, by name.
    """

    # The rows.
    store: Store | None
    data: str  # "files" in fit_on_parquet
    feature_cols: Sequence[str]
    inputs: Mapping[str, NamedInput] | None
    label_cols: Sequence[str]
    sample_weight_col: str | None
    validation: float | str | None
    sparse_cols: Sequence[str] | None
    compress_sparse_cols: bool
    transformation_fn: Callable[[Arrays], Arrays] | None
    data_module: Callable[..., object] | None
    reader: Literal["native", "petastorm"]
    train_reader_num_workers: int
    val_reader_num_workers: int
    fill: Mapping[str, Fill] | None
    partitions_per_process: int
    keep_data: float
    inmemory_cache_all: bool
    local_cache: bool

    # The training.
    batch_size: int
    elastic_batch: Literal["global", "rank"]
    val_batch_size: int | None
    epochs: int
    train_steps_per_epoch: int | None
    validation_steps_per_epoch: int | None
    shuffle: bool
    random_seed: int | None
    scale_lr: bool
    gradient_compression: object
    use_gpu: bool
    mp_start_method: str | None

    # The run and its model.
    terminate_on_nan: bool
    log_every_n_steps: int | None
    early_stopping: EarlyStopping | None
    epoch_callback: Callable[[int, Mapping[str, float]], object] | None
    checkpoints: Checkpoints
    run_id: str | None
    resume: str | None
    output_cols: Sequence[str] | None
    output_types: Sequence[str] | None

    own: Mapping[str, Any]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the plan with these values of an estimator's parameters; unset columns become empty tuples."""
        columns = {name: values[name] or () for name in ("feature_cols", "label_cols")}
        own = {name: value for name, value in values.items() if name not in _SHARED}
        return cls(**{name: values[name] for name in _SHARED} | columns, own=own)

    @property
    def params(self) -> dict[str, object]:
        """All parameters by name, as plug-ins receive them."""
        return {**{name: getattr(self, name) for name in _SHARED}, **self.own}


_SHARED = tuple(field.name for field in fields(FitPlan) if field.name != "own")
