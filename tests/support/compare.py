"""One attention on a backend against eager torch: results and all gradients, in poisoned memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import attn_engine
from attn_engine.ir.schedule import Schedule
from tests.support.eager import Functions, eager_attention
from tests.support.engines import blocks, poisoned_memory

Make = Callable[..., Functions]
"""From captured tensors, by name, to the functions of a definition, named as in `attn_engine.compile`."""

TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def plain() -> Functions:
    return {}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(
    b: int = 1,
    h: int = 2,
    hkv: int | None = None,
    sq: int = 33,
    skv: int | None = None,
    d: int = 16,
    dv: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[Tensor]:
    hkv, skv, dv = hkv or h, sq if skv is None else skv, dv or d
    shapes = [(b, h, sq, d), (b, hkv, skv, d), (b, hkv, skv, dv)]
    return [randn(*shape, seed=3 * seed + n, dtype=dtype) for n, shape in enumerate(shapes)]


def leaf(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A leaf of its own, that requires a gradient if it is a float; expanded tensors and strides stay as they are."""
    if not tensor.is_floating_point():
        return tensor
    made = tensor.detach() if dtype in (None, tensor.dtype) else tensor.detach().to(dtype)
    return made.requires_grad_()


def run(
    attend: Callable[..., Any], tensors: Sequence[Tensor], captures: Mapping[str, Tensor], d_o: Tensor, d_lse: Tensor
) -> dict[str, Tensor]:
    """o, lse (unless `attend` gives o alone) and the gradients of sum(o * d_o) + sum(lse * d_lse)."""
    results = attend(*tensors)
    results = results if isinstance(results, tuple) else (results,)
    # An output that depends on none of the tensors has no gradient.
    trained = [(r, d.to(r.dtype)) for r, d in zip(results, (d_o, d_lse), strict=False) if r.requires_grad]
    named = {"q": tensors[0], "k": tensors[1], "v": tensors[2]} | dict(captures)
    wanted = {name: t for name, t in named.items() if t.requires_grad}
    outputs, cotangents = [r for r, _ in trained], [d for _, d in trained]
    grads = torch.autograd.grad(outputs, list(wanted.values()), cotangents, allow_unused=True) if wanted else []
    found = dict(zip(("o", "lse"), (r.detach() for r in results), strict=False))
    for (name, tensor), gradient in zip(wanted.items(), grads, strict=True):
        found[f"d{name}"] = torch.zeros_like(tensor) if gradient is None else gradient
    return found


def both(
    make: Make,
    tensors: Sequence[Tensor],
    captures: Mapping[str, Tensor] | None = None,
    backend: str = "cpu",
    scale: float | None = None,
    schedule: Schedule | None = None,
    reference: Make | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the engine and eager torch make of the same definition; every float capture gets a gradient."""
    scale = tensors[0].shape[3] ** -0.5 if scale is None else scale
    tensors, captures = [leaf(t) for t in tensors], {n: leaf(c) for n, c in (captures or {}).items()}
    exact = [leaf(t, torch.float64) for t in tensors], {n: leaf(c, torch.float64) for n, c in captures.items()}
    q, v = tensors[0], tensors[2]
    d_o, d_lse = randn(*q.shape[:3], v.shape[3], seed=91).to(q.dtype), randn(*q.shape[:3], seed=92)
    functions = (reference or make)(**exact[1])
    want = run(
        lambda q, k, v: eager_attention(q, k, v, functions, scale), *exact, d_o, d_lse * float("row" not in functions)
    )
    definition = make(**captures)
    with poisoned_memory(), blocks(schedule):
        attend = attn_engine.compile(**definition, backend=backend)
        got = run(
            lambda q, k, v: attend(q, k, v, scale=scale, return_lse="row" not in definition),
            tensors,
            captures,
            d_o,
            d_lse,
        )
    return got, want


def check(
    make: Make,
    tensors: Sequence[Tensor],
    captures: Mapping[str, Tensor] | None = None,
    backend: str = "cpu",
    tolerance: float | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Asserts that `both` agree, gives the engine's results."""
    got, want = both(make, tensors, captures, backend, **options)
    tolerance = tolerance or TOLERANCE[tensors[0].dtype]
    for name, value in got.items():
        assert_near(name, value, want[name], tolerance)
    return got


def assert_near(name: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    """Equal up to `tolerance` times the largest right value (or 1); infinities in the same places."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    finite = want.isfinite()
    assert torch.equal(got[~finite].double(), want[~finite].double()), f"{name}: infinities differ"
    if finite.any():
        size = max(1.0, want[finite].abs().max().item())
        error = (got.double() - want.double())[finite].abs().max().item()
        assert error <= tolerance * size, f"{name}: off by {error:.3g}, largest value {size:.3g}"
