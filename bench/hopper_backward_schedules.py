"""What choices of the backward's schedule on Hopper are worth: `python -m bench.hopper_backward_schedules`.

Variants of one plan of gradients, interleaved in the same rounds, beside cuDNN: the order of products in a step, where sums start,
how many products are in flight, blocks, the order of programs. bf16, medians on cold L2, TFLOP/s of visible scores.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xdsl.dialects.builtin import ModuleOp

from attn_engine import library
from attn_engine.backends.backend import get_backend
from attn_engine.dialects import attn
from attn_engine.frontend import Definition, build
from attn_engine.ir.schedule import KernelSchedule
from attn_engine.runtime import driver
from attn_engine.runtime.devices import Target
from attn_engine.runtime.schedules import apart, default_schedule, with_gradients
from bench.custom import back
from bench.custom_rows import Shape, inputs
from bench.hopper import cudnn
from bench.timing import interleaved
from bench.warm import side_by_side

GLUON = Target("gluon", "sm_90")
WRT = ("q", "k", "v")
WRONG = 1e-2
CUDNN = "cuDNN"


@dataclass(frozen=True)
class Variant:
    """Blocks of the kernel of dk and dv, if not those by default, and passes with other options, or left out."""

    name: str
    passes: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    dkdv: tuple[int, int, int, int] | None = None
    dq: tuple[int, int, int, int] | None = None

    more: tuple[str, ...] = ()
    """Passes in front of `tile-fragment-sums`."""
    late: bool = False
    """Whether passes are those whose sums are a step late."""

    def pipeline(self) -> tuple[str, ...]:
        options = {spec.partition("{")[0]: spec for spec in self.passes}
        backend, found = get_backend("gluon"), list[str]()
        for spec in backend.late if self.late else backend.gradients:
            name = spec.partition("{")[0]
            found += self.more if name == "tile-fragment-sums" else ()
            found += [options.get(name, spec)] if name not in self.without else []
        return tuple(found)


DEFAULT = Variant("dq in its own step")
LATE = Variant("dq a step later under dk, scores behind it", late=True)
GRID = replace(LATE, name="programs in the order of the grid", without=("tile-order-programs",))
_LATER = ("tile-defer-sums",)
SHORT, LONG = (64, 128, 8, 2), (128, 128, 8, 2)
AROUND = Variant(
    "dq around the exponentials of the next step",
    ("tile-overlap-products{late_reads=false in_flight=0}",),
    dkdv=SHORT,
    more=("tile-defer-sums{in_place=false}",),
)
EARLY = replace(LATE, name="dq a step later, scores in front of its end", passes=("tile-rotate-steps{in_flight=3}",))
TWO_SLOTS = replace(LATE, name="dq a step later, two slots, three steps", passes=("tile-pipeline-steps{stages=3}",))
LATE_APART = replace(
    LATE, name="dq a step later, slots released by threads", passes=("tile-split-roles{apart_arrivals=true}",)
)
OWN_MIDDLE = Variant(
    "dq in front of dk, scores behind it",
    ("tile-overlap-products{late_sums=true in_flight=0}", "tile-rotate-steps{last=true}"),
)
SCORES = Variant(
    "scores in their own step, dq in front of dk",
    ("tile-overlap-products{late_sums=true}",),
    ("tile-start-products", "tile-rotate-steps"),
)
SCORES_FIRST = Variant("scores in their own step", (), ("tile-start-products", "tile-rotate-steps"))
SHORTER = Variant("64 queries a step", dkdv=SHORT)
ZERO = Variant("sums from zero", without=("tile-start-products",))
LONG_STEADY = Variant("128 queries a step", ("tile-rotate-steps{in_flight=2}",), dkdv=LONG)


@dataclass(frozen=True)
class Row:
    """A definition on a shape, and its variants."""

    name: str
    definition: Definition
    shape: Shape
    variants: tuple[Variant, ...]
    kv_heads: int = 0
    deterministic: bool = False


_CAUSAL, _FULL = Definition(mask_mod=library.causal), Definition()


_MAIN = (DEFAULT, LATE, EARLY, TWO_SLOTS, LATE_APART, AROUND, OWN_MIDDLE, SCORES, SCORES_FIRST)
ROWS = (
    Row("causal", _CAUSAL, Shape(), _MAIN),
    Row("full", _FULL, Shape(visible=1.0), _MAIN),
    Row("causal", _CAUSAL, Shape(1, 32, 16384), _MAIN[:6]),
    Row("causal", _CAUSAL, Shape(4, 32, 4096, 64, 64), (DEFAULT, SHORTER, OWN_MIDDLE, SCORES, SCORES_FIRST)),
    Row("causal", _CAUSAL, Shape(1, 32, 8192), (DEFAULT, LATE, GRID), kv_heads=8),
    Row("causal", _CAUSAL, Shape(), (DEFAULT, ZERO, SCORES), deterministic=True),
    Row("full", _FULL, Shape(visible=1.0), (DEFAULT, ZERO, SCORES), deterministic=True),
    Row("causal", _CAUSAL, Shape(4, 32, 4096, 64, 64), (DEFAULT, ZERO, LONG_STEADY), deterministic=True),
)


def plan_of(row: Row, variant: Variant, length: int) -> Callable[..., Any]:
    """The plan of gradients of a variant, for lengths that are multiples of a length."""
    shape, fused = row.shape, not row.deterministic
    traced = build(row.definition, dtype=torch.bfloat16, head_dim=shape.d, head_dim_v=shape.dv)
    module = driver.to_attn(traced.module, WRT)
    function = next(f for f in driver.functions(module) if any(isinstance(o, attn.BackwardOp) for o in f.walk()))
    op = next(o for o in function.walk() if isinstance(o, attn.BackwardOp))
    schedule = with_gradients(default_schedule(GLUON, traced.module), op, fused)
    for kind in ("dkdv", "dq"):
        blocks = getattr(variant, kind)
        schedule = replace(schedule, **{kind: KernelSchedule(*blocks)}) if blocks is not None else schedule
    backend = replace(get_backend("gluon"), pipeline=variant.pipeline(), knows_whole=True)
    facts = driver.Facts(positive_scale=True, multiple=length)
    request = driver.Request(WRT, "gluon", schedule, facts, deterministic=row.deterministic)
    tiles = driver.to_tile(ModuleOp([function.clone()]), request, backend, fused, apart(op))
    return backend.build(backend.emit(tiles))["backward"]


@dataclass
class Problem:
    """Operands, with the output and the rows that a forward of cuDNN has saved."""

    operands: list[Tensor]
    rest: list[Tensor]
    peer: Callable[[], tuple[Tensor, ...]]

    @classmethod
    def of(cls, row: Row, shape: Shape) -> Problem:
        operands = [x.requires_grad_() for x in inputs(shape, row.kv_heads)]
        o = cudnn(operands[0], operands[1], operands[2], shape.visible < 1)
        d_o = torch.randn_like(o)
        peer = back(o, tuple(operands), d_o)
        q, k, v = (x.detach() for x in operands)
        group = q.shape[1] // k.shape[1]
        with torch.no_grad():
            repeated = (k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
            scale = shape.d**-0.5
            lse = torch.ops.aten._scaled_dot_product_cudnn_attention(  # type: ignore[attr-defined]
                q, *repeated, None, True, 0.0, shape.visible < 1, False, scale=scale
            )[1]
        return cls([q, k, v], [o.detach().contiguous(), d_o.contiguous(), lse.reshape(q.shape[:3]).float()], peer)


def call_of(plan: Callable[..., Any], given: Problem) -> tuple[Callable[[], object], list[Tensor]]:
    """A call, and the tensors that it writes."""
    found = [torch.full_like(x, torch.nan) for x in given.operands]
    scale = given.operands[0].shape[3] ** -0.5
    return lambda: plan(*given.operands, *given.rest, *found, scale), found


def compile_one(task: tuple[int, int]) -> None:
    row = ROWS[task[0]]
    shape = replace(row.shape, batch=1, length=512)
    call_of(plan_of(row, row.variants[task[1]], row.shape.length), Problem.of(row, shape))[0]()
    torch.cuda.synchronize()


def error_of(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """The largest relative difference of dq, dk and dv, in the last head."""
    pairs = [(a[-1, -1].float(), b[-1, -1].float()) for a, b in zip(got, want, strict=True)]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def lines_of(row: Row) -> list[str]:
    """One line a variant; gradients that differ from cuDNN's are said so."""
    given = Problem.of(row, row.shape)
    want = given.peer()
    runs: dict[str, Callable[[], object]] = {CUDNN: given.peer}
    wrong, lines = {CUDNN: ""}, list[str]()
    name = f"{row.name}{f', {row.kv_heads} heads of keys' if row.kv_heads else ''}{', deterministic' if row.deterministic else ''}"
    for variant in row.variants:
        try:
            run, found = call_of(plan_of(row, variant, row.shape.length), given)
            run()
            torch.cuda.synchronize()
            error = error_of(found, want)
            wrong[variant.name], runs[variant.name] = "" if error < WRONG else f" (wrong: {error:.0e})", run
        except Exception as error:  # One variant must not cost the others their figures.
            lines.append(f"| {name} | {row.shape} | {variant.name} | {type(error).__name__}: {str(error)[:80]} | | |")
    times = interleaved(runs, rounds=4, launches=2)
    rate, peer = row.shape.flops[1] * 1e-9, times[CUDNN]
    return lines + [
        f"| {name} | {row.shape} | {side}{wrong[side]} | {ms:.3f} | {rate / ms:.0f} | {peer / ms:.2f} |"
        for side, ms in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="numbers of rows, with commas; all if not given")
    parser.add_argument("--out", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    numbers = [int(n) for n in arguments.rows.split(",")] if arguments.rows else list(range(len(ROWS)))
    side_by_side(compile_one, [(n, v) for n in numbers for v in range(len(ROWS[n].variants))])
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}; bf16, backward;"
        " `python -m bench.hopper_backward_schedules`.",
        "",
        "| definition | shape | schedule | ms | TFLOP/s | of cuDNN |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        try:
            found = lines_of(ROWS[number])
        except Exception as error:  # Nor one row the others.
            found = [
                f"| {ROWS[number].name} | {ROWS[number].shape} | {type(error).__name__}: {str(error)[:120]} | | | |"
            ]
        print("\n".join(found), flush=True)
        lines += found
        (arguments.out / "hopper_backward_schedules.md").write_text("\n".join(lines) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
