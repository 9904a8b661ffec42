"""Strides and aliases of what is passed, second calls, which gradients are wanted, magnitudes, lse."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import attn_engine
from attn_engine import errors, library
from tests.support.compare import check, leaf, plain, qkv, randn
from tests.support.engines import ALL, INTERPRETED, SMALL, blocks, counted_compilations, poisoned_memory


def causal():
    return {"mask_mod": library.causal}


def dense(q, k, v):
    return (q @ k.mT * q.shape[3] ** -0.5).softmax(-1) @ v


# --- lse -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_b07_b08_lse_is_a_natural_logarithm(backend: str, dtype: torch.dtype):
    if backend == INTERPRETED and dtype is torch.bfloat16:
        pytest.skip("Triton's interpreter has no bfloat16")
    q, k, v = qkv(b=2, h=4, hkv=2, sq=128 if backend == "cpu" else 24, d=64, dtype=dtype)
    _, lse = attn_engine.compile(backend=backend)(q, k, v, return_lse=True)
    right = (q.double() @ k.double().repeat_interleave(2, 1).mT / 8).logsumexp(-1)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), right, rtol=1e-5, atol=1e-4)


# --- strides, aliases ----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("skv", [33, 34])
def test_b85_keys_expanded_over_heads(backend: str, skv: int):
    """Stride 0 over heads, and over positions of the queries; gradients reach the tensors that were expanded."""
    q1, k1, v1 = (leaf(t) for t in (randn(1, 4, 1, 32), randn(1, 1, skv, 32, seed=1), randn(1, 1, skv, 32, seed=2)))
    with blocks(SMALL), poisoned_memory():
        o = attn_engine.compile(backend=backend)(
            q1.expand(2, 4, 20, 32), k1.expand(2, 4, skv, 32), v1.expand(2, 4, skv, 32)
        )
        o.square().sum().backward()
    exact = [leaf(t, torch.float64) for t in (q1, k1, v1)]
    right = dense(exact[0].expand(2, 4, 20, 32), *(t.expand(2, 4, skv, 32) for t in exact[1:]))
    right.square().sum().backward()
    torch.testing.assert_close(o.double(), right, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip((q1, k1, v1), exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-3, atol=1e-3)


LAYOUTS = {
    "expanded": lambda t: torch.ones((), dtype=t.dtype).expand(t.shape),
    "heads inside": lambda t: randn(*t.transpose(1, 2).shape, seed=8).transpose(1, 2).to(t.dtype),
    "channels first": lambda t: randn(*t.mT.shape, seed=9).mT.to(t.dtype),
    "every other": lambda t: randn(*t.shape[:3], 2 * t.shape[3], seed=10)[..., ::2].to(t.dtype),
    "flipped batch": lambda t: randn(*t.shape, seed=11).flip(0).to(t.dtype),
}


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_b86_layouts_of_the_gradient_of_the_output(backend: str, layout: str):
    q, k, v = qkv(b=2, h=4, hkv=1, sq=20, d=32, dtype=torch.float16)
    d_o = LAYOUTS[layout](q)
    leaves, exact = [leaf(t) for t in (q, k, v)], [leaf(t, torch.float64) for t in (q, k, v)]
    with blocks(SMALL), poisoned_memory():
        got = torch.autograd.grad(attn_engine.compile(backend=backend)(*leaves), leaves, d_o)
    wanted = torch.autograd.grad(dense(*exact), exact, d_o.double())
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-2, atol=5e-3 * theirs.abs().max().item())


@pytest.mark.parametrize("backend", ALL)
def test_b88_one_tensor_three_times(backend: str):
    x, exact = leaf(randn(1, 2, 32, 16)), leaf(randn(1, 2, 32, 16), torch.float64)
    attn_engine.compile(backend=backend)(x, x, x).square().sum().backward()
    dense(exact, exact, exact).square().sum().backward()
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ALL)
def test_b89_positions_outside_of_heads(backend: str):
    """(B, S, H, D) in memory, one query: the output has the right strides, and nothing is written past its end."""
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv(b=2, h=4, hkv=2, sq=1, skv=40))
    with poisoned_memory():
        o = attn_engine.compile(backend=backend)(q, k, v)
    right = dense(q.double(), *(t.double().repeat_interleave(2, 1) for t in (k, v)))
    torch.testing.assert_close(o.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ALL)
def test_b79_offsets_beyond_32_bits(backend: str):
    """Rows of k and v so far apart that the offset of the last one passes 2 ** 31 elements (never touched between)."""
    row, count = 2**30, 4
    storage = torch.empty(row * (count - 1) + 16, dtype=torch.float16)
    k = storage.as_strided((1, 1, count, 8), (8, 8, row, 1))
    v = storage[8:].as_strided((1, 1, count, 8), (8, 8, row, 1))
    q = randn(1, 1, 3, 8).half()
    k.copy_(randn(1, 1, count, 8, seed=1)), v.copy_(randn(1, 1, count, 8, seed=2))
    leaves = [leaf(q), leaf(k), leaf(v)]
    with torch.no_grad():
        o = attn_engine.compile(backend=backend)(*leaves)
    right = dense(q.double(), k.double(), v.double())
    torch.testing.assert_close(o.double(), right, rtol=1e-2, atol=2e-3)


# --- which gradients -----------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [s for s in product([True, False], repeat=3) if any(s)])
def test_b98_every_subset_of_gradients(wanted: tuple[bool, ...]):
    """What is not wanted costs no kernel and stays None; what is wanted has the same value."""
    make = lambda: [t.requires_grad_(w) for t, w in zip(qkv(h=4, hkv=2, sq=40), wanted, strict=True)]  # noqa: E731
    tensors, exact = make(), [leaf(t, torch.float64) for t in qkv(h=4, hkv=2, sq=40)]
    attend = attn_engine.compile(mask_mod=library.causal)
    with poisoned_memory():
        attend(*tensors).square().sum().backward()
    k, v = (t.repeat_interleave(2, 1) for t in exact[1:])
    torch.nn.functional.scaled_dot_product_attention(exact[0], k, v, is_causal=True).square().sum().backward()
    for tensor, right, wants in zip(tensors, exact, wanted, strict=True):
        assert (tensor.grad is not None) == wants
        if wants:
            torch.testing.assert_close(tensor.grad.double(), right.grad, rtol=1e-4, atol=1e-4)


def test_b98_no_work_for_frozen_keys():
    """With only q wanted, no kernel for dk and dv is built."""
    q, k, v = qkv(sq=16)
    attend = attn_engine.compile()
    attend(q.requires_grad_(), k, v)
    (compiled,) = attend._memory.compiled.values()
    assert "dkdv" not in compiled.source and "dq" in compiled.source


@pytest.mark.parametrize("options", [{"return_lse": True}, {"scale": 0.5}, {}])
def test_b124_backward_of_every_option(options: dict[str, object]):
    results = attn_engine.compile(score_mod=library.soft_cap(5.0))(*(leaf(t) for t in qkv(sq=16)), **options)
    for result in results if isinstance(results, tuple) else [results]:
        result.sum().backward(retain_graph=True)


# --- second calls --------------------------------------------------------------------------------


def test_b87_the_second_call_of_a_closure():
    """Two functions of the same code over other numbers are two definitions."""
    q, k, v = qkv(sq=40)
    found = [attn_engine.attention(q, k, v, mask_mod=library.sliding_window(n)) for n in (3, 9, 3)]
    assert torch.equal(found[0], found[2]) and not torch.allclose(found[0], found[1])
    check(lambda: {"mask_mod": library.sliding_window(9)}, (q, k, v))


def test_b102_other_captures_of_one_object():
    """A capture replaced or written between two calls of one compiled object."""
    state = {"bias": randn(33, 33)}
    attend = attn_engine.compile(score_mod=lambda s, b, h, i, j: s + state["bias"][i, j])
    q, k, v = qkv()
    for change in (lambda: None, lambda: state["bias"].zero_(), lambda: state.update(bias=randn(33, 33, seed=5))):
        change()
        right = (q.double() @ k.double().mT / 4 + state["bias"]).softmax(-1) @ v.double()
        torch.testing.assert_close(attend(q, k, v).double(), right, rtol=1e-4, atol=1e-5)


def test_b102_backward_after_another_call():
    """The first call's gradients, taken after a second call with other lengths, heads and scale."""
    attend = attn_engine.compile(mask_mod=library.causal)
    first, second = [leaf(t) for t in qkv(sq=40)], [leaf(t) for t in qkv(b=2, h=4, hkv=2, sq=17, skv=50, seed=3)]
    o1, o2 = attend(*first), attend(*second, scale=2.0)
    o2.square().sum().backward()
    o1.square().sum().backward()
    exact = [leaf(t, torch.float64) for t in first]
    torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=True).square().sum().backward()
    for mine, theirs in zip(first, exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-4)


def test_b109_a_mask_and_then_another():
    q, k, v = qkv(sq=40)
    table = torch.rand(40, 40, generator=torch.Generator().manual_seed(1)) < 0.5
    table[:, 0] = True
    attn_engine.attention(q, k, v, mask_mod=lambda b, h, i, j: table[i, j])
    o = attn_engine.attention(q, k, v, mask_mod=library.causal)
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(o, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", INTERPRETED])
def test_b91_keys_grow_by_one(backend: str):
    """One query, keys from 30 to 40 (an edge of blocks between): one compilation."""
    q, k, v = qkv(h=4, hkv=2, sq=1, skv=40, dtype=torch.float16)
    attend = attn_engine.compile(backend=backend)
    with counted_compilations() as count, blocks(SMALL):
        for size in range(30, 41):
            keys, values = k[:, :, :size], v[:, :, :size]
            wide = (t.double().repeat_interleave(2, 1) for t in (keys, values))
            torch.testing.assert_close(attend(q, keys, values).double(), dense(q.double(), *wide), rtol=0, atol=4e-3)
    assert count() == 1


def test_b100_runs_are_bitwise_equal():
    tensors = qkv(h=4, hkv=2, sq=130, dtype=torch.bfloat16)

    def once():
        leaves = [leaf(t) for t in tensors]
        bias = leaf(randn(4))
        o = attn_engine.attention(*leaves, score_mod=library.alibi(bias), mask_mod=library.causal)
        o.square().sum().backward()
        return [o.detach(), *(t.grad for t in (*leaves, bias))]

    for one, other in zip(once(), once(), strict=True):
        assert torch.equal(one, other)


# --- magnitudes and dtypes -----------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", INTERPRETED])
def test_b46_standard_deviation_3(backend: str):
    size, d = (1024, 128) if backend == "cpu" else (70, 128)
    tensors = [3 * t for t in qkv(h=1, sq=size, d=d, dtype=torch.float16)]
    check(causal, tensors, backend=backend, tolerance=1e-2)


@pytest.mark.parametrize("backend", ALL)
def test_b46_magnitude_30(backend: str):
    """Logits in the thousands: every row is a hard maximum."""
    tensors = [30 * t for t in qkv(h=1, sq=40, d=16)]
    found = check(causal, tensors, backend=backend, tolerance=2e-3, schedule=SMALL)
    assert all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize("backend", ALL)
def test_b47_all_inputs_1000(backend: str):
    """Logits of 1.6e7, all alike: the weights are uniform, dq and dk vanish."""
    tensors = [torch.full_like(t, 1000.0) for t in qkv(h=2, sq=50, d=64)]
    leaves = [leaf(t) for t in tensors]
    o = attn_engine.compile(backend=backend)(*leaves)
    o.sum().backward()
    torch.testing.assert_close(o, tensors[2], rtol=1e-5, atol=0)
    assert all(t.grad.isfinite().all() for t in leaves)


def test_b76_mixed_dtypes_are_an_error():
    """RMSNorm leaves q and k in float32 while v is bfloat16."""
    q, k, v = qkv(sq=16)
    with pytest.raises(errors.DtypeError, match=r"v is torch.bfloat16 but q is torch.float32"):
        attn_engine.attention(q, k, v.bfloat16())


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_b77_float32_is_float32(precision: str):
    """On a CPU there is nothing but float32, whatever the setting; lse too."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        check(plain, qkv(sq=256, d=64), tolerance=1e-5)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("backend", ALL)
def test_b103_backward_of_a_soft_cap(backend: str):
    make = lambda: {"score_mod": library.soft_cap(10.0), "mask_mod": library.causal}  # noqa: E731
    tensors = [4 * t for t in qkv(b=2 if backend == "cpu" else 1, h=2, sq=130 if backend == "cpu" else 40, d=64)]
    check(make, tensors, backend=backend, schedule=SMALL)
