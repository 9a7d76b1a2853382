from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
from ray.exceptions import RayActorError, RayTaskError

from sparkhvd._util.background import in_background
from sparkhvd.driver.elastic.ray_leases import RayLeases
from sparkhvd.driver.ray.cluster import RankResources
from sparkhvd.errors import ConfigError, LaunchError


@pytest.fixture
def cluster(monkeypatch):
    """Pretend that this process is connected to a cluster whose resources a test sets."""
    values: dict[str, Any] = {"total": {"CPU": 4.0}, "free": {"CPU": 4.0}, "nodes": []}
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: values["total"])
    monkeypatch.setattr(ray, "available_resources", lambda: values["free"])
    monkeypatch.setattr(ray, "nodes", lambda: values["nodes"])
    return values


def test_resources_that_the_job_does_not_hold_itself_belong_to_others(cluster):
    leases = RayLeases(RankResources(2), grows=False)
    cluster["free"] = {"CPU": 2.0}
    assert not leases.others_run(3, 1)
    assert leases.others_run(3, 0), "the cluster has room for two leases"
    assert not leases.others_run(1, 0), "the lease may be about to connect"
    cluster["free"] = {}
    assert leases.others_run(1, 0)


def test_only_a_job_without_a_largest_number_of_ranks_grows_with_the_cluster(cluster):
    node = {"Alive": True, "Resources": {"CPU": 5.0}}
    cluster["nodes"] = [node, node, {**node, "Alive": False}]
    assert RayLeases(RankResources(2), grows=True).slots() == 4
    assert RayLeases(RankResources(2), grows=False).slots() == 0


def test_leases_on_nodes_that_ray_drains_are_about_to_end(cluster, monkeypatch):
    monkeypatch.setattr("sparkhvd.driver.elastic.ray_leases._draining_nodes", lambda: {"b"})
    leases = RayLeases(RankResources(1), grows=False)
    leases._nodes = {7: "a", 8: "b"}
    assert leases.leaving({0: 7, 1: 8, 2: 9}) == {1: "Ray drains the node"}


def test_a_lease_gets_a_slot_that_the_discovery_offers(cluster):
    leases = RayLeases(RankResources(1), grows=True, has_discovery=True)
    assert leases.slots() == 0, "the discovery has not found any slots yet"
    waiting = in_background(lambda: leases._slot_for(0), "lease")
    leases.offer({"a": 1, "b": 2})
    assert waiting.result(60) == "a"
    assert (leases._slot_for(1), leases._slot_for(2), leases.slots()) == ("b", "b", 3)
    assert RayLeases(RankResources(1), grows=False, has_discovery=True).slots() == 0
    assert RayLeases(RankResources(1), grows=True)._slot_for(0) is None, "without a discovery, Ray chooses the node"


def test_the_slot_of_a_lease_that_has_ended_is_free(cluster, monkeypatch):
    leases = RayLeases(RankResources(1), grows=False, has_discovery=True)
    leases.offer({"a": 1})

    def end(self: RayLeases, number: int) -> None:
        raise LaunchError(f"on {self._slot_for(number)}")

    monkeypatch.setattr(RayLeases, "_start", end)
    assert [str(leases.run(number, None, None)) for number in (0, 1)] == ["on a", "on a"]


def test_a_lease_that_waits_for_a_slot_can_be_cancelled(cluster):
    leases = RayLeases(RankResources(1), grows=False, has_discovery=True)
    waiting = in_background(lambda: leases.run(4, None, None), "lease")
    leases.cancel(4, waiting)
    assert str(waiting.result(0)) == "The discovery offered no slot until the end of the lease."


def test_the_last_leases_on_a_node_leave_when_the_discovery_withdraws_slots(cluster, monkeypatch):
    monkeypatch.setattr("sparkhvd.driver.elastic.ray_leases._draining_nodes", set)
    leases = RayLeases(RankResources(1), grows=False, has_discovery=True)
    leases.offer({"a": 3, "b": 1})
    assert [leases._slot_for(number) for number in range(4)] == ["a", "a", "a", "b"]
    attempts = {number: number for number in range(4)}
    assert leases.leaving(attempts) == {}
    leases.offer({"a": 1})
    assert leases.leaving(attempts) == dict.fromkeys((1, 2, 3), "The discovery has withdrawn the slot")
    assert leases.leaving({0: 0}) == {}


def test_the_drained_nodes_are_unknown_to_versions_of_ray_without_the_function(cluster, monkeypatch):
    monkeypatch.delattr("ray._private.state.GlobalState.get_draining_nodes")
    assert RayLeases(RankResources(1), grows=False).leaving({0: 7}) == {}


def test_the_error_of_an_actor_is_explained_in_one_sentence():
    leases = RayLeases(RankResources(1), grows=False)
    unreachable = RayTaskError("hold", "Traceback ...", LaunchError("Host a cannot connect to the driver."))
    prefix = "A Ray actor of the elastic job has ended: "
    assert leases.explain(unreachable) == (f"{prefix}Host a cannot connect to the driver", False)
    why, is_final = leases.explain(RayActorError(error_msg="The actor is dead because its node has died."))
    assert (why, is_final) == (f"{prefix}The actor is dead because its node has died", False)


def test_elastic_jobs_are_refused_through_ray_client(monkeypatch):
    monkeypatch.setattr("sparkhvd.driver.elastic.ray_leases.ray_client.is_connected", lambda: True)
    with pytest.raises(ConfigError, match="Elastic jobs do not work through Ray Client"):
        RayLeases(RankResources(1), grows=False).addresses()


def test_after_a_shutdown_of_ray_no_call_starts_it_again(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    leases = RayLeases(RankResources(1), grows=True)
    error = leases.run(0, None, None)
    assert str(error) == "Ray has been shut down in this process."
    done: Future[None] = Future()
    done.set_result(None)
    leases.cancel(0, done)
    assert (leases.slots(), leases.others_run(1, 0), leases.leaving({})) == (0, False, {})
