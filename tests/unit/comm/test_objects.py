from __future__ import annotations

import numpy as np
import pytest

from sparkhvd.comm import session
from sparkhvd.comm.objects import allgather_object, broadcast_object
from sparkhvd.errors import CollectiveError
from tests.ranks import RankGroup


@pytest.fixture(scope="module")
def group():
    with RankGroup(2) as started:
        yield started


class Unpicklable:
    def __reduce__(self):
        raise TypeError("holds a socket")


def broadcast_value(root):
    communicator = session.current()
    value = {"from": communicator.world.rank, "array": np.arange(3), "function": lambda x: x + me_too(x)}
    received = broadcast_object(communicator, value, root)
    return received["from"], received["array"].tolist(), received["function"](1)


def me_too(x):
    return x * 10


def gather_values():
    communicator = session.current()
    return allgather_object(
        communicator, None if communicator.world.rank == 0 else ["x" * 1000 * communicator.world.rank]
    )


class Settings:
    rank = None


def gather_objects_of_a_class_that_differs_by_rank():
    Settings.rank = session.rank()
    gathered = allgather_object(session.current(), Settings())
    return Settings.rank, isinstance(gathered[session.rank()], Settings)


def broadcast_an_unpicklable_object():
    with pytest.raises(CollectiveError) as caught:
        broadcast_object(session.current(), Unpicklable())
    return str(caught.value)


def gather_unpicklable_objects():
    communicator = session.current()
    with pytest.raises(CollectiveError) as caught:
        allgather_object(communicator, Unpicklable() if communicator.world.rank == 1 else 5)
    return str(caught.value)


def gather_while_one_rank_has_joined():
    me, message = session.current(), None
    if me.world.rank == 0:
        with pytest.raises(CollectiveError) as caught:
            allgather_object(me, 5)
        message = str(caught.value)
    me.join()
    return message


@pytest.mark.parametrize("root", [0, 1])
def test_broadcast_object_reaches_every_rank(group, root):
    assert group.run(broadcast_value, root) == [(root, [0, 1, 2], 11)] * 2


def test_allgather_object_returns_objects_in_rank_order(group):
    assert group.run(gather_values) == [[None, ["x" * 1000]]] * 2


def test_gathered_objects_leave_the_attributes_of_their_class_unchanged(group):
    assert group.run(gather_objects_of_a_class_that_differs_by_rank) == [(0, True), (1, True)]


def test_a_root_that_cannot_pickle_fails_every_rank(group):
    root, other = group.run(broadcast_an_unpicklable_object)
    assert root == "Rank 0 cannot broadcast a Unpicklable: holds a socket"
    assert other == "Rank 0 could not pickle the object to broadcast; see the error on that rank."


def test_a_rank_that_cannot_pickle_fails_every_rank_of_a_gather(group):
    other, failed = group.run(gather_unpicklable_objects)
    assert failed == "A Unpicklable cannot be sent to other ranks: holds a socket"
    assert other == "Ranks [1] could not pickle the objects to send; see the errors on those ranks."


def test_a_gather_names_the_ranks_that_have_joined(group):
    message = "Ranks [1] have joined, but gathering objects needs the objects of all ranks."
    assert group.run(gather_while_one_rank_has_joined) == [message, None]
