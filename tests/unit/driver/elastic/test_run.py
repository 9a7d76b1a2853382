from __future__ import annotations

import pytest

from sparkhvd.driver.elastic.discovery import DiscoveryFunction
from sparkhvd.driver.elastic.run import ElasticOptions, check_limits
from sparkhvd.driver.hosts import parse_hosts
from sparkhvd.errors import SlotsError


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        (ElasticOptions(2), (2, 2, 2)),
        (ElasticOptions(2, 1, 5), (2, 1, 5)),
        (ElasticOptions(min_num_proc=2, hosts=parse_hosts("a:2,b:3")), (2, 2, 5)),
        (ElasticOptions(3, 1, 4, hosts=parse_hosts("a:2,b:3")), (3, 1, 4)),
        (ElasticOptions(2, discovery=DiscoveryFunction(dict)), (2, 2, None)),
        (ElasticOptions(2, launcher="ray"), (2, 2, None)),
        (ElasticOptions(2, 1, 5, launcher="ray"), (2, 1, 5)),
    ],
)
def test_the_largest_number_of_ranks_is_the_number_of_slots_if_it_is_known(options, limits):
    checked, _ = check_limits(options, 60.0)
    assert (checked.num_proc, checked.min_size, checked.max_size) == limits


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ElasticOptions(6, 1, hosts=parse_hosts("a:2,b:3")), r"^num_proc=6 is more than the 5 slots .*\(a:2,b:3\)"),
        (ElasticOptions(min_num_proc=2, hosts=parse_hosts("a:1")), r"^min_num_proc=2 is more than the 1 slot of "),
    ],
)
def test_hosts_with_too_few_slots_are_refused(options, words):
    with pytest.raises(SlotsError, match=words):
        check_limits(options, 60.0)
