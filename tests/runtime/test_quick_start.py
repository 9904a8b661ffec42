"""The ancestors' quick start, with the repairs that it needs: imports, one misspelt name, the super() call."""

from __future__ import annotations

import pytest
import torch

from attn_engine import AttentionEngine, CustomIO, OnlineFunc, SymbolScalar, Var, create_block_mask, meta_tensor

B, H, S, D, DV = 1, 4, 130, 32, 32
softmax_scale = 1 / D**0.5


def score_mod(score, custom_fwd_inputs, b, h, q_idx, kv_idx):
    return score * softmax_scale


class OnlineSoftmax(OnlineFunc):
    def __init__(self):
        online_rowscales = {
            "m": SymbolScalar("m", Var("-inf")),
            "r": SymbolScalar("r", Var("0.0")),
        }
        final_rowscales = {
            "lse": SymbolScalar("lse", Var("0.0")),
        }
        super().__init__(online_rowscales, final_rowscales, CustomIO({}))

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
        lse = (online_rowscales["r"]).log() + online_rowscales["m"]
        return o_new, {"lse": lse}

    @staticmethod
    def forward(scores, final_rowscales, b, h, q_idx, kv_idx):
        return (scores - final_rowscales["lse"]).exp()

    @staticmethod
    def backward(dp, scores, final_rowscales, doosum_rowscales, b, h, q_idx, kv_idx):
        return (dp - doosum_rowscales) * scores


def causal_mask(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def dense(q, k, v, mask):
    """The same attention on B, H, S, D in float64."""
    s = (q.double() @ k.double().mT) * softmax_scale
    return s.masked_fill(~mask, float("-inf")).softmax(-1) @ v.double()


@pytest.mark.parametrize("named", ["block_mask", "mask_mod"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_quick_start(named: str, layout: str):
    dtype = torch.float32
    qkv_meta = tuple(meta_tensor(B, H, S, d, dtype=dtype) for d in (D, D, DV))
    mod = AttentionEngine(
        qkv_meta,
        CustomIO({}),
        score_mod=score_mod,
        online_func=OnlineSoftmax(),
        tune=False,
        tune_file="mha_tune.json",
        layout=layout,
        **{named: causal_mask},
    )
    torch.manual_seed(0)
    shape = (B, S, H) if layout == "bshd" else (B, H, S)
    q, k, v = (torch.randn(*shape, d, dtype=dtype, requires_grad=True) for d in (D, D, DV))
    out = mod(q, k, v)
    out.backward(torch.ones_like(out))

    turned = [t.detach().transpose(1, 2) if layout == "bshd" else t.detach() for t in (q, k, v)]
    q64, k64, v64 = (t.double().requires_grad_() for t in turned)
    expected = dense(q64, k64, v64, torch.ones(S, S, dtype=torch.bool).tril())
    expected.backward(torch.ones_like(expected))
    got = [out, q.grad, k.grad, v.grad]
    if layout == "bshd":
        got = [t.transpose(1, 2) for t in got]
    for mine, right in zip(got, (expected, q64.grad, k64.grad, v64.grad), strict=True):
        assert torch.allclose(mine.double(), right, atol=2e-5)


def test_block_mask_tensor_hides_blocks():
    blocks = create_block_mask(lambda b, h, q, kv: (q // 64 == kv // 64) & (q >= kv), 1, 1, S, S, Qblk=64, KVblk=64)
    qkv_meta = tuple(meta_tensor(B, H, S, d, dtype=torch.float32) for d in (D, D, DV))
    mod = AttentionEngine(
        qkv_meta, score_mod=lambda s, b, h, q, kv: s * softmax_scale, block_mask=blocks, layout="bhsd"
    )
    q, k, v = (torch.randn(B, H, S, D) for _ in range(3))
    i = torch.arange(S) // 64
    assert torch.allclose(mod(q, k, v).double(), dense(q, k, v, i[:, None] == i), atol=2e-5)
