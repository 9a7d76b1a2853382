"""Messages for Horovod's names that sparkhvd lacks or has elsewhere, and for packages that are not installed."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from sparkhvd._util.suggestions import did_you_mean

ELASTIC = (
    "Elastic training is not available under this name. sparkhvd.run_elastic() and sparkhvdrun start elastic jobs: see "
    "docs/how-to/elastic.md. An interrupted fit resumes from its checkpoints, even with another number of ranks: see "
    "docs/how-to/resume.md."
)
SPARK = (
    "sparkhvd has no module sparkhvd.spark. Import the names of horovod.spark from sparkhvd itself, as in `from "
    "sparkhvd import run, TorchEstimator, KerasEstimator, LightningEstimator, Store, SparkBackend`, Store classes from "
    "sparkhvd.store, and collectives from sparkhvd.torch, sparkhvd.tensorflow and sparkhvd.keras; see "
    "docs/horovod/index.md."
)
# The extra that installs each package.
_EXTRAS = MappingProxyType(
    {
        "keras": "keras",
        "lightning": "lightning",
        "optuna": "tune",
        "pytorch_lightning": "lightning",
        "pyspark": "spark",
        "ray": "ray",
        "tensorflow": "keras",
        "torch": "torch",
    }
)
# Arguments of horovod.run, with their names in sparkhvd.run.
_RENAMED_RUN_ARGUMENTS = MappingProxyType(
    {"np": "num_proc", "mpi_args": "extra_mpi_args", "network_interface": "nics", "network_interfaces": "nics"}
)
# Names of horovod.spark.keras and similar modules that sparkhvd itself exports.
_TOP_LEVEL_NAMES = frozenset(
    f"{framework}{suffix}" for framework in ("Torch", "Keras", "Lightning") for suffix in ("Estimator", "Model")
)
# Arguments of Horovod's elastic jobs, with the arguments of sparkhvd.run_elastic in their place.
_ELASTIC_RUN_ARGUMENTS = MappingProxyType(
    {
        "min_np": "min_num_proc",
        "max_np": "max_num_proc",
        "min_num_proc": "min_num_proc",
        "max_num_proc": "max_num_proc",
        "slots": "discovery",
        "reset_limit": "reset_limit",
    }
)


def missing(module: str, name: str, known: Iterable[str]) -> str:
    """Return the message for an attribute that a module lacks, with the closest names in ``known``."""
    if name in {"elastic", "run_elastic"}:
        return ELASTIC
    if name in _TOP_LEVEL_NAMES:
        return f"{name} comes from sparkhvd itself: from sparkhvd import {name}."
    return f"module {module!r} has no attribute {name!r}. {did_you_mean(name, known)}".rstrip()


def is_extra(module: str) -> bool:
    """Return whether a module belongs to a package that an extra installs."""
    return module.partition(".")[0] in _EXTRAS


def not_installed(feature: str, module: str) -> str:
    """Return the message for a missing module that ``feature`` needs and an extra installs."""
    package = module.partition(".")[0]
    command = f"pip install 'sparkhvd[{_EXTRAS[package]}]'"
    return f"{feature} needs the package {package}, which is not installed here: {command}."


def unknown_argument(name: str, known: Iterable[str]) -> str:
    """Return the message for a keyword that ``run`` does not accept."""
    if name in _ELASTIC_RUN_ARGUMENTS:
        return (
            f"run() takes no argument {name!r}. Pass {_ELASTIC_RUN_ARGUMENTS[name]} to sparkhvd.run_elastic(): see "
            "docs/how-to/elastic.md."
        )
    current_name = _RENAMED_RUN_ARGUMENTS.get(name, name)
    return f"run() takes no argument {name!r}. {did_you_mean(current_name, known, show=str)}".rstrip()
