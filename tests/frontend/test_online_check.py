"""Steps that depend on how a row is cut, and given methods that disagree, are refused with the row that shows it."""

from __future__ import annotations

import warnings

import pytest
import torch

import attn_engine
from attn_engine import OnlineFunc, SymbolScalar, Var, errors
from attn_engine.frontend.definition import Definition
from attn_engine.frontend.online_check import check_online_func, hard_rows
from attn_engine.runtime.evaluator import check_definition, evaluate


def scalars(**start: str) -> dict[str, SymbolScalar]:
    return {name: SymbolScalar(name, Var(value)) for name, value in start.items()}


class Softmax(OnlineFunc):
    """The ancestors' own example, with a combine in natural logarithms."""

    def __init__(self):
        super().__init__(scalars(m="-inf", r="0.0"), scalars(lse="0.0"))

    def online_fwd(self, scores, online_rowscales, b, h, q_idx):
        m, r = online_rowscales["m"], online_rowscales["r"]
        m_new = m.max(scores.get_reduce("max"))
        scale = (m - m_new).exp()
        scores = (scores - m_new).exp()
        return scores, {"m": m_new, "r": r * scale + scores.get_reduce("sum")}, scale

    def online_fwd_epilogue(self, o, online_rowscales, b, h, q_idx):
        return o / online_rowscales["r"], {"lse": online_rowscales["r"].log() + online_rowscales["m"]}

    def forward(self, scores, final_rowscales, b, h, q_idx, kv_idx):
        return (scores - final_rowscales["lse"]).exp()

    def backward(self, dp, scores, final_rowscales, doosum, b, h, q_idx, kv_idx):
        return (dp - doosum) * scores

    def combine(self, final_rowscales):
        lse = final_rowscales["lse"]
        weight = (lse - lse.get_reduce("max")).exp()
        return weight / weight.get_reduce("sum")


class Retention(OnlineFunc):
    def __init__(self):
        super().__init__(scalars(r="0.0"), scalars(r="0.0"))

    def online_fwd(self, scores, online_rowscales, b, h, q_idx):
        r = online_rowscales["r"]
        r_new = r + scores.get_reduce("abssum")
        return scores / r_new.max(1), {"r": r_new}, r.max(1) / r_new.max(1)

    def online_fwd_epilogue(self, o, online_rowscales, b, h, q_idx):
        return o, {"r": online_rowscales["r"]}

    def combine(self, final_rowscales):
        r = final_rowscales["r"]
        return r.max(1) / r.get_reduce("sum").max(1)


TABLE = torch.rand(3, 40)


class Captured(OnlineFunc):
    """A weight that reads a table wider than any block, by head and key."""

    def __init__(self):
        super().__init__({}, {})

    def online_fwd(self, scores, online_rowscales, b, h, q_idx):
        return scores * TABLE[h, q_idx], {}, 1.0

    def online_fwd_epilogue(self, o, online_rowscales, b, h, q_idx):
        return o, {}

    def forward(self, scores, final_rowscales, b, h, q_idx, kv_idx):
        return scores * TABLE[h, q_idx]


@pytest.mark.parametrize("kind", [Softmax, Retention, Captured])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_right_ones_pass(kind, mode):
    with warnings.catch_warnings(), mode():
        warnings.simplefilter("error")
        check_online_func(kind(), evaluate)


class WithoutRescale(Softmax):
    def online_fwd(self, *args):
        p, rows, _ = super().online_fwd(*args)
        return p, rows, 1.0


class SumNotRescaled(Softmax):
    def online_fwd(self, scores, online_rowscales, b, h, q_idx):
        p, rows, scale = super().online_fwd(scores, online_rowscales, b, h, q_idx)
        return p, rows | {"r": online_rowscales["r"] + p.get_reduce("sum")}, scale


class OneInEveryBlock(Softmax):
    """Softmax with one more score of 0, counted once per block instead of once per row."""

    def online_fwd(self, scores, online_rowscales, b, h, q_idx):
        p, rows, scale = super().online_fwd(scores, online_rowscales, b, h, q_idx)
        return p, rows | {"r": rows["r"] + (-rows["m"]).exp()}, scale


class ClampedDifference(Softmax):
    def online_fwd(self, scores, online_rowscales, b, h, q_idx):
        m, r = online_rowscales["m"], online_rowscales["r"]
        m_new = m.max(scores.get_reduce("max"))
        scale = (m - m_new).exp()
        scores = torch.clamp(scores - m_new, min=-2.0).exp()
        return scores, {"m": m_new, "r": r * scale + scores.get_reduce("sum")}, scale

    forward = backward = combine = None


class ClampedStatistic(Retention):
    def online_fwd(self, scores, online_rowscales, b, h, q_idx):
        p, rows, scale = super().online_fwd(scores, online_rowscales, b, h, q_idx)
        return p, {"r": rows["r"].max(1)}, scale

    combine = None


class FinalOfTheLastBlock(Softmax):
    """The largest score of the last block, not of the row."""

    def __init__(self):
        OnlineFunc.__init__(self, scalars(m="-inf", r="0.0", top="0.0"), scalars(top="0.0"))

    def online_fwd(self, scores, online_rowscales, b, h, q_idx):
        p, rows, scale = super().online_fwd(scores, online_rowscales, b, h, q_idx)
        return p, rows | {"top": scores.get_reduce("max")}, scale

    def online_fwd_epilogue(self, o, online_rowscales, b, h, q_idx):
        return o / online_rowscales["r"], {"top": online_rowscales["top"]}

    forward = backward = combine = None


STEPS = [WithoutRescale, SumNotRescaled, OneInEveryBlock, ClampedDifference, ClampedStatistic, FinalOfTheLastBlock]


@pytest.mark.parametrize("kind", STEPS)
def test_steps_that_depend_on_the_cut_are_refused(kind):
    with pytest.raises(errors.OnlineFuncError) as caught:
        check_online_func(kind(), evaluate)
    text = str(caught.value)
    assert "online_fwd on blocks of" in text and "on the whole row it is" in text and __file__ in text
    assert any(f"the row is {name}: [" in text for name in hard_rows())


class WrongForward(Softmax):
    def forward(self, scores, final_rowscales, b, h, q_idx, kv_idx):
        return (scores - final_rowscales["lse"]).exp2()


class WrongBackward(Softmax):
    def backward(self, dp, scores, final_rowscales, doosum, b, h, q_idx, kv_idx):
        return dp * scores


class WrongOnSaturatedRows(Retention):
    """Right where the sum is above 1 only."""

    def backward(self, dp, scores, final_rowscales, doosum, b, h, q_idx, kv_idx):
        r = final_rowscales["r"]
        return (dp - torch.sign(scores) * doosum) / r.max(1)


class MixedBases(Softmax):
    def combine(self, final_rowscales):
        lse = final_rowscales["lse"]
        weight = (lse - lse.get_reduce("max")).exp2()
        return weight / weight.get_reduce("sum")


class CombineOfClamped(Retention):
    """Parts whose sums were clamped before they were saved."""

    def online_fwd_epilogue(self, o, online_rowscales, b, h, q_idx):
        return o, {"r": online_rowscales["r"].max(1)}


METHODS = [
    (WrongForward, "forward", "from online_fwd"),
    (WrongBackward, "backward", "by differentiation"),
    (WrongOnSaturatedRows, "backward", "the row is small"),
    (MixedBases, "combine", "on the whole row"),
    (CombineOfClamped, "combine", "of parts of 5, 1, 6 keys"),
]


@pytest.mark.parametrize(("kind", "name", "fragment"), METHODS)
def test_methods_that_disagree_are_refused(kind, name, fragment):
    with pytest.raises(errors.OnlineFuncError) as caught:
        check_online_func(kind(), evaluate)
    assert str(caught.value).startswith(name) and fragment in str(caught.value)


class Misspelt(Softmax):
    def backward(self, dp, scores, final_rowscales, doosum, b, h, q_idx, kv_idx):
        return (dp - doosum_rowscales) * scores  # noqa: F821


class Empty(Softmax):
    def combine(self, final_rowscales):
        pass


@pytest.mark.parametrize(("kind", "fragment"), [(Misspelt, "doosum_rowscales"), (Empty, "None")])
def test_methods_that_cannot_run_are_warned_of_and_derived(kind, fragment):
    q, k, v = (torch.randn(1, 1, 9, 16, requires_grad=True) for _ in range(3))
    with pytest.warns(errors.OnlineFuncWarning, match=fragment):
        o = attn_engine.attention(q, k, v, row=kind())
    torch.testing.assert_close(o, (q @ k.mT / 4).softmax(-1) @ v)
    torch.autograd.grad(o.sum(), q)


def test_the_api_refuses_and_checks_once():
    q, k, v = (torch.randn(1, 1, 9, 16) for _ in range(3))
    with pytest.raises(errors.OnlineFuncError, match="the row is"):
        attn_engine.attention(q, k, v, row=WithoutRescale())
    calls = []

    class Counted(Softmax):
        def combine(self, final_rowscales):
            calls.append(1)
            return super().combine(final_rowscales)

    kept = Counted()
    for _ in range(3):
        check_definition(Definition(row=kept))
    assert len(calls) == 1
