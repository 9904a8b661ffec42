"""The TileLang backend on whole attentions: what the passes make, as text that runs on the CPU."""

from __future__ import annotations

import pytest
import torch

import attn_engine as ae
from tests.recurrence.support import reference

pytest.importorskip("tilelang")


@pytest.fixture
def on_cpu():
    from tests.support import tilelang_shim

    with tilelang_shim.on_cpu():
        yield


def dense(q, k, v, score=lambda s: s):
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return score(q.double() @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def test_causal_softmax_with_grouped_heads_and_a_capture(on_cpu):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 70, 40).half() for heads in (4, 2, 2))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])

    def alibi(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    o = ae.attention(q, k, v, mask_mod=ae.library.causal, score_mod=alibi, backend="tilelang")
    distance = torch.arange(70) - torch.arange(70)[:, None]
    want = dense(q, k, v, lambda s: (s + slopes[:, None, None] * distance).masked_fill(distance > 0, -torch.inf))
    assert float((o.double() - want).abs().max()) < 2e-3


def test_linear_attention(on_cpu):
    """A recurrence without a decay."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 40, 2, 16, generator=generator).half() for _ in range(3))
    want, _ = reference(q.double(), k.double(), v.double())
    assert want.abs().max() > 0.1
    assert (ae.recurrence(q, k, v, backend="tilelang")[0] - want).norm() < 5e-4 * want.norm()


def test_without_keys(on_cpu):
    """Their tensors have no bulk copies, whose sizes the driver wants above 0."""
    from attn_engine.backends.tilelang.build import load
    from attn_engine.runtime.inspect import View

    q, k = torch.ones(1, 1, 128, 64).half(), torch.ones(1, 1, 0, 64).half()
    o, lse = ae.attention(q, k, k, backend="tilelang", return_lse=True)
    assert not o.any() and (lse == -torch.inf).all()
    module = load(ae.compile().source("tilelang", View(dtype=torch.float16, head_dim=64)))
    assert (module._is_plain(q), module._is_plain(k), module._is_plain(q.mT)) == (True, False, False)


def test_captured_conditions(on_cpu):
    """Of any strides, and without axes: conditions are passed to kernels as bytes."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 2, 40, 16, generator=generator).half() for _ in range(3))
    table, always = torch.rand(40, 80, generator=generator)[:, ::2] < 0.7, torch.tensor(True)

    def visible(b, h, q_idx, kv_idx):
        return (table[q_idx, kv_idx] & always) | (q_idx == kv_idx)

    found = ae.attention(q, k, v, mask_mod=visible, backend="tilelang")
    torch.testing.assert_close(found, ae.attention(q, k, v, mask_mod=visible, backend="cpu"), atol=2e-3, rtol=2e-3)


def test_gradients_of_values_that_no_query_sees(on_cpu):
    """Their loop over heads and queries, which is one, has no iteration and yet runs."""
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, h, n, 64, generator=generator).half() for h, n in ((4, 64), (2, 200), (2, 200)))
    found: list[torch.Tensor] = []
    for name in ("cpu", "tilelang"):
        given = v.clone().requires_grad_()
        o = ae.attention(q, k, given, mask_mod=ae.library.causal, backend=name)
        found += torch.autograd.grad((o.float() ** 2).sum(), given)
    assert not found[1][:, :, 64:].any()
    torch.testing.assert_close(found[1], found[0], atol=2e-2, rtol=2e-2)


def test_without_a_device_the_error_names_what_can_run():
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    x = torch.randn(1, 1, 16, 16).half()
    with pytest.raises(
        ae.AttnEngineError, match="backend 'tilelang' cannot run here: torch finds no GPU; usable here: cpu"
    ):
        ae.attention(x, x, x, backend="tilelang")
