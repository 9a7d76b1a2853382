"""The flags of ``sparkhvdrun``, which have the same names as Horovod's."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import sparkhvd
from sparkhvd._util.suggestions import did_you_mean


def _megabytes(text: str) -> str:
    return str(int(float(text) * 1024 * 1024))


def _comma_separated(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _unchanged(text: str) -> str:
    return text


@dataclass(frozen=True)
class SettingFlag:
    """A flag that sets a variable of the ranks' environment.

    Attributes:
        name: its name, without leading dashes.
        variable: Horovod's name for the setting.
        config_key: section and key in a configuration file.
        switch: whether the flag takes no value and has a ``--no-`` form.
        convert: converts the flag's text to the variable's.
        inverted: whether the flag turns a feature on that the variable turns off.
    """

    name: str
    variable: str
    config_key: tuple[str, str]
    switch: bool = False
    convert: Callable[[str], str] = _unchanged
    inverted: bool = False

    @property
    def attribute(self) -> str:
        """Return the name of the attribute of the parsed arguments."""
        return self.name.replace("-", "_")

    def text(self, value: object) -> str:
        """Return the value of the variable.

        Raises:
            ValueError: the flag's value cannot be converted.
        """
        if self.switch:
            if not isinstance(value, int):
                raise ValueError("must be true or false")
            return str(int(bool(value) != self.inverted))
        return self.convert(str(value))


SETTING_FLAGS = (
    SettingFlag(
        "fusion-threshold-mb", "HOROVOD_FUSION_THRESHOLD", ("params", "fusion_threshold_mb"), convert=_megabytes
    ),
    SettingFlag("cycle-time-ms", "HOROVOD_CYCLE_TIME", ("params", "cycle_time_ms")),
    SettingFlag("cache-capacity", "HOROVOD_CACHE_CAPACITY", ("params", "cache_capacity")),
    SettingFlag("hierarchical-allreduce", "HOROVOD_HIERARCHICAL_ALLREDUCE", ("params", "hierarchical_allreduce"), True),
    SettingFlag("hierarchical-allgather", "HOROVOD_HIERARCHICAL_ALLGATHER", ("params", "hierarchical_allgather"), True),
    SettingFlag("torus-allreduce", "HOROVOD_TORUS_ALLREDUCE", ("params", "torus_allreduce"), True),
    SettingFlag("autotune", "HOROVOD_AUTOTUNE", ("autotune", "enabled"), True),
    SettingFlag("autotune-log-file", "HOROVOD_AUTOTUNE_LOG", ("autotune", "log_file")),
    SettingFlag("autotune-warmup-samples", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", ("autotune", "warmup_samples")),
    SettingFlag("autotune-steps-per-sample", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", ("autotune", "steps_per_sample")),
    SettingFlag(
        "autotune-bayes-opt-max-samples",
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        ("autotune", "bayes_opt_max_samples"),
    ),
    SettingFlag(
        "autotune-gaussian-process-noise",
        "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        ("autotune", "gaussian_process_noise"),
    ),
    SettingFlag("timeline-filename", "HOROVOD_TIMELINE", ("timeline", "filename")),
    SettingFlag("timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES", ("timeline", "mark_cycles"), True),
    SettingFlag("stall-check", "HOROVOD_STALL_CHECK_DISABLE", ("stall_check", "enabled"), True, inverted=True),
    SettingFlag(
        "stall-check-warning-time-seconds",
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        ("stall_check", "warning_time_seconds"),
    ),
    SettingFlag(
        "stall-check-shutdown-time-seconds",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        ("stall_check", "shutdown_time_seconds"),
    ),
    SettingFlag("mpi-threads-disable", "HOROVOD_MPI_THREADS_DISABLE", ("library_options", "mpi_threads_disable"), True),
    SettingFlag("num-nccl-streams", "HOROVOD_NUM_NCCL_STREAMS", ("library_options", "num_nccl_streams")),
    SettingFlag("thread-affinity", "HOROVOD_THREAD_AFFINITY", ("library_options", "thread_affinity")),
    SettingFlag("gloo-timeout-seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS", ("library_options", "gloo_timeout_seconds")),
    SettingFlag("log-level", "HOROVOD_LOG_LEVEL", ("logging", "level")),
    SettingFlag("log-hide-timestamp", "HOROVOD_LOG_HIDE_TIME", ("logging", "hide_timestamp"), True),
)

# The section and key of --mpi-args in a configuration file.
MPI_ARGS = ("library_options", "mpi_args")
# Flags of Horovod that are accepted without effect, with the reason.
WITHOUT_EFFECT: Mapping[str, str] = {
    "--disable-cache": "no state of the hosts is cached between runs",
    "--tcp": "InfiniBand verbs are not used",
}
# Flags of Horovod that are rejected, with the reason.
UNSUPPORTED: Mapping[str, str] = {
    "--jsrun": "LSF's jsrun is not supported; use -H host1:2,host2:2, or --mpi",
}


# Flags of elastic jobs, by the names of their attributes. Either of the first two makes a job elastic.
FOR_ELASTIC: Mapping[str, str] = {
    "min_num_proc": "--min-np",
    "host_discovery_script": "--host-discovery-script",
    "max_num_proc": "--max-np",
    "slots_per_host": "--slots-per-host",
    "elastic_timeout": "--elastic-timeout",
    "reset_limit": "--reset-limit",
    "cooldown_range": "--blacklist-cooldown-range",
    "store": "--store",
    "commit_interval": "--commit-interval",
    "max_restarts": "--max-restarts",
}
STARTS_ELASTIC = ("min_num_proc", "host_discovery_script")


# Flags that configure the access to other machines, by the names of their attributes.
FOR_HOSTS: Mapping[str, str] = {
    "ssh_port": "--ssh-port",
    "ssh_identity_file": "--ssh-identity-file",
    "nics": "--network-interfaces",
}


class Parser(argparse.ArgumentParser):
    """Reports errors of a command line in one line, without the usage."""

    def _check_value(self, action: argparse.Action, value: object) -> None:
        choices = [str(choice) for choice in action.choices or ()]
        if str(value) not in choices and (suggestion := did_you_mean(str(value), choices)):
            raise argparse.ArgumentError(action, f"unknown value {value!r}. {suggestion}")
        super()._check_value(action, value)

    def parse(self, words: Sequence[str] | None) -> argparse.Namespace:
        """Return the flags of a command line; for a misspelled one, exit with a suggestion."""
        flags, unknown = self.parse_known_args(words)
        for word in unknown:
            if not word.startswith("-"):
                self.error(f"unexpected argument {word}.")
            suggestion = did_you_mean(word.partition("=")[0], self._flags(), show=str)
            self.error(f"unknown flag {word}. {suggestion}".rstrip())
        return flags

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Match whole flags only: ``-m`` in ``python -m module`` must not match the beginning of a flag."""
        matches: list[Any] = super()._get_option_tuples(option_string)
        return [match for match in matches if option_string.startswith(match[1])]

    def _flags(self) -> list[str]:
        """Return all flags, including those of subcommands."""
        flags = [flag for action in self._actions for flag in action.option_strings]
        for action in self._actions:
            if isinstance(action.choices, Mapping):  # the parsers of commands
                flags += [flag for subparser in action.choices.values() for flag in subparser._flags()]  # noqa: SLF001
        return flags

    def error(self, message: str) -> NoReturn:
        sentence = message if message.endswith("?") else f"{message.removesuffix('.')}."
        self.exit(2, f"{self.prog}: {sentence} See {self.prog} --help.\n")


class _UnsupportedFlag(argparse.Action):
    """Exits with the reason why a flag is not supported."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002 - argparse's signature
        values: object,  # noqa: ARG002
        option_string: str | None = None,
    ) -> None:
        parser.error(f"{option_string}: {UNSUPPORTED[str(option_string)]}.")


def add_interfaces(parser: argparse.ArgumentParser) -> None:
    """Add the flag for ``nics``."""
    parser.add_argument(
        *("--network-interfaces", "--network-interface"),
        dest="nics",
        action="extend",
        type=_comma_separated,
        default=[],
        help="interfaces to use, as a,b",
    )


def parser() -> Parser:
    """Return the parser of the command line."""
    command_line = Parser(
        prog="sparkhvdrun",
        description="Run a program once per rank, on this machine or on others through ssh; hvd.init() connects them.",
        allow_abbrev=False,
    )
    command_line.add_argument("-v", "--version", action="version", version=sparkhvd.__version__)
    command_line.add_argument("-np", "--num-proc", type=int, help="number of ranks; default: all slots")
    command_line.add_argument("-cb", "--check-build", action="store_true", help="show the available features and exit")
    command_line.add_argument("--start-timeout", type=float, help="seconds within which all ranks must have started")
    add_interfaces(command_line)
    command_line.add_argument("--output-filename", help="folder for each rank's output: rank.<number>/stdout, stderr")
    command_line.add_argument("-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true")
    command_line.add_argument("--verbose", action="store_true", help="show debug lines, and the command line of mpirun")
    command_line.add_argument("--config-file", help="YAML file with settings; flags override it")
    command_line.add_argument("-p", "--ssh-port", type=int)
    command_line.add_argument("-i", "--ssh-identity-file")
    hosts = command_line.add_mutually_exclusive_group()
    hosts.add_argument("-H", "--hosts", help="host1:2,host2:2; default: this machine")
    hosts.add_argument("-hostfile", "--hostfile", help="file with lines like 'host1 slots=2'")
    controller = command_line.add_mutually_exclusive_group()
    controller.add_argument("--gloo", action="store_true", help="use sparkhvd's own launcher (the default)")
    controller.add_argument("--mpi", action="store_true", help="start the ranks with mpirun; needs mpi4py")
    command_line.add_argument("--mpi-args", default="", help="more arguments of mpirun, in one string")
    command_line.add_argument("--binding-args", default="", help="process binding arguments of mpirun, in one string")
    _add_elastic(command_line)
    _add_setting_flags(command_line)
    for flag in WITHOUT_EFFECT:
        command_line.add_argument(
            flag, dest="without_effect", action="append_const", const=flag, help=argparse.SUPPRESS
        )
    for flag in UNSUPPORTED:
        command_line.add_argument(flag, action=_UnsupportedFlag, nargs="*", help=argparse.SUPPRESS)
    command_line.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    return command_line


def _add_elastic(command_line: argparse.ArgumentParser) -> None:
    group = command_line.add_argument_group(
        "elastic jobs", "jobs whose ranks may come and go; --min-np or --host-discovery-script starts one"
    )
    group.add_argument("--min-np", "--min-num-proc", dest="min_num_proc", type=int)
    group.add_argument("--max-np", "--max-num-proc", dest="max_num_proc", type=int)
    group.add_argument("--slots-per-host", type=int, help="slots of hosts for which the script prints no number")
    group.add_argument("--elastic-timeout", type=float, help="seconds for enough ranks to be ready again; default: 600")
    group.add_argument("--reset-limit", type=int, help="largest number of changes of the ranks")
    group.add_argument(
        "--blacklist-cooldown-range",
        dest="cooldown_range",
        type=float,
        nargs=2,
        metavar=("SHORTEST", "LONGEST"),
        help="seconds without new ranks on a host after failures there; default: 1 60",
    )
    group.add_argument("--store", metavar="URL", help="where rank 0 publishes commits, in case all ranks are lost")
    group.add_argument("--commit-interval", type=float, help="seconds between published commits; default: 60")
    group.add_argument(
        "--max-restarts", type=int, help="number of new starts after all ranks were lost; default: 3 with --store, or 0"
    )
    group.add_argument(
        "--host-discovery-script", help="prints a line 'host' or 'host:slots' per host; run every second"
    )


def _add_setting_flags(command_line: argparse.ArgumentParser) -> None:
    group = command_line.add_argument_group("settings of the ranks")
    for flag in SETTING_FLAGS:
        if flag.switch:
            group.add_argument(f"--{flag.name}", dest=flag.attribute, action="store_true", default=None)
            group.add_argument(f"--no-{flag.name}", dest=flag.attribute, action="store_false", help=argparse.SUPPRESS)
        else:
            group.add_argument(f"--{flag.name}", dest=flag.attribute)
    # Horovod's other names for --log-hide-timestamp.
    group.add_argument("--log-without-timestamp", dest="log_hide_timestamp", action="store_true", default=None)
    group.add_argument("--log-with-timestamp", dest="log_hide_timestamp", action="store_false")
