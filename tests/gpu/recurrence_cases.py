"""Recurrences on a GPU against the token loop in fp64, with weak decays: strong ones hide errors in old states.

Each case is a plain function, so that all of them compile and run side by side in processes of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

import attn_engine
from tests.recurrence.support import reference

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
HALF, FLOAT, BRAIN = torch.float16, torch.float32, torch.bfloat16


def made(batch, tokens, heads, shared, key, value, dtype, kind="token", sequences=None) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator, device="cuda")

    rates = torch.where(torch.arange(heads, device="cuda") % 2 == 0, 0.01, 0.3)
    x = {"q": randn(batch, tokens, shared, key).to(dtype), "k": randn(batch, tokens, shared, key).to(dtype)}
    x["k"] = torch.nn.functional.normalize(x["k"].float(), dim=-1).to(dtype)
    x["v"] = randn(batch, tokens, heads, value).to(dtype)
    x["decay"] = rates * torch.nn.functional.logsigmoid(randn(batch, tokens, heads))
    if kind.startswith("channel"):
        x["decay"] = x["decay"][..., None] * torch.rand(key, generator=generator, device="cuda")
    x["beta" if kind.endswith("delta") else "weight"] = randn(batch, tokens, heads).sigmoid()
    x["initial_state"] = randn(sequences or batch, heads, key, value)
    return x


def near(name, got, want, dtype):
    assert bool(got.isfinite().all()), f"{name} is not finite"
    error = ((got.double() - want).norm() / want.norm().clamp(min=1e-9)).item()
    assert error < TOLERANCE[dtype], f"{name}: relative error {error:.2e}"


def compare(x, dtype, right=reference, **options):
    got = {n: t.detach().clone().requires_grad_() for n, t in x.items()}
    want = {n: t.detach().double().requires_grad_() for n, t in x.items()}
    o, final = attn_engine.recurrence(**got, output_final_state=True, **options)
    right_o, right_final = right(**want)
    d_o, d_final = torch.randn_like(right_o), torch.randn_like(right_final)
    near("o", o.detach(), right_o.detach(), dtype)
    near("final", final.detach(), right_final.detach(), dtype)
    ((o.double() * d_o).sum() + (final * d_final).sum()).backward()
    ((right_o * d_o).sum() + (right_final * d_final).sum()).backward()
    for name in x:
        near(f"d_{name}", got[name].grad, want[name].grad, dtype)


def gradients(*shape, dtype, kind="token"):
    compare(made(*shape, dtype, kind), dtype)


def strided():
    """Operands cut out of one projection: blocks can be copied, and with an odd offset they cannot."""
    x = made(2, 130, 2, 2, 64, 64, BRAIN)
    right, _ = reference(**{n: t.double() for n, t in x.items()})
    for offset in (0, 3):
        wide = torch.cat([torch.zeros_like(x["q"][..., :offset]), x["q"], x["k"], x["v"]], -1)
        q, k, v = wide[..., offset:].split(64, -1)
        o, _ = attn_engine.recurrence(**(x | {"q": q, "k": k, "v": v}))
        near("o", o, right, BRAIN)
    alike = x["decay"][..., None].expand(-1, -1, -1, 64)
    o, _ = attn_engine.recurrence(**(x | {"decay": alike}))
    near("o", o, right, BRAIN)


def packed():
    x = made(1, 700, 4, 2, 64, 64, BRAIN, sequences=3)
    bounds = [0, 300, 300, 650]

    def one_by_one(**wide):
        state = wide.pop("initial_state")
        parts = [
            reference(**{n: t[:, lo:hi] for n, t in wide.items()}, initial_state=state[n : n + 1])
            for n, (lo, hi) in enumerate(pairwise(bounds))
        ]
        rest = wide["v"].new_zeros(1, 50, 4, 64)
        return torch.cat([*(o for o, _ in parts), rest], 1), torch.cat([s for _, s in parts])

    compare(x, BRAIN, one_by_one, cu_seqlens=torch.tensor(bounds, device="cuda"))


def decoding(batch, kind="token"):
    x = made(batch, 5, 4, 2, 128, 128, BRAIN, kind)
    state = x.pop("initial_state")
    want, final = reference(**{n: t.double() for n, t in x.items()}, initial_state=state.double())
    steps = [attn_engine.recurrence_step(**{n: t[:, i : i + 1] for n, t in x.items()}, state=state) for i in range(5)]
    near("o", torch.cat(steps, 1), want, BRAIN)
    near("state", state, final, BRAIN)


def strong_decay_and_resets():
    x = made(1, 192, 2, 2, 64, 64, FLOAT)
    x["decay"] = torch.linspace(0, -120, 64, device="cuda").repeat(3)[None, :, None].expand(1, -1, 2).clone()
    compare(x, FLOAT)
    x["decay"][:, 70:72] = float("-inf")
    compare(x, FLOAT)


def resets(kind):
    """Exactly, and with gradients: in a chunk of its own, several in a chunk, of some channels alone."""
    x = made(1, 200, 2, 2, 64, 64, FLOAT, kind)
    x["decay"][:, [0, 5, 6, 40, 130], 1] = float("-inf")
    if kind.startswith("channel"):
        x["decay"][:, 20:22, :, 3:5] = float("-inf")
    compare(x, FLOAT)


def long(kind):
    """131072 tokens, in one call and in two that hand the state on."""
    x = made(1, 131072, 2, 2, 64, 64, BRAIN, kind)
    x.pop("beta" if kind.endswith("delta") else "weight")
    half, state = 65536, x.pop("initial_state")
    got = {n: t.requires_grad_() for n, t in x.items()}
    o, final = attn_engine.recurrence(**got, initial_state=state, output_final_state=True)
    o.float().square().sum().backward()
    assert all(bool(t.grad.isfinite().all()) for t in got.values()), "a gradient is not finite"
    parts = []
    for part in (slice(0, half), slice(half, None)):
        cut = {n: t.detach()[:, part] for n, t in x.items()}
        mine, state = attn_engine.recurrence(**cut, initial_state=state, output_final_state=True)
        parts.append(mine)
    near("o", torch.cat(parts, 1), o.detach().double(), BRAIN)
    near("state", state, final.detach().double(), BRAIN)


Case = tuple[Callable[..., None], tuple[object, ...], dict[str, object]]


def _case(function: Callable[..., None], *args: object, **options: object) -> Case:
    return function, args, options


CASES: dict[str, Case] = {
    "128 bf16": _case(gradients, 2, 257, 4, 4, 128, 128, dtype=BRAIN),
    "128 fp16": _case(gradients, 2, 257, 4, 4, 128, 128, dtype=HALF),
    "128 fp32": _case(gradients, 1, 130, 2, 2, 128, 128, dtype=FLOAT),
    "pieces": _case(gradients, 1, 2080, 2, 2, 128, 128, dtype=BRAIN),
    "one group bf16": _case(gradients, 2, 130, 8, 1, 128, 64, dtype=BRAIN),
    "one group fp16": _case(gradients, 2, 130, 8, 1, 128, 64, dtype=HALF),
    "odd channels bf16": _case(gradients, 1, 65, 3, 1, 48, 40, dtype=BRAIN),
    "odd channels fp32": _case(gradients, 1, 65, 3, 1, 48, 40, dtype=FLOAT),
    "one token": _case(gradients, 1, 1, 2, 2, 64, 64, dtype=BRAIN),
    "256": _case(gradients, 1, 150, 2, 2, 256, 256, dtype=BRAIN),
    "256 keys, 64 values": _case(gradients, 1, 150, 2, 1, 256, 64, dtype=HALF),
    "256 keys, 512 values, in pieces": _case(gradients, 1, 1100, 2, 1, 256, 512, dtype=BRAIN),
    "channel 64": _case(gradients, 2, 70, 4, 2, 64, 64, dtype=BRAIN, kind="channel"),
    "channel 128": _case(gradients, 2, 150, 4, 2, 128, 128, dtype=BRAIN, kind="channel"),
    "delta 64": _case(gradients, 2, 70, 4, 2, 64, 64, dtype=BRAIN, kind="delta"),
    "delta 128": _case(gradients, 2, 150, 4, 2, 128, 128, dtype=BRAIN, kind="delta"),
    "delta 256": _case(gradients, 1, 150, 2, 2, 256, 256, dtype=BRAIN, kind="delta"),
    "channel delta": _case(gradients, 1, 70, 2, 2, 64, 64, dtype=BRAIN, kind="channel delta"),
    "channel delta 128": _case(gradients, 2, 150, 4, 2, 128, 128, dtype=BRAIN, kind="channel delta"),
    "channel delta 256": _case(gradients, 1, 150, 2, 2, 256, 256, dtype=BRAIN, kind="channel delta"),
    "channel delta fp32": _case(gradients, 1, 130, 2, 2, 128, 128, dtype=FLOAT, kind="channel delta"),
    "channel pieces": _case(gradients, 1, 1100, 2, 2, 64, 64, dtype=BRAIN, kind="channel"),
    "512 values": _case(gradients, 1, 130, 2, 2, 64, 512, dtype=BRAIN),
    "strided": _case(strided),
    "packed": _case(packed),
    "decoding 1": _case(decoding, 1),
    "decoding 3": _case(decoding, 3),
    "strong decay": _case(strong_decay_and_resets),
    "131072 tokens": _case(long, "token"),
    "131072 tokens, channels": _case(long, "channel"),
    "resets": _case(resets, "token"),
    "resets of channels": _case(resets, "channel"),
    "resets, delta": _case(resets, "delta"),
    "resets of channels, delta": _case(resets, "channel delta"),
}


def run(name: str) -> str:
    """One case; the message of what went wrong, or nothing."""
    torch.set_float32_matmul_precision("highest")
    torch.full((2**26,), torch.nan, device="cuda")  # NaN in what the allocator hands out again
    function, args, options = CASES[name]
    try:
        function(*args, **options)
    except AssertionError as error:
        return str(error) or "failed"
    return ""
