"""Mistakes that users make, in each kind of function: each is an error of ours, at the user's line, that says what to write."""

import copy
import inspect
import linecache
import math

import numpy as np
import pytest
import torch

import attn_engine
from attn_engine import LinearAttentionEngine, OnlineFunc, SymbolScalar, Var, errors, meta_tensor
from attn_engine.flex import create_block_mask, flex_attention
from attn_engine.frontend import Definition
from attn_engine.frontend.source import is_user_file
from tests.support.frontend_tracing import trace

X = torch.randn(1, 4, 8, 16)
NAMES = {
    "np": np, "torch": torch, "math": math, "F": torch.nn.functional, "json": __import__("json"),
    "statistics": __import__("statistics"), "array": np.arange(8.0), "integers": np.arange(8), "table": np.ones((8, 8)),
    "values": [1.0, 2.0, 3.0, 4.0], "t": torch.rand(4), "pair": torch.rand(8, 8),
}  # fmt: skip


def written(parameters, body):
    """A function of one line whose source is known, as of a file."""
    text = f"def function({parameters}):\n    return {body}\n"
    file = f"/mistakes/{abs(hash(text))}.py"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names = dict(NAMES, __name__="mistakes")
    exec(compile(text, file, "exec"), names)
    return names["function"]


SCORE = "s, b, h, q, kv"
NUMBER, NUMPY, INDEX = "torch.clamp(x, min=a, max=b)", "torch.where", "torch.from_numpy(array)"
LIST, FORMAT = "torch.tensor(values)", "a format"
MISTAKES = [
    ("torch.minimum(s, 3)", errors.OperandError, NUMBER),
    ("torch.maximum(0, s)", errors.OperandError, NUMBER),
    ("torch.fmin(s, 3.0)", errors.OperandError, NUMBER),
    ("torch.max(s, 0.0)", errors.OperandError, NUMBER),
    ("s + torch.gt(3, s)", errors.OperandError, "an operator"),
    ("torch.where(torch.logical_and(q > 0, True), s, 0.0)", errors.OperandError, "x & y"),
    ("torch.where(True, s, 0.0)", errors.OperandError, "torch.tensor(3.0)"),
    ("s * array[h]", errors.ConcreteValueError, INDEX),
    ("s * integers[q - kv]", errors.ConcreteValueError, INDEX),
    ("s * table[h, q]", errors.ConcreteValueError, INDEX),
    ("s * table[h][q]", errors.ConcreteValueError, INDEX),
    ("s * array[:h].sum()", errors.ConcreteValueError, LIST),
    ("np.take(array, h) * s", errors.ConcreteValueError, INDEX),
    ("np.float32(s)", errors.ConcreteValueError, INDEX),
    ("np.array([s, s]).sum()", errors.ConcreteValueError, INDEX),
    ("np.where(q > kv, s, 0.0)", errors.UnsupportedFunctionError, NUMPY),
    ("np.clip(s, -1, 1)", errors.UnsupportedFunctionError, NUMPY),
    ("np.mean(s)", errors.UnsupportedFunctionError, NUMPY),
    ("np.linalg.norm(s)", errors.UnsupportedFunctionError, NUMPY),
    ("np.exp(s)", errors.UnsupportedFunctionError, "torch.exp"),
    ("s * values[h]", errors.ConcreteValueError, LIST),
    ("s * (1.0, 2.0)[h]", errors.ConcreteValueError, LIST),
    ("s * {0: 1.0}[h]", errors.ConcreteValueError, "a tensor outside"),
    ("s * sum(values[:h])", errors.ConcreteValueError, LIST),
    ("s if s > 0 else -s", errors.ControlFlowError, "torch.where"),
    ("s if h in [1, 2] else 0.0", errors.ControlFlowError, "torch.where"),
    ("max(s, 0.0)", errors.ControlFlowError, "torch.maximum"),
    ("sum(s for _ in range(q))", errors.ConcreteValueError, LIST),
    ("math.exp(s)", errors.ConcreteValueError, "torch.exp"),
    ("float(s)", errors.ConcreteValueError, "x.float()"),
    ("s.item()", errors.ConcreteValueError, "x.float()"),
    ('s * float(f"{s:.2f}")', errors.ConcreteValueError, FORMAT),
    ('s * float("{:.2f}".format(s))', errors.ConcreteValueError, FORMAT),
    ('s * float("%.2f" % s)', errors.ConcreteValueError, "x.float()"),
    ("s * float(repr(s))", errors.OperandError, "not known yet"),
    ("json.dumps([s])", errors.OperandError, "not known yet"),
    ("statistics.mean([s, s])", errors.UnsupportedFunctionError, "elementwise"),
    ("torch.vmap(lambda x: x)(s)", errors.OperandError, "not known yet"),
    ("torch.cond(q > kv, lambda x: x, lambda x: -x, (s,))", errors.OperandError, "not known yet"),
    ("torch.func.grad(lambda x: x * x)(s)", errors.OperandError, "takes tensors only"),
    ("s(2)", errors.OperandError, "a traced value is not callable"),
    ("s.type()", errors.UnsupportedFunctionError, "x.dtype"),
    ("torch.ones(q, 2)", errors.OperandError, "not known yet"),
]


def refused(call, function, error, text):
    with pytest.raises(error) as caught:
        call(function)
    message, file = str(caught.value), function.__code__.co_filename
    assert type(caught.value) is error, message
    assert f"{file}:2\n    {linecache.getline(file, 2).strip()}" in message
    assert text in message


@pytest.mark.parametrize(("body", "error", "text"), MISTAKES)
def test_in_scores(body, error, text):
    refused(lambda f: attn_engine.attention(X, X, X, score_mod=f), written(SCORE, body), error, text)
    refused(lambda f: flex_attention(X, X, X, score_mod=f), written(SCORE, body), error, text)


MASKS = [
    ("torch.minimum(q, 3) > kv", errors.OperandError, NUMBER),
    ("integers[q] >= integers[kv]", errors.ConcreteValueError, INDEX),
    ("np.where(q > kv, True, False)", errors.UnsupportedFunctionError, NUMPY),
    ("np.logical_and(q > kv, kv > 0)", errors.UnsupportedFunctionError, "torch.logical_and"),
    ("np.tril(np.ones((8, 8)))[q, kv]", errors.ConcreteValueError, INDEX),
    ("values[h] > q", errors.ConcreteValueError, LIST),
    ("q >= kv and kv > 0", errors.ControlFlowError, "&"),
    ("q in range(3)", errors.ControlFlowError, "torch.where"),
    ("h in {0, 1}", errors.ConcreteValueError, "a tensor outside"),
]


@pytest.mark.parametrize(("body", "error", "text"), MASKS)
def test_in_masks(body, error, text):
    def flex(function):
        return flex_attention(X, X, X, block_mask=create_block_mask(function, None, None, 8, 8))

    refused(lambda f: attn_engine.attention(X, X, X, mask_mod=f), written("b, h, q, kv", body), error, text)
    refused(flex, written("b, h, q, kv", body), error, text)


ROWS = [
    ("torch.minimum(s, 3)", errors.OperandError, NUMBER),
    ("torch.maximum(s, 0.0) / s.sum()", errors.OperandError, NUMBER),
    ("np.exp(s - np.max(s))", errors.UnsupportedFunctionError, NUMPY),
    ("s / np.sum(s)", errors.UnsupportedFunctionError, NUMPY),
    ("s * array", errors.OperandError, "a ndarray"),
    ("s / s.sum().item()", errors.ConcreteValueError, "x.float()"),
    ('s * float(f"{s.sum():.2f}")', errors.ConcreteValueError, FORMAT),
    ("s - max(s)", errors.LoopError, "one element"),
    ("torch.max(s, 0.0)", errors.OperandError, NUMBER),
]


@pytest.mark.parametrize(("body", "error", "text"), ROWS)
def test_in_rows(body, error, text):
    refused(lambda f: attn_engine.attention(X, X, X, row=f), written("s", body), error, text)


ELEMENTS = [
    ("torch.minimum(x, 3)", errors.OperandError, NUMBER),
    ("x * array[channel]", errors.ConcreteValueError, INDEX),
    ("x * values[b]", errors.ConcreteValueError, LIST),
    ("x * math.cos(pos)", errors.ConcreteValueError, "torch.exp"),
    ("np.where(channel < 8, x, -x)", errors.UnsupportedFunctionError, NUMPY),
]


@pytest.mark.parametrize(("body", "error", "text"), ELEMENTS)
@pytest.mark.parametrize("name", ["query_mod", "key_mod", "value_mod"])
def test_in_mods_of_elements(name, body, error, text):
    function = written("x, b, h, pos, channel", body)
    refused(lambda f: attn_engine.compile(**{name: f})(X, X, X), function, error, text)


STEPS = [
    ('torch.minimum(s, 3), {"m": r["m"]}, 1.0', errors.OperandError, NUMBER),
    ('s, {"m": torch.maximum(r["m"], 0)}, 1.0', errors.OperandError, NUMBER),
    ('s * array[q], {"m": r["m"]}, 1.0', errors.ConcreteValueError, INDEX),
    ('s, {"m": r["n"]}, 1.0', errors.OnlineFuncError, "named 'n', but m"),
    ('np.where(s > 0, s, 0), {"m": r["m"]}, 1.0', errors.UnsupportedFunctionError, NUMPY),
]
ENDS = [
    ("np.exp(o), {}", errors.OperandError, "not known yet"),
    ("torch.minimum(o, 3), {}", errors.OperandError, NUMBER),
    ("o / array[q], {}", errors.ConcreteValueError, INDEX),
    ('o / r["n"], {}', errors.OnlineFuncError, "named 'n', but m"),
]


def online(step, end):
    class Online(OnlineFunc):
        online_fwd, online_fwd_epilogue = staticmethod(step), staticmethod(end)

        def __init__(self):
            super().__init__({"m": SymbolScalar("m", Var("-inf"))}, {})

    return Online()


@pytest.mark.parametrize(("body", "error", "text"), STEPS)
def test_in_online_steps(body, error, text):
    end = written("o, r, b, h, q", "o, {}")
    function = written("s, r, b, h, q", body)
    refused(lambda f: attn_engine.attention(X, X, X, row=online(f, end)), function, error, text)


@pytest.mark.parametrize(("body", "error", "text"), ENDS)
def test_in_online_epilogues(body, error, text):
    step = written("s, r, b, h, q", 's, {"m": r["m"].max(s.get_reduce("max"))}, 1.0')
    function = written("o, r, b, h, q", body)
    refused(lambda f: attn_engine.attention(X, X, X, row=online(step, f)), function, error, text)


META = tuple(meta_tensor(1, 4, 8, 16, dtype=torch.float32) for _ in "qkv")
OPERANDS = [
    ("torch.minimum(x, 3)", errors.OperandError, NUMBER),
    ("x if x > 0 else -x", errors.ControlFlowError, "torch.where"),
    ("math.exp(x)", errors.ConcreteValueError, "torch.exp"),
    ("float(x)", errors.ConcreteValueError, "x.float()"),
    ("x.item()", errors.ConcreteValueError, "x.float()"),
    ("values[x]", errors.ConcreteValueError, LIST),
    ("{0: 1}[x]", errors.ConcreteValueError, "a tensor outside"),
    ("array[x]", errors.ConcreteValueError, INDEX),
    ('x * float(f"{x:.2f}")', errors.ConcreteValueError, FORMAT),
    ("sum(x for _ in range(x))", errors.ConcreteValueError, LIST),
]


@pytest.mark.parametrize(("body", "error", "text"), OPERANDS)
@pytest.mark.parametrize("name", ["q_mod", "k_mod", "v_mod", "decay_mod"])
def test_in_mods_of_recurrences(name, body, error, text):
    function = written("x", body)
    decay = -torch.rand(1, 4, 8)
    refused(lambda f: LinearAttentionEngine(META, **{name: f})(X, X, X, decay), function, error, text)


@pytest.mark.parametrize(
    ("body", "text"), [("None", "returns None"), ("(x, x)", "a tuple"), ("np.where(x > 0, x, 0)", "a ndarray")]
)
def test_results_of_mods_of_recurrences(body, text):
    with pytest.raises(errors.ReturnValueError, match=text) as caught:
        LinearAttentionEngine(META, k_mod=written("x", body))(X, X, X)
    assert "def function(x):" in str(caught.value)


def test_mods_of_recurrences_do_not_write_into_their_operand():
    k = X.clone()
    with pytest.raises(errors.InPlaceWriteError, match="k_mod has written"):
        LinearAttentionEngine(META, k_mod=written("x", "x.mul_(2)"))(X, k, X)


def test_errors_of_torch_in_mods_of_recurrences_stay_themselves():
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        LinearAttentionEngine(META, k_mod=written("x", "x.view(3)"))(X, X, X)


def test_whole_tensors_are_not_returned():
    for kind, parameters in (("score_mod", SCORE), ("mask_mod", "b, h, q, kv")):
        with pytest.raises(errors.ReturnValueError, match=r"of shape \(8, 8\)") as caught:
            trace(Definition(**{kind: written(parameters, "pair > 0")}))
        assert f"def function({parameters}):" in str(caught.value)


def helper(x):
    return x


def raised(score):
    raise TypeError("mine")


class Made:
    def __init__(self, x):
        self.x = x

    def method(self):
        return self.x


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (lambda s, b, h, q, kv: raised(s), TypeError, "mine"),
        (lambda s, b, h, q, kv: helper(s, 1), TypeError, "takes 1 positional argument but 2"),
        (lambda s, b, h, q, kv: Made(s, 1), TypeError, "takes 2 positional arguments but 3"),
        (lambda s, b, h, q, kv: Made(s).method(1) * s, TypeError, "takes 1 positional argument but 2"),
        (lambda s, b, h, q, kv: s * (NAMES["pair"] @ torch.ones(3))[q], RuntimeError, "size mismatch"),
        (lambda s, b, h, q, kv: s * NAMES["none"][h], KeyError, "none"),
        (lambda s, b, h, q, kv: s * torch.sqrt(64), TypeError, "must be Tensor"),
    ],
)
def test_what_users_raise_and_what_has_no_traced_value_stays_itself(function, error, text):
    with pytest.raises(error, match=text):
        trace(Definition(score_mod=function))


def test_what_was_raised_is_the_cause():
    with pytest.raises(errors.OperandError) as caught:
        trace(Definition(score_mod=lambda s, b, h, q, kv: torch.minimum(s, 3)))
    assert isinstance(caught.value.__cause__, TypeError)


def test_without_source_the_values_of_the_function_tell():
    names = {"torch": torch}
    exec(f"def function({SCORE}):\n    return torch.minimum(s, 3)", names)
    with pytest.raises(errors.OperandError, match="this line raises TypeError"):
        trace(Definition(score_mod=names["function"]))


def test_files_of_libraries_are_not_the_users():
    import statistics

    for module in (statistics, np, np.linalg, torch.nn.functional, errors):
        assert not is_user_file(inspect.getfile(module))
    assert is_user_file(inspect.getfile(pytest))
    assert is_user_file(__file__)


def test_powers_of_three_and_copies_are_taken():
    score_mod = written(SCORE, "pow(q, 2, 3) * s")
    expected = written(SCORE, "((q ** 2) % 3) * s")
    torch.testing.assert_close(*(attn_engine.attention(X, X, X, score_mod=f) for f in (score_mod, expected)))
    copied = attn_engine.attention(X, X, X, score_mod=lambda s, b, h, q, kv: copy.deepcopy(s) * 2)
    torch.testing.assert_close(copied, attn_engine.attention(X, X, X, score_mod=lambda s, b, h, q, kv: s * 2))
    typed = attn_engine.attention(X, X, X, score_mod=lambda s, b, h, q, kv: s * q.type(torch.float32))
    torch.testing.assert_close(typed, attn_engine.attention(X, X, X, score_mod=lambda s, b, h, q, kv: s * q))
