"""The settings of a process, read from the environment in this module only.

All other modules receive the frozen ``Config``. Each field declares its default, its reader, its meaning, and the
``HOROVOD_*`` variables that are read as a fallback. A field's own variable is ``SPARKHVD_`` plus its name in capitals.
A test compares the documentation's page of settings with these declarations.
"""

from __future__ import annotations

import getpass
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, cast

from sparkhvd.errors import ConfigError

T = TypeVar("T")
Reader = Callable[[str], T]  # converts text to a value; raises ValueError with the rule, as "must be ..."

_log = logging.getLogger(__name__)
_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
_ON, _OFF = frozenset({"1", "true", "on", "yes"}), frozenset({"0", "false", "off", "no"})


def non_negative_number(text: str) -> float:
    """Read a number that is not negative."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError("must be a number") from None
    if math.isnan(value):
        raise ValueError("must be a number")
    if value < 0:
        raise ValueError("must be at least 0")
    return value


def positive_number(text: str) -> float:
    """Read a finite number above 0."""
    value = non_negative_number(text)
    if value == 0:
        raise ValueError("must be above 0")
    if math.isinf(value):
        raise ValueError("must be finite")
    return value


def non_negative_integer(text: str) -> int:
    """Read an integer that is not negative."""
    value = non_negative_number(text)
    if not value.is_integer():
        raise ValueError("must be a whole number")
    return int(value)


def positive_integer(text: str) -> int:
    """Read an integer of at least 1."""
    value = non_negative_integer(text)
    if value == 0:
        raise ValueError("must be at least 1")
    return value


def switch(text: str) -> bool:
    """Read on or off; a number is on unless it is 0."""
    word = text.strip().lower()
    if word in _ON or word in _OFF:
        return word in _ON
    try:
        return float(word) != 0
    except ValueError:
        raise ValueError("must be 1 or 0") from None


def inverted_switch(text: str) -> bool:
    """Read a switch that turns off what the setting turns on."""
    return not switch(text)


def log_level(text: str) -> int:
    """Read a level of Python's logging, by name or number."""
    word = text.strip().lower()
    if word in _LEVELS:
        return _LEVELS[word]
    if word.isdecimal():
        return int(word)
    raise ValueError(f"must be one of {', '.join(_LEVELS)}, or the number of a level of Python's logging")


def path(text: str) -> str:
    """Read a path, or other text, unchanged."""
    return text


def core_list(text: str) -> tuple[int, ...]:
    """Read a comma-separated list of processor cores."""
    try:
        return tuple(non_negative_integer(part) for part in text.split(","))
    except ValueError:
        raise ValueError("must be a list of core numbers such as 0,1,2") from None


def timeline_file(text: str) -> str:
    """Read a path; DYNAMIC, as in Horovod, means none, since ``start_timeline()`` can always start a recording."""
    return "" if text == "DYNAMIC" else text


def gpu_operations(text: str) -> str:
    """Read the backend that moves CUDA tensors between the ranks."""
    word = text.strip().lower()
    if word in {"automatic", "nccl", "staged"}:
        return word
    raise ValueError("must be one of automatic, nccl, staged")


def horovod_gpu_operations(text: str) -> str:
    """Read the same from Horovod's variable, whose other values (``MPI``, ``DDL``) copy tensors to the host."""
    return "nccl" if text.strip().lower() == "nccl" else "staged"


@dataclass(frozen=True)
class Declaration:
    """The declaration of a setting, except for its default.

    Attributes:
        meaning: its description for the documentation.
        readers: the reader of each fallback variable, by name; the first variable that is set wins.
        own_reader: the reader of the setting's own variable.
    """

    meaning: str
    own_reader: Reader[Any]
    readers: Mapping[str, Reader[Any]]


def setting(
    default: T, reader: Reader[T], meaning: str, *horovod: str, differing: Mapping[str, Reader[T]] | None = None
) -> T:
    """Declare a field of ``Config``.

    Args:
        default: the value if no variable is set.
        reader: converts a variable's text to the value.
        meaning: its description for the documentation.
        horovod: Horovod's variables for the same setting, read in this order if the own variable is not set.
        differing: Horovod's variables for the same setting that need another reader, each with its reader.
    """
    readers = dict.fromkeys(horovod, reader) | dict(differing or {})
    return field(default=default, metadata={"setting": Declaration(meaning, reader, readers)})


@dataclass(frozen=True)
class Config:
    """Settings of the collective core and of the launchers; the declaration of each field describes it."""

    collective_timeout: float = setting(
        1800.0,
        non_negative_number,
        "Seconds that a rank waits in a collective for the other ranks before it raises an error. It bounds the wait "
        "for a slow or hanging rank; the loss of a rank is detected at once.",
    )
    host_timeout: float | None = setting(
        None,
        positive_number,
        "Seconds without a response from a host, for example after a loss of power or network, after which the other "
        "ranks consider its ranks lost. On an idle connection, detection takes at least 3 seconds. The default is 30, "
        "and 2 in elastic jobs.",
    )
    start_timeout: float = setting(
        600.0,
        non_negative_number,
        "Seconds within which all ranks must start.",
        "HOROVOD_SPARK_START_TIMEOUT",
        "HOROVOD_START_TIMEOUT",
    )
    result_timeout: float = setting(
        300.0,
        non_negative_number,
        "Seconds that a rank may take, after its function returns, to serialize the result and to leave the job.",
    )
    warm_seconds: float = setting(
        0.0,
        non_negative_number,
        "Seconds for which each executor keeps an idle process that has imported the frameworks, so that ranks of the "
        "next job start at once; 0 keeps none. The process also ends with the executor or the driver.",
    )
    fusion_threshold: int | None = setting(
        None,
        non_negative_integer,
        "Largest size in bytes to which ready allreduces are fused; 0 disables fusion. The default is 1048576 if all "
        "ranks share memory, and 67108864 otherwise. Must be equal on all ranks. Autotuning does not change a value "
        "that you set.",
        "HOROVOD_FUSION_THRESHOLD",
    )
    cache_capacity: int = setting(
        1024,
        non_negative_integer,
        "Number of tensors in the response cache, which shortens negotiation; 0 disables the cache. Must be equal on "
        "all ranks.",
        "HOROVOD_CACHE_CAPACITY",
    )
    shared_memory: bool = setting(True, switch, "Whether ranks on the same host exchange data through shared memory.")
    hierarchical_allreduce: bool | None = setting(
        None,
        switch,
        "Whether an allreduce across hosts first reduces in the shared memory of each host, so that each host sends "
        "as few bytes as possible. Must be equal on all ranks. The default is 1. Autotuning does not change a value "
        "that you set.",
        "HOROVOD_HIERARCHICAL_ALLREDUCE",
    )
    hierarchical_allgather: bool = setting(
        True,
        switch,
        "Whether an allgather across hosts first gathers in the shared memory of each host. Must be equal on all "
        "ranks.",
        "HOROVOD_HIERARCHICAL_ALLGATHER",
    )
    link_gbits: float = setting(
        25.0,
        positive_number,
        "Expected bandwidth between hosts in Gbit/s. This estimate and `SPARKHVD_LINK_LATENCY_US` determine the "
        "choice of algorithms between hosts; they limit nothing. Must be equal on all ranks.",
    )
    link_latency_us: float = setting(
        30.0,
        positive_number,
        "Expected latency of a small message between hosts, in microseconds. Must be equal on all ranks.",
    )
    autotune: bool = setting(
        False,
        switch,
        "Whether the job searches for the fastest fusion threshold and allreduce algorithm while it runs.",
        "HOROVOD_AUTOTUNE",
    )
    autotune_log: str = setting(
        "",
        path,
        "CSV file on the host of rank 0 to which autotuning writes its samples and the final choice.",
        "HOROVOD_AUTOTUNE_LOG",
    )
    autotune_warmup_samples: int = setting(
        3,
        non_negative_integer,
        "Number of initial samples that autotuning discards.",
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
    )
    autotune_steps_per_sample: int = setting(
        10,
        positive_integer,
        "Number of steps per sample of autotuning; the sample is the median of their speeds.",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
    )
    autotune_max_samples: int = setting(
        70,
        non_negative_integer,
        "Number of samples after which autotuning ends and keeps the best settings.",
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
    )
    encrypt: bool = setting(
        False,
        switch,
        "Whether the job encrypts its traffic between hosts: between ranks, with the rendezvous, and with the driver. "
        "Needs OpenSSL on every host.",
    )
    gpu_operations: str = setting(
        "automatic",
        gpu_operations,
        "How CUDA tensors move between ranks: `staged` copies them through pinned CPU memory, `nccl` moves them from "
        "GPU to GPU in the order of CUDA streams. `automatic` stages them and logs one warning that names both "
        "values. Must be equal on all ranks.",
        differing={"HOROVOD_GPU_OPERATIONS": horovod_gpu_operations},
    )
    network_interfaces: str = setting(
        "",
        path,
        "Comma-separated names of the network interfaces that connect ranks across hosts. If empty, each pair of ranks "
        "uses the first interface that connects them.",
        "HOROVOD_GLOO_IFACE",
    )
    thread_affinity: tuple[int, ...] = setting(
        (),
        core_list,
        "Comma-separated processor cores, one per local rank. The engine's thread of local rank 0 is pinned to the "
        "first core, that of local rank 1 to the second, and so on. If empty, no thread is pinned.",
        "HOROVOD_THREAD_AFFINITY",
    )
    stall_check: bool = setting(
        True,
        switch,
        "Whether a rank that waits too long in a collective identifies the stragglers and logs a stall report.",
        differing={"HOROVOD_STALL_CHECK_DISABLE": inverted_switch},
    )
    stall_check_seconds: float = setting(
        60.0,
        non_negative_number,
        "Seconds that a rank waits in a collective before its first stall report, at most a quarter of the time after "
        "which the job would end. Another report follows each time that the wait has doubled.",
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
    )
    stall_shutdown_seconds: float = setting(
        0.0,
        non_negative_number,
        "Seconds that a rank waits in a collective before the job ends with an error on all ranks; 0 disables this "
        "limit.",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    )
    timeline: str = setting(
        "",
        timeline_file,
        "File for a timeline, in Chrome's trace format, that starts in `init()`.",
        "HOROVOD_TIMELINE",
    )
    timeline_mark_cycles: bool = setting(
        False,
        switch,
        "Whether the timeline of `SPARKHVD_TIMELINE` shows every negotiation cycle.",
        "HOROVOD_TIMELINE_MARK_CYCLES",
    )
    log_level: int | None = setting(
        None,
        log_level,
        "Level of the `sparkhvd` logger on every rank: trace, debug, info, warning, error, fatal, or a number.",
        "HOROVOD_LOG_LEVEL",
    )


_DEFAULTS = Config()

# Each mpirun sets one of these to the number of processes: Open MPI, MPICH and Intel MPI, MVAPICH.
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")

# Horovod's variables without a counterpart here: accepted, with one notice that gives the reason.
WITHOUT_EFFECT: Mapping[str, str] = {
    "HOROVOD_CYCLE_TIME": "a collective starts as soon as all ranks have submitted it, without waiting for a cycle",
    "HOROVOD_TORUS_ALLREDUCE": "there is no torus allreduce",
    "HOROVOD_MPI_THREADS_DISABLE": "the collectives do not run over MPI",
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE": "the collectives do not run over MPI",
    "HOROVOD_CONTROLLER": "there is one controller",
    "HOROVOD_CPU_OPERATIONS": "there is one implementation of the collectives",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "SPARKHVD_COLLECTIVE_TIMEOUT bounds the wait for a slow or hanging rank, and the "
    "loss of a rank is detected at once",
    "HOROVOD_CCL_CACHE": "oneCCL is not used",
    "HOROVOD_NUM_NCCL_STREAMS": "NCCL gets one stream per GPU",
    "HOROVOD_BATCH_D2D_MEMCOPIES": "CUDA tensors are not fused on the GPU",
    "HOROVOD_DISABLE_NVTX_RANGES": "there are no NVTX ranges",
    "HOROVOD_ENABLE_ASYNC_COMPLETION": "with NCCL, results are always ordered by the CUDA stream",
    "HOROVOD_ENABLE_XLA_OPS": "there are no XLA operations",
    "HOROVOD_DYNAMIC_PROCESS_SETS": "process sets can always be added and removed",
    "HOROVOD_DISABLE_GROUP_FUSION": "a group always runs as a whole",
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "autotuning compares medians without a model of the noise",
    "HOROVOD_ELASTIC": "run_elastic and the flags of sparkhvdrun decide whether a job is elastic",
    "HOROVOD_ELASTIC_TIMEOUT": "run_elastic takes elastic_timeout, and sparkhvdrun takes --elastic-timeout",
    "HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX": "a rank uses the GPUs that Spark assigned to its task",
    "DATABRICKS_FILE_AVAILABILITY_WAIT_TIMEOUT_SECS": "the manifest of a dataset is written last and lists its files",
    "DATABRICKS_FILE_AVAILABILITY_CHECK_INTERVAL_SECS": "the manifest of a dataset is written last and lists its files",
    "HOROVOD_LOG_HIDE_TIME": "Python's logging formats the log lines",
}


def variable_of(name: str) -> str:
    """Return the environment variable of the field ``name`` of ``Config``."""
    return f"SPARKHVD_{name.upper()}"


def declarations() -> dict[str, Declaration]:
    """Return the declarations of all fields of ``Config``, by name."""
    return {item.name: cast("Declaration", item.metadata["setting"]) for item in fields(Config)}


def from_environment(environment: Mapping[str, str] | None = None) -> Config:
    """Read the configuration from the environment.

    Args:
        environment: read instead of the process environment if set.

    Raises:
        ConfigError: a variable has an invalid value; the message contains its name and the value.
    """
    env = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    for name, readers in _readers().items():
        if (variable := _first_set(readers, env)) is not None:
            values[name] = _read(variable, env[variable], readers[variable])
    return Config(**values)


def setting_variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of settings, Horovod's among them, that the environment sets."""
    env = os.environ if environment is None else environment
    return {name: env[name] for readers in _readers().values() for name in readers if env.get(name, "") != ""}


def with_changed_variables(
    config: Config, before: Mapping[str, str], environment: Mapping[str, str] | None = None
) -> Config:
    """Return the configuration of a launched job with the settings that its program has changed in the environment.

    Args:
        config: the launcher's configuration, which holds for all settings whose variables are unchanged.
        before: the earlier result of ``setting_variables()``.
        environment: read instead of the process environment if set.

    Raises:
        ConfigError: a changed variable has an invalid value, or the program has changed whether the job is encrypted.
    """
    env = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    for name, readers in _readers().items():
        changed = [variable for variable in readers if env.get(variable, "") != before.get(variable, "")]
        if _first_set(changed, env) is None and _first_set(readers, before) not in changed:
            continue
        # Variables that the program has set take precedence over inherited ones.
        variable = _first_set([*changed, *readers], env)
        values[name] = (
            getattr(_DEFAULTS, name) if variable is None else _read(variable, env[variable], readers[variable])
        )
    result = replace(config, **values)
    if result.encrypt != config.encrypt:
        raise ConfigError(
            f"{variable_of('encrypt')} has changed since the job was launched, but the servers of the job "
            f"already run {'with' if config.encrypt else 'without'} encryption. Set it where you launch the job."
        )
    return result


def _readers() -> dict[str, dict[str, Reader[Any]]]:
    """Return the readers of each setting by variable, in the order of precedence."""
    return {
        name: {variable_of(name): declared.own_reader, **declared.readers} for name, declared in declarations().items()
    }


def _first_set(variables: Iterable[str], environment: Mapping[str, str]) -> str | None:
    return next((variable for variable in variables if environment.get(variable, "") != ""), None)


def java_home(environment: Mapping[str, str] | None = None) -> str | None:
    """Return Java's home folder for Spark; None if no variable sets it."""
    env = os.environ if environment is None else environment
    return env.get("JAVA_HOME") or None


def batch_variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables in which Slurm and LSF describe the job that this process belongs to."""
    env = os.environ if environment is None else environment
    return {name: value for name, value in env.items() if name.startswith(("SLURM_", "LSB_"))}


def warn_ignored_variables(environment: Mapping[str, str] | None = None) -> None:
    """Log one line that lists Horovod's variables that are set but have no effect."""
    env = os.environ if environment is None else environment
    reasons = [f"{name} ({why})" for name, why in WITHOUT_EFFECT.items() if env.get(name, "") != ""]
    if reasons:
        _log.warning("These variables are set but have no effect here: %s.", "; ".join(reasons))


def mpirun_size(environment: Mapping[str, str] | None = None) -> int:
    """Return the number of processes that mpirun started, including this one; 1 without mpirun."""
    env = os.environ if environment is None else environment
    return max([1, *(int(env[name]) for name in _MPI_SIZES if env.get(name, "").isdecimal())])


def warn_if_horovod_rank(environment: Mapping[str, str] | None = None) -> None:
    """Log one line if Horovod's variables describe this process as one of several."""
    env = os.environ if environment is None else environment
    size = env.get("HOROVOD_SIZE", "")
    if size.isdecimal() and int(size) > 1:
        _log.warning(
            "HOROVOD_SIZE=%s is set, but no launcher of sparkhvd started this process, so it runs as a single rank. "
            "Start the program with sparkhvdrun -np %s, sparkhvd.run or mpirun.",
            *(size, size),
        )


def _read(variable: str, text: str, reader: Reader[Any]) -> Any:
    try:
        return reader(text)
    except ValueError as error:
        raise ConfigError(f"{variable} {error}, got {text!r}.") from None


def changed_environment(changes: Mapping[str, str | None], defaults: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment with ``changes`` applied, for a child process.

    Args:
        changes: new values; None removes a variable.
        defaults: values of variables that neither the environment nor ``changes`` sets.
    """
    merged = {**(defaults or {}), **os.environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def export(variables: Mapping[str, str | None]) -> None:
    """Set variables of this process's environment, for user code to read; None removes one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def take_variables(names: Sequence[str]) -> dict[str, str]:
    """Read variables of this process's environment and remove them, so that child processes do not get them."""
    return {name: value for name in names if (value := os.environ.pop(name, None)) is not None}


def yarn_container() -> str:
    """Return the id of this process's YARN container; empty outside YARN."""
    return os.environ.get("CONTAINER_ID", "")


def restrict_nccl_to(interfaces: str) -> None:
    """Restrict NCCL's own connections to network interfaces, unless the environment already names some for NCCL.

    Args:
        interfaces: comma-separated names; empty leaves the choice to NCCL.
    """
    names = ",".join(name.strip() for name in interfaces.split(",") if name.strip())
    if names and not os.environ.get(NCCL_INTERFACES):
        export({NCCL_INTERFACES: f"={names}"})  # without the equals sign, eth1 would also match eth10


def visible_devices() -> str | None:
    """Return the GPUs to which CUDA_VISIBLE_DEVICES restricts this process; None if it is unrestricted."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


# NCCL reads it when it creates its first communicator.
NCCL_INTERFACES = "NCCL_SOCKET_IFNAME"
# The path of the launch context of the rank to which this program belongs, see ``comm.connect.inherited_world``.
INHERITED_CONTEXT = "SPARKHVD_LAUNCH_CONTEXT"


def inherited_context_path() -> str:
    """Return the path of the launch context of this program's rank; empty outside such a program."""
    return os.environ.get(INHERITED_CONTEXT, "")


# Variables that describe this login or machine and not the user's intent.
_OF_THIS_MACHINE = (
    *("CUDA_VISIBLE_DEVICES", "DISPLAY", "HOME", "HOSTNAME", "LOGNAME", "LS_COLORS", "MAIL", "OLDPWD", "PWD"),
    *("SHELL", "SHLVL", "TERM", "TMPDIR", "USER", "_"),
)
_OF_THIS_LOGIN = ("BASH_FUNC", "DBUS_", "SSH_", "XDG_")


def environment_for_hosts() -> dict[str, str]:
    """Return the variables of this process that ranks on other machines get too, as with Horovod's launcher."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_THIS_MACHINE and not name.startswith(_OF_THIS_LOGIN)
    }


def ssh_client_address() -> str:
    """Return the address from which ssh started this process, as this host sees it; empty without ssh."""
    return os.environ.get("SSH_CONNECTION", "").partition(" ")[0]


# The GPUs that Spark assigned to this rank's task, separated by commas.
OWN_DEVICES = "SPARKHVD_DEVICES"


def own_devices() -> list[str]:
    """Return the GPUs of this rank, in Spark's order; empty if it has none."""
    return [name for name in os.environ.get(OWN_DEVICES, "").split(",") if name]


def local_folders() -> tuple[str, ...]:
    """Return folders for temporary data: Spark's local folders, then the system's folder of temporary files, if any."""
    local = tuple(folder for folder in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if folder)
    try:
        return (*local, tempfile.gettempdir())
    except FileNotFoundError:  # in a container with a read-only file system, or on a full disk
        return local


# A rank's folder that is removed when its process ends, however it ends.
SCRATCH = "SPARKHVD_SCRATCH"


def scratch_folder() -> str | None:
    """Return the folder for files that end with this process; None means the system's folder of temporary files."""
    return os.environ.get(SCRATCH)


_GIVEN_ROWS = "SPARKHVD_GIVEN_ROWS"


def given_rows_variable(paths: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the variable that points a rank to the rows of its task; empty without rows."""
    return ((_GIVEN_ROWS, json.dumps(dict(paths))),) if paths else ()


def given_rows() -> dict[str, str]:
    """Return the Arrow files with the rows of this rank's task, by split; empty without rows."""
    paths: dict[str, str] = json.loads(os.environ.get(_GIVEN_ROWS, "{}"))
    return paths


def runs_on_databricks() -> bool:
    """Return whether this process belongs to a Databricks cluster."""
    return bool(os.environ.get("DATABRICKS_RUNTIME_VERSION"))


def hadoop_token_file() -> str | None:
    """Return the path of the container's tokens from YARN; None outside YARN."""
    return os.environ.get("HADOOP_TOKEN_FILE_LOCATION")


def hadoop_user_name() -> str:
    """Return the user name of Hadoop clients without Kerberos."""
    return os.environ.get("HADOOP_USER_NAME") or getpass.getuser()
