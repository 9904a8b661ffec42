"""attn-simplify: constant folding, exact algebra, common subexpressions and dead code in scalar code."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter
from xdsl.traits import IsolatedFromAbove, IsTerminator, OpTrait, Pure
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


def _within(op: Operation) -> list[Block]:
    """The blocks of an operation that see what is around it."""
    return [] if not op.regions or _has_trait(type(op), IsolatedFromAbove) else _nested(op)


@cache
def _has_trait(kind: type[Operation], trait: type[OpTrait]) -> bool:
    return kind.has_trait(trait)


def _rewrite_block(block: Block) -> bool:
    """One sweep of folding and algebra, operands before users."""
    changed = False
    for op in list(block.ops):
        for inner in _within(op):
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
    return not _has_trait(type(op), IsTerminator) and (_has_trait(type(op), Pure) or _reads_only_captures(op))


@dataclass
class _Known:
    """The operations met so far in a block and in those around it, to find the equal one among."""

    around: _Known | None = None
    _found: dict[tuple[object, ...], list[Operation]] = field(default_factory=dict[tuple[object, ...], list[Operation]])

    def first(self, op: Operation) -> Operation | None:
        """The equal operation met first; where there is none, this one is from now on."""
        # Few have the same operands: only constants, which have none, are told apart by what they hold.
        held = () if op.operands else (frozenset(op.attributes.items()), frozenset(op.properties.items()))
        key = (type(op), *op.operands, *held)
        known: _Known | None = self
        while known is not None:
            for other in known._found.get(key, ()):
                if _are_equal(op, other):
                    return other
            known = known.around
        self._found.setdefault(key, []).append(op)
        return None


def _are_equal(op: Operation, other: Operation) -> bool:
    """Whether two operations of one kind on the same operands are the same otherwise."""
    return (
        op.name == other.name
        and op.attributes == other.attributes
        and op.properties == other.properties
        and op.result_types == other.result_types
        and all(a.is_structurally_equivalent(b) for a, b in zip(op.regions, other.regions, strict=True))
    )


def _share(block: Block, known: _Known) -> bool:
    """Uses the first of equal operations for all of them; nested regions see what dominates them."""
    changed = False
    for op in list(block.ops):
        for inner in _within(op):
            changed |= _share(inner, _Known(known))
        if not _is_shareable(op):
            continue
        first = known.first(op)
        if first is None:
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
        for inner in _within(op):
            changed |= _erase_dead(inner)
    return changed


def simplify(op: Operation) -> None:
    """Simplifies every region below this operation, in place; the operation itself stays."""
    # Nothing goes in or out of a function or a kernel: each is done for itself, as often as it needs.
    inner = [o for o in op.walk() if _has_trait(type(o), IsolatedFromAbove)]
    for isolated in reversed([o for o in inner if o is not op]):
        _simplify_regions(isolated)
    _simplify_regions(op)


def _simplify_regions(op: Operation) -> None:
    for block in _nested(op):
        changed = True
        while changed:
            changed = _rewrite_block(block)
            changed |= _share(block, _Known())
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
