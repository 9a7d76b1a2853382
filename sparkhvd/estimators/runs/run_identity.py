"""The identity of a run, by which ``resume="auto"`` finds the run of an earlier fit with the same content.

Everything that changes the returned model is part of the identity. A run id consists of two digests: one without and
one with the values of the model's initial weights. The Store records runs that differ only in these values together,
so that a script that draws its weights anew gets a warning about why it starts a new run.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sparkhvd.data.reuse.fingerprint import fingerprint
from sparkhvd.data.schema.selection import Selection
from sparkhvd.errors import ParamError
from sparkhvd.estimators.params.backend import SparkBackend
from sparkhvd.estimators.params.policies import Checkpoints
from sparkhvd.estimators.runs.canonical import canonical_form
from sparkhvd.store import layout
from sparkhvd.store.protocol import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

logger = logging.getLogger(__name__)


class Counts(Enum):
    """Whether a parameter is part of a run's identity."""

    ALWAYS = "it changes the model that comes back"
    IN_A_MAP = "a run may be continued with another value, but maps of one fit that differ in it are different runs"
    NEVER = "it changes what is shown, kept or used, not the model"


# Every parameter of every estimator; a parameter that is missing here always counts.
DECISIONS: Mapping[str, Counts] = MappingProxyType(
    {
        # num_proc=None leaves the number of ranks to the cluster, and out of the identity.
        **dict.fromkeys(("num_proc", "backend", "backend_env"), Counts.ALWAYS),
        # The rows and their order.
        **dict.fromkeys(
            (
                "data", "feature_cols", "inputs", "label_cols", "sample_weight_col", "validation", "sparse_cols",
                "compress_sparse_cols", "transformation_fn", "data_module", "reader", "fill", "partitions_per_process",
                "inmemory_cache_all", "local_cache", "shuffle", "batch_size", "val_batch_size", "batch_format",
                "train_steps_per_epoch", "validation_steps_per_epoch", "random_seed",
            ),
            Counts.ALWAYS,
        ),
        # The training, and the epoch whose model is returned.
        **dict.fromkeys(
            (
                "model", "optimizer", "loss", "loss_constructors", "loss_weights", "metrics", "input_shapes",
                "label_shapes", "custom_objects", "scale_lr", "gradient_compression", "backward_passes_per_step",
                "train_minibatch_fn", "lr_scheduler", "clip_grad_norm", "clip_grad_value", "mixed_precision",
                "torch_compile", "trainer_args", "callbacks", "checkpoint_callback", "checkpoints", "early_stopping",
                "terminate_on_nan",
            ),
            Counts.ALWAYS,
        ),
        "epochs": Counts.IN_A_MAP,
        **dict.fromkeys(
            (
                "store", "run_id", "resume", "keep_data", "use_gpu", "mp_start_method", "train_reader_num_workers",
                "val_reader_num_workers", "verbose", "log_every_n_steps", "logger", "output_cols", "output_types",
            ),
            Counts.NEVER,
        ),
    }
)  # fmt: skip


def _of_backend(backend: Any) -> Any:
    """Return the number of ranks and their environment; the launcher does not count."""
    if isinstance(backend, str):
        return None
    if isinstance(backend, SparkBackend):
        return [backend.requested_ranks, backend.env]
    return backend.num_processes()


# The part of a parameter that counts, if it is not the whole value.
_COUNTING_PARTS: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "backend": _of_backend,
        "checkpoints": lambda policy: [policy.best, policy.mode] if isinstance(policy, Checkpoints) else policy,
    }
)


def run_id_by_content(
    kind: str, df: DataFrame, selection: Selection, params: Mapping[str, Any], mapped: Collection[str] = ()
) -> str:
    """Return a run id that is shared only by fits with the same rows, parameters, model and optimizer.

    Args:
        kind: the class of the estimator.
        df: the rows.
        selection: the columns and rows that are trained on.
        params: by name.
        mapped: the parameters that a parameter map sets for this fit, as in ``fit(df, [{...}, {...}])``.

    Raises:
        ParamError: the content of the rows or of a parameter cannot be determined.
    """
    rows = fingerprint(df, selection, caches=False)
    if rows is None:
        raise ParamError(
            "resume='auto' identifies a run by its rows, but the content of these cannot be determined: the DataFrame "
            "contains a user-defined function, a cache or a random expression, or comes through Spark Connect. Pass a "
            "run_id instead."
        )
    counting = [name for name in sorted(params) if _counts(name, mapped)]

    def digest(*, weights: bool) -> str:
        content = [(name, canonical_form(_counted(name, params[name]), name, weights=weights)) for name in counting]
        identity = json.dumps([kind, rows.text, content])
        return hashlib.sha256(identity.encode()).hexdigest()[:32]

    return layout.auto_run(digest(weights=False), digest(weights=True))


def note_run(store: Store, run_id: str) -> None:
    """Record that a run exists; warn if others differ from it only in the model's initial weights."""
    alike, this = layout.alike_folder(run_id), layout.alike_path(run_id)
    noted = store.list(alike)
    if this in noted:
        return
    if noted:
        logger.warning(
            "Run %s is a new run, although run %s has the same rows, parameters and model structure: the model's "
            "initial weights differ. To have a restarted script resume its run, seed the weights before making the "
            "model (torch.manual_seed, keras.utils.set_random_seed). To resume that run now, pass run_id=%r.",
            run_id,
            layout.run_of_note(noted[-1]),
            layout.run_of_note(noted[-1]),
        )
    with store.open(this, "wb") as file:
        file.write(b"")


def _counts(name: str, mapped: Collection[str]) -> bool:
    decision = DECISIONS.get(name, Counts.ALWAYS)
    return decision is Counts.ALWAYS or (decision is Counts.IN_A_MAP and name in mapped)


def _counted(name: str, value: Any) -> Any:
    return _COUNTING_PARTS[name](value) if name in _COUNTING_PARTS else value
