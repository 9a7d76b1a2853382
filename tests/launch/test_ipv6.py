"""Network namespaces as hosts that have IPv6 addresses only."""

from __future__ import annotations

import os
import sys
from ipaddress import ip_address

import pytest

import sparkhvd
from tests.launch import hosts
from tests.launch.namespaces_script import place
from tests.scripts import results_of, run_script


@pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not())
def test_ranks_on_hosts_behind_ssh_connect_over_ipv6(tmp_path, monkeypatch):
    with hosts.hosts(2, ipv6=True) as (_, made):
        program = tmp_path / "ssh"  # the last words are the host and the command
        cases = "".join(f'{host.address}) exec ip netns exec {host.namespace} /bin/sh -c "$1";;\n' for host in made)
        program.write_text(
            f"#!/bin/sh\nwhile [ $# -gt 2 ]; do shift; done\nhost=$1; shift\ncase $host in\n{cases}esac\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        listed = ",".join(f"[{host.address}]:2" for host in made)
        found = sparkhvd.run(place, hosts=listed, start_timeout=60)
    assert [one["cross"] for one in found] == [[0, 4, 0, 2], [1, 4, 0, 2], [2, 4, 1, 2], [3, 4, 1, 2]]
    assert [one["sum"] for one in found] == [10.0] * 4


def test_an_ipv6_loopback_address_is_this_machine():
    (one, other) = sparkhvd.run(place, hosts="[::1]:2", start_timeout=60)
    assert [one["cross"], other["cross"]] == [[0, 2, 0, 2], [1, 2, 0, 2]]


@pytest.mark.spark
@pytest.mark.cluster
@pytest.mark.soak
@pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not())
def test_spark_with_ipv6_only_runs_the_barrier_and_mpi_launchers(tmp_path):
    done = run_script([sys.executable, "-m", "tests.launch.ipv6_script", tmp_path], tmp_path, 280)
    results = results_of(done)
    assert results["problems"] == []
    assert sorted(ip_address(host) for host in results["hosts"]) == [ip_address(host) for host in results["addresses"]]
    for launcher in ("barrier", "mpi"):
        assert [one["cross"] for one in results[launcher]] == [[0, 2, 0, 1], [1, 2, 1, 1]]
        assert [one["sum"] for one in results[launcher]] == [3.0, 3.0]
