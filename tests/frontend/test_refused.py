"""What cannot be traced is refused at the user's own line, and the message says what to write instead."""

from __future__ import annotations

import inspect
import math
import warnings

import numpy as np
import pytest
import torch

from attn_engine import errors
from attn_engine.frontend import CustomIO, Definition, build
from tests.support.frontend_tracing import trace

TABLE = torch.rand(4, 8)
VALUES = [1.0, 2.0, 3.0]


def if_on_data(score, b, h, q_idx, kv_idx):
    if score > 0:  # here
        return score
    return -score


def while_on_data(score, b, h, q_idx, kv_idx):
    while score > 0:  # here
        score = score - 1
    return score


def and_on_data(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx and kv_idx > 0  # here


def not_on_data(b, h, q_idx, kv_idx):
    return not (q_idx >= kv_idx)  # here


def chained_comparison(b, h, q_idx, kv_idx):
    return 0 <= q_idx - kv_idx < 8  # here


def python_max(score, b, h, q_idx, kv_idx):
    return max(score, 0.0)  # here


def bool_of_data(b, h, q_idx, kv_idx):
    return bool(q_idx >= kv_idx)  # here


def loop_over_data(score, b, h, q_idx, kv_idx):
    return sum(x for x in score)  # here


def loop_to_data(score, b, h, q_idx, kv_idx):
    for _ in range(q_idx):  # here
        score = score * 0.5
    return score


def length_of_data(score, b, h, q_idx, kv_idx):
    return score / len(score)  # here


def float_of_data(score, b, h, q_idx, kv_idx):
    return score + float(q_idx)  # here


def math_function(score, b, h, q_idx, kv_idx):
    return math.exp(score)  # here


def numpy_function(score, b, h, q_idx, kv_idx):
    return np.exp(score)  # here


def size_of_data(score, b, h, q_idx, kv_idx):
    return score * score.shape[-1] ** -0.5  # here


def item_of_data(score, b, h, q_idx, kv_idx):
    return score.item()  # here


def python_list(score, b, h, q_idx, kv_idx):
    return score * VALUES[h]  # here


def python_dict(score, b, h, q_idx, kv_idx):
    return score * {0: 1.0}[h]  # here


def unknown_function(score, b, h, q_idx, kv_idx):
    return torch.lgamma(score)  # here


def unknown_method(score, b, h, q_idx, kv_idx):
    return score.reshape(1)  # here


def detached(score, b, h, q_idx, kv_idx):
    return score.detach()  # here


def half_cast(score, b, h, q_idx, kv_idx):
    return score.to(torch.float16)  # here


def matmul(score, b, h, q_idx, kv_idx):
    return score @ score  # here


def write_in_place(score, b, h, q_idx, kv_idx):
    score.add_(1)  # here
    return score


def torch_in_place(score, b, h, q_idx, kv_idx):
    torch.relu_(score)  # here
    return score


def write_into_capture(score, b, h, q_idx, kv_idx):
    TABLE[h, q_idx] = 0.0  # here
    return score


def add_into_capture(score, b, h, q_idx, kv_idx):
    TABLE.add_(score)  # here
    return score


def count_calls(score, b, h, q_idx, kv_idx):
    TABLE.add_(1)  # here
    return score


def stopped_gradient(score, b, h, q_idx, kv_idx):
    with torch.no_grad():
        return torch.exp(score)  # here


def torch_max_over_a_dim(score, b, h, q_idx, kv_idx):
    return torch.max(score, 0)  # here


def write_into_score(score, b, h, q_idx, kv_idx):
    score[0] = 1.0  # here
    return score


def any_in_mask(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx).any()  # here


def sum_in_score(score, b, h, q_idx, kv_idx):
    return score / score.sum()  # here


def softmax_in_score(score, b, h, q_idx, kv_idx):
    return torch.softmax(score, dim=-1)  # here


def max_in_score(score, b, h, q_idx, kv_idx):
    return score - score.max()  # here


def row_of_capture(score, b, h, q_idx, kv_idx):
    return score + TABLE[h]  # here


def slice_of_capture(score, b, h, q_idx, kv_idx):
    return score + TABLE[h, 1:]  # here


def whole_capture(score, b, h, q_idx, kv_idx):
    return score + TABLE  # here


def float_index(score, b, h, q_idx, kv_idx):
    return score + TABLE[h, q_idx / 2]  # here


def too_many_indices(score, b, h, q_idx, kv_idx):
    return score + TABLE[b, h, q_idx]  # here


def string_operand(score, b, h, q_idx, kv_idx):
    return score + "1"  # here


def none_operand(score, b, h, q_idx, kv_idx):
    return score.maximum(None)  # here


def float_and(b, h, q_idx, kv_idx):
    return (q_idx * 1.0) & True  # here


def number_as_condition(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx, score, 0.0)  # here


def too_few_arguments(score, b, h, q_idx, kv_idx):
    return score.maximum()  # here


def huge_integer(b, h, q_idx, kv_idx):
    return q_idx < 2**63  # here


def integer_power(score, b, h, q_idx, kv_idx):
    return score * q_idx**kv_idx  # here


def returns_none(score, b, h, q_idx, kv_idx):  # here
    score = score * 2


def returns_tuple(score, b, h, q_idx, kv_idx):  # here
    return score, score


def returns_condition(score, b, h, q_idx, kv_idx):  # here
    return score > 0


def mask_returns_number(b, h, q_idx, kv_idx):  # here
    return q_idx - kv_idx


def mask_returns_none(b, h, q_idx, kv_idx):  # here
    pass


def wrong_signature(score, q_idx, kv_idx):  # here
    return score


REFUSED = [
    (if_on_data, errors.ControlFlowError, "torch.where"),
    (while_on_data, errors.ControlFlowError, "torch.where"),
    (and_on_data, errors.ControlFlowError, "&"),
    (not_on_data, errors.ControlFlowError, "~"),
    (chained_comparison, errors.ControlFlowError, "(a <= x) & (x < b)"),
    (python_max, errors.ControlFlowError, "torch.maximum"),
    (bool_of_data, errors.ControlFlowError, "torch.where"),
    (loop_over_data, errors.LoopError, "one element"),
    (loop_to_data, errors.ConcreteValueError, "Python needs the number"),
    (length_of_data, errors.LoopError, "torch.ones_like"),
    (float_of_data, errors.ConcreteValueError, ".float()"),
    (math_function, errors.ConcreteValueError, "torch.exp"),
    (numpy_function, errors.UnsupportedFunctionError, "torch.exp"),
    (size_of_data, errors.LoopError, "closes over"),
    (item_of_data, errors.ConcreteValueError, ".float()"),
    (python_list, errors.ConcreteValueError, "torch.tensor(values)"),
    (python_dict, errors.ConcreteValueError, "tensor"),
    (unknown_function, errors.UnsupportedFunctionError, "'lgamma'"),
    (unknown_method, errors.UnsupportedFunctionError, ".reshape"),
    (detached, errors.UnsupportedFunctionError, "detach the tensors before"),
    (half_cast, errors.UnsupportedFunctionError, "torch.float16"),
    (matmul, errors.UnsupportedFunctionError, "a * b"),
    (write_in_place, errors.InPlaceWriteError, "x = x.add(...)"),
    (torch_in_place, errors.InPlaceWriteError, "relu_"),
    (write_into_capture, errors.InPlaceWriteError, "torch.where"),
    (add_into_capture, errors.InPlaceWriteError, "add_"),
    (count_calls, errors.InPlaceWriteError, "'TABLE' while the function is traced"),
    (stopped_gradient, errors.UnsupportedFunctionError, "leave torch.no_grad() out"),
    (torch_max_over_a_dim, errors.ReductionError, "torch.maximum"),
    (write_into_score, errors.InPlaceWriteError, "torch.where"),
    (any_in_mask, errors.ReductionError, "'any' in mask_mod"),
    (sum_in_score, errors.ReductionError, "'sum' in score_mod"),
    (softmax_in_score, errors.ReductionError, "row function"),
    (max_in_score, errors.ReductionError, "torch.maximum"),
    (row_of_capture, errors.CaptureIndexError, "torch.dot(a, b)"),
    (slice_of_capture, errors.CaptureIndexError, "torch.dot(a, b)"),
    (whole_capture, errors.CaptureIndexError, "TABLE[q_idx, kv_idx]"),
    (float_index, errors.CaptureIndexError, "x.long()"),
    (too_many_indices, errors.CaptureIndexError, "TABLE[b, h]"),
    (string_operand, errors.OperandError, "a str"),
    (none_operand, errors.OperandError, "None"),
    (float_and, errors.OperandError, "compare first"),
    (number_as_condition, errors.OperandError, "x != 0"),
    (too_few_arguments, errors.OperandError, "maximum"),
    (huge_integer, errors.IntegerOverflowError, "64 bits"),
    (integer_power, errors.OperandError, ".float()"),
    (returns_none, errors.ReturnValueError, "returns None"),
    (returns_tuple, errors.ReturnValueError, "a tuple"),
    (returns_condition, errors.ReturnValueError, "mask_mod"),
    (mask_returns_number, errors.ReturnValueError, "q_idx >= kv_idx"),
    (mask_returns_none, errors.ReturnValueError, "returns None"),
    (wrong_signature, errors.SignatureError, "score_mod(score, b, h, q_idx, kv_idx)"),
]


def _marked_line(function) -> tuple[int, str]:
    lines, first = inspect.getsourcelines(function)
    offset = next(i for i, line in enumerate(lines) if "# here" in line)
    return first + offset, lines[offset].strip()


def _definition(function) -> Definition:
    return (
        Definition(score_mod=function)
        if "score" in inspect.signature(function).parameters
        else Definition(mask_mod=function)
    )


@pytest.mark.parametrize(("function", "error", "text"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_refused_with_the_line_and_the_fix(function, error, text):
    with pytest.raises(error) as caught:
        trace(_definition(function))
    number, line = _marked_line(function)
    assert type(caught.value) is error
    assert f"{__file__}:{number}\n    {line}" in str(caught.value)
    assert text in str(caught.value)


ROWS = [
    (lambda s: torch.softmax(s, -1, dtype=torch.float64), errors.ReductionError, "float32"),
    (lambda s: s / s.sum(dtype=torch.float16), errors.ReductionError, "float32"),
    (lambda s: s.sum(dim=1), errors.ReductionError, "dim=-1"),
    (lambda s: s - s.amax().sum(), errors.ReductionError, "number per row already"),
    (lambda s: s.max(0), errors.ReductionError, "torch.maximum"),
    (lambda s: s * s.max(dim=-1).indices.float(), errors.ReductionError, "values only"),
    (lambda s: s.cumsum(-1), errors.ReductionError, "reduce with sum"),
    (lambda s: s / s.size(-1), errors.LoopError, "torch.ones_like(s).sum()"),
    (lambda s: s / s.numel(), errors.LoopError, "torch.ones_like(s).sum()"),
    (lambda s: torch.linalg.vector_norm(s, ord=3), errors.OperandError, "1, 2 or inf"),
    (lambda s: s.get_reduce("prod"), errors.ReductionError, "abssum"),
    (lambda s: s.sum(), errors.ReturnValueError, "per row"),
    (lambda s: s > s.mean(), errors.ReturnValueError, "condition"),
    (lambda s: None, errors.ReturnValueError, "None"),
    (lambda s, t: s, errors.SignatureError, "row(s)"),
]


@pytest.mark.parametrize(("row", "error", "text"), ROWS)
def test_refused_rows(row, error, text):
    with pytest.raises(error) as caught:
        trace(Definition(row=row))
    assert text in str(caught.value)
    assert "test_refused.py" in str(caught.value)


def test_a_value_must_not_leave_its_function():
    kept = []

    def keeping(score, b, h, q_idx, kv_idx):
        kept.append(score)
        return score

    with pytest.raises(errors.LeakedValueError, match="score_mod"):
        trace(Definition(score_mod=keeping, mask_mod=lambda b, h, q, kv: kept[0] > 0))
    with pytest.raises(errors.LeakedValueError):
        torch.exp(kept[0])


def test_complex_captures_are_refused():
    table = torch.zeros(4, dtype=torch.complex64)
    with pytest.raises(errors.CaptureTypeError, match="'table' is torch\\.complex64"):
        trace(Definition(score_mod=lambda s, b, h, q, kv: s + table[h]))


@pytest.mark.parametrize(
    ("shapes", "tensors", "text"),
    [
        ({"bias": ("heads",)}, {}, "not given"),
        ({}, {"bias": torch.zeros(2)}, "not declared"),
        ({"bias": ("heads",)}, {"bias": torch.zeros(2, 2)}, "declared is"),
        ({"bias": (1,)}, {"bias": torch.zeros(2)}, "declared is"),
    ],
)
def test_custom_inputs_must_fit_their_declaration(shapes, tensors, text):
    with pytest.raises(errors.CustomInputError, match=text):
        build(Definition(custom_io=CustomIO(shapes)), dtype=torch.float16, head_dim=64, head_dim_v=64, custom=tensors)


def test_unknown_dimensions_and_undeclared_names():
    with pytest.raises(errors.CustomInputError, match="seq_len_kv"):
        CustomIO({"bias": ("batch", "head")})
    with pytest.raises(errors.CustomInputError, match="'scale' is not declared"):
        trace(Definition(score_mod=lambda s, inputs, b, h, q, kv: s * inputs["scale"]))


def test_a_user_error_stays_itself():
    def broken(score, b, h, q_idx, kv_idx):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), warnings.catch_warnings():
        trace(Definition(score_mod=broken))
