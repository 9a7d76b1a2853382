from __future__ import annotations

import numpy as np
import pytest
import torch

from sparkhvd.data.schema.data_schema import ColumnSpec
from sparkhvd.errors import ParamError
from sparkhvd.estimators.params.named_inputs import columns_of, named_inputs
from sparkhvd.estimators.torch.inputs import called_in_order, plan_inputs, taking_inputs_in_order


class Towers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.kinds = torch.nn.Embedding(4, 2)

    def forward(self, kind, picture, rest=None):
        return self.kinds(kind), picture, rest


COLUMNS = [
    ColumnSpec("a", "float64", (), "feature", "scalar"),
    ColumnSpec("b", "float64", (), "feature", "scalar"),
    ColumnSpec("k", "int32", (), "feature", "scalar"),
    ColumnSpec("p", "float32", (4,), "feature", "array"),
]
GIVEN = {"picture": {"columns": "p", "shape": [-1, 1, 2, 2]}, "rest": ["b", "a"], "kind": "k"}


def test_named_inputs_may_have_any_order_shape_and_dtype():
    plan = plan_inputs(Towers(), COLUMNS, None, named_inputs("inputs", GIVEN))
    arrays = {"a": np.array([1.0, 2]), "b": np.array([3.0, 4]), "k": np.array([0, 3], np.int32)}
    arrays["p"] = np.arange(8, dtype=np.float32).reshape(2, 4)
    kind, picture, rest = (part.tensor(arrays, 2) for part in plan)
    assert (kind.dtype, kind.tolist()) == (torch.int64, [0, 3])
    assert picture.shape == (2, 1, 2, 2)
    assert rest.tolist() == [[3, 1], [4, 2]]
    assert columns_of(named_inputs("inputs", GIVEN)) == ("p", "b", "a", "k")
    square = {
        "picture": "p",
        "kind": {"columns": ["a"], "dtype": "int64"},
        "rest": {"columns": ["a", "b"], "shape": [2, 1]},
    }
    plan = plan_inputs(Towers(), COLUMNS, None, named_inputs("inputs", square))
    assert plan[0].tensor(arrays, 2).tolist() == [1, 2]
    assert plan[2].tensor(arrays, 2).shape == (2, 2, 1)


class Keywords(torch.nn.Module):
    def forward(self, first, skipped=7, third=None, *, only, **others):
        return first, skipped, third, only, others


def test_named_inputs_may_be_keyword_only_and_leave_out_arguments_with_defaults():
    model, named = Keywords(), named_inputs("inputs", {"only": "a", "more": "b", "third": "k", "first": "p"})
    plan = plan_inputs(model, COLUMNS, None, named)
    assert [(part.columns, part.keyword) for part in plan] == [
        (("p",), ""),
        (("k",), "third"),
        (("a",), "only"),
        (("b",), "more"),
    ]
    tensors = [torch.tensor([float(index)]) for index in range(4)]
    wanted = (tensors[0], 7, tensors[1], tensors[2], {"more": tensors[3]})
    assert called_in_order(model, plan)(*tensors) == wanted
    with taking_inputs_in_order(model, plan):
        assert model(*tensors) == wanted
    with pytest.raises(ParamError, match="inputs has no column for the model's input 'only'"):
        plan_inputs(model, COLUMNS, None, named_inputs("inputs", {"first": "p"}))


def test_a_struct_stands_for_all_its_fields():
    fields = [ColumnSpec(f"s.{name}", "float64", (), "feature", "scalar") for name in ("u", "v")]
    named = named_inputs("inputs", {"kind": "k", "picture": "p", "rest": ["s", "a"]})
    rest = plan_inputs(Towers(), [*COLUMNS, *fields], None, named)[2]
    arrays = {"a": np.array([1.0]), "s.u": np.array([2.0]), "s.v": np.array([3.0])}
    assert rest.tensor(arrays, 1).tolist() == [[2, 3, 1]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"image": "p"}, r"inputs has the key 'image', but the model's inputs are \['kind', 'picture', 'rest'\]"),
        ({"kind": "k"}, "inputs has no column for the model's input 'picture'"),
        ({"kind": "k", "picture": "q"}, "inputs uses the column 'q', but the feature columns are"),
        ({"kind": {"column": "k"}}, r"inputs\['kind'\]=.* must be a column, a list of columns, or a dict with columns"),
        ({"kind": {"columns": "k", "dtype": "integer!"}}, "dtype a name such as 'int64'"),
        (
            {"kind": {"columns": "k", "dtype": "string"}, "picture": "p"},
            r"inputs\['kind'\] has dtype 'string', which PyTorch does not have",
        ),
        ([], "must be a dict from the model's input names to columns"),
    ],
)
def test_inputs_that_do_not_fit_the_model_are_refused(given, message):
    with pytest.raises(ParamError, match=message):
        plan_inputs(Towers(), COLUMNS, None, named_inputs("inputs", given))


def test_shapes_are_declared_in_one_parameter():
    with pytest.raises(ParamError, match=r"inputs, which sets the shape of each input.*Leave input_shapes out"):
        plan_inputs(Towers(), COLUMNS, [[1]], named_inputs("inputs", GIVEN))
