from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkhvd.errors import ConfigError
from sparkhvd.world import World, layout

_HOSTS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12)


def test_the_default_world_has_one_rank() -> None:
    assert World() == World(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)


@pytest.mark.parametrize("field", ["rank", "local_rank", "cross_rank"])
@pytest.mark.parametrize("value", [-1, 1])
def test_a_rank_outside_its_size_is_refused_with_its_name(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"^{field} must be within 0\.\.0, got {value}\.$"):
        World(**{field: value})


def test_ranks_of_two_hosts_have_local_and_cross_ranks() -> None:
    worlds = layout(["a", "a", "b", "b"])
    assert [(w.rank, w.local_rank, w.cross_rank) for w in worlds] == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
    assert {(w.size, w.local_size, w.cross_size) for w in worlds} == {(4, 2, 2)}


def test_ranks_of_a_host_need_not_be_consecutive() -> None:
    assert [(w.local_rank, w.cross_rank) for w in layout(["a", "b", "a", "b"])] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_hosts_may_hold_different_numbers_of_ranks() -> None:
    worlds = layout(["a", "a", "b"])
    assert [w.local_size for w in worlds] == [2, 2, 1]
    assert [w.cross_size for w in worlds] == [2, 1, 2]


@given(_HOSTS)
def test_local_ranks_count_the_ranks_of_each_host(hosts: list[str]) -> None:
    worlds = layout(hosts)
    for host in set(hosts):
        local = [w for w, h in zip(worlds, hosts, strict=True) if h == host]
        assert [w.local_rank for w in local] == list(range(len(local)))
        assert {w.local_size for w in local} == {len(local)}


@given(_HOSTS)
def test_cross_ranks_count_the_ranks_with_the_same_local_rank(hosts: list[str]) -> None:
    worlds = layout(hosts)
    for local_rank in {w.local_rank for w in worlds}:
        peers = [w for w in worlds if w.local_rank == local_rank]
        assert sorted(w.cross_rank for w in peers) == list(range(len(peers)))
        assert {w.cross_size for w in peers} == {len(peers)}
