"""The identity of a run, by which ``resume="auto"`` finds the run of an earlier fit with the same content.

Everything that changes the returned model is part of the identity. A run id consists of two digests: one without and
one with the values of the model's initial weights. The Store records runs that differ only in these values in one
folder. A script that draws new initial weights therefore gets a warning that explains why it starts a new run.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sparkhvd._util.frameworks import frameworks
from sparkhvd.data.reuse.fingerprint import fingerprint
from sparkhvd.data.schema.selection import Selection
from sparkhvd.errors import ParamError
from sparkhvd.estimators.params.backend import Backend, SparkBackend
from sparkhvd.estimators.params.policies import Checkpoints
from sparkhvd.estimators.runs.canonical import canonical_forms
from sparkhvd.store import layout
from sparkhvd.store.protocol import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

logger = logging.getLogger(__name__)


def _backend_identity(backend: Backend | str) -> object:
    """Return the parts of a backend that belong to the identity: ranks and environment, but not the launcher."""
    if isinstance(backend, str):
        return None
    if isinstance(backend, SparkBackend):
        return [backend.start_size if backend.is_elastic else backend.requested_ranks, backend.env]
    return backend.num_processes()


# The part of a parameter that belongs to the identity, if it is not the whole value.
_IDENTITY_PARTS: Mapping[str, Callable[[Any], object]] = MappingProxyType(
    {
        "backend": _backend_identity,
        "checkpoints": lambda policy: [policy.best, policy.mode] if isinstance(policy, Checkpoints) else policy,
    }
)


def run_id_by_content(estimator_class: str, df: DataFrame, selection: Selection, params: Mapping[str, object]) -> str:
    """Return a run id that is shared only by fits with the same rows, parameters, model and optimizer.

    Args:
        estimator_class: the class of the estimator.
        df: the rows.
        selection: the columns and rows that are trained on.
        params: the parameters that are part of the identity, by name, see ``declarations.Identity``.

    Raises:
        ParamError: the content of the rows or of a parameter cannot be determined.
    """
    rows = fingerprint(df, selection, caches=False)
    if rows is None:
        raise ParamError(
            "resume='auto' identifies a run by its rows, but their content cannot be determined: the DataFrame "
            "contains a user-defined function, a cache or a random expression, or was created from an RDD, from rows "
            "of the driver, or through Spark Connect. Pass a run_id instead."
        )

    def digest(*, weights: bool) -> str:
        parts = {name: _identity_part(name, value) for name, value in params.items()}
        content = sorted(canonical_forms(parts, weights=weights).items())
        identity = json.dumps([estimator_class, rows.text, content])
        return hashlib.sha256(identity.encode()).hexdigest()[:32]

    return layout.auto_run(digest(weights=False), digest(weights=True))


def record_run(store: Store, run_id: str) -> None:
    """Record that a run exists; warn if other runs differ from it only in the model's initial weights."""
    alike_folder, own_path = layout.alike_folder(run_id), layout.alike_path(run_id)
    recorded_paths = store.list(alike_folder)
    if own_path in recorded_paths:
        return
    if recorded_paths:
        logger.warning(
            "Run %s is a new run, although run %s has the same rows, parameters and model structure: the model's "
            "initial weights differ. To have a restarted script resume its run, seed the weights before making the "
            "model (%s). To resume that run now, pass run_id=%r.",
            run_id,
            layout.run_of_note(recorded_paths[-1]),
            ", ".join(framework.seeding for framework in frameworks() if framework.seeding),
            layout.run_of_note(recorded_paths[-1]),
        )
    with store.open(own_path, "wb") as file:
        file.write(b"")


def _identity_part(name: str, value: object) -> object:
    return _IDENTITY_PARTS[name](value) if name in _IDENTITY_PARTS else value
