"""``sparkhvd doctor``: the preflight as a command."""

from __future__ import annotations

import argparse
import functools
import logging
import os
import shutil
import socket
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import urlsplit

import sparkhvd
from sparkhvd._util.background import in_background
from sparkhvd.cli.flags import Parser, add_interfaces
from sparkhvd.compat.spark import java_versions
from sparkhvd.config import java_home
from sparkhvd.driver.arguments import check_counts, check_seconds
from sparkhvd.driver.preflight.preflight import preflight
from sparkhvd.errors import ConfigError, LaunchError, SparkHvdError
from sparkhvd.store import Store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# Lines that Spark's JVM writes at every start, which do not explain a failure.
_STARTUP_LINES = (
    "WARNING: Using incubator modules",
    "Using Spark's default log4j",
    "Setting default log level",
    "To adjust logging level",
    "WARN NativeCodeLoader:",
    "WARN Utils: Your hostname",
    "WARN Utils: Set SPARK_LOCAL_IP",
)

_NAME_SECONDS = 10.0


class SessionTimeoutError(LaunchError):
    """Spark did not create a session in time and is still trying."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code, which is 0 if nothing prevents a job from running."""
    words = sys.argv[1:] if arguments is None else arguments
    if not words:
        parser().print_help(sys.stderr)
        return 2
    flags = parser().parse(words)
    logging.basicConfig(stream=sys.stderr, format="sparkhvd: %(message)s")
    try:
        check_counts(flags.num_proc, flags.gpus_per_task, flags.cpus_per_task)
        check_seconds("timeout", flags.timeout)
        session, is_own = _session(flags)
        try:
            report = preflight(
                session,
                flags.num_proc,
                store=Store.create(flags.store) if flags.store is not None else None,
                gpus_per_task=flags.gpus_per_task,
                cpus_per_task=flags.cpus_per_task,
                nics=flags.nics,
                timeout=flags.timeout,
            )
        finally:
            if is_own:
                session.stop()
    except SparkHvdError as error:
        sys.stderr.write(f"sparkhvd: {error}\n")
        if isinstance(error, SessionTimeoutError):
            sys.stderr.flush()
            os._exit(1)  # pyspark's exit handlers would wait for the same server again
        return 1
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in {"pyspark", "py4j"}:
            raise
        sys.stderr.write(f"sparkhvd: Spark failed: {_in_one_line(error)}\n")
        return 1
    return 0 if report.ok else 1


def parser() -> Parser:
    """Return the parser of the command line."""
    about = "The command line of sparkhvd. `sparkhvd COMMAND --help` shows the flags of a command."
    command_line = Parser(prog="sparkhvd", description=about, allow_abbrev=False)
    command_line.add_argument("-v", "--version", action="version", version=sparkhvd.__version__)
    commands = command_line.add_subparsers(required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="check a cluster for problems that would prevent or slow down a job")
    where = doctor.add_mutually_exclusive_group()
    where.add_argument("--master", help="Spark's master URL; default: the master of Spark's own configuration")
    where.add_argument("--remote", help="a Spark Connect server, like sc://host")
    doctor.add_argument("-np", "--num-proc", type=int, help="number of ranks; default: all slots")
    doctor.add_argument("--store", help="URL of a Store to check")
    doctor.add_argument("--gpus-per-task", type=float)
    doctor.add_argument("--cpus-per-task", type=int)
    add_interfaces(doctor)
    doctor.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for a session and for busy slots")
    doctor.add_argument("--conf", action="append", default=[], metavar="NAME=VALUE", help="a setting of Spark")
    return command_line


def _session(flags: argparse.Namespace) -> tuple[SparkSession, bool]:
    """Return the session to use, and whether to stop it: a ``spark-submit`` program may already have one."""
    from pyspark.sql import SparkSession  # noqa: PLC0415 - --help and --version need no Spark

    builder = SparkSession.builder.appName("sparkhvd doctor")
    if flags.master is not None:
        builder = builder.master(flags.master)
    if flags.remote is not None:
        builder = builder.remote(flags.remote)
    for setting in flags.conf:
        name, equals, value = setting.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--conf must be NAME=VALUE, like spark.executor.cores=4, got {setting!r}.")
        builder = builder.config(name, value)
    is_own = SparkSession.getActiveSession() is None
    if is_own:
        _check_hosts(flags)
        if flags.remote is None:
            _check_java()
        sys.stderr.write(f"sparkhvd: waiting at most {flags.timeout:g} s for a Spark session on {_master(flags)}\n")
    with tempfile.TemporaryFile() as log:
        try:
            with _stderr_to(log):  # Spark's JVM inherits it for as long as it lives
                session = in_background(builder.getOrCreate, "sparkhvd-session")
                return session.result(flags.timeout if flags.timeout < threading.TIMEOUT_MAX else None), is_own
        except TimeoutError:
            why = f"it was not created within --timeout {flags.timeout:g} s.{_last_line(log)}"
            raise SessionTimeoutError(f"There is no Spark session on {_master(flags)}: {why}") from None
        except Exception as error:
            why = _in_one_line(error)
            if not hasattr(error, "java_exception"):  # a Java exception needs no explanation from the log
                why = f"{why.removesuffix('.')}.{_last_line(log)}"
            raise LaunchError(f"There is no Spark session on {_master(flags)}: {why}") from error


def _check_java() -> None:
    """Check that there is a Java for Spark to start.

    Raises:
        LaunchError: there is none.
    """
    home = java_home()
    if home is not None and not os.access(Path(home, "bin", "java"), os.X_OK):
        raise LaunchError(
            f"JAVA_HOME is {home!r}, but there is no program bin/java in that folder, so Spark cannot start. Set "
            f"JAVA_HOME to the folder of {java_versions()}, or unset it to use the java on PATH."
        )
    if home is None and shutil.which("java") is None:
        raise LaunchError(
            f"java was not found on PATH, so Spark cannot start. Install {java_versions()}, or set JAVA_HOME."
        )


def _check_hosts(flags: argparse.Namespace) -> None:
    """Check that at least one host in the flags has an address: Spark would retry unknown hosts endlessly.

    Raises:
        LaunchError: this machine cannot resolve any host that the flags name.
    """
    scheme, _, locations = str(flags.remote or flags.master or "").partition("://")
    if scheme not in {"spark", "sc"}:
        return
    unknown = []
    for location in locations.partition("/")[0].split(","):
        host = location
        try:
            host = urlsplit(f"//{location}").hostname or ""
            lookup = in_background(functools.partial(socket.getaddrinfo, host, None), "sparkhvd-names")
            lookup.result(min(flags.timeout, _NAME_SECONDS))
        except TimeoutError:
            return  # the name server is slow; Spark tries again
        except (OSError, ValueError) as error:
            unknown.append(f"{host!r} ({error.args[-1]})")
        else:
            return
    raise LaunchError(
        f"There is no Spark session on {_master(flags)}: this machine cannot resolve the host "
        f"{' and '.join(unknown)}. Check the name, and the DNS or /etc/hosts of this machine."
    )


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").splitlines()
    written = [line for line in lines if line[:1].strip() and not any(words in line for words in _STARTUP_LINES)]
    return f" Spark's last output: {written[-1]}" if written else ""


def _master(flags: argparse.Namespace) -> str:
    return str(flags.remote or flags.master or "the master that Spark's configuration names")


def _in_one_line(error: BaseException) -> str:
    return textwrap.shorten(str(getattr(error, "java_exception", error)), 600)


@contextmanager
def _stderr_to(file: IO[bytes]) -> Iterator[None]:
    """Redirect the stderr of this process, and of children that it starts, to the file within this block."""
    previous_stderr = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(previous_stderr, 2)
        os.close(previous_stderr)


if __name__ == "__main__":
    sys.exit(main())
