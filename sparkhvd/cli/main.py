"""``sparkhvd doctor``: the preflight on the command line."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import sparkhvd
from sparkhvd.driver.preflight import preflight
from sparkhvd.errors import ConfigError, SparkHvdError
from sparkhvd.store import Store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; the exit code is 0 when nothing keeps a job from running."""
    flags = parser().parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, format="sparkhvd: %(message)s")
    try:
        session, own = _session(flags)
        try:
            report = preflight(
                session,
                flags.num_proc,
                store=Store.create(flags.store) if flags.store is not None else None,
                gpus_per_task=flags.gpus_per_task,
                cpus_per_task=flags.cpus_per_task,
                timeout=flags.timeout,
            )
        finally:
            if own:
                session.stop()
    except SparkHvdError as error:
        sys.stderr.write(f"sparkhvd: {error}\n")
        return 1
    return 0 if report.ok else 1


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(prog="sparkhvd", allow_abbrev=False)
    made.add_argument("-v", "--version", action="version", version=sparkhvd.__version__)
    commands = made.add_subparsers(required=True)
    doctor = commands.add_parser("doctor", help="look for what would keep a job from running well on a cluster")
    where = doctor.add_mutually_exclusive_group()
    where.add_argument("--master", help="Spark's master URL; that of Spark's own configuration when left out")
    where.add_argument("--remote", help="a Spark Connect server, like sc://host")
    doctor.add_argument("-np", "--num-proc", type=int, help="number of ranks; all slots when left out")
    doctor.add_argument("--store", help="URL of a Store to check")
    doctor.add_argument("--gpus-per-task", type=float)
    doctor.add_argument("--cpus-per-task", type=int)
    doctor.add_argument("--timeout", type=float, default=30.0, help="seconds to wait for busy slots")
    doctor.add_argument("--conf", action="append", default=[], metavar="NAME=VALUE", help="a setting of Spark")
    return made


def _session(flags: argparse.Namespace) -> tuple[SparkSession, bool]:
    """The session to use, and whether it is ours to stop: ``spark-submit`` programs may have one already."""
    from pyspark.sql import SparkSession  # noqa: PLC0415 - what else the program does needs no Spark

    builder = SparkSession.builder.appName("sparkhvd doctor")
    if flags.master is not None:
        builder = builder.master(flags.master)
    if flags.remote is not None:
        builder = builder.remote(flags.remote)
    for setting in flags.conf:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--conf {setting!r} is not like spark.executor.cores=4.")
        builder = builder.config(name, value)
    own = SparkSession.getActiveSession() is None
    return builder.getOrCreate(), own


if __name__ == "__main__":
    sys.exit(main())
