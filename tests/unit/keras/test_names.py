"""The names of the module and the collectives of the backend."""

from __future__ import annotations

import keras

import sparkhvd.keras as hvd
from sparkhvd.comm import interface


def reduce_eagerly():
    result = hvd.allreduce(keras.ops.ones((2,)) * hvd.rank(), op=hvd.Sum, name="eager")
    assert keras.ops.convert_to_numpy(result).tolist() == [1.0, 1.0]
    assert hvd.broadcast_object("text", 0) == "text"
    assert int(hvd.broadcast(3 + hvd.rank(), 0, name="epoch")) == 3
    means = hvd.allreduce([1.0 + hvd.rank(), 0.5], name="scores")  # like the values of model.evaluate
    assert keras.ops.convert_to_numpy(means).tolist() == [1.5, 0.5]


def test_collectives_are_those_of_the_backend(group):
    group.run(reduce_eagerly)


def test_the_module_exports_the_common_interface_without_duplicates():
    assert set(interface.__all__) < set(hvd.__all__) <= set(dir(hvd))
    assert len(set(hvd.__all__)) == len(hvd.__all__)
    assert all(getattr(hvd, name) is getattr(interface, name) for name in interface.__all__)
    assert all(getattr(hvd, name) is not None for name in hvd.__all__)
