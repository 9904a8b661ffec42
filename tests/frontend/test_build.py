"""What common definitions trace to."""

from __future__ import annotations

import torch

from attn_engine import library
from attn_engine.frontend import Definition
from tests.support.frontend_tracing import region_ops, trace


def test_alibi_causal_softmax_with_lse():
    traced = trace(
        Definition(score_mod=library.alibi(torch.rand(4)), mask_mod=library.causal), return_lse=True, head_dim_v=128
    )
    assert traced.capture_names == ["slopes"]
    assert region_ops(traced, "mask") == ["%0 = arith.cmpi sge, %q_idx, %kv_idx", "attn.yield %0 : i1"]
    assert region_ops(traced, "row") == [
        "%0 = attn.row_reduce max %s ties split",
        "%1 = arith.subf %s, %0",
        "%2 = math.exp %1",
        "%3 = attn.row_reduce sum %2",
        "%4 = arith.divf %2, %3",
        "%5 = arith.subf %s, %0",
        "%6 = math.exp %5",
        "%7 = attn.row_reduce sum %6",
        "%8 = math.log %7",
        "%9 = arith.addf %0, %8",
        "attn.yield %4, %9",
    ]
