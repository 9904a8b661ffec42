"""Custom attention beside compiled FlexAttention, or the compiled dense formula where it has none: `python -m bench.custom`.

B4 H32 S4096 D128 bf16 (B1 for sigmoid and relu, whose dense form needs S x S memory). Milliseconds, medians, interleaved.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attn_engine
from attn_engine import library
from bench.timing import interleaved
from bench.warm import side_by_side

S, D, H = 4096, 128, 32
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Custom:
    """A definition of ours, its peer, and the captured tensors that train."""

    name: str
    ours: Attend
    peer: Attend
    batch: int = 4
    trained: tuple[Tensor, ...] = ()
    slow_peer: bool = False
    """The peer's backward takes a second or so: run it once."""


def flex(score_mod: Any, mask_mod: Any) -> Attend:
    compiled = torch.compile(flex_attention)
    blocks = create_block_mask(mask_mod, None, None, S, S, device="cuda") if mask_mod is not None else None
    return lambda q, k, v: compiled(q, k, v, score_mod=score_mod, block_mask=blocks)


def same(name: str, score_mod: Any, mask_mod: Any, **more: Any) -> Custom:
    """The very same functions on both sides."""
    ours = attn_engine.compile(score_mod=score_mod, mask_mod=mask_mod)
    return Custom(name, ours, flex(score_mod, mask_mod), **more)


def dense(weight: Callable[[Tensor], Tensor]) -> Attend:
    """weight(scale q k^T) v over visible keys, compiled."""
    visible = torch.ones(S, S, dtype=torch.bool, device="cuda").tril()

    @torch.compile
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = torch.where(visible, weight((q @ k.transpose(-1, -2)) * D**-0.5), 0.0)
        return p.to(v.dtype) @ v

    return run


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def definitions() -> list[Custom]:
    device = torch.device("cuda")
    slopes = torch.exp2(-torch.arange(1, H + 1, device=device) / 4)
    trained = slopes.clone().requires_grad_()
    bias = torch.randn(1, H, S, S, device=device, dtype=torch.bfloat16, requires_grad=True)
    documents = torch.arange(S, device=device) // (S // 8)

    def window(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (q - kv < 1024)

    def same_document(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (documents[q] == documents[kv])

    row = {"sigmoid": (library.sigmoid, torch.sigmoid), "relu": (library.relu, torch.relu)}
    return [
        same("ALiBi, window 1024", lambda s, b, h, q, kv: s + slopes[h] * (kv - q), window),
        same(
            "the same, slopes trained",
            lambda s, b, h, q, kv: s + trained[h] * (kv - q),
            window,
            trained=(trained,),
            slow_peer=True,
        ),
        same("soft-cap 20, causal", lambda s, b, h, q, kv: 20 * torch.tanh(s / 20), causal),
        same("8 documents, causal", None, same_document),
        same("dense bias with gradient", lambda s, b, h, q, kv: s + bias[0, h, q, kv], None, trained=(bias,)),
        *(
            Custom(f"{name}, causal", attn_engine.compile(row=ours, mask_mod=library.causal), dense(peer), batch=1)
            for name, (ours, peer) in row.items()
        ),
    ]


def inputs(case: Custom) -> list[Tensor]:
    shape = (case.batch, H, S, D)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


def measure(case: Custom) -> dict[str, tuple[float, float]]:
    torch.manual_seed(0)
    q, k, v = inputs(case)
    leaves = (q, k, v, *case.trained)
    d_o = torch.randn_like(q)
    result: dict[str, tuple[float, float]] = {}
    forward = {"ours": ahead(case.ours, q, k, v), "peer": ahead(case.peer, q, k, v)}
    outputs = {"ours": case.ours(q, k, v), "peer": case.peer(q, k, v)}
    backward = {name: back(o, leaves, d_o) for name, o in outputs.items()}
    fast = interleaved(forward)
    slow = interleaved({"ours": backward["ours"]}) if case.slow_peer else interleaved(backward)
    if case.slow_peer:
        slow |= interleaved({"peer": backward["peer"]}, rounds=1, launches=1)
    for name in forward:
        result[name] = (fast[name], slow[name])
    return result


def build(task: tuple[int, bool]) -> None:
    """One forward and backward of a definition, ours or the peer's."""
    number, is_ours = task
    case = definitions()[number]
    q, k, v = inputs(case)
    attend = case.ours if is_ours else case.peer
    torch.autograd.grad(attend(q, k, v).sum(), (q, k, v, *case.trained))


def ahead(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    def run() -> Tensor:
        with torch.no_grad():
            return attend(q, k, v)

    return run


def back(o: Tensor, leaves: tuple[Tensor, ...], d_o: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(o, leaves, d_o, retain_graph=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; H{H} S{S} D{D} bf16; `python -m bench.custom`.",
        "",
        "| definition | forward ms | peer | ratio | backward ms | peer | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    cases = definitions()
    side_by_side(build, [(number, is_ours) for number in range(len(cases)) for is_ours in (True, False)])
    for case in cases:
        torch._dynamo.reset()
        try:
            found = measure(case)
        except Exception as error:  # One definition must not cost the others their figures.
            lines.append(f"| {case.name} | failed: {type(error).__name__}: {str(error)[:120]} | | | | | |")
        else:
            (fo, bo), (fp, bp) = found["ours"], found["peer"]
            lines.append(f"| {case.name} | {fo:.3f} | {fp:.3f} | {fp / fo:.2f} | {bo:.3f} | {bp:.3f} | {bp / bo:.2f} |")
        print(lines[-1], flush=True)
        torch.cuda.empty_cache()
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "custom.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
