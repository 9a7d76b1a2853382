from __future__ import annotations

import pytest
import torch

from sparkhvd.errors import ParamError
from sparkhvd.estimators.batch_dependence import BatchDependence
from sparkhvd.estimators.lightning.plugin import PLUGIN as LIGHTNING
from sparkhvd.estimators.torch.batch_normalization import batch_dependence_of
from sparkhvd.torch import SyncBatchNorm


def network(*layers):
    return torch.nn.Sequential(torch.nn.Linear(2, 4), *layers)


@pytest.mark.parametrize(
    ("layer", "local", "need_two_rows", "need_two_pixels"),
    [
        (torch.nn.BatchNorm1d(4), ("1",), ("1",), ()),
        (torch.nn.LazyBatchNorm1d(), ("1",), ("1",), ()),
        (torch.nn.BatchNorm2d(4), ("1",), (), ("1",)),
        (SyncBatchNorm(4), (), ("1",), ()),
        (torch.nn.SyncBatchNorm(4), ("1",), ("1",), ()),
        (torch.nn.LayerNorm(4), (), (), ()),
        (torch.nn.InstanceNorm1d(4), (), (), ()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_layers_that_normalize_by_their_batch_are_found(layer, local, need_two_rows, need_two_pixels):
    found = batch_dependence_of(network(layer))
    assert (found.local, found.need_two_rows, found.need_two_pixels) == (local, need_two_rows, need_two_pixels)
    assert found.avoids_single_rows == bool(need_two_rows or need_two_pixels)


def test_a_trainer_that_synchronizes_the_layers_needs_no_advice():
    params = {"model": network(torch.nn.BatchNorm1d(4)), "trainer_args": None}
    assert LIGHTNING.batch_dependence(params).local == ("1",)
    assert LIGHTNING.batch_dependence({**params, "trainer_args": {"sync_batchnorm": True}}).local == ()


def test_layers_in_evaluation_mode_train_on_single_rows_in_lightning():
    """A hook may set them to training mode, so a last batch still avoids a single row."""
    params = {"model": network(torch.nn.BatchNorm1d(4).eval(), torch.nn.BatchNorm1d(4)), "trainer_args": None}
    found = LIGHTNING.batch_dependence(params)
    assert (found.local, found.need_two_rows, found.need_two_pixels) == (("2",), ("2",), ("1",))
    assert LIGHTNING.batch_dependence({**params, "model": params["model"].eval()}).local == ("1", "2"), "a fitted model"
    assert batch_dependence_of(params["model"].train()).local == ("1", "2")


def test_one_line_names_the_layers_and_an_alternative_for_several_ranks():
    found = batch_dependence_of(network(*(torch.nn.BatchNorm1d(4) for _ in range(5))))
    assert found.remarks(1, 32) == []
    assert BatchDependence().remarks(4, 32) == []
    (remark,) = found.remarks(4, 32)
    assert remark == (
        "the model's batch normalization (1, 2, 3 and 2 more) sees the 32 rows of its own rank, not the 128 rows of "
        "all 4 ranks. To normalize over all of them, use sparkhvd.torch.SyncBatchNorm.convert_sync_batchnorm(model)."
    )


def test_elastic_batches_need_three_rows_for_batch_normalization():
    dependence = batch_dependence_of(network(torch.nn.BatchNorm1d(4)))
    dependence.check_changing_ranks(3)
    batch_dependence_of(network()).check_changing_ranks(1)
    with pytest.raises(ParamError, match=r"batch_size=2 leaves .* at least 3, or elastic_batch='global'"):
        dependence.check_changing_ranks(2)


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_embeddings_that_count_values_in_their_batch_are_named(kind):
    found = batch_dependence_of(torch.nn.Sequential(kind(4, 2), kind(4, 2, scale_grad_by_freq=True)))
    assert found.remarks(1, 8) == []
    (remark,) = found.remarks(2, 8)
    assert remark.startswith(
        "scale_grad_by_freq of the model's embeddings (1) counts values in the 8 rows of its own rank, not the 16 rows "
        "of all 2 ranks. The training is therefore not that of one big batch"
    )
