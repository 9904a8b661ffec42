"""Generated Hopper kernels on this GPU: errors against float64, then TFLOP/s beside cuDNN and plain Triton.

python -m bench.gluon_generated            # correctness, then speed; about a minute
python -m bench.gluon_generated --no-speed
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import attn_engine
from attn_engine import library
from attn_engine.backends.backend import get_backend
from bench.timing import interleaved
from bench.warm import side_by_side

SPEED = ((4, 32, 4096), (1, 32, 16384))
SHAPES = (((2, 4, 2), (1000, 777)), ((1, 2, 2), (129, 300)), ((1, 3, 1), (512, 512)))
RELATIVE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@dataclass(frozen=True)
class Case:
    """A definition and how wide its heads are."""

    name: str
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    row: Callable[..., Any] | None = None
    d: int = 128
    dtype: torch.dtype = torch.bfloat16
    dv: int | None = None
    """Channels of values, if other than `d`."""


def cases() -> list[Case]:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device="cuda")
    table = torch.randn(4, 1000, 784, device="cuda")
    documents = torch.arange(1000, device="cuda") // 130
    sinks = library.or_masks(library.sliding_window(200), library.and_masks(library.causal, _first_keys))
    return [
        Case("full"),
        Case("causal", mask_mod=library.causal),
        Case("causal f16", mask_mod=library.causal, dtype=torch.float16),
        Case("causal D64", mask_mod=library.causal, d=64),
        Case("full D64", d=64),
        Case("window", mask_mod=library.sliding_window(200)),
        Case("prefix", mask_mod=library.prefix_lm(150)),
        Case("alibi", score_mod=library.alibi(slopes), mask_mod=library.causal),
        Case("soft cap", score_mod=library.soft_cap(20.0)),
        Case("sigmoid", row=library.sigmoid, mask_mod=library.causal),
        Case("relu", row=library.relu, mask_mod=library.causal),
        Case("first keys", mask_mod=sinks),
        Case("documents", mask_mod=library.and_masks(library.causal, library.document(documents))),
        Case("table bf16", score_mod=library.bias(table.bfloat16())),
        Case("table f32", score_mod=library.bias(table), mask_mod=library.causal),
        Case("table D64", score_mod=library.bias(table.bfloat16()), d=64),
        Case("causal D96", mask_mod=library.causal, d=96),
        Case("causal D256", mask_mod=library.causal, d=256),
        Case("cap D256", score_mod=library.soft_cap(20.0), d=256),
        Case("192 and 128", mask_mod=library.causal, d=192, dv=128),
        Case("128 and 256", d=128, dv=256),
    ]


def _first_keys(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx < 4


def inputs(case: Case, heads: tuple[int, int, int], sizes: tuple[int, int]) -> list[Tensor]:
    (batch, q_heads, kv_heads), (sq, skv) = heads, sizes
    q = torch.randn(batch, q_heads, sq, case.d, device="cuda")
    k, v = (torch.randn(batch, kv_heads, skv, d, device="cuda") for d in (case.d, case.dv or case.d))
    return [x.to(case.dtype) for x in (q, k, v)]


def reference(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense attention in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    s = q.double() @ k.transpose(2, 3) * case.d**-0.5
    index = [
        torch.arange(n, device="cuda").view([-1 if a == axis else 1 for a in range(4)])
        for axis, n in enumerate(s.shape)
    ]
    if case.score_mod is not None:
        s = case.score_mod(s, *index)
    seen = torch.ones_like(s, dtype=torch.bool)
    if case.mask_mod is not None:
        seen = seen & case.mask_mod(*index)
    if case.row is not None:
        return torch.where(seen, case.row(s), 0.0) @ v
    return s.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0) @ v


def check(case: Case) -> bool:
    """Whether the relative error of the output is small on several shapes."""
    ours = attn_engine.compile(score_mod=case.score_mod, mask_mod=case.mask_mod, row=case.row, backend="gluon")
    worst = 0.0
    for heads, sizes in SHAPES:
        operands = inputs(case, heads, sizes)
        worst = max(worst, relative(ours(*operands), reference(case, *operands)))
    limit = RELATIVE[case.dtype]
    fine = worst < limit
    print(f"{'ok' if fine else 'WRONG':6}{case.name:12}relative error {worst:.1e} (limit {limit:.1e})", flush=True)
    return fine


def relative(got: Tensor, want: Tensor) -> float:
    error = float((got.double() - want).norm() / want.norm())
    return error if error == error else float("inf")


def warm(number: int) -> None:
    """Compiles what `check` runs."""
    case = cases()[number]
    attn_engine.compile(score_mod=case.score_mod, mask_mod=case.mask_mod, row=case.row, backend="gluon")(
        *inputs(case, *SHAPES[0])
    )


def check_gradients() -> bool:
    """Of one causal definition; `bench.gluon_backward` has more."""
    case = Case("gradients", mask_mod=library.causal)
    operands = inputs(case, (1, 4, 2), (300, 300))
    ours = attn_engine.compile(mask_mod=library.causal, backend="gluon")
    leaves = [x.clone().requires_grad_() for x in operands]
    exact = [x.double().requires_grad_() for x in operands]
    o, want = ours(*leaves), reference(case, *exact)
    weight = torch.randn_like(o)
    o.backward(weight)
    want.backward(weight.double())
    worst = max(relative(a.grad, b.grad) for a, b in zip(leaves, exact, strict=True))  # type: ignore[arg-type]
    fine = worst < 2 * RELATIVE[case.dtype]
    print(f"{'ok' if fine else 'WRONG':6}{case.name:12}relative error {worst:.1e}", flush=True)
    return fine


def cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=causal)


def measure() -> None:
    """TFLOP/s of visible scores, medians of interleaved rounds."""
    for batch, heads, size in SPEED:
        operands = inputs(Case("speed"), (batch, heads, heads), (size, size))
        for causal in (True, False):
            mask = library.causal if causal else None
            contenders: dict[str, Callable[[], object]] = {
                name: partial(attn_engine.compile(mask_mod=mask, backend=name), *operands)
                for name in ("gluon", "triton")
            }
            contenders["cudnn"] = partial(cudnn, *operands, causal)
            flops = 4 * batch * heads * size * size * 128 / (2 if causal else 1)
            found = interleaved(contenders, rounds=5, launches=3)
            text = ", ".join(f"{name} {flops / milliseconds * 1e-9:.0f}" for name, milliseconds in found.items())
            print(f"{'causal' if causal else 'full':7}B{batch} H{heads} S{size} D128 bf16: {text} TFLOP/s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-speed", action="store_true")
    arguments = parser.parse_args()
    available = get_backend("gluon").check()
    if not available.ok:
        print(available.reason)
        return 2
    torch.manual_seed(0)
    known = cases()
    side_by_side(warm, range(len(known)))
    results = [*(check(case) for case in known), check_gradients()]
    if not arguments.no_speed:
        measure()
    return 0 if all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
