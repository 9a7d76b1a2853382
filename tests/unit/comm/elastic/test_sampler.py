from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkhvd.comm.elastic import sampler as module
from sparkhvd.comm.elastic.sampler import ElasticSampler, epoch_order, share_of_rank
from sparkhvd.errors import ConfigError


class Ranks:
    """The samplers of all ranks, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, length: int, size: int) -> None:
        self._patch = monkeypatch
        self.length = length
        monkeypatch.setattr(module.session, "is_initialized", lambda: True)
        self.samplers: list[ElasticSampler] = []
        self.resize(size)

    def resize(self, size: int) -> None:
        state = self.samplers[0].state_dict() if self.samplers else None
        self._patch.setattr(module.session, "size", lambda: size)
        samplers = []
        for rank in range(size):
            self._patch.setattr(module.session, "rank", lambda rank=rank: rank)
            samplers.append(ElasticSampler(range(self.length), seed=7))
            if state is not None:
                samplers[-1].load_state_dict(state)
        self.samplers = samplers

    def step(self, number: int, batch: int) -> list[int]:
        """Process a batch on all ranks."""
        taken = [list(one)[number * batch : (number + 1) * batch] for one in self.samplers]
        for one in self.samplers:
            one.record_batch(number, batch)
        assert len({one.processed_num for one in self.samplers}) == 1, "all ranks agree on what is processed"
        return [index for part in taken for index in part]


@given(
    length=st.integers(0, 60),
    sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=5),
    batch=st.integers(1, 5),
)
def test_every_sample_is_processed_once_while_ranks_join_and_leave(length, sizes, batch):
    with pytest.MonkeyPatch.context() as monkeypatch:
        ranks = Ranks(monkeypatch, length, sizes[0][0])
        seen: list[int] = []
        for size, count in sizes:
            ranks.resize(size)
            for number in range(min(count, -(-len(ranks.samplers[0]) // batch))):
                seen += ranks.step(number, batch)
        ranks.resize(sizes[-1][0])
        for number in range(-(-len(ranks.samplers[0]) // batch)):
            seen += ranks.step(number, batch)
    counts = Counter(seen)
    assert sorted(counts) == list(range(length))
    assert len(seen) - length < max(size for size, _ in sizes), "only the end of the epoch is padded"
    assert all(one.processed_num == length for one in ranks.samplers)


def test_all_ranks_have_equally_many_samples():
    assert [share_of_rank([5, 6, 7, 8], rank, 3) for rank in range(3)] == [[5, 8], [6, 5], [7, 6]]
    assert [share_of_rank([5], rank, 3) for rank in range(3)] == [[5], [5], [5]]
    assert share_of_rank([], 0, 3) == []


def test_epochs_have_different_orders_that_all_ranks_know():
    assert epoch_order(50, True, 1, 2) == epoch_order(50, True, 1, 2)
    orders = [epoch_order(50, True, seed, epoch) for seed, epoch in [(1, 2), (1, 3), (2, 2)]]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert epoch_order(4, False, 1, 2) == [0, 1, 2, 3]


def test_recorded_indices_are_counted_like_batches_and_must_be_the_next_ones():
    sampler = ElasticSampler(range(10), shuffle=False)
    sampler.record_indices([0, 1, 2])
    sampler.record_indices([3])
    assert sampler.state_dict() == {"epoch": 0, "processed_num": 4}
    with pytest.raises(ConfigError, match=r"expected \[4, 5\], got \[5, 4\]"):
        sampler.record_indices([5, 4])


def test_a_batch_that_is_recorded_twice_counts_once_and_the_next_epoch_starts_from_zero():
    sampler = ElasticSampler(range(10), shuffle=False)
    sampler.record_batch(1, 2)
    sampler.record_batch(1, 2)
    assert sampler.processed_num == 4
    sampler.reset()
    assert list(sampler) == [4, 5, 6, 7, 8, 9]
    assert len(sampler) == 6
    sampler.set_epoch(1)
    assert (sampler.processed_num, len(sampler)) == (0, 10)
