from __future__ import annotations

import io

import numpy as np
import pytest
import torch

from sparkhvd.data.schema.data_schema import ColumnSpec
from sparkhvd.errors import ParamError, SchemaError
from sparkhvd.estimators.torch.inputs import called_in_order, plan_inputs


class Two(torch.nn.Module):
    def __init__(self, embedding=False):
        super().__init__()
        self.layer = torch.nn.Embedding(10, 2) if embedding else torch.nn.Linear(1, 1)

    def forward(self, left, right):
        return left, right


def scalar(name, dtype="float64"):
    return ColumnSpec(name, dtype, (), "feature", "scalar")


def vector(name, width, dtype="float64"):
    return ColumnSpec(name, dtype, (width,), "feature", "array")


def tensors(model, columns, arrays, shapes=None):
    return [part.tensor(arrays, 3) for part in plan_inputs(model, columns, shapes)]


def test_columns_of_a_one_input_model_are_concatenated_in_order():
    arrays = {"a": np.array([1.0, 2, 3]), "b": np.arange(6.0).reshape(3, 2), "c": np.array([7, 8, 9])}
    columns = [scalar("a"), vector("b", 2), scalar("c", "int64")]
    (found,) = tensors(torch.nn.Linear(4, 1), columns, arrays)
    assert found.dtype == torch.float32
    assert found.tolist() == [[1, 0, 1, 7], [2, 2, 3, 8], [3, 4, 5, 9]]
    (planned,) = plan_inputs(torch.nn.Linear(4, 1), columns, None)
    assert planned.tensor({name: array[:0] for name, array in arrays.items()}, 0).shape == (0, 4)


def test_a_compiled_model_has_the_inputs_of_the_original():
    (found,) = plan_inputs(torch.compile(torch.nn.Linear(2, 1), backend="eager"), [scalar("a"), scalar("b")], None)
    assert found.columns == ("a", "b")


def test_one_scalar_column_of_a_one_input_model_has_one_number_per_row():
    (found,) = tensors(torch.nn.Linear(1, 1), [scalar("a")], {"a": np.arange(3.0)})
    assert found.shape == (3, 1)


def test_a_single_array_column_is_passed_unchanged():
    (found,) = tensors(torch.nn.Linear(2, 1), [vector("a", 2)], {"a": np.arange(6.0).reshape(3, 2)})
    assert found.shape == (3, 2)


def test_a_forward_that_takes_only_keyword_arguments_gets_each_column_by_its_name():
    class ByName(torch.nn.Module):
        def forward(self, **inputs):
            return inputs

    model, arrays = ByName(), {"b": np.arange(6.0).reshape(3, 2), "a": np.arange(3.0)}
    inputs = plan_inputs(model, [scalar("a"), vector("b", 2)], None)
    found = called_in_order(model, inputs)(*(part.tensor(arrays, 3) for part in inputs))
    assert {name: list(tensor.shape) for name, tensor in found.items()} == {"a": [3], "b": [3, 2]}


def test_as_many_arguments_as_columns_get_one_column_each():
    arrays = {"a": np.arange(3.0), "b": np.arange(6.0).reshape(3, 2)}
    left, right = tensors(Two(), [scalar("a"), vector("b", 2)], arrays)
    assert (left.shape, right.shape) == ((3,), (3, 2))


def test_input_shapes_reshape_each_column_with_or_without_a_dimension_for_the_rows():
    arrays = {"a": np.arange(12.0).reshape(3, 4), "b": np.arange(3.0)}
    left, right = tensors(Two(), [vector("a", 4), scalar("b")], arrays, [[-1, 1, 2, 2], [1]])
    assert (left.shape, right.shape) == ((3, 1, 2, 2), (3, 1))


def test_integers_stay_integers_only_for_a_model_with_an_embedding():
    columns, arrays = [scalar("a", "int32"), scalar("b")], {"a": np.arange(3, dtype=np.int32), "b": np.arange(3.0)}
    assert [part.dtype for part in tensors(Two(embedding=True), columns, arrays)] == [torch.int64, torch.float32]
    assert [part.dtype for part in tensors(Two(), columns, arrays)] == [torch.float32, torch.float32]


@pytest.mark.filterwarnings("ignore:`?torch.jit:DeprecationWarning")
@pytest.mark.parametrize("saved", [False, True])
def test_integers_stay_integers_for_an_embedding_inside_torchscript_too(saved):
    scripted = torch.jit.script(torch.nn.Sequential(torch.nn.Embedding(10, 2)))
    if saved:
        buffer = io.BytesIO()
        torch.jit.save(scripted, buffer)
        buffer.seek(0)
        scripted = torch.jit.load(buffer)
    large = 2**24 + 1  # float32 cannot represent this number
    (found,) = tensors(scripted, [scalar("a", "int64")], {"a": np.full(3, large)})
    assert (found.dtype, found[0, 0]) == (torch.int64, large)


def test_features_take_the_dtype_of_the_models_parameters():
    (found,) = tensors(torch.nn.Linear(1, 1).double(), [scalar("a", "float32")], {"a": np.zeros(3, np.float32)})
    assert found.dtype == torch.float64


def test_a_column_of_the_right_dtype_and_shape_is_not_copied():
    array = np.zeros((3, 2), np.float32)
    (found,) = tensors(torch.nn.Linear(2, 1), [vector("a", 2, "float32")], {"a": array})
    array[0, 0] = 5
    assert found[0, 0] == 5


def test_a_wrong_number_of_columns_is_refused_with_both_numbers():
    with pytest.raises(ParamError, match=r"forward takes 2 inputs, but feature_cols has 3 columns: \['a', 'b', 'c'\]"):
        plan_inputs(Two(), [scalar("a"), scalar("b"), scalar("c")], None)


def test_a_wrong_number_of_input_shapes_is_refused():
    words = r"input_shapes has 1 shape, but feature_cols has 2 columns: \['a', 'b'\]\. .* or leave input_shapes out"
    with pytest.raises(ParamError, match=words):
        plan_inputs(Two(), [scalar("a"), scalar("b")], [[1]])
    with pytest.raises(ParamError, match="input_shapes has 2 shapes, but feature_cols has 1 column:"):
        plan_inputs(torch.nn.Linear(1, 1), [scalar("a")], [[1], [1]])


def test_an_input_shape_of_another_size_is_refused_before_training():
    with pytest.raises(ParamError, match=r"input_shapes has \[2, 2\] for column 'a', but its rows have shape \[5\]"):
        plan_inputs(torch.nn.Linear(5, 1), [vector("a", 5)], [[2, 2]])


def test_integers_and_floats_do_not_mix_in_the_input_of_an_embedding():
    with pytest.raises(SchemaError, match=r"'a: int64', 'b: float32'.* cannot be concatenated"):
        plan_inputs(torch.nn.Sequential(torch.nn.Embedding(3, 2)), [scalar("a", "int64"), scalar("b")], None)
