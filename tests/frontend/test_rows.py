"""Row functions: what they reduce to, softmax recognised, and OnlineFunc read back as the function it computes."""

from __future__ import annotations

import pytest
import torch

import attn_engine
from attn_engine import errors, library
from attn_engine.frontend import Definition, OnlineFunc, SymbolScalar, Var
from attn_engine.interpreters.attn import run_attention
from tests.support.frontend_tracing import region_ops, trace

B, H, SQ, SKV, D = 2, 2, 5, 7, 4


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, n, D, dtype=torch.float64, generator=generator) for n in (SQ, SKV, SKV)]


ROWS = {
    "softmax": (library.softmax, lambda s: torch.softmax(s, -1)),
    "softmax1": (library.softmax1, lambda s: s.exp() / (1 + s.exp().sum(-1, keepdim=True))),
    "sigmoid": (library.sigmoid, torch.sigmoid),
    "relu": (library.relu, torch.relu),
    "identity": (library.identity, lambda s: s),
    "retention": (library.retention, lambda s: s / s.abs().sum(-1, keepdim=True).clamp(min=1)),
    "cosine": (library.cosine, lambda s: s / s.norm(dim=-1, keepdim=True)),
    "torch.softmax": (lambda s: torch.softmax(s, -1), lambda s: torch.softmax(s, -1)),
    "F.softmax": (lambda s: torch.nn.functional.softmax(s, dim=-1), lambda s: torch.softmax(s, -1)),
    "log_softmax": (lambda s: torch.log_softmax(s, dim=-1), lambda s: torch.log_softmax(s, -1)),
    "logsumexp": (lambda s: torch.exp(s - torch.logsumexp(s, -1, keepdim=True)), lambda s: torch.softmax(s, -1)),
    "mean": (lambda s: s - s.mean(), lambda s: s - s.mean(-1, keepdim=True)),
    "min": (lambda s: s - s.min(), lambda s: s - s.amin(-1, keepdim=True)),
    "amin": (lambda s: s - torch.amin(s, dim=-1), lambda s: s - s.amin(-1, keepdim=True)),
    "max dim": (lambda s: s - s.max(dim=-1, keepdim=True).values, lambda s: s - s.amax(-1, keepdim=True)),
    "max dim unpacked": (lambda s: s - torch.max(s, -1)[0], lambda s: s - s.amax(-1, keepdim=True)),
    "norm 1": (lambda s: s / s.norm(p=1, dim=-1), lambda s: s / s.abs().sum(-1, keepdim=True)),
    "norm inf": (
        lambda s: s / torch.linalg.vector_norm(s, ord=float("inf"), dim=-1),
        lambda s: s / s.abs().amax(-1, keepdim=True),
    ),
    "normalize": (
        lambda s: torch.nn.functional.normalize(s, dim=-1),
        lambda s: torch.nn.functional.normalize(s, dim=-1),
    ),
    "any": (
        lambda s: torch.where((s > 0.9).any(), s, -s),
        lambda s: torch.where((s > 0.9).any(-1, keepdim=True), s, -s),
    ),
    "all": (lambda s: s * torch.all(s > -0.4), lambda s: s * torch.all(s > -0.4, -1, keepdim=True)),
    "count_nonzero": (
        lambda s: s / (1 + torch.count_nonzero(s > 0)),
        lambda s: s / (1 + torch.count_nonzero(s > 0, -1)).unsqueeze(-1),
    ),
    "count": (lambda s: torch.ones_like(s) / torch.ones_like(s).sum(), lambda s: torch.full_like(s, 1 / SKV)),
    "get_reduce": (
        lambda s: s / (s.get_reduce("abssum") + s.get_reduce("max") - s.get_reduce("min") + s.get_reduce("sum")),
        lambda s: s / (s.abs().sum(-1) + s.amax(-1) - s.amin(-1) + s.sum(-1)).unsqueeze(-1),
    ),
    "indices": (lambda s, b, h, q_idx: s * (q_idx + 1) + h, lambda s: s * torch.arange(1, SQ + 1).view(-1, 1) + HEADS),
    "key index": (lambda s, b, h, q_idx, kv_idx: s * kv_idx, lambda s: s * torch.arange(SKV)),
    "none": (None, lambda s: torch.softmax(s, -1)),
}
HEADS = torch.arange(H).view(-1, 1, 1)


@pytest.mark.parametrize("name", ROWS)
def test_rows_compute_what_torch_computes(name: str):
    row, reference = ROWS[name]
    q, k, v = inputs()
    traced = trace(Definition(row=row), head_dim=D, head_dim_v=D)
    (o,) = run_attention(traced.module, q, k, v, 0.5)
    torch.testing.assert_close(o, reference(q @ k.transpose(-1, -2) * 0.5) @ v)


NORMS = {
    "norm": (lambda x: x / (x.norm(dim=-1) + 0.1), lambda x: x / (x.norm(dim=-1, keepdim=True) + 0.1)),
    "std": (lambda x: x / (x.std() + 0.1), lambda x: x / (x.std(-1, keepdim=True) + 0.1)),
    "normalize": (lambda x: torch.nn.functional.normalize(x, dim=-1),) * 2,
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_zero_have_gradients_of_zero(name: str):
    mod, reference = NORMS[name]
    q, k, v = (x.float().requires_grad_() for x in inputs())
    with torch.no_grad():
        q[0, 0, 1] = 0.0
    o = attn_engine.compile(query_mod=mod, row=library.identity, backend="cpu")(q, k, v)
    expected = reference(q) @ k.mT @ v / D**0.5
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)
    (found,), (wanted,) = (torch.autograd.grad(x.sum(), q) for x in (o, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_ties_are_those_of_the_function_that_was_written():
    assert "attn.row_reduce max %s ties split" in region_ops(trace(Definition(row=lambda s: s - s.amax())), "row")[0]
    assert "max %s ties split" in region_ops(trace(Definition(row=lambda s: s - s.max())), "row")[0]
    assert "max %s ties split" in region_ops(trace(Definition(row=lambda s: s - s.get_reduce("max"))), "row")[0]
    assert "max %s ties first" in region_ops(trace(Definition(row=lambda s: s - s.max(dim=-1).values)), "row")[0]
    assert "min %s ties first" in region_ops(trace(Definition(row=lambda s: s - torch.min(s, -1)[0])), "row")[0]


def test_max_of_another_value_is_elementwise():
    assert region_ops(trace(Definition(row=lambda s: s.max(0.0))), "row") == [
        "%0 = arith.constant 0.000000e+00",
        "%1 = arith.maximumf %s, %0",
        "attn.yield %1",
    ]


SINKS = torch.tensor([0.5, -1.0])


def sink(s, b, h, q_idx):
    m = torch.maximum(s.amax(), SINKS[h])
    e = torch.exp(s - m)
    return e / (e.sum() + torch.exp(SINKS[h] - m))


def base_two(s):
    t = s * 1.4426950408889634
    e = torch.exp2(t - t.amax())
    return e / e.sum()


def guarded(s):
    m = s.amax()
    e = torch.exp(s - torch.where(torch.isinf(m), 0.0, m))
    return torch.where(m == -float("inf"), 0.0, e * (1 / e.sum()))


@pytest.mark.parametrize(
    "row", [None, library.softmax1, sink, base_two, guarded, lambda s: torch.softmax(s, -1), lambda s: torch.exp(s)]
)
def test_lse_of_softmax_like_rows(row):
    q, k, v = inputs()
    traced = trace(Definition(row=row, mask_mod=library.causal), head_dim=D, head_dim_v=D, return_lse=True)
    assert traced.has_lse
    _, lse = run_attention(traced.module, q, k, v, 0.5, traced.captures)
    visible = torch.arange(SQ).view(-1, 1) >= torch.arange(SKV)
    scores = (q @ k.transpose(-1, -2) * 0.5).masked_fill(~visible, -float("inf"))
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1))


@pytest.mark.parametrize(
    "row",
    [
        library.relu,
        library.sigmoid,
        library.retention,
        library.identity,
        lambda s: torch.exp(2 * s),
        lambda s: torch.exp(s * s),
        lambda s: torch.exp2(s - s.amax()),
        lambda s: torch.exp(s - s.amax()) * s,
        lambda s: torch.exp(s - s.amax()) + 1.0,
        lambda s: 1.0 / torch.exp(s),
        lambda s: torch.exp(s.amax() - s),
        lambda s: torch.where(s > 0, torch.exp(s), 0.0),
        lambda s: torch.relu(torch.softmax(s, -1) - 0.1),
        lambda s, b, h, q, kv: torch.exp(s - kv),
    ],
)
def test_lse_of_other_rows_is_refused(row):
    with pytest.raises(errors.LseError, match="no softmax"):
        trace(Definition(row=row), return_lse=True)


class OnlineSoftmax(OnlineFunc):
    def __init__(self):
        super().__init__(
            {"m": SymbolScalar("m", Var("-inf")), "r": SymbolScalar("r", Var("0.0"))},
            {"lse": SymbolScalar("lse", Var("0.0"))},
        )

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        m, r = online_rowscales["m"], online_rowscales["r"]
        m_new = m.max(scores.get_reduce("max"))
        scale_tmp = (m - m_new).exp()
        r = r * scale_tmp
        scores = (scores - m_new).exp()
        r = r + scores.get_reduce("sum")
        return scores, {"m": m_new, "r": r}, scale_tmp

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        o_new = o / online_rowscales["r"]
        return o_new, {"lse": online_rowscales["r"].log() + online_rowscales["m"]}

    @staticmethod
    def forward(scores, final_rowscales, b, h, q_idx, kv_idx):
        return (scores - final_rowscales["lse"]).exp()

    @staticmethod
    def backward(dp, scores, final_rowscales, doosum_rowscales, b, h, q_idx, kv_idx):
        return (dp - doosum_rowscales) * scores


class OnlineRetention(OnlineFunc):
    def __init__(self):
        super().__init__({"r": SymbolScalar("r", Var(0.0))}, {"r": SymbolScalar("r", Var(0.0))})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        r = online_rowscales["r"]
        r_new = r + scores.get_reduce("abssum")
        kept, kept_new = r.max(1), r_new.max(1)
        return scores / kept_new, {"r": r_new}, kept / kept_new

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o, {"r": online_rowscales["r"].max(1)}


class Identity(OnlineFunc):
    def __init__(self):
        super().__init__({}, {})

    def online_fwd(self, scores, online_rowscales, b, h, q_idx):
        return scores, {}, 1.0

    def online_fwd_epilogue(self, o, online_rowscales, b, h, q_idx):
        return 2.0 * -o, {}


def test_an_online_softmax_is_the_softmax():
    online, offline = trace(Definition(row=OnlineSoftmax())), trace(Definition())
    assert str(online.module) == str(offline.module)
    assert online.final_rowscales == ("lse",)
    assert str(trace(Definition(row=OnlineSoftmax()), return_lse=True).module) == str(
        trace(Definition(), return_lse=True).module
    )


def test_an_online_retention_and_an_identity():
    assert region_ops(trace(Definition(row=OnlineRetention())), "row") == [
        "%0 = math.absf %s",
        "%1 = attn.row_reduce sum %0",
        "%2 = arith.constant 1.000000e+00",
        "%3 = arith.maximumf %1, %2",
        "%4 = arith.divf %s, %3",
        "attn.yield %4",
    ]
    q, k, v = inputs()
    (o,) = run_attention(trace(Definition(row=Identity()), head_dim=D, head_dim_v=D).module, q, k, v, 1.0)
    torch.testing.assert_close(o, -2 * (q @ k.transpose(-1, -2)) @ v)


class Guarded(OnlineSoftmax):
    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        m, r = online_rowscales["m"], online_rowscales["r"]
        m_new = torch.maximum(m, scores.get_reduce("max"))
        factor = torch.where(m == float("-inf"), 0.0, torch.exp(m - m_new))
        scores = torch.exp(scores - m_new)
        return (
            scores,
            {"m": m_new, "r": torch.exp2(m) * 3.0 + r * factor + r * m_new + m_new * r / 2 + scores.sum()},
            factor,
        )


def test_initial_values_fold_through_guards():
    assert str(trace(Definition(row=Guarded())).module) == str(trace(Definition()).module)


def _changed(**methods) -> OnlineFunc:
    return type("Changed", (OnlineSoftmax,), {name: staticmethod(f) for name, f in methods.items()})()


@pytest.mark.parametrize(
    ("online", "text"),
    [
        (_changed(online_fwd=lambda s, rows, b, h, q: s), "does not return"),
        (_changed(online_fwd=lambda s, rows, b, h, q: (s, {"m": rows["m"]}, 1.0)), "m, r, as declared"),
        (_changed(online_fwd=lambda s, rows, b, h, q: (s, {"m": s, "r": rows["r"]}, 1.0)), "one number per key"),
        (_changed(online_fwd_epilogue=lambda o, rows, b, h, q: o), "does not return"),
        (_changed(online_fwd_epilogue=lambda o, rows, b, h, q: (rows["r"], {"lse": rows["r"]})), "is not o"),
        (_changed(online_fwd_epilogue=lambda o, rows, b, h, q: (o + 1.0, {"lse": rows["r"]})), "than to scale"),
        (_changed(online_fwd_epilogue=lambda o, rows, b, h, q: (rows["r"] / o, {"lse": rows["r"]})), "than to scale"),
        (_changed(online_fwd_epilogue=lambda o, rows, b, h, q: (o.exp(), {"lse": rows["r"]})), "than to scale"),
        (
            _changed(online_fwd_epilogue=lambda o, rows, b, h, q: (torch.tanh(o), {"lse": rows["r"]})),
            "than to scale|epilogue",
        ),
        (_changed(online_fwd_epilogue=lambda o, rows, b, h, q: (o * o, {"lse": rows["r"]})), "than to scale"),
        (_changed(online_fwd_epilogue=lambda o, rows, b, h, q: (o, {"l": rows["r"]})), "lse, as declared"),
    ],
)
def test_online_functions_that_break_their_contract(online, text):
    with pytest.raises(errors.OnlineFuncError, match=text):
        trace(Definition(row=online))


class WithoutSuper(OnlineSoftmax):
    def __init__(self):
        pass


class WithoutScalars(OnlineSoftmax):
    def __init__(self):
        OnlineFunc.__init__(self, {"m": -float("inf")}, {})


class WithoutEpilogue(OnlineFunc):
    def __init__(self):
        super().__init__({}, {})

    online_fwd = OnlineSoftmax.online_fwd


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (WithoutSuper, "call super"),
        (WithoutScalars, "dict of SymbolScalar"),
        (WithoutEpilogue, "no method online_fwd_epilogue"),
        (lambda: Var("minus infinity"), "is no number"),
    ],
)
def test_online_functions_are_checked_before_tracing(kind, text):
    with pytest.raises(errors.OnlineFuncError, match=text) as caught:
        Definition(row=kind())
    assert "test_rows.py" in str(caught.value)


def test_an_epilogue_scales_in_every_spelling():
    forms = [
        lambda o, rows, b, h, q: (o / rows["r"], {"lse": rows["r"]}),
        lambda o, rows, b, h, q: (torch.div(o, rows["r"]), {"lse": rows["r"]}),
        lambda o, rows, b, h, q: (o * (1.0 / rows["r"]), {"lse": rows["r"]}),
        lambda o, rows, b, h, q: ((1.0 / rows["r"]) * o, {"lse": rows["r"]}),
        lambda o, rows, b, h, q: (torch.mul(o, rows["r"].reciprocal()), {"lse": rows["r"]}),
    ]
    q, k, v = inputs()
    for form in forms:
        traced = trace(Definition(row=_changed(online_fwd_epilogue=form)), head_dim=D, head_dim_v=D)
        (o,) = run_attention(traced.module, q, k, v, 1.0)
        torch.testing.assert_close(o, torch.softmax(q @ k.transpose(-1, -2), -1) @ v)
