"""convert-attn-to-tile: kernels and plans mean what the attention meant."""

from __future__ import annotations

import pytest
import torch
from xdsl.parser import Parser

from attn_engine.interpreters.attn import run_online
from attn_engine.interpreters.attn_backward import run_backward
from attn_engine.interpreters.tile import run_plan
from attn_engine.passes.convert_attn_to_tile import ConvertAttnToTilePass
from attn_engine.universe import make_context
from tests.support.attn_lowered import SOFTMAX_BACKWARD, SOFTMAX_ONLINE, SOFTMAX_THREE_STEPS

BLOCKS = (16, 16, 4, 1)


def with_head_dim(text: str, dim: int) -> str:
    return text.replace("tensor<?x?x?x?xf32>", f"tensor<?x?x?x{dim}xf32>")


def converted(text: str, **options: object):
    context = make_context()
    module = Parser(context, text).parse_module()
    schedule = {"forward": BLOCKS, "rows": BLOCKS, "dq": (16, 32, 4, 1), "dkdv": (32, 16, 4, 1)}
    ConvertAttnToTilePass(**{**schedule, **options}).apply(context, module)  # type: ignore[arg-type]
    module.verify()
    printed = str(module)
    again = Parser(context, printed).parse_module()
    assert str(again) == printed
    return again


def inputs(b: int, h: int, hk: int, sq: int, skv: int, d: int):
    generator = torch.Generator().manual_seed(sq * 1000 + skv)
    new = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float32)  # noqa: E731
    return new(b, h, sq, d), new(b, hk, skv, d), new(b, hk, skv, d)


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize(("sq", "skv"), [(1, 1), (16, 16), (17, 40), (40, 17), (33, 0)])
@pytest.mark.parametrize("text", [SOFTMAX_ONLINE, SOFTMAX_THREE_STEPS], ids=["one_step", "three_steps"])
def test_forward(text: str, sq: int, skv: int, pad: bool):
    d = 12
    q, k, v = inputs(2, 4, 2, sq, skv, d)
    module = Parser(make_context(), with_head_dim(text, d)).parse_module()
    expected = run_online(module, q, k, v, 0.3, block=16)
    o = torch.full_like(q, float("nan"))
    rows = [torch.full(q.shape[:3], float("nan")) for _ in expected[1:]]
    run_plan(converted(with_head_dim(text, d), pad=pad), "forward", [q, k, v, o, *rows, 0.3], exact=True)
    alive = ~torch.isnan(expected[0])
    assert torch.allclose(o[alive].double(), expected[0][alive], atol=2e-6)
    for got, want in zip(rows, expected[1:], strict=True):
        assert torch.allclose(got.double(), want, atol=2e-6)


@pytest.mark.parametrize(("sq", "skv"), [(1, 1), (16, 32), (17, 40), (40, 17), (33, 0)])
def test_backward(sq: int, skv: int):
    d = 12
    q, k, v = inputs(2, 4, 2, sq, skv, d)
    d_o, slopes = torch.randn_like(q), torch.rand(4) + 0.5
    o, lse = torch.randn_like(q), torch.randn(2, 4, sq) + 3
    text = with_head_dim(SOFTMAX_BACKWARD, d)
    module = Parser(make_context(), text).parse_module()
    expected = run_backward(module, q, k, v, 0.3, o, d_o, [lse], [], [slopes])
    got = [torch.full_like(t, float("nan")) for t in (q, k, v, slopes)]
    run_plan(converted(text), "backward", [q, k, v, o, d_o, lse, slopes, *got, 0.3], exact=True)
    for name, value in zip(("dq", "dk", "dv"), got, strict=False):
        assert torch.allclose(value.double(), expected[name], atol=3e-6), name
    assert torch.allclose(got[3].double(), expected["d_captures"][0], rtol=1e-5, atol=1e-5)
