"""attn-simplify: constant folding, exact algebra, common subexpressions and dead code in scalar code."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter
from xdsl.traits import IsolatedFromAbove, IsTerminator, Pure
from xdsl.transforms.common_subexpression_elimination import KnownOps
from xdsl.transforms.dead_code_elimination import is_trivially_dead

from attn_engine.dialects import attn, tile
from attn_engine.passes.simplify_algebra import rewrite
from attn_engine.passes.simplify_constants import fold_constants

# What they read is not written while a region runs, so that two equal reads are one.
READS = (attn.LoadOp, tile.GatherOp)


def _keep_name(old: SSAValue, new: SSAValue) -> None:
    if new.name_hint is None:
        new.name_hint = old.name_hint


def _replace(op: Operation, change: SSAValue | tuple[Operation, ...]) -> None:
    if isinstance(change, tuple):
        Rewriter.insert_op(change, InsertPoint.before(op))
        new = change[-1].results[0]
    else:
        new = change
    _keep_name(op.results[0], new)
    op.results[0].replace_all_uses_with(new)
    Rewriter.erase_op(op)


def _nested(op: Operation) -> list[Block]:
    return [block for region in op.regions for block in region.blocks]


def _rewrite_block(block: Block) -> bool:
    """One sweep of folding and algebra, operands before users."""
    changed = False
    for op in list(block.ops):
        for inner in _nested(op):
            changed |= _rewrite_block(inner)
        if (folded := fold_constants(op)) is not None:
            change = (folded,)
        elif (found := rewrite(op)) is not None:
            change = found if isinstance(found, SSAValue) else tuple(found)
        else:
            continue
        _replace(op, change)
        changed = True
    return changed


def _reads_only_captures(op: Operation) -> bool:
    if isinstance(op, tile.MapOp):
        return not any(isinstance(inner, READS) for inner in op.walk())
    return isinstance(op, attn.LoadOp) or (isinstance(op, tile.GatherOp) and isinstance(op.parent_op(), tile.MapOp))


def _is_shareable(op: Operation) -> bool:
    """Whether an equal operation before it gives the same results."""
    return not op.has_trait(IsTerminator) and (op.has_trait(Pure) or _reads_only_captures(op))


def _share(block: Block, known: KnownOps) -> bool:
    """Uses the first of equal operations for all of them; nested regions see what dominates them."""
    changed = False
    for op in list(block.ops):
        for inner in _nested(op):
            changed |= _share(inner, KnownOps() if op.has_trait(IsolatedFromAbove) else KnownOps(known))
        if not _is_shareable(op):
            continue
        first = known.get(op)
        if first is None:
            known[op] = op
            continue
        for old, new in zip(op.results, first.results, strict=True):
            _keep_name(old, new)
            old.replace_all_uses_with(new)
        Rewriter.erase_op(op)
        changed = True
    return changed


def _erase_dead(block: Block) -> bool:
    changed = False
    for op in reversed(list(block.ops)):
        if is_trivially_dead(op):
            Rewriter.erase_op(op)
            changed = True
            continue
        for inner in _nested(op):
            changed |= _erase_dead(inner)
    return changed


def simplify(op: Operation) -> None:
    """Simplifies every region below this operation, in place; the operation itself stays."""
    for block in _nested(op):
        changed = True
        while changed:
            changed = _rewrite_block(block)
            changed |= _share(block, KnownOps())
            changed |= _erase_dead(block)


@dataclass(frozen=True)
class AttnSimplifyPass(ModulePass):
    """Folds constants (in the arithmetic of their type), applies exact algebra, shares equal operations, drops dead ones.

    Every rule holds for all inputs, NaN, infinities and -0.0 included; nothing is reassociated.

    ```
    %one = arith.constant 1.0 : f32          ->   attn.yield %s : f32
    %eight = arith.constant 8.0 : f32
    %a = arith.mulf %s, %one : f32
    %b = arith.divf %a, %eight : f32         ->   %b = arith.mulf %s, %eighth : f32
    ```
    """

    name = "attn-simplify"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        simplify(op)
