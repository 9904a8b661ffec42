"""Which backend an attention gets when its user names none.

On Hopper the forward has kernels of several backends. Those that suit an attention are ranked by what their schedules
should cost (`predict`); with a tuner, `selection.fastest` measures them instead, forward and gradients apart. Scores that
gather element by element, and functions of very much arithmetic, are judged by what they compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import ModuleOp, TensorType, f32
from xdsl.ir import Block, Operation, SSAValue

from attn_engine.backends.backend import BACKENDS, Overlap, get_backend
from attn_engine.dialects import attn, tile
from attn_engine.ir.axes import Axes, axes_of
from attn_engine.ir.intervals import INT64
from attn_engine.ir.schedule import padded
from attn_engine.passes.attn_narrow_integers import Narrower
from attn_engine.passes.lowering.distances import without_costly
from attn_engine.runtime.devices import Target, is_usable
from attn_engine.runtime.env import named_backend
from attn_engine.runtime.predict import Prediction, predict
from attn_engine.runtime.schedules import heads_of

PLAIN, ASYNC_ARCH = "triton", "sm_90"
SMALLEST_HEAD, LARGEST_HEAD = 64, 256
MAX_SCORE_COST = 64
"""Above so many operations per score, plain kernels are taken."""

_FREE = (arith.ConstantOp, attn.YieldOp)
_CHEAP = (
    *(math.ExpOp, math.Exp2Op, math.LogOp, math.Log2Op, math.AbsFOp, math.SqrtOp, math.RsqrtOp, math.FmaOp),
    math.TanhOp,
)
_EXPANDED = 15
"""About what a function without an instruction of its own costs."""
_GATHER, _SMALL = 8, 1024
"""What reading a number costs of a table with so few places: its address, whether it is inside, and the access."""

WORTH = 1.05
"""How much faster than plain kernels others must be predicted to be."""


@dataclass(frozen=True)
class Considered:
    """Backends that suit an attention, the one that should be fastest first, and why others do not."""

    ranked: tuple[Prediction, ...]
    unsuited: tuple[str, ...]

    def lines(self) -> list[str]:
        return [*(p.told(self.ranked[0]) for p in self.ranked), *self.unsuited]


def choose(backend: str | None, target: Target, module: ModuleOp, in_blocks: bool = True) -> tuple[Target, ...]:
    """Targets to try in order; one only if the user or the environment named a backend.

    `in_blocks` says that descriptors can be made of q, k and v, without which nothing is copied asynchronously.
    """
    if not is_open(backend, target) or not in_blocks:
        return (target,)
    ranked = consider(module).ranked
    plain = next(p for p in ranked if p.backend == target.backend)
    better = [p for p in ranked if p.clocks * WORTH < plain.clocks]
    return (*(Target(p.backend, target.arch) for p in better), target)


def is_open(backend: str | None, target: Target) -> bool:
    """Whether there is anything to choose."""
    return named_backend(backend) is None and target.backend == PLAIN and target.arch == ASYNC_ARCH


def consider(module: ModuleOp, anywhere: bool = False) -> Considered:
    """What each backend's forward should cost on Hopper, of those that are usable here (or of all: `anywhere`)."""
    op = next(o for o in module.walk() if isinstance(o, attn.AttentionOp))
    heads = heads_of(module)
    backends = [get_backend(name) for name in BACKENDS]
    reasons = {b.name: _unsuited(b.name, b.overlap, op, anywhere) for b in backends if b.overlap is not None}
    costs = {name: min(score_cost(op, _loads(name)), MAX_SCORE_COST) for name in reasons}
    ranked = [predict(name, heads, costs[name]) for name, reason in reasons.items() if reason is None]
    unsuited = [f"{name}: {reason}" for name, reason in reasons.items() if reason is not None]
    return Considered(tuple(sorted(ranked, key=lambda p: p.clocks)), tuple(unsuited))


def gradients_of(target: Target, plain: str) -> str:
    """By prediction, the backend of the gradients of a target's forward, if that is another."""
    overlap = get_backend(target.backend).overlap
    return "" if overlap is None or overlap.gradients else plain


def _unsuited(name: str, overlap: Overlap, op: attn.AttentionOp, anywhere: bool) -> str | None:
    """Why a backend is not considered for an attention."""
    if name == PLAIN:
        return None
    if not anywhere and not is_usable(name):
        return get_backend(name).check().reason
    suits = _suits(op, _loads(name)) and (not overlap.heads or all(size in overlap.heads for size in _sizes(op)))
    return None if suits else "its loop does not run other work beside products here"


def _loads(backend: str) -> bool:
    """Whether kernels of a backend load blocks of what scores compute by distance."""
    return get_backend(backend).sums_diagonals


def _sizes(op: attn.AttentionOp) -> list[int]:
    return [v.type.get_shape()[3] for v in (op.q, op.v) if isinstance(v.type, TensorType)]


def _suits(op: attn.AttentionOp, loads: bool) -> bool:
    """Whether a forward with asynchronous products can be the faster one."""
    if tile.element_of(op.q) == f32:
        return False
    if any(not SMALLEST_HEAD <= padded(size) <= LARGEST_HEAD for size in _sizes(op)):
        return False
    mods = (op.query_mod, op.key_mod, op.value_mod)
    return not any(m is not None and m.blocks for m in mods) and score_cost(op, loads) <= MAX_SCORE_COST


def score_cost(op: attn.AttentionOp, loads: bool = True) -> int:
    """Operations that the score_mod does per score; gathers other than from a table of scores count as too many.

    If `loads`, what it computes by the distance of two positions is loaded from memory, an operation each, and threads
    find small tables in their cache.
    """
    if op.score_mod is None or not op.score_mod.blocks:
        return 0
    axes, block = axes_of(op, "score_mod"), op.score_mod.block
    ops, read = without_costly(block) if loads else (list(block.ops), 0)
    elements = [o for o in ops if not isinstance(o, _FREE) and {"q", "kv"} <= axes[o.results[0]]]
    small = {o for o in elements if isinstance(o, attn.LoadOp) and loads and _is_small(o, axes, block)}
    return sum(_GATHER if o in small else _cost(o, block) for o in elements) + read


def _is_small(op: attn.LoadOp, axes: Mapping[SSAValue, Axes], block: Block) -> bool:
    """Whether the places of a table that one head reads are few, whatever the lengths."""
    ranges, places = Narrower(block).find(), 1
    for index in op.indices:
        if axes[index] & {"q", "kv"}:
            found = ranges.get(index, INT64)
            places *= found.hi - found.lo + 1
    return places <= _SMALL


def _cost(op: Operation, score_mod: Block) -> int:
    if isinstance(op, attn.LoadOp):
        return 1 if list(op.indices)[-2:] == list(score_mod.args[3:5]) else MAX_SCORE_COST + 1
    return 1 if op.name.startswith("arith.") or isinstance(op, _CHEAP) else _EXPANDED
