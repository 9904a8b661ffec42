"""The torch op under torch's own checks: schema, fake tensors, autograd, autocast, compile, checkpoints."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import attn_engine
from attn_engine import errors
from attn_engine.runtime import driver
from tests.runtime.attention_support import causal, dense, qkv, triangle


def compiled_key(return_lse: bool, slopes: torch.Tensor) -> str:
    """The key of an attention with all gradients."""
    before = set(driver._CACHE)
    attention = attn_engine.compile(mask_mod=causal, score_mod=lambda s, b, h, q, kv: s + slopes[h] * (q - kv))
    attention(*qkv(), return_lse=return_lse)
    return next(iter(set(driver._CACHE) - before), next(reversed(driver._CACHE)))


@pytest.mark.parametrize("return_lse", [False, True])
def test_opcheck(return_lse: bool):
    q, k, v = qkv()
    slopes = torch.rand(2, requires_grad=True)
    key = compiled_key(return_lse, slopes)
    opcheck(torch.ops.attn_engine.forward.default, (q, k, v, [slopes], 0.3, key))
    plain = [t.detach() for t in (q, k, v)]
    o, *rows = torch.ops.attn_engine.forward(*plain, [slopes.detach()], 0.3, key)
    outputs, saved = rows[: int(return_lse)], rows[int(return_lse) :]
    d_outputs = [torch.randn_like(x) for x in outputs]
    arguments = (*plain, o, torch.randn_like(o), saved, d_outputs, [slopes.detach()], 0.3, key)
    opcheck(torch.ops.attn_engine.backward.default, arguments)


def test_gradients_of_output_and_lse_by_finite_differences():
    """In the direction of random tensors, with the loss summed in float64."""
    inputs = [t.detach() for t in qkv(1, 1, 6, 6, 4)]
    weight, row_weight = torch.randn(1, 1, 6, 4).double(), torch.randn(1, 1, 6).double()

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        o, lse = attn_engine.attention(*tensors, mask_mod=causal, return_lse=True)
        return (o.double() * weight).sum() + (lse.double() * row_weight).sum()

    for n in range(3):
        leaves = [t.clone().requires_grad_(i == n) for i, t in enumerate(inputs)]
        (gradient,) = torch.autograd.grad(loss(*leaves), leaves[n])
        direction = torch.randn_like(inputs[n])
        step = 1e-2
        moved = [[t + sign * step * direction if i == n else t for i, t in enumerate(inputs)] for sign in (1, -1)]
        slope = (loss(*moved[0]) - loss(*moved[1])) / (2 * step)
        assert abs((gradient * direction).sum() - slope) < 2e-3 * max(1.0, abs(slope))


@pytest.mark.parametrize("wanted", [("q",), ("k",), ("v",), ("q", "v"), ()])
def test_only_what_needs_a_gradient_is_computed(wanted: tuple[str, ...]):
    q, k, v = (t.detach().requires_grad_(name in wanted) for name, t in zip("qkv", qkv(), strict=True))
    attention = attn_engine.compile(mask_mod=causal)
    o = attention(q, k, v)
    (built,) = attention._memory.compiled.values()
    assert built.signature.gradients == wanted
    assert o.requires_grad is bool(wanted)
    if not wanted:
        assert "backward" not in built.plans
        return
    o.sum().backward()
    expected = [t.detach().double().requires_grad_() for t in (q, k, v)]
    dense(*expected, mask=triangle(20, 20)).sum().backward()
    for name, mine, right in zip("qkv", (q, k, v), expected, strict=True):
        if name in wanted:
            torch.testing.assert_close(mine.grad.double(), right.grad, rtol=1e-5, atol=1e-5)
        else:
            assert mine.grad is None


def test_lse_alone_and_expanded_gradients():
    q, k, v = qkv()
    _, lse = attn_engine.attention(q, k, v, return_lse=True)
    found = torch.autograd.grad(lse.sum(), (q, k, v))
    q64, k64 = (t.detach().double().requires_grad_() for t in (q, k))
    (q64 @ k64.mT / 8**0.5).logsumexp(-1).sum().backward()
    for mine, right in zip(found, (q64.grad, k64.grad, torch.zeros(v.shape).double()), strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=1e-5)
    o = attn_engine.attention(q, k, v)
    (summed,) = torch.autograd.grad(o.sum(), v)
    (given,) = torch.autograd.grad(attn_engine.attention(q, k, v), v, torch.ones_like(o))
    assert torch.equal(summed, given)


def test_second_derivative_is_an_error_that_says_so():
    q, k, v = qkv()
    (gradient,) = torch.autograd.grad(attn_engine.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(errors.SecondDerivativeError, match="second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype: torch.dtype):
    plain, cast = qkv(sq=300, skv=300, dtype=dtype), qkv(sq=300, skv=300, dtype=dtype)
    attn_engine.attention(*plain).sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attn_engine.attention(*cast).sum().backward()
    for a, b in zip(plain, cast, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_autocast_of_mixed_dtypes_is_an_error():
    q, k, v = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(errors.DtypeError, match="v is torch\\.bfloat16"):
        attn_engine.attention(q, k, v.to(torch.bfloat16))


def test_default_dtype_changes_nothing():
    q, k, v = qkv(sq=300, skv=300)
    expected = attn_engine.attention(q, k, v)
    torch.set_default_dtype(torch.float64)
    try:
        found = attn_engine.attention(q, k, v)
        found.sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)
    assert q.grad.dtype == torch.float32


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd_nothing_is_saved(mode):
    attention = attn_engine.compile(mask_mod=causal)
    q, k, v = qkv()
    with mode():
        o = attention(q, k, v)
    (built,) = attention._memory.compiled.values()
    assert (built.signature.saved, built.signature.gradients, o.requires_grad) == (0, (), False)
    torch.testing.assert_close(o.double(), dense(q, k, v, mask=triangle(20, 20)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoint(reentrant: bool):
    plain, again = qkv(), qkv()
    attn_engine.attention(*plain, mask_mod=causal).sum().backward()
    checkpoint(lambda *t: attn_engine.attention(*t, mask_mod=causal), *again, use_reentrant=reentrant).sum().backward()
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_torch_compile_breaks_its_graph_around_attention():
    slopes = torch.nn.Parameter(torch.rand(2))

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attn_engine.attention(q * 2, k, v, score_mod=lambda s, b, h, i, j: s * slopes[h]) + 1

    outside = torch.compile(layer, backend="aot_eager")
    for factor in (1.0, 3.0):
        with torch.no_grad():
            slopes.mul_(factor)
        eager, compiled = qkv(), qkv()
        for inputs, function in ((eager, layer), (compiled, outside)):
            function(*inputs).sum().backward()
        for a, b in zip(eager, compiled, strict=True):
            torch.testing.assert_close(a.grad, b.grad)


def test_torch_compile_of_attention_itself():
    """Packed sequences too, whose functions are made anew in each call; nothing of ours is compiled."""
    counter = CompileCounter()
    attend = torch.compile(attn_engine.attention, backend=counter)
    kept = torch.compile(attn_engine.compile(mask_mod=causal), backend=counter)
    for bounds in (None, torch.tensor([0, 3, 20])):
        q, k, v = (x[:1].detach() for x in qkv())
        expected = attn_engine.attention(q, k, v, mask_mod=causal, cu_seqlens_q=bounds)
        assert torch.equal(attend(q, k, v, mask_mod=causal, cu_seqlens_q=bounds), expected)
        assert torch.equal(kept(q, k, v, cu_seqlens_q=bounds), expected)
    assert counter.frame_count == 0


def test_fake_and_meta_tensors_run_nothing():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.randn(1, 2, 5, 8)
        o, lse = attn_engine.attention(x, x, x, return_lse=True)
    assert (tuple(o.shape), tuple(lse.shape)) == ((1, 2, 5, 8), (1, 2, 5))
    x = torch.empty(1, 2, 5, 8, device="meta")
    assert attn_engine.attention(x, x, x, backend="cpu").device.type == "meta"
