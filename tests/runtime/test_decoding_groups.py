"""Few queries whose heads share keys: heads are rows of one block, and every function still sees heads and positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from xdsl.dialects.builtin import ModuleOp

import attn_engine
from attn_engine import library
from attn_engine.errors import PassError
from attn_engine.frontend.build import build
from attn_engine.frontend.checks import Sizes
from attn_engine.frontend.definition import Definition
from attn_engine.passes.attn_analyze_mask import AttnAnalyzeMaskPass
from attn_engine.passes.attn_pack_heads import AttnPackHeadsPass
from attn_engine.runtime.decoding import Decoding, decoding, pack, unpack
from attn_engine.runtime.devices import Target
from attn_engine.runtime.driver import context, to_attn
from tests.support.compare import qkv, randn

KEYS, HEADS, BATCH = 1100, 12, 2
SLOPES, SINKS, BY_QUERY = randn(HEADS).abs(), randn(HEADS), randn(HEADS, 16, seed=1)
LENGTHS, SEEN = torch.tensor([1050, 3]), torch.arange(HEADS) % 3 == 0
FREQUENCIES = 10000.0 ** (-torch.arange(8) / 8)


DEFINITIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "slopes": {"score_mod": lambda s, b, h, q, kv: s + SLOPES[h] * (kv - q - KEYS)},
    "causal": {"mask_mod": library.causal},
    "window": {"mask_mod": lambda b, h, q, kv: (q + 900 >= kv) & (q + 900 - kv < 70)},
    "lengths": {"mask_mod": lambda b, h, q, kv: kv < LENGTHS[b] + q},
    "by head": {"mask_mod": lambda b, h, q, kv: SEEN[h] | (kv % 5 == h % 5)},
    "table by query": {"score_mod": lambda s, b, h, q, kv: s * BY_QUERY[h, q]},
    "retention": {"row": library.retention},
    "sinks": {"row": library.softmax_with_sink(SINKS)},
    "rotary": {"query_mod": library.rotary(FREQUENCIES), "key_mod": library.rotary(FREQUENCIES)},
    "query mod": {"query_mod": lambda x, b, h, position, channel: x * SLOPES[h] + position},
}


def both(functions: dict[str, Any], tensors: list[torch.Tensor], **options: Any) -> tuple[Any, Any]:
    """The result with heads as rows, and that of dense code in float64."""
    attend = attn_engine.compile(backend="cpu", **functions)
    got = attend(*tensors, **options)
    ((*_, known),) = attend._memory.compiled
    assert known.decoding.group == tensors[0].shape[1] // tensors[1].shape[1] > 1
    exact = attn_engine.compile(backend="reference", **functions)(*(t.double() for t in tensors), **options)
    return got, exact


@pytest.mark.parametrize(("queries", "kv_heads"), [(1, 3), (7, 2)])
@pytest.mark.parametrize("name", DEFINITIONS)
def test_functions_see_heads_and_positions(name: str, queries: int, kv_heads: int):
    tensors = qkv(b=BATCH, h=HEADS, hkv=kv_heads, sq=queries, skv=KEYS)
    got, exact = both(DEFINITIONS[name], tensors)
    assert got.shape == tensors[0].shape
    torch.testing.assert_close(got.double(), exact, atol=3e-5, rtol=3e-5)


def test_lse_and_strides():
    q, k, v = qkv(b=BATCH, h=6, hkv=2, sq=3, skv=KEYS, dv=24)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    (o, lse), (exact_o, exact_lse) = both(
        {"mask_mod": library.causal_bottom_right(3, KEYS)}, [q, k, v], return_lse=True
    )
    torch.testing.assert_close(o.double(), exact_o, atol=3e-5, rtol=3e-5)
    torch.testing.assert_close(lse.double(), exact_lse, atol=3e-5, rtol=3e-5)


def test_packed_sequences():
    q, k, v = qkv(h=4, hkv=2, sq=9, skv=1500)
    bounds = {"cu_seqlens_q": torch.tensor([0, 1, 5, 9]), "cu_seqlens_k": torch.tensor([0, 700, 701, 1500])}
    got, exact = both({"mask_mod": library.causal}, [q, k, v], **bounds)
    torch.testing.assert_close(got.double(), exact, atol=3e-5, rtol=3e-5)


def test_rows_are_heads_only_where_keys_are_shared_and_nothing_trains():
    sizes, target = Sizes(2, 12, 3, 2, 4096, 64, 64), Target("triton", "sm_90")
    assert decoding(sizes, target) == Decoding(16, True, 4)
    assert decoding(replace(sizes, q_len=1, kv_heads=1), target) == Decoding(16, True, 12, True)
    assert decoding(replace(sizes, q_len=16), target).rows == 64
    assert decoding(sizes, target, trains=True).group == decoding(replace(sizes, kv_heads=12), target).group == 1
    q, k, v = qkv(h=4, hkv=2, sq=2, skv=KEYS)
    attend = attn_engine.compile(backend="cpu")
    o = attend(q.requires_grad_(), k, v)
    o.sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(attend(q, k, v), o, atol=1e-5, rtol=1e-5)
    assert len(attend._memory.compiled) == 2 and q.grad is not None


def test_rows_and_back():
    q = randn(2, 6, 3, 5)
    rows = pack(q, 3)
    assert rows.shape == (2, 2, 9, 5) and torch.equal(rows[1, 1, 2 * 3 + 1], q[1, 1 * 3 + 1, 2])
    assert torch.equal(unpack(rows, 3), q) and torch.equal(unpack(rows[..., 0], 3), q[..., 0])
    single = randn(2, 6, 1, 5)
    assert pack(single, 3).data_ptr() == single.data_ptr()


def _packed(mask: Callable[..., Any], group: int, single: bool) -> ModuleOp:
    module = build(Definition(mask_mod=mask), dtype=torch.float32, head_dim=16, head_dim_v=16).module
    AttnPackHeadsPass(group, single).apply(context(), module)
    return module


def test_ranges_of_masks_stay_exact():
    """The mask is analysed after the rows are packed: a window of keys is skipped to, not walked to."""
    lowered = to_attn(_packed(lambda b, h, q, kv: (q + 900 >= kv) & (q + 900 - kv < 70), 4, False), ())
    text = str(lowered).split(" blocks {")[1].split(" blocks_t {")[0]
    assert "floordivsi" in text and "constant 831 : i32" in text and "constant 901 : i32" in text


def test_heads_are_packed_before_masks_are_analysed():
    lowered = build(Definition(mask_mod=library.causal), dtype=torch.float32, head_dim=16, head_dim_v=16).module
    AttnAnalyzeMaskPass().apply(context(), lowered)
    with pytest.raises(PassError, match="before attn-analyze-mask"):
        AttnPackHeadsPass(4).apply(context(), lowered)
