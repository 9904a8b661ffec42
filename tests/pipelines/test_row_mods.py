"""Query, key and value mods that read their row, and gradients of what mods capture: against torch, on every path."""

import pytest
import torch

import attn_engine
from attn_engine import errors, library, pipelines
from attn_engine.arch import get_arch
from attn_engine.dialects import attn
from attn_engine.frontend.build import build
from attn_engine.frontend.definition import Definition
from attn_engine.interpreters.attn import run_attention
from attn_engine.interpreters.attn_backward import run_backward
from attn_engine.ir.schedule import Length
from attn_engine.passes.lowering import mods
from attn_engine.runtime import attention, driver
from tests.support.engines import ALL, SMALL, blocks, poisoned_memory

D = 8
HALF = D // 2
GENERATOR = torch.Generator().manual_seed(0)
W = torch.randn(D, generator=GENERATOR)
TABLE = torch.randn(2, 40, generator=GENERATOR)
FREQUENCIES = 1.0 / 100 ** (torch.arange(HALF) / HALF)


# --- mods, as users write them, and the same on whole tensors [B, H, S, D] -----------------------


def rms_norm(x, b, h, pos, c):
    return x * torch.rsqrt((x * x).mean(-1) + 1e-6) * W[c]


def rotary(x, b, h, pos, c):
    angle = pos * FREQUENCIES[c % HALF]
    return x * torch.cos(angle) + torch.where(c < HALF, -x[c + HALF], x[c - HALF]) * torch.sin(angle)


def whole_rotary(x):
    angle = torch.arange(x.shape[2])[:, None] * FREQUENCIES.to(x.dtype).repeat(2)
    return x * angle.cos() + torch.cat([-x[..., HALF:], x[..., :HALF]], -1) * angle.sin()


def whole_norm(x, w=W):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w.to(x.dtype)


CHANNELS = torch.arange(D)
MODS = {
    "norm": (rms_norm, whole_norm),
    "rotary": (rotary, whole_rotary),
    "of the library": (
        library.in_turn(library.rms_norm(W), library.rotary(FREQUENCIES)),
        lambda x: whole_rotary(whole_norm(x)),
    ),
    "rotary of norm": (
        lambda x, b, h, pos, c: rotary(rms_norm(x, b, h, pos, c), b, h, pos, c),
        lambda x: whole_rotary(whole_norm(x)),
    ),
    "pairs": (
        lambda x, b, h, pos, c: x * torch.where(c % 2 == 0, -x[c ^ 1], 2 * x[c ^ 1]),
        lambda x: x * torch.where(CHANNELS % 2 == 0, -x[..., CHANNELS ^ 1], 2 * x[..., CHANNELS ^ 1]),
    ),
    "roll": (lambda x, b, h, pos, c: x * x[c + 3].exp(), lambda x: x * x.roll(-3, -1).exp()),
    "part": (
        lambda x, b, h, pos, c: x[torch.where(c < 4, (c + 2) % 4, c)] * (c + 1) + x.sum(),
        lambda x: x[..., [2, 3, 0, 1, 4, 5, 6, 7]] * (CHANNELS + 1) + x.sum(-1, keepdim=True),
    ),
    "layer norm": (
        lambda x: (x - x.mean()) / (x.var(unbiased=False) + 1e-5).sqrt(),
        lambda x: torch.nn.functional.layer_norm(x, (D,)),
    ),
    "softmax": (lambda x: x.softmax(-1), lambda x: x.softmax(-1)),
    "largest": (lambda x: x / (1 + x.abs().amax(-1)), lambda x: x / (1 + x.abs().amax(-1, keepdim=True))),
    "norm of the neighbour": (
        lambda x, b, h, pos, c: rms_norm(x, b, h, pos, c)[c + 1] * x.sum(),
        lambda x: whole_norm(x).roll(-1, -1) * x.sum(-1, keepdim=True),
    ),
    "a condition next door": (
        lambda x, b, h, pos, c: x * (x > 0)[c + 1] + c[c + 1],
        lambda x: x * (x > 0).roll(-1, -1) + CHANNELS.roll(-1),
    ),
    "one per row": (lambda x: (x * x).sum().sqrt(), lambda x: x.norm(dim=-1, keepdim=True).expand(x.shape)),
}


def reference(q, k, v, query=None, key=None, value=None):
    q, k, v = (f(t) if f else t for f, t in ((query, q), (key, k), (value, v)))
    group = q.shape[1] // k.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    )


def operands(dtype, s=5, d=D):
    g = torch.Generator().manual_seed(1)
    return [
        torch.randn(2, h, n, d, generator=g, dtype=dtype).requires_grad_() for h, n in ((4, s), (2, s + 2), (2, s + 2))
    ]


@pytest.mark.parametrize("name", MODS)
def test_meaning_and_gradients(name):
    """The oracle and the derived backward, in float64."""
    mod, whole = MODS[name]
    traced = build(Definition(None, None, None, mod, mod, mod), dtype=torch.float32, head_dim=D, head_dim_v=D)
    module = traced.module
    driver.run_passes(module, (*pipelines.ATTN_ANALYSIS, *pipelines.derive_backward(("q", "k", "v"))))
    forward = next(o for o in module.walk() if isinstance(o, attn.AttentionOp))
    backward = next(o for o in module.walk() if isinstance(o, attn.BackwardOp))
    q, k, v = operands(torch.float64)
    captures = [c.double() if c.is_floating_point() else c for c in traced.captures]
    o, *saved = (t.detach() for t in run_attention(forward, q, k, v, D**-0.5, captures))
    want = reference(q, k, v, whole, whole, whole)
    torch.testing.assert_close(o, want.detach(), rtol=1e-5, atol=1e-6)
    d_o = torch.randn(o.shape, generator=GENERATOR, dtype=torch.float64)
    gradients = torch.autograd.grad(want, (q, k, v), d_o)
    found = run_backward(backward, *(t.detach() for t in (q, k, v)), D**-0.5, o, d_o, saved, [], captures)
    for got, expected in zip((found["dq"], found["dk"], found["dv"]), gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ALL)
def test_rotary_norm_with_trained_weights(backend, monkeypatch):
    """Grouped heads, several blocks, channels that are padded; the weights of the norms and of the values train."""
    monkeypatch.setattr(mods, "BLOCKS_PER_SUM", 2)  # several programs, the last with one block of rows
    d, half = 12, 6
    frequencies = 1.0 / 100 ** (torch.arange(half) / half)
    w, table = (t.clone().requires_grad_() for t in (torch.linspace(0.5, 1.5, d), TABLE))
    q, k, v = operands(torch.float32, s=35, d=d)

    def norm(x, c):
        return x * torch.rsqrt((x * x).mean(-1) + 1e-6) * w[c]

    def mod(x, b, h, pos, c):
        angle, y = pos * frequencies[c % half], norm(x, c)
        return y * torch.cos(angle) + torch.where(c < half, -y[c + half], y[c - half]) * torch.sin(angle)

    def whole(x):
        y = whole_norm(x, w)
        angle = torch.arange(x.shape[2])[:, None] * frequencies.repeat(2)
        return y * angle.cos() + torch.cat([-y[..., half:], y[..., :half]], -1) * angle.sin()

    leaves = (q, k, v, w, table)
    want = reference(q, k, v, whole, whole, lambda x: x * table[None, :, : x.shape[2], None])
    with blocks(SMALL), poisoned_memory():
        ours = attn_engine.compile(
            query_mod=mod, key_mod=mod, value_mod=lambda x, b, h, pos, c: x * table[h, pos], backend=backend
        )
        got = ours(q, k, v)
        found = torch.autograd.grad(got.square().sum(), leaves)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for x, y in zip(found, torch.autograd.grad(want.square().sum(), leaves), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("d", [16, 10])
def test_blocks_through_descriptors(d, monkeypatch):
    """They are of what the mods made, where its rows lie as descriptors want them."""
    monkeypatch.setattr(attention, "arch_for", lambda _: get_arch("sm_90"))
    monkeypatch.setattr(Length, "of", lambda *_: Length.LONG)
    monkeypatch.setattr(attention, "NARROWEST", 16)
    leaves = [torch.randn(1, h, 40, 16, generator=GENERATOR)[..., :d].requires_grad_() for h in (2, 1, 1)]
    with blocks(SMALL):
        ours = attn_engine.compile(query_mod=library.rms_norm(), key_mod=library.rms_norm(), backend="tile_interpreter")
        found = torch.autograd.grad(ours(*leaves).square().sum(), leaves)
    assert ("tile.load_block" in next(reversed(driver._CACHE.values())).tile_ir) == (d == 16)
    ones = torch.ones(d)
    want = reference(*leaves, query=lambda x: whole_norm(x, ones), key=lambda x: whole_norm(x, ones))
    for x, y in zip(found, torch.autograd.grad(want.square().sum(), leaves), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "tile_interpreter"])
def test_only_what_a_mod_captures_trains(backend):
    q, k, v = (t.detach() for t in operands(torch.float32))
    w = W.clone().requires_grad_()
    with blocks(SMALL):
        ours = attn_engine.compile(key_mod=lambda x, b, h, pos, c: x * w[c], backend=backend)
        (found,) = torch.autograd.grad(ours(q, k, v).square().sum(), [w])
    (want,) = torch.autograd.grad(reference(q, k, v, key=lambda x: x * w).square().sum(), [w])
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def test_a_capture_of_mods_and_scores():
    """Contributions of both meet in one gradient."""
    q, k, v = operands(torch.float32)
    w = W.clone().requires_grad_()
    ours = attn_engine.compile(
        query_mod=lambda x, b, h, pos, c: x * w[c] * torch.rsqrt((x * x).sum()),
        score_mod=lambda s, b, h, i, j: s + w[h],
        value_mod=lambda x, b, h, pos, c: x + w[c],
        row=lambda s: torch.sigmoid(s),
        backend="cpu",
    )
    leaves = (q, k, v, w)
    found = torch.autograd.grad(ours(q, k, v).square().sum(), leaves)
    s = (q * w / q.norm(dim=-1, keepdim=True)) @ k.repeat_interleave(2, 1).mT * D**-0.5 + w[:4, None, None]
    want = torch.autograd.grad((s.sigmoid() @ (v + w).repeat_interleave(2, 1)).square().sum(), leaves)
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


# --- what is refused ------------------------------------------------------------------------------


def test_a_channel_that_depends_on_the_position():
    q, k, v = operands(torch.float32)
    with pytest.raises(errors.OperandError, match="depends on pos"):
        attn_engine.compile(query_mod=lambda x, b, h, pos, c: x[c + pos])(q, k, v)


@pytest.mark.parametrize("index", [lambda c: c // 2, lambda c: c % 2 * 4 + c // 2])
def test_other_maps_have_no_gradient(index):
    q, k, v = operands(torch.float32)
    ours = attn_engine.compile(query_mod=lambda x, b, h, pos, c: x[index(c)], backend="cpu")
    with torch.no_grad():
        places = [int(index(c)) for c in range(D)]
        torch.testing.assert_close(ours(q, k, v), reference(q, k, v, query=lambda x: x[..., places]))
    with pytest.raises(errors.UnsupportedGradientError):
        ours(q, k, v)


def test_scores_have_no_channels():
    q, k, v = operands(torch.float32)
    with pytest.raises(errors.OperandError, match="indexed"):
        attn_engine.compile(score_mod=lambda s, b, h, i, j: s[i])(q, k, v)


@pytest.mark.parametrize("backend", ["cpu", "tile_interpreter"])
def test_what_an_element_picks_is_trained(backend):
    """A slope for each sign: where the gradient goes is decided by the element, not by its channel alone."""
    slopes = torch.tensor([0.3, 1.5], requires_grad=True)
    q, k, v = operands(torch.float32, s=35)
    leaves = (q, k, v, slopes)
    with blocks(SMALL), poisoned_memory():
        ours = attn_engine.compile(key_mod=lambda x: x * slopes[torch.where(x > 0, 1, 0)], backend=backend)
        found = torch.autograd.grad(ours(q, k, v).square().sum(), leaves)
    want = reference(q, k, v, key=lambda x: x * slopes[(x > 0).long()])
    for x, y in zip(found, torch.autograd.grad(want.square().sum(), leaves), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-4, atol=2e-4)
