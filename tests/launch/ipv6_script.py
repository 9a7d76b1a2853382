"""Run by test_ipv6.py in a separate process: two Spark workers on hosts with IPv6 addresses only.

python -m tests.launch.ipv6_script FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

import sparkhvd
from tests.launch import hosts
from tests.launch.namespaces_script import place
from tests.scripts import print_results

HOSTS = 2


def session_on(cluster: hosts.Cluster) -> SparkSession:
    builder = SparkSession.builder.master(cluster.master).config("spark.executor.memory", "512m")
    for process in ("driver", "executor"):
        flags = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Djava.net.preferIPv6Addresses=true"
        builder.config(f"spark.{process}.extraJavaOptions", flags)
    for name in ("spark.driver.host", "spark.driver.bindAddress"):
        builder.config(name, f"[{cluster.address}]")
    return builder.config("spark.ui.enabled", "false").config("spark.log.level", "ERROR").getOrCreate()


def main(folder: Path) -> None:
    with hosts.cluster(HOSTS, folder, ipv6=True) as cluster:
        os.environ |= {"SPARK_LOCAL_IP": f"[{cluster.address}]", "SPARK_PREFER_IPV6": "true"}
        session = session_on(cluster)
        try:
            report = sparkhvd.preflight(session, HOSTS, timeout=100.0, stdout=sys.stderr)
            launched = {one: sparkhvd.run(place, num_proc=HOSTS, launcher=one) for one in ("barrier", "mpi")}
            hosts_seen = sorted(task.host for task in report.tasks)
            print_results(
                {
                    **launched,
                    "problems": report.problems,
                    "hosts": hosts_seen,
                    "addresses": [h.address for h in cluster.hosts],
                }
            )
        finally:
            session.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
