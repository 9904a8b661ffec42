"""Forwards on Hopper: asynchronous kernels beside plain ones and a peer, milliseconds: `python -m bench.hopper`.

B4 H32 S4096 bf16. Peers are cuDNN for softmax, FlexAttention compiled for anything else; all in the same rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import attn_engine
from attn_engine import library
from bench.custom import flex
from bench.timing import interleaved
from bench.warm import side_by_side

B, H, S = 4, 32, 4096
BACKENDS = ("gluon", "triton")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A definition, head dims, and its peer; `visible` of the S x S scores count as work."""

    name: str
    ours: Callable[[str], Attend]
    peer: Callable[[], Attend] | None
    visible: int
    d: int = 128
    dv: int = 128


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=causal)


def _softmax(causal: bool, d: int, dv: int | None = None) -> Case:
    mask = library.causal if causal else None
    visible = S * (S + 1) // 2 if causal else S * S
    name = "causal" if causal else "full"
    ours = partial(attn_engine.compile, mask_mod=mask)
    return Case(name, lambda b: ours(backend=b), lambda: partial(_cudnn, causal=causal), visible, d, dv or d)


def _custom(name: str, visible: int, score_mod: Any = None, mask_mod: Any = None) -> Case:
    ours = partial(attn_engine.compile, score_mod=score_mod, mask_mod=mask_mod)
    return Case(name, lambda b: ours(backend=b), lambda: flex(score_mod, mask_mod), visible)


def cases() -> list[Case]:
    device = torch.device("cuda")
    slopes = torch.exp2(-torch.arange(1, H + 1, device=device) / 4)
    bias = torch.randn(1, H, S, S, device=device, dtype=torch.bfloat16)
    documents = torch.arange(S, device=device) // (S // 8)
    sink = torch.zeros(H, device=device)
    triangle, window, eighth = S * (S + 1) // 2, 1024, S // 8

    def in_window(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (q - kv < window)

    def with_first_keys(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & ((q - kv < window) | (kv < 4))

    def same_document(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (documents[q] == documents[kv])

    def alibi(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + slopes[h] * (kv - q)

    def soft_cap(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return 20 * torch.tanh(s / 20)

    def add_bias(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + bias[0, h, q, kv]

    banded = triangle - (S - window) * (S - window + 1) // 2
    rows = partial(attn_engine.compile, mask_mod=library.causal)
    causal = library.causal
    return [
        _custom("ALiBi, window 1024", banded, alibi, in_window),
        _custom("soft-cap 20, causal", triangle, soft_cap, causal),
        _custom("8 documents, causal", 8 * eighth * (eighth + 1) // 2, None, same_document),
        _custom("dense bias", S * S, add_bias),
        Case(
            "causal, a sink per head (peer without)",
            lambda b: rows(row=library.softmax_with_sink(sink), backend=b),
            lambda: flex(None, causal),
            triangle,
        ),
        _custom("window 1024, 4 first keys", banded + 4 * (S - window), None, with_first_keys),
        *(_softmax(True, d) for d in (64, 96, 128, 256)),
        _softmax(True, 192, 128),
        *(_softmax(False, d) for d in (64, 128)),
        Case("sigmoid, causal", lambda b: rows(row=library.sigmoid, backend=b), None, triangle),
        Case("relu, causal", lambda b: rows(row=library.relu, backend=b), None, triangle),
    ]


def inputs(case: Case) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, H, S, d, device="cuda", dtype=torch.bfloat16) for d in (case.d, case.d, case.dv)]


def contenders(case: Case) -> dict[str, Attend]:
    found = {name: case.ours(name) for name in BACKENDS}
    return found if case.peer is None else found | {"peer": case.peer()}


def build(task: tuple[int, str]) -> None:
    number, name = task
    case = cases()[number]
    with torch.no_grad():
        contenders(case)[name](*inputs(case))


def row(case: Case) -> str:
    """A line of the table; an output that is not that of plain kernels is said so."""
    operands, found = inputs(case), contenders(case)
    with torch.no_grad():
        outputs = {name: found[name](*operands).float() for name in BACKENDS}
        error = float((outputs["gluon"] - outputs["triton"]).norm() / outputs["triton"].norm())
        del outputs
        times = interleaved({name: partial(attend, *operands) for name, attend in found.items()}, rounds=4, launches=3)
    flops = 2 * B * H * case.visible * (case.d + case.dv)
    rate, peer = flops / times["gluon"] * 1e-9, times.get("peer")
    heads = f"{case.d}" if case.d == case.dv else f"{case.d}/{case.dv}"
    beside = f"{peer:.3f} | {peer / times['gluon']:.2f}" if peer is not None else "| "
    wrong = "" if error < 1e-2 else f" (differs: {error:.0e})"
    return f"| {case.name}{wrong} | {heads} | {times['gluon']:.3f} | {rate:.0f} | {times['triton']:.3f} | {beside} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; B{B} H{H} S{S} bf16, forward; `python -m bench.hopper`.",
        "Peers: cuDNN for softmax alone, compiled FlexAttention for the others.",
        "",
        "| definition | head dim | asynchronous ms | TFLOP/s | plain Triton ms | peer ms | peer / asynchronous |",
        "|---|---|---|---|---|---|---|",
    ]
    known = cases()
    names = [
        [*BACKENDS, *(["peer"] if case.peer is not None and case.name not in ("causal", "full") else [])]
        for case in known
    ]
    side_by_side(build, [(number, name) for number, own in enumerate(names) for name in own])
    print("\n".join(lines), flush=True)
    for case in known:
        torch._dynamo.reset()
        try:
            lines.append(row(case))
        except Exception as error:  # One definition must not cost the others their figures.
            lines.append(f"| {case.name} | failed: {type(error).__name__}: {str(error)[:120]} | | | | | |")
        print(lines[-1], flush=True)
        torch.cuda.empty_cache()
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "hopper_definitions.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
