"""The flags of ``sparkhvdrun``: those that Horovod's users type, under their names."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import sparkhvd
from sparkhvd._util.suggestions import did_you_mean


def _megabytes(text: str) -> str:
    return str(int(float(text) * 1024 * 1024))


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _same(text: str) -> str:
    return text


@dataclass(frozen=True)
class Tuning:
    """A flag that sets a variable of the ranks' environment.

    Attributes:
        flag: its name, without dashes.
        variable: Horovod's name for the setting.
        place: section and key in a configuration file.
        switch: whether it takes no value but has a ``--no-`` form.
        convert: makes the variable's text from the flag's.
        inverted: whether the variable turns off what the flag turns on.
    """

    flag: str
    variable: str
    place: tuple[str, str]
    switch: bool = False
    convert: Callable[[str], str] = _same
    inverted: bool = False

    @property
    def name(self) -> str:
        """The attribute of the parsed arguments."""
        return self.flag.replace("-", "_")

    def text(self, value: object) -> str:
        """What the variable is set to."""
        if self.switch:
            if not isinstance(value, int):
                raise ValueError("it is neither true nor false")
            return str(int(bool(value) != self.inverted))
        return self.convert(str(value))


TUNINGS = (
    Tuning("fusion-threshold-mb", "HOROVOD_FUSION_THRESHOLD", ("params", "fusion_threshold_mb"), convert=_megabytes),
    Tuning("cycle-time-ms", "HOROVOD_CYCLE_TIME", ("params", "cycle_time_ms")),
    Tuning("cache-capacity", "HOROVOD_CACHE_CAPACITY", ("params", "cache_capacity")),
    Tuning("hierarchical-allreduce", "HOROVOD_HIERARCHICAL_ALLREDUCE", ("params", "hierarchical_allreduce"), True),
    Tuning("hierarchical-allgather", "HOROVOD_HIERARCHICAL_ALLGATHER", ("params", "hierarchical_allgather"), True),
    Tuning("torus-allreduce", "HOROVOD_TORUS_ALLREDUCE", ("params", "torus_allreduce"), True),
    Tuning("autotune", "HOROVOD_AUTOTUNE", ("autotune", "enabled"), True),
    Tuning("autotune-log-file", "HOROVOD_AUTOTUNE_LOG", ("autotune", "log_file")),
    Tuning("autotune-warmup-samples", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", ("autotune", "warmup_samples")),
    Tuning("autotune-steps-per-sample", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", ("autotune", "steps_per_sample")),
    Tuning(
        "autotune-bayes-opt-max-samples",
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        ("autotune", "bayes_opt_max_samples"),
    ),
    Tuning(
        "autotune-gaussian-process-noise",
        "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        ("autotune", "gaussian_process_noise"),
    ),
    Tuning("timeline-filename", "HOROVOD_TIMELINE", ("timeline", "filename")),
    Tuning("timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES", ("timeline", "mark_cycles"), True),
    Tuning("stall-check", "HOROVOD_STALL_CHECK_DISABLE", ("stall_check", "enabled"), True, inverted=True),
    Tuning(
        "stall-check-warning-time-seconds",
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        ("stall_check", "warning_time_seconds"),
    ),
    Tuning(
        "stall-check-shutdown-time-seconds",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        ("stall_check", "shutdown_time_seconds"),
    ),
    Tuning("mpi-threads-disable", "HOROVOD_MPI_THREADS_DISABLE", ("library_options", "mpi_threads_disable"), True),
    Tuning("num-nccl-streams", "HOROVOD_NUM_NCCL_STREAMS", ("library_options", "num_nccl_streams")),
    Tuning("thread-affinity", "HOROVOD_THREAD_AFFINITY", ("library_options", "thread_affinity")),
    Tuning("gloo-timeout-seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS", ("library_options", "gloo_timeout_seconds")),
    Tuning("log-level", "HOROVOD_LOG_LEVEL", ("logging", "level")),
    Tuning("log-hide-timestamp", "HOROVOD_LOG_HIDE_TIME", ("logging", "hide_timestamp"), True),
)

# Where a configuration file has what --mpi-args gives.
MPI_ARGS = ("library_options", "mpi_args")
# Flags of Horovod that are accepted, with the line that says why they change nothing.
WITHOUT_EFFECT: Mapping[str, str] = {
    "--disable-cache": "nothing about the hosts is kept between runs",
    "--tcp": "InfiniBand verbs are not used",
}
# Flags of Horovod for what there is no way to do here.
UNSUPPORTED: Mapping[str, str] = {
    "--jsrun": "LSF's jsrun is not supported; use -H host1:2,host2:2, or --mpi",
    "--min-np": "an elastic job cannot be started from the command line",
    "--min-num-proc": "an elastic job cannot be started from the command line",
    "--max-np": "an elastic job cannot be started from the command line",
    "--max-num-proc": "an elastic job cannot be started from the command line",
    "--slots-per-host": "an elastic job cannot be started from the command line",
    "--elastic-timeout": "an elastic job cannot be started from the command line",
    "--reset-limit": "an elastic job cannot be started from the command line",
    "--blacklist-cooldown-range": "an elastic job cannot be started from the command line",
    "--host-discovery-script": "an elastic job cannot be started from the command line",
}


# Flags that say how to reach other machines, by their attributes.
FOR_HOSTS: Mapping[str, str] = {
    "ssh_port": "--ssh-port",
    "ssh_identity_file": "--ssh-identity-file",
    "nics": "--network-interfaces",
}


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one line, without all that could be on it."""

    def _check_value(self, action: argparse.Action, value: object) -> None:
        choices = [str(choice) for choice in action.choices or ()]
        if str(value) not in choices and (meant := did_you_mean(str(value), choices)):
            raise argparse.ArgumentError(action, f"there is no {value!r}. {meant}")
        super()._check_value(action, value)

    def parse(self, words: Sequence[str] | None) -> argparse.Namespace:
        """The flags of a command line; a misspelt one ends the program with the nearest that there is."""
        found, unknown = self.parse_known_args(words)
        for word in unknown:
            if not word.startswith("-"):
                self.error(f"{word} is more than was expected.")
            meant = did_you_mean(word.partition("=")[0], self._flags(), show=str)
            self.error(f"there is no flag {word}. {meant}".rstrip())
        return found

    def _flags(self) -> list[str]:
        """Those of its commands, too."""
        flags = [flag for action in self._actions for flag in action.option_strings]
        for action in self._actions:
            if isinstance(action.choices, Mapping):  # the parsers of commands
                flags += [flag for one in action.choices.values() for flag in one._flags()]  # noqa: SLF001
        return flags

    def error(self, message: str) -> NoReturn:
        sentence = message if message.endswith("?") else f"{message.removesuffix('.')}."
        self.exit(2, f"{self.prog}: {sentence} See {self.prog} --help.\n")


class _Refuse(argparse.Action):
    """Ends the program with the reason why a flag cannot be followed."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002 - argparse calls it so
        values: object,  # noqa: ARG002
        option_string: str | None = None,
    ) -> None:
        parser.error(f"{option_string}: {UNSUPPORTED[str(option_string)]}.")


def add_interfaces(parser: argparse.ArgumentParser) -> None:
    """The flag for ``nics``."""
    parser.add_argument(
        *("--network-interfaces", "--network-interface"),
        dest="nics",
        action="extend",
        type=_names,
        default=[],
        help="interfaces to use, as a,b",
    )


def parser() -> Parser:
    """The parser of the command line."""
    made = Parser(
        prog="sparkhvdrun",
        description="Run a program once per rank, on this machine or on others through ssh; hvd.init() connects them.",
        allow_abbrev=False,
    )
    made.add_argument("-v", "--version", action="version", version=sparkhvd.__version__)
    made.add_argument("-np", "--num-proc", type=int, help="number of ranks; all slots when left out")
    made.add_argument("-cb", "--check-build", action="store_true", help="show what is available, and end")
    made.add_argument("--start-timeout", type=float, help="seconds within which all ranks must have started")
    add_interfaces(made)
    made.add_argument("--output-filename", help="folder that keeps each rank's output: rank.<number>/stdout, stderr")
    made.add_argument("-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true")
    made.add_argument("--verbose", action="store_true", help="show debug lines, and the command line of mpirun")
    made.add_argument("--config-file", help="YAML file with settings; flags win")
    made.add_argument("-p", "--ssh-port", type=int)
    made.add_argument("-i", "--ssh-identity-file")
    hosts = made.add_mutually_exclusive_group()
    hosts.add_argument("-H", "--hosts", help="host1:2,host2:2; this machine when left out")
    hosts.add_argument("-hostfile", "--hostfile", help="file with lines like 'host1 slots=2'")
    controller = made.add_mutually_exclusive_group()
    controller.add_argument("--gloo", action="store_true", help="the launcher of sparkhvd itself, as without it")
    controller.add_argument("--mpi", action="store_true", help="let mpirun start the ranks; needs mpi4py")
    made.add_argument("--mpi-args", default="", help="more arguments of mpirun, in one string")
    made.add_argument("--binding-args", default="", help="process binding arguments of mpirun, in one string")
    _add_tunings(made)
    for flag in WITHOUT_EFFECT:
        made.add_argument(flag, dest="without_effect", action="append_const", const=flag, help=argparse.SUPPRESS)
    for flag in UNSUPPORTED:
        made.add_argument(flag, action=_Refuse, nargs="*", help=argparse.SUPPRESS)
    made.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    return made


def _add_tunings(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("settings of the ranks")
    for one in TUNINGS:
        if one.switch:
            group.add_argument(f"--{one.flag}", dest=one.name, action="store_true", default=None)
            group.add_argument(f"--no-{one.flag}", dest=one.name, action="store_false", help=argparse.SUPPRESS)
        else:
            group.add_argument(f"--{one.flag}", dest=one.name)
    # Horovod's other names of the last ones.
    group.add_argument("--log-without-timestamp", dest="log_hide_timestamp", action="store_true", default=None)
    group.add_argument("--log-with-timestamp", dest="log_hide_timestamp", action="store_false")
