"""What common definitions trace to."""

from __future__ import annotations

import pytest
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


GOLDEN = {
    "causal": (
        "mask",
        Definition(mask_mod=library.causal),
        ["%0 = arith.cmpi sge, %q_idx, %kv_idx", "attn.yield %0 : i1"],
    ),
    "window": (
        "mask",
        Definition(mask_mod=library.sliding_window(256)),
        [
            "%0 = arith.cmpi sge, %q_idx, %kv_idx",
            "%1 = arith.subi %q_idx, %kv_idx",
            "%2 = arith.constant 256",
            "%3 = arith.cmpi slt, %1, %2",
            "%4 = arith.andi %0, %3 : i1",
            "attn.yield %4 : i1",
        ],
    ),
    "documents": (
        "mask",
        Definition(mask_mod=library.document(torch.zeros(2, 8, dtype=torch.int32))),
        [
            "%0 = attn.load %ids[%b, %q_idx] : tensor<?x?xi32> -> i64",
            "%1 = attn.load %ids[%b, %kv_idx] : tensor<?x?xi32> -> i64",
            "%2 = arith.cmpi eq, %0, %1",
            "attn.yield %2 : i1",
        ],
    ),
    "remainder": (
        "mask",
        Definition(mask_mod=lambda b, h, q, kv: q % 4 == 0),
        [
            "%0 = arith.constant 4",
            "%1 = arith.floordivsi %q_idx, %0",
            "%2 = arith.muli %1, %0",
            "%3 = arith.subi %q_idx, %2",
            "%4 = arith.constant 0",
            "%5 = arith.cmpi eq, %3, %4",
            "attn.yield %5 : i1",
        ],
    ),
    "soft cap": (
        "score_mod",
        Definition(score_mod=library.soft_cap(30.0)),
        [
            "%0 = arith.constant 3.000000e+01",
            "%1 = arith.divf %score, %0",
            "%2 = math.tanh %1",
            "%3 = arith.mulf %0, %2",
            "attn.yield %3",
        ],
    ),
    "relu": (
        "row",
        Definition(row=library.relu),
        [
            "%0 = arith.constant 0.000000e+00",
            "%1 = arith.cmpf ole, %s, %0",
            "%2 = arith.select %1, %0, %s",
            "attn.yield %2",
        ],
    ),
    "sigmoid": (
        "row",
        Definition(row=library.sigmoid),
        [
            "%0 = arith.constant 0.000000e+00",
            "%1 = arith.cmpf olt, %s, %0",
            "%2 = arith.negf %s",
            "%3 = arith.select %1, %s, %2",
            "%4 = math.exp %3",
            "%5 = arith.constant 1.000000e+00",
            "%6 = arith.select %1, %4, %5",
            "%7 = arith.addf %5, %4",
            "%8 = arith.divf %6, %7",
            "attn.yield %8",
        ],
    ),
    "retention": (
        "row",
        Definition(row=library.retention),
        [
            "%0 = math.absf %s",
            "%1 = attn.row_reduce sum %0",
            "%2 = arith.constant 1.000000e+00",
            "%3 = arith.cmpf olt, %1, %2",
            "%4 = arith.select %3, %2, %1",
            "%5 = arith.divf %s, %4",
            "attn.yield %5",
        ],
    ),
    "cosine": (
        "row",
        Definition(row=library.cosine),
        [
            "%0 = arith.mulf %s, %s",
            "%1 = attn.row_reduce sum %0",
            "%2 = math.sqrt %1",
            "%3 = arith.divf %s, %2",
            "attn.yield %3",
        ],
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_regions(name: str):
    region, definition, expected = GOLDEN[name]
    assert region_ops(trace(definition), region) == expected


def test_the_whole_module():
    text = str(trace(Definition(), dtype=torch.bfloat16, head_dim=128, head_dim_v=96).module)
    assert (
        "func.func @attention(%q: tensor<?x?x?x128xbf16>, %k: tensor<?x?x?x128xbf16>, %v: tensor<?x?x?x96xbf16>, %scale: f32) -> tensor<?x?x?x96xbf16>"
        in text
    )
    assert "mask {" not in text
    assert "score_mod {" not in text
    assert "func.return %o : tensor<?x?x?x96xbf16>" in text


def test_the_default_scale():
    assert Definition().default_scale(64) == 0.125
    assert Definition(bare_score=True).default_scale(64) == 1.0
