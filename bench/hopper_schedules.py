"""What choices of the forward's schedule on Hopper are worth: `python -m bench.hopper_schedules`.

Variants of one kernel, interleaved in the same rounds: blocks of keys in flight, when and by whom slots are released,
where an output is waited for, where queries are read, sums in parts or whole. bf16, medians on cold L2, TFLOP/s of
visible scores.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_engine import library
from attn_engine.backends.backend import get_backend
from attn_engine.frontend import Definition, build
from attn_engine.ir.schedule import KernelSchedule
from attn_engine.runtime import driver
from attn_engine.runtime.devices import Target
from attn_engine.runtime.schedules import default_schedule
from bench.custom_rows import Shape, inputs
from bench.timing import interleaved
from bench.warm import side_by_side

GLUON = Target("gluon", "sm_90")
WRONG = 2e-2


@dataclass(frozen=True)
class Variant:
    """The blocks of the forward, if not those by default, and passes with other options."""

    name: str
    forward: tuple[int, int, int, int] | None = None
    passes: tuple[str, ...] = ()
    without: str = ""
    """A pass that is left out."""

    def pipeline(self) -> tuple[str, ...]:
        options = {spec.partition("{")[0]: spec for spec in self.passes}
        return tuple(options.get(p, p) for p in get_backend("gluon").pipeline if p != self.without)


DEFAULT = Variant("as by default")
HELD, AT_ONCE = (
    Variant(f"slots released {name}", None, (f"tile-order-async{{hold={value}}}",))
    for name, value in (
        ("under the next products", "true"),
        ("at once", "false"),
    )
)
WHOLE = Variant("sums exchanged in every step", without="tile-split-sums")
MEET, APART = (
    Variant(f"slots released by {name}", None, (f"tile-specialize-warps{{apart={value}}}",))
    for name, value in (("warps that meet", "false"), ("each thread", "true"))
)
WITHIN = Variant("all weights within their step", without="tile-defer-weights")
BEHIND = Variant("output waited for behind all weights", without="tile-advance-waits")
HALVES = Variant("output waited for between halves of the weights", None, ("tile-advance-waits{halves=true}",))
CHAIN = Variant("maxima one after the other", without="tile-reduce-in-trees")
SHARED = Variant("queries in shared memory", None, ('tile-pipeline{queries="shared"}',))


def stages(count: int, forward: tuple[int, int, int] = (128, 128, 8)) -> Variant:
    return Variant(f"{forward[0]} x {forward[1]}, {count} stages", (*forward, count))


def combined(*variants: Variant) -> Variant:
    """The passes of several."""
    return Variant("; ".join(v.name for v in variants), None, tuple(spec for v in variants for spec in v.passes))


@dataclass(frozen=True)
class Row:
    """A definition on a shape, and its variants."""

    name: str
    definition: Definition
    shape: Shape
    variants: tuple[Variant, ...]


_CAUSAL, _FULL = Definition(mask_mod=library.causal), Definition()
_SIGMOID = Definition(row=library.sigmoid, mask_mod=library.causal)
_ORDER = (DEFAULT, MEET, BEHIND, HALVES, CHAIN)
_DEEP = (*_ORDER, HELD, stages(3), SHARED, combined(SHARED, HALVES))
_NO_MAXIMA = (DEFAULT, WITHIN, APART, HALVES, combined(APART, HALVES), HELD, AT_ONCE)
ROWS = (
    Row("causal", _CAUSAL, Shape(), (*_DEEP, WHOLE)),
    Row("full", _FULL, Shape(visible=1.0), _DEEP),
    Row("full", _FULL, Shape(1, 32, 16384, visible=1.0), _DEEP),
    Row("causal", _CAUSAL, Shape(4, 32, 4096, 64, 64), (*_ORDER, SHARED, stages(2, (192, 128, 12)))),
    Row("full", _FULL, Shape(4, 32, 4096, 64, 64, 1.0), (*_ORDER, stages(4))),
    Row("causal", _CAUSAL, Shape(4, 32, 4096, 96, 96), (*_ORDER, stages(2))),
    Row("causal", _CAUSAL, Shape(4, 32, 4096, 256, 256), _ORDER),
    Row("causal", _CAUSAL, Shape(8, 16, 8192, 192, 128), (*_ORDER, stages(3, (128, 64, 8)))),
    Row("causal", _CAUSAL, Shape(8, 12, 8192, 128, 256), _ORDER),
    Row("sigmoid, causal", _SIGMOID, Shape(), (*_NO_MAXIMA, SHARED)),
    Row("relu", Definition(row=library.relu), Shape(64, 6, 2048, 64, 64, 1.0), _NO_MAXIMA),
)


def plan_of(row: Row, variant: Variant) -> Callable[..., Any]:
    """The forward plan of a variant."""
    lse = row.definition.row is None
    shape = row.shape
    traced = build(row.definition, dtype=torch.bfloat16, head_dim=shape.d, head_dim_v=shape.dv, return_lse=lse)
    schedule = default_schedule(GLUON, traced.module)
    if variant.forward is not None:
        schedule = replace(schedule, forward=KernelSchedule(*variant.forward))
    backend = replace(get_backend("gluon"), pipeline=variant.pipeline())
    request = driver.Request((), "gluon", schedule, driver.Facts(positive_scale=True))
    tiles = driver.to_tile(driver.to_attn(traced.module, ()), request, backend)
    return backend.build(backend.emit(tiles))["forward"]


def call_of(row: Row, variant: Variant, operands: list[Tensor]) -> tuple[Callable[[], object], Tensor]:
    """A call, and the tensor that it writes."""
    plan, (q, _, v) = plan_of(row, variant), operands
    o = torch.full((*q.shape[:3], v.shape[3]), torch.nan, device=q.device, dtype=q.dtype)
    rows = [torch.empty(q.shape[:3], device=q.device)] if row.definition.row is None else []
    return lambda: plan(*operands, o, *rows, q.shape[3] ** -0.5), o


def compile_one(task: tuple[int, int]) -> None:
    row = ROWS[task[0]]
    call_of(row, row.variants[task[1]], inputs(replace(row.shape, batch=1, length=512)))[0]()


def lines_of(row: Row) -> list[str]:
    """One line a variant; what differs from the first variant's output is said so."""
    operands, runs, outputs = inputs(row.shape), dict[str, Callable[[], object]](), dict[str, Tensor]()
    failed: list[str] = []
    for variant in row.variants:
        try:
            run, o = call_of(row, variant, operands)
            run()
            outputs[variant.name], runs[variant.name] = o[-1, -1].float(), run
        except Exception as error:  # One variant must not cost the others their figures.
            failed.append(
                f"| {row.name} | {row.shape} | {variant.name} | {type(error).__name__}: {str(error)[:80]} | |"
            )
    times = interleaved(runs, rounds=5, launches=3)
    first = outputs[row.variants[0].name]
    wrong = {n: "" if float((o - first).norm() / first.norm()) < WRONG else " (differs)" for n, o in outputs.items()}
    rate = row.shape.flops[0] * 1e-9
    return failed + [
        f"| {row.name} | {row.shape} | {name}{wrong[name]} | {ms:.3f} | {rate / ms:.0f} |" for name, ms in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    side_by_side(compile_one, [(n, v) for n, row in enumerate(ROWS) for v in range(len(row.variants))])
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; bf16, forward; `python -m bench.hopper_schedules`.",
        "",
        "| definition | shape | schedule | ms | TFLOP/s |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for row in ROWS:
        found = lines_of(row)
        print("\n".join(found), flush=True)
        lines += found
        (arguments.out / "hopper_schedules.md").write_text("\n".join(lines) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
