"""Operands through descriptors, on devices that have them: same results, any length; other tensors go without."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import attn_engine
from attn_engine import library
from attn_engine.arch import get_arch
from attn_engine.ir.schedule import Length
from attn_engine.runtime import attention, driver, op
from tests.support.compare import check, plain, qkv, randn
from tests.support.engines import INTERPRETED, ORACLE, SMALL, blocks


@pytest.fixture(autouse=True)
def device():
    """Tensors are taken to be on a device with descriptors, and long enough for them."""
    with (
        mock.patch.object(attention, "arch_for", lambda _: get_arch("sm_90")),
        mock.patch.object(Length, "of", lambda *_: Length.LONG),
        mock.patch.object(attention, "NARROWEST", 16),
    ):
        yield


def bias(bias):
    return {"score_mod": lambda s, b, h, q, kv: s + bias[h, q, kv], "mask_mod": library.causal}


def mods():
    return {"query_mod": lambda x: torch.tanh(x) + 0.1, "value_mod": lambda x: x * x + 1.0}


@pytest.mark.parametrize("backend", [ORACLE, INTERPRETED])
@pytest.mark.parametrize("sq, skv", [(64, 96), (33, 70)])
@pytest.mark.parametrize("name", ["plain", "bias", "mods"])
def test_equals_eager(name: str, sq: int, skv: int, backend: str):
    make = {"plain": plain, "bias": bias, "mods": mods}[name]
    captures = {"bias": randn(2, sq, skv, seed=7)} if name == "bias" else {}
    tensors = qkv(b=2, hkv=1, sq=sq, skv=skv, d=24, dv=16)
    check(make, tensors, captures, backend=backend, schedule=SMALL)
    assert "tile.load_block" in compiled()


def compiled() -> str:
    return next(reversed(driver._CACHE.values())).tile_ir


def test_a_tensor_that_no_descriptor_takes_is_read_without():
    q, k, v = qkv(sq=20, d=16)
    shifted = torch.empty(q.numel() + 1)[1:].view_as(q).copy_(q)
    assert shifted.data_ptr() % 16
    attend = attn_engine.compile(backend=ORACLE)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    with blocks(SMALL):
        torch.testing.assert_close(attend(shifted, k, v), wanted)
        assert "tile.load_block" not in compiled()
        torch.testing.assert_close(attend(q, k, v), wanted)
        assert "tile.load_block" in compiled()


def test_the_gradient_of_the_output_may_lie_anyhow():
    q, k, v = (t.requires_grad_() for t in qkv(sq=20, d=16))
    with blocks(SMALL), mock.patch.object(op, "backward", wraps=op.backward) as spied:
        o = attn_engine.compile(backend=ORACLE)(q, k, v)
        (found,) = torch.autograd.grad(o.sum(), q)
    (wanted,) = torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(q, k, v).sum(), q)
    torch.testing.assert_close(found, wanted)
    assert spied.call_args.args[4].is_contiguous()


def test_narrow_heads_are_read_without():
    q, k, v = qkv(sq=20, d=64, dv=32)
    with blocks(SMALL), mock.patch.object(attention, "NARROWEST", 64):
        attn_engine.compile(backend=ORACLE)(q, k, v)
        assert "tile.load_block" not in compiled()
        attn_engine.compile(backend=ORACLE)(q, k, k)
        assert "tile.load_block" in compiled()
