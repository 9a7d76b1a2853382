from __future__ import annotations

import pytest

pytest.importorskip("ray")

from sparkhvd.driver.ray.cluster import RankResources, describe_nodes


def test_the_scarcest_resource_limits_the_ranks_of_a_node():
    assert RankResources(2).ranks_in({"CPU": 5.0}) == 2
    assert RankResources(1, 1.0).ranks_in({"CPU": 8.0, "GPU": 3.0}) == 3
    assert RankResources(1, 0.5).ranks_in({"CPU": 8.0, "GPU": 3.0}) == 6
    assert RankResources(1, 0.2).ranks_in({"CPU": 8.0, "GPU": 1.0}) == 5
    assert RankResources(1, 0.6).ranks_in({"CPU": 8.0, "GPU": 2.0}) == 2
    assert RankResources(1, 0.3).ranks_in({"CPU": 8.0, "GPU": 0.6}) == 2
    assert RankResources(1, 1.0).ranks_in({"CPU": 8.0}) == 0


def test_a_bundle_has_the_resources_of_its_ranks():
    assert RankResources(2).bundle() == {"CPU": 2.0}
    assert RankResources(2, 0.5).bundle(4) == {"CPU": 8.0, "GPU": 2.0}


def test_the_description_groups_equal_nodes():
    nodes = [{"CPU": 8.0, "GPU": 1.0}, {"CPU": 2.0}, {"CPU": 8.0, "GPU": 1.0}]
    assert describe_nodes(nodes) == "1 node with 2 CPU; 2 nodes with 8 CPU and 1 GPU"
    assert describe_nodes([]) == "no node"
