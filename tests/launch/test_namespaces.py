"""Three network namespaces as three hosts, each with its own Spark worker and address."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.launch.hosts import why_not
from tests.scripts import results_of, run_script

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.spark, pytest.mark.cluster]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    if why_not():
        pytest.skip(why_not())
    folder = tmp_path_factory.mktemp("hosts")
    done = run_script([sys.executable, "-m", "tests.launch.namespaces_script", folder], folder, 580)
    return results_of(done)


def test_the_preflight_examines_every_host(results):
    assert results["preflight"]["problems"] == []
    slots = r"3 ranks \(3 requested; master spark://\S+\), available after [\d.]+ s"
    assert re.fullmatch(slots, results["preflight"]["slots"]), "Spark has brought executors since the session began"
    assert sorted(results["preflight"]["hosts"]) == sorted(results["addresses"])


def test_the_preflight_names_two_hosts_that_cannot_connect_with_a_remedy(results):
    (problem,) = results["preflight of two apart"]["problems"]
    one, other = results["addresses"][1:3]
    for source, target in ((one, other), (other, one)):
        assert re.search(rf"{re.escape(source)} cannot reach {re.escape(target)}: \S", problem)
    assert len(re.findall("cannot reach", problem)) == 2
    assert "Open all TCP ports between the hosts, or name the network that connects them with nics=" in problem
    assert sorted(results["preflight of two apart"]["hosts"]) == sorted(results["addresses"])


def test_the_preflight_tries_only_the_named_network(results):
    assert results["preflight of a network"]["problems"] == []
    (problem,) = results["preflight of bridges"]["problems"]
    assert len(re.findall(r"cannot reach [\d.]+: No server answered; tried 172\.17\.0\.1:", problem)) == 6


@pytest.mark.parametrize("encrypt", ["0", "1"])
@pytest.mark.parametrize("launcher", ["barrier", "mpi"])
def test_ranks_see_every_host_and_reach_each_other_and_encryption_hides_all_their_traffic(results, launcher, encrypt):
    job = results["jobs"][f"{launcher}, {encrypt}"]
    assert [one["cross"] for one in job["ranks"]] == [[rank, 3, rank, 1] for rank in range(3)]
    assert [one["sum"] for one in job["ranks"]] == [6.0] * 3
    assert job["overheard"] == (["printed something", "reduced something", "finished/"] if encrypt == "0" else [])


def test_an_unreachable_host_is_named_before_mpirun_starts(results):
    message = results["mpi, one apart"]
    assert message.startswith("Some hosts have no address at which both the driver and another host reach them: {")
    named = [address for address in results["addresses"] if f"'{address}': [" in message]
    assert len(named) == 2, f"it, and the one that it probes: {message}"
    assert results["addresses"][1] in named


def test_a_host_cut_off_from_the_network_is_named_soon_without_leftovers(results):
    assert [row["wrong"] for row in results["cut off"].values()] == [[]]
