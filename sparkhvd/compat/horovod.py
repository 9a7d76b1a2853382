"""What is said about names of Horovod's that are not here, or are elsewhere, and about packages that are missing."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from sparkhvd._util.suggestions import did_you_mean

ELASTIC = (
    "Elastic training is not available. An interrupted fit resumes from its checkpoints, also with another number of "
    "ranks: see docs/guide/recovery.md."
)
SPARK = (
    "sparkhvd has no module sparkhvd.spark. Import the names of horovod.spark from sparkhvd itself, as in `from "
    "sparkhvd import run, TorchEstimator, KerasEstimator, LightningEstimator, Store, SparkBackend`, Store classes from "
    "sparkhvd.store, and collectives from sparkhvd.torch, sparkhvd.tensorflow and sparkhvd.keras; see "
    "docs/guide/migrating.md."
)
# The extra that installs a package.
_EXTRAS = MappingProxyType(
    {
        "keras": "keras",
        "lightning": "lightning",
        "pytorch_lightning": "lightning",
        "pyspark": "spark",
        "tensorflow": "keras",
        "torch": "torch",
    }
)
# Arguments of horovod.run under the names that they have here.
_OF_RUN = MappingProxyType(
    {"np": "num_proc", "mpi_args": "extra_mpi_args", "network_interface": "nics", "network_interfaces": "nics"}
)
# What horovod.spark.keras and its like have beside the collectives.
_AT_THE_TOP = frozenset(
    f"{framework}{kind}" for framework in ("Torch", "Keras", "Lightning") for kind in ("Estimator", "Model")
)
_ELASTIC_OF_RUN = frozenset({"min_np", "max_np", "min_num_proc", "max_num_proc", "slots", "reset_limit"})


def missing(module: str, name: str, known: Iterable[str]) -> str:
    """What to say of an attribute that a module does not have, but maybe one of ``known``."""
    if name in {"elastic", "run_elastic"}:
        return ELASTIC
    if name == "Adasum":
        return f"Adasum is available only in sparkhvd.torch; {module} has Average, Sum, Min, Max and Product."
    if name in _AT_THE_TOP:
        return f"{name} comes from sparkhvd itself: from sparkhvd import {name}."
    return f"module {module!r} has no attribute {name!r}. {did_you_mean(name, known)}".rstrip()


def is_extra(module: str) -> bool:
    """Whether a module is of a package that an extra installs."""
    return module.partition(".")[0] in _EXTRAS


def not_installed(what: str, module: str) -> str:
    """What to say where ``what`` needs a module of an extra's package, which is not there."""
    package = module.partition(".")[0]
    return (
        f"{what} needs the package {package}, which is not installed here: pip install 'sparkhvd[{_EXTRAS[package]}]'."
    )


def unknown_argument(name: str, known: Iterable[str]) -> str:
    """What to say of a keyword that ``run`` does not take."""
    if name in _ELASTIC_OF_RUN:
        return f"run() takes no {name}. {ELASTIC}"
    meant = _OF_RUN.get(name, name)
    return f"run() takes no argument {name!r}. {did_you_mean(meant, known, show=str)}".rstrip()
