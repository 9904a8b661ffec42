"""Which backend an attention gets when its user names none.

On Hopper the forward has asynchronous kernels (`gluon`) beside plain ones (`triton`). They were faster at head dims 64
and 128 wherever both were timed; other head dims up to 256, and scores of other arithmetic, are taken to be like those.
Scores that gather element by element, and functions of very much arithmetic, are judged by what they compute.
"""

from __future__ import annotations

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import ModuleOp, TensorType, f32
from xdsl.ir import Block, Operation

from attn_engine.dialects import attn, tile
from attn_engine.ir.axes import axes_of
from attn_engine.ir.schedule import padded
from attn_engine.runtime.devices import Target, is_usable

ASYNC_ARCH = "sm_90"
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


def choose(backend: str | None, target: Target, module: ModuleOp, in_blocks: bool = True) -> tuple[Target, ...]:
    """Targets to try in order; one only if the user or the environment named a backend.

    `in_blocks` says that descriptors can be made of q, k and v, without which nothing is copied asynchronously.
    """
    if (
        not in_blocks
        or backend is not None
        or target.backend != "triton"
        or target.arch != ASYNC_ARCH
        or not is_usable("gluon")
    ):
        return (target,)
    op = next(o for o in module.walk() if isinstance(o, attn.AttentionOp))
    return (Target("gluon", target.arch), target) if _suits(op) else (target,)


def _suits(op: attn.AttentionOp) -> bool:
    """Whether the asynchronous forward is predicted to be the faster one."""
    if tile.element_of(op.q) == f32:
        return False
    sizes = [padded(v.type.get_shape()[3]) for v in (op.q, op.v) if isinstance(v.type, TensorType)]
    if any(not SMALLEST_HEAD <= size <= LARGEST_HEAD for size in sizes):
        return False
    mods = (op.query_mod, op.key_mod, op.value_mod)
    return not any(m is not None and m.blocks for m in mods) and score_cost(op) <= MAX_SCORE_COST


def score_cost(op: attn.AttentionOp) -> int:
    """Operations that the score_mod does per score; gathers other than from a table of scores count as too many."""
    if op.score_mod is None or not op.score_mod.blocks:
        return 0
    axes = axes_of(op, "score_mod")
    elements = [o for o in op.score_mod.block.ops if not isinstance(o, _FREE) and {"q", "kv"} <= axes[o.results[0]]]
    return sum(_cost(o, op.score_mod.block) for o in elements)


def _cost(op: Operation, score_mod: Block) -> int:
    if isinstance(op, attn.LoadOp):
        return 1 if list(op.indices)[-2:] == list(score_mod.args[3:5]) else MAX_SCORE_COST + 1
    return 1 if op.name.startswith("arith.") or isinstance(op, _CHEAP) else _EXPANDED
