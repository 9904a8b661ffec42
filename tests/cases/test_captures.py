"""Captured tensors: their gradients, their shapes, reads past their ends, their dtypes."""

from __future__ import annotations

import pytest
import torch

import attn_engine
from attn_engine import errors, library
from tests.support.compare import check, qkv, randn
from tests.support.engines import ALL, SMALL


@pytest.mark.parametrize("backend", ALL)
def test_b58_a_captured_scalar(backend: str):
    """The additive part of t contributes nothing: a softmax does not change when its row is shifted."""

    def make(t):
        return {"score_mod": lambda s, b, h, i, j: s * t + t, "mask_mod": library.causal}

    check(make, qkv(h=2, sq=16), {"t": torch.tensor(0.7)}, backend)


def test_b58_in_half_precision():
    t = torch.tensor(0.7, dtype=torch.float16, requires_grad=True)
    q, k, v = qkv(sq=16, dtype=torch.float16)
    attn_engine.attention(q, k, v, score_mod=lambda s, b, h, i, j: s * t + t).float().square().sum().backward()
    exact = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    s = q.double() @ k.double().mT / 4 * exact
    (s.softmax(-1) @ v.double()).square().sum().backward()
    assert t.grad.dtype == torch.float16
    torch.testing.assert_close(t.grad.double(), exact.grad, rtol=1e-2, atol=1e-2)


def test_b59_captured_and_not_used():
    w = torch.ones(2, requires_grad=True)

    def score_mod(s, b, h, i, j):
        w[h]
        return s

    q, k, v = (t.requires_grad_() for t in qkv(sq=16))
    attn_engine.attention(q, k, v, score_mod=score_mod).sum().backward()
    assert w.grad is None or w.grad.eq(0).all()
    assert q.grad is not None


def test_b59_multiplied_by_zero():
    """What is read but cannot matter: the gradient is 0, not an error."""
    check(lambda w: {"score_mod": lambda s, b, h, i, j: s + 0.0 * w[h]}, qkv(sq=16), {"w": randn(2)})


@pytest.mark.parametrize("backend", ALL)
def test_b61_a_bias_built_from_a_parameter(backend: str):
    """bias[b, q, k] = y[b, q] + y[b, k], outside of the function and inside of it."""
    outside = check(
        lambda y: {"score_mod": lambda s, b, h, i, j: s + (y[:, :, None] + y[:, None, :])[b, i, j]},
        qkv(b=2, sq=16),
        {"y": randn(2, 16)},
        backend,
    ) if backend == "cpu" else None  # fmt: skip
    inside = check(
        lambda y: {"score_mod": lambda s, b, h, i, j: s + (y[b, i] + y[b, j])},
        qkv(b=2, sq=16),
        {"y": randn(2, 16)},
        backend,
    )
    assert inside["dy"].abs().max() > 1e-2
    if outside is not None:
        torch.testing.assert_close(inside["dy"], outside["dy"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ALL)
def test_b62_relative_position_bias(backend: str):
    """Many scores read one element of the table; its gradient is their sum."""
    size = 256 if backend == "cpu" else 40
    table = {"bias": randn(2 * size)}
    check(lambda bias: {"score_mod": lambda s, b, h, i, j: s + bias[i - j + size]}, qkv(sq=size), table, backend)


def test_b62_relative_position_bias_per_head():
    make = lambda bias: {"score_mod": lambda s, b, h, i, j: s + bias[h, (i - j + 100) // 7], "mask_mod": library.causal}  # noqa: E731
    check(make, qkv(h=4, hkv=2, sq=70), {"bias": randn(4, 30)}, schedule=SMALL)


@pytest.mark.parametrize("backend", ALL)
def test_b64_a_dot_of_captured_rows(backend: str):
    """A second product in the score: short rows are read element by element, and get their gradients."""
    make = lambda qr, kr: {"score_mod": lambda s, b, h, i, j: s + (qr[h, i] * kr[j]).sum(-1)}  # noqa: E731
    check(make, qkv(sq=8), {"qr": randn(2, 8, 4), "kr": randn(8, 4, seed=1)}, backend)


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("shape", [(1, 1, 33, 33), (1, 4, 1, 33), (2, 1, 33, 1), (4, 33, 33), (33, 33), (1, 33)])
def test_b65_broadcast_biases(backend: str, shape: tuple[int, ...]):
    """The gradient is summed over the axes along which the bias is broadcast."""
    if backend != "cpu" and len(shape) != 4:
        pytest.skip("the cpu backend covers the rest")
    check(
        lambda bias: {"score_mod": library.bias(bias)},
        qkv(b=2, h=4, hkv=2),
        {"bias": randn(*shape)},
        backend,
        schedule=SMALL,
    )


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("scattered", [False, True])
def test_b65_expanded_biases(backend: str, scattered: bool):
    """A bias of stride 0: the gradient reaches the tensor that was expanded, not one of its copies."""
    small = randn(1, 33, 33).requires_grad_()
    wide = small.expand(4, 33, 33)
    q, k, v = qkv(h=4)
    last = (lambda j: (j * 5) % 33) if scattered else (lambda j: j)
    o = attn_engine.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + wide[h, i, last(j)], backend=backend)
    o.square().sum().backward()
    exact = small.detach().double().requires_grad_()
    bias = exact.expand(4, 33, 33)[:, :, torch.tensor([last(j) for j in range(33)])]
    right = (q.double() @ k.double().mT / 4 + bias).softmax(-1) @ v.double()
    right.square().sum().backward()
    torch.testing.assert_close(small.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ALL)
def test_b67_masks_that_look_up_positions(backend: str):
    """A table as long as the sequence, which ends inside of a block; documents of square lengths."""
    lengths = [n * n for n in ((1, 2, 3, 4, 5, 6, 7, 8, 6) if backend == "cpu" else (1, 2, 3, 4, 3))]
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    both = library.and_masks(library.document(ids), library.causal)
    check(lambda: {"mask_mod": both}, qkv(sq=sum(lengths)), backend=backend)


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("beyond", [28, 1])
def test_b68_reads_past_the_end_on_masked_lanes(backend: str, beyond: int):
    """The buffer is shorter than the keys; the mask hides what has no entry. Behind it in memory: NaN."""
    size = 33
    memory = torch.cat([randn(size), torch.full((beyond,), float("nan"))])

    def make(buffer):
        return {
            "score_mod": lambda s, b, h, i, j: s + buffer[j],
            "mask_mod": lambda b, h, i, j: j < size,
        }

    def reference(buffer):
        return make(torch.cat([buffer, torch.zeros(beyond, dtype=buffer.dtype)]))

    found = check(
        make, qkv(sq=20, skv=size + beyond), {"buffer": memory[:size]}, backend, schedule=SMALL, reference=reference
    )
    assert memory[size:].isnan().all() and found["dbuffer"].isfinite().all()


@pytest.mark.parametrize("backend", ALL)
def test_b68_reads_before_the_start_on_masked_lanes(backend: str):
    """An index that is negative where the mask hides the key."""

    def make(buffer):
        return {"score_mod": lambda s, b, h, i, j: s * buffer[i - j], "mask_mod": library.causal}

    def reference(buffer):
        return {"score_mod": lambda s, b, h, i, j: s * buffer[(i - j).clamp(min=0)], "mask_mod": library.causal}

    check(make, qkv(sq=33), {"buffer": randn(33)}, backend, schedule=SMALL, reference=reference)


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_b71_mathematics_of_half_captures(backend: str, dtype: torch.dtype):
    """Promoted to float32 first: exp of a half overflows at 11.1, and log keeps 10 bits."""
    if backend != "cpu" and dtype is torch.bfloat16:
        pytest.skip("Triton's interpreter has no bfloat16")
    m = torch.tensor([3.0, 12.5]).to(dtype)

    def make(m):
        return {"score_mod": lambda s, b, h, i, j: s * torch.log(torch.exp(m[h])) + torch.sin(m[h] * j)}

    tensors = qkv(sq=40)
    exact = m.double()
    found = check(lambda: make(exact.float()), tensors)
    q, k, v = tensors
    o = attn_engine.attention(q, k, v, **make(m), backend=backend)
    torch.testing.assert_close(o, found["o"], rtol=1e-4, atol=1e-5)


def test_b74_a_reduction_in_the_mask():
    """Over a short captured row it is unrolled; over scores there is none in a mask, and the error says so."""
    table = torch.eye(16, 4, dtype=torch.bool)
    q, k, v = qkv(sq=16)
    o = attn_engine.attention(q, k, v, mask_mod=lambda b, h, i, j: torch.any(table[i]) & (j < 9))
    assert o[:, :, 4:].eq(0).all()
    right = (q @ k[:, :, :9].mT / 4).softmax(-1) @ v[:, :, :9]
    torch.testing.assert_close(o[:, :, :4], right[:, :, :4], rtol=1e-4, atol=1e-5)
    with pytest.raises(errors.ReductionError, match="one element at a time"):
        attn_engine.attention(q, k, v, mask_mod=lambda b, h, i, j: (i >= j).any())


def test_b97_a_capture_on_another_device():
    table = torch.ones(16, device="meta")
    q, k, v = qkv(sq=16)
    with pytest.raises(errors.DeviceError, match="table"):
        attn_engine.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[j])


@pytest.mark.parametrize("backend", ALL)
def test_b104_alibi_of_a_decoding_step(backend: str):
    """One query at position 16 against row 16 of the whole; slopes stay in float32."""
    slopes = torch.tensor([2.0**-0.5, 1 / 3])
    q, k, v = qkv(sq=17, dtype=torch.float16)
    whole = attn_engine.attention(q, k, v, score_mod=library.alibi(slopes), mask_mod=library.causal, backend=backend)
    step = attn_engine.attention(q[:, :, 16:], k, v, score_mod=library.alibi(slopes, offset=16), backend=backend)
    torch.testing.assert_close(step, whole[:, :, 16:], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize(("sink", "skv"), [(0.5, 0), (100.0, 20), (-100.0, 20), (0.5, 20)])
def test_b106_b107_sinks(backend: str, sink: float, skv: int):
    """A sink joins the maximum: without keys the output is 0, with a large one nothing overflows."""

    def make(sinks):
        def row(s, b, h, q):
            m = torch.maximum(s.amax(), sinks[h])
            e = torch.exp(s - m)
            return e / (e.sum() + torch.exp(sinks[h] - m))

        return {"row": row}

    found = check(make, qkv(sq=5, skv=skv), {"sinks": torch.tensor([sink, 0.1])}, backend)
    assert all(value.isfinite().all() for value in found.values())
    if not skv:
        assert found["o"].eq(0).all()


@pytest.mark.parametrize("backend", ALL)
def test_scores_that_depend_on_no_key(backend: str):
    """All scores of a row alike, from a capture alone: to the loops over keys they are scores like any other."""
    make = lambda t: {"score_mod": lambda s, b, h, i, j: torch.clamp(t[h], -1.5, 1.5), "mask_mod": library.causal}  # noqa: E731
    check(make, qkv(sq=20), {"t": randn(2)}, backend, schedule=SMALL)
