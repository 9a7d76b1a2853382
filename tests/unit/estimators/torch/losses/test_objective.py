from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from sparkhvd.errors import DataError, ModelOutputError, ParamError
from sparkhvd.estimators.torch.losses.divisors import inexact_losses
from sparkhvd.estimators.torch.losses.objective import objective_of
from tests.unit.estimators.arrays import schema


def objective(loss, **more):
    return objective_of({"label_cols": ("y",), "loss": loss, **more})


def label(loss, output, values, **more):
    (found,) = objective(loss, **more).labels([output], {"y": np.asarray(values)})
    return found


def accuracy(output, label):
    return (output.argmax(dim=1) == label).float().mean()


CLASS_LOSSES = [
    torch.nn.CrossEntropyLoss(),
    functional.cross_entropy,
    functional.nll_loss,
    partial(functional.cross_entropy, label_smoothing=0.1),
]


@pytest.mark.parametrize("loss", CLASS_LOSSES)
@pytest.mark.parametrize("values", [[0, 2, 1], [0.0, 2.0, 1.0], [[0], [2], [1]]])
def test_a_class_loss_gets_class_indices(loss, values):
    found = label(loss, torch.zeros(3, 4), values)
    assert (found.dtype, found.tolist()) == (torch.int64, [0, 2, 1])


@pytest.mark.parametrize("loss", [*CLASS_LOSSES, torch.nn.NLLLoss()])
@pytest.mark.parametrize("shape", [(2, 1), (2,), (2, 1, 3)])
def test_a_class_loss_of_one_output_is_refused_because_it_is_always_0(loss, shape):
    with pytest.raises(ModelOutputError, match=r"needs one output per class; the model returns 1 .*BCEWithLogitsLoss"):
        objective(loss).try_out([torch.zeros(shape)], {"y": np.zeros((2, *shape[2:]), np.int64)})


@pytest.mark.parametrize(
    "loss",
    [torch.nn.CrossEntropyLoss(weight=torch.ones(3)), partial(functional.cross_entropy, weight=torch.ones(3))],
)
def test_the_tensors_of_a_loss_move_to_the_device_of_the_outputs(loss):
    outputs, labels = torch.zeros(2, 3, device="meta"), torch.zeros(2, dtype=torch.int64, device="meta")
    assert objective(loss).loss([outputs], [labels], {}).device.type == "meta"


class OfLogit(torch.nn.CrossEntropyLoss):
    """A loss for two classes with one output."""

    def forward(self, output, target):
        both = torch.cat([torch.zeros_like(output), output], dim=1)
        return super().forward(both, target.reshape(-1).long())


def test_a_users_subclass_of_a_class_loss_may_take_a_single_output():
    assert label(OfLogit(), torch.zeros(2, 1), [0, 1]).numel() == 2
    objective(OfLogit()).try_out([torch.zeros(2, 1)], {"y": np.array([0, 1])})


def test_class_probabilities_are_valid_labels():
    found = label(torch.nn.CrossEntropyLoss(), torch.zeros(2, 3), [[0, 1, 0], [1, 0, 0]])
    assert (found.dtype, found.shape) == (torch.float32, (2, 3))


def test_fractional_class_indices_are_an_error():
    with pytest.raises(DataError, match="Label column 'y' holds fractional numbers"):
        label(functional.cross_entropy, torch.zeros(2, 4), [0.0, 0.5])


def test_a_label_with_as_many_elements_as_the_output_takes_its_shape_and_dtype():
    found = label(torch.nn.BCEWithLogitsLoss(), torch.zeros(3, 1), [0, 1, 1])
    assert (found.dtype, found.shape) == (torch.float32, (3, 1))


def test_other_labels_keep_their_shape_and_integers_stay_integers():
    assert label(lambda o, t: o.mean(), torch.zeros(3, 4), np.array([1, 2, 3], np.int32)).dtype == torch.int64
    assert label(lambda o, t: o.mean(), torch.zeros(3, 4), [1.0, 2.0, 3.0]).dtype == torch.float32


def test_label_shapes_set_the_shape():
    found = label(lambda o, t: o.mean(), torch.zeros(2, 4), [[1.0, 2, 3, 4]] * 2, label_shapes=((-1, 2, 2),))
    assert found.shape == (2, 2, 2)


def test_losses_are_summed_with_their_weights_which_default_to_a_mean():
    outputs = [torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [2.0]])]
    columns = {"a": np.zeros(2), "b": np.zeros(2)}
    params = {"label_cols": ("a", "b"), "loss": [functional.mse_loss, functional.l1_loss]}
    plain, weighted = objective_of(params), objective_of({**params, "loss_weights": (2.0, 10.0)})
    assert plain.loss(outputs, plain.labels(outputs, columns), columns).item() == pytest.approx((5 + 2) / 2)
    assert weighted.loss(outputs, weighted.labels(outputs, columns), columns).item() == pytest.approx(2 * 5 + 10 * 2)


def test_metrics_may_be_a_list_a_dict_or_groups():
    two = {"label_cols": ("a", "b"), "loss": functional.mse_loss}
    assert objective(functional.mse_loss, metrics=[accuracy]).names() == ["loss", "accuracy"]
    assert objective(functional.mse_loss, metrics={"right": accuracy}).names() == ["loss", "right"]
    assert objective_of({**two, "metrics": [accuracy]}).names() == ["loss", "accuracy_a", "accuracy_b"]
    groups = objective_of({**two, "metrics": [[accuracy], [functional.l1_loss, functional.mse_loss]]})
    assert groups.names() == ["loss", "group_0_a", "group_0_b", "group_1_a", "group_1_b"]
    assert groups.metrics[3].function is functional.mse_loss


def test_a_metric_is_measured_with_its_own_output():
    found = objective_of({"label_cols": ("a", "b"), "loss": functional.mse_loss, "metrics": {"l1": functional.l1_loss}})
    outputs = [torch.tensor([[1.0]]), torch.tensor([[5.0]])]
    labels = found.labels(outputs, {"a": np.zeros(1), "b": np.zeros(1)})
    assert found.measure(found.loss(outputs, labels, {}), outputs, labels) == {
        "loss": 13.0,
        "l1_a": 1.0,
        "l1_b": 5.0,
    }


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"loss": [functional.mse_loss] * 3}, r"loss has 3 entries, but label_cols has 2: \['a', 'b'\]"),
        ({"loss_weights": (1.0,)}, "loss_weights has 1 entry, but label_cols has 2"),
        ({"label_shapes": ((1,),)}, "label_shapes has 1 entry, but label_cols has 2"),
        ({"loss": "mse"}, "loss='mse' is not callable"),
        ({"loss": torch.nn.MSELoss(reduction="sum")}, r"The loss MSELoss has reduction='sum'; it must be 'mean'"),
        (
            {"loss": partial(functional.mse_loss, reduction="sum")},
            r"The loss mse_loss has reduction='sum'; it must be 'mean'",
        ),
        ({"loss": torch.nn.MSELoss(reduction="batchmean")}, r"MSELoss has reduction='batchmean'; it must be 'mean'"),
        ({"metrics": [[accuracy] * 3]}, "metrics: entry 0 must be a function, or a group"),
        ({"metrics": [accuracy, accuracy]}, r"metrics: the names .* are not unique"),
    ],
)
def test_contradictory_losses_and_metrics_are_refused(params, message):
    with pytest.raises(ParamError, match=message):
        objective_of({"label_cols": ("a", "b"), "loss": functional.mse_loss, **params})


def test_outputs_that_do_not_match_the_label_are_refused_with_both_shapes():
    with pytest.raises(
        ModelOutputError,
        match=r"The loss mse_loss cannot compare the model's output of shape \[2, 3\] with label 'y' of shape \[2, 5\]",
    ):
        objective(functional.mse_loss).try_out([torch.zeros(2, 3)], {"y": np.zeros((2, 5))})


def test_a_shape_that_torch_would_silently_broadcast_is_refused():
    with pytest.raises(ModelOutputError, match=r"output of shape \[2, 2\] with label 'y' of shape \[2\]"):
        objective(torch.nn.MSELoss()).try_out([torch.zeros(2, 2)], {"y": np.zeros(2)})


def test_a_loss_that_gives_one_value_per_row_is_refused():
    with pytest.raises(ModelOutputError, match=r"returns shape \[2, 1\] .*; it must return one number"):
        objective(lambda output, label: output - label).try_out([torch.zeros(2, 1)], {"y": np.zeros(2)})


def test_a_metric_that_cannot_be_computed_is_named():
    with pytest.raises(ModelOutputError, match="The metric 'accuracy' cannot compare"):
        objective(functional.mse_loss, metrics=[accuracy]).try_out([torch.zeros(2)], {"y": np.zeros(2)})


@pytest.mark.parametrize("kind", [KeyError, ValueError, NotImplementedError])
def test_an_error_in_the_users_code_is_reported_with_its_line_and_without_advice_about_shapes(kind):
    def mine(output, label):
        raise kind("my bug")

    with pytest.raises(ModelOutputError) as caught:
        objective(mine).try_out([torch.zeros(2)], {"y": np.zeros(2)})
    line = mine.__code__.co_firstlineno + 1
    text = f'line {line} of {Path(__file__).name}, in mine: raise kind("my bug")'
    assert str(caught.value).startswith(f"The loss mine raised {kind.__name__}: ")
    assert text in str(caught.value)
    assert "label_shapes" not in str(caught.value)


@pytest.mark.parametrize("parameters", [{"loss": torch.nn.MSELoss}, {"metrics": [torch.nn.MSELoss]}])
def test_a_class_instead_of_an_instance_is_refused(parameters):
    with pytest.raises(ParamError, match=r"holds the class MSELoss; pass an instance such as MSELoss\(\)"):
        objective(**{"loss": functional.mse_loss, **parameters})


def test_the_cause_ends_with_a_full_stop_before_the_advice():
    with pytest.raises(ModelOutputError, match=r"\. Change the model's last layer"):
        objective(functional.l1_loss).try_out([torch.zeros(2, 3)], {"y": np.zeros((2, 5))})


def test_a_class_beyond_the_output_is_refused():
    with pytest.raises(ModelOutputError, match="Target 7 is out of bounds"):
        objective(functional.cross_entropy).try_out([torch.zeros(2, 3)], {"y": np.array([0, 7])})


def test_a_wrong_number_of_outputs_is_refused_with_the_label_names():
    with pytest.raises(ModelOutputError, match=r"returns 2 outputs with the shapes .*, but label_cols has 1: \['y'\]"):
        objective(functional.mse_loss).try_out([torch.zeros(2), torch.zeros(2)], {"y": np.zeros(2)})


@pytest.mark.parametrize("loss", [torch.nn.MSELoss(), functional.mse_loss], ids=["module", "function"])
def test_weights_multiply_the_losses_of_their_rows(loss):
    found = objective(loss, sample_weight_col="w")
    output, columns = torch.tensor([[1.0], [2.0], [3.0]]), {"y": np.zeros(3), "w": np.array([3.0, 0.0, 1.0])}
    value = found.loss([output], found.labels([output], columns), columns)
    assert value.item() == pytest.approx((3 * 1 + 0 * 4 + 1 * 9) / 3)


@pytest.mark.parametrize(
    "loss", [torch.nn.KLDivLoss(reduction="batchmean"), partial(functional.kl_div, reduction="batchmean")]
)
def test_the_divergence_by_rows_is_a_mean_over_rows_even_with_weights(loss):
    output = torch.tensor([[0.2, 0.8], [0.5, 0.5], [0.9, 0.1]]).log()
    columns = {"y": np.array([[0.5, 0.5], [1.0, 0.0], [0.3, 0.7]]), "w": np.array([3.0, 0.0, 1.0])}
    of_rows = functional.kl_div(output, torch.from_numpy(columns["y"]).float(), reduction="none").sum(dim=1)
    plain, weighted = objective(loss), objective(loss, sample_weight_col="w")
    assert plain.loss([output], plain.labels([output], columns), columns).item() == pytest.approx(of_rows.mean().item())
    value = weighted.loss([output], weighted.labels([output], columns), columns)
    assert value.item() == pytest.approx(((3 * of_rows[0] + of_rows[2]) / 3).item())


def test_a_loss_that_has_no_value_per_row_is_refused_with_weights():
    def mean(output, label, reduction="mean"):
        return (output - label).mean()

    found = objective(mean, sample_weight_col="w")
    with pytest.raises(ModelOutputError, match="one value per row"):
        found.try_out([torch.zeros(3, 1)], {"y": np.zeros(3), "w": np.ones(3)})


@pytest.mark.parametrize(
    ("loss", "otherwise"),
    [
        (torch.nn.CrossEntropyLoss(), []),
        (torch.nn.CrossEntropyLoss(weight=torch.ones(3)), ["CrossEntropyLoss"]),
        (torch.nn.NLLLoss(ignore_index=0), ["NLLLoss"]),
        (partial(torch.nn.functional.cross_entropy, weight=torch.ones(3)), ["partial"]),
        (torch.nn.functional.cross_entropy, []),
        (torch.nn.BCEWithLogitsLoss(pos_weight=torch.ones(1)), []),
    ],
)
def test_losses_with_another_divisor_than_the_rows_are_recognized(loss, otherwise):
    kinds = (("int64", (1,)), ("int32", (2,)), ("float32", (2,)))
    scalar, whole, vector = (schema(y=("label", dtype, shape, "array")) for dtype, shape in kinds)
    found = objective_of({"loss": loss, "label_cols": ("y",)})
    assert inexact_losses(found, scalar, own_steps=True) == otherwise
    assert inexact_losses(found, scalar) == inexact_losses(found, whole) == inexact_losses(found, vector) == []
    assert inexact_losses(objective_of({"loss": loss, "label_cols": ("y",), "sample_weight_col": "w"}), vector) == []
