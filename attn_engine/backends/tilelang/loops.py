"""tilelang-flatten-loops: a pipelined loop within a loop becomes one loop, in the form that TileLang takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, scf
from xdsl.dialects.builtin import ModuleOp, i32
from xdsl.ir import Block, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_buffer_check import reads, writes
from attn_engine.dialects.tile_buffer_memory import CopyOp
from attn_engine.passes.simplify_constants import is_constant

STAGES = "stages"


def _is_scalar_code(op: Operation) -> bool:
    """Whether an op can be computed elsewhere: arithmetic, or a read of an argument, which no kernel writes."""
    return op.name.startswith("arith.") or isinstance(op, tile.GatherOp | tile.DimOp)


@dataclass(frozen=True)
class Nest:
    """A loop of scalars, copies of buffers, and one loop with stages."""

    outer: scf.ForOp
    inner: scf.ForOp

    def around(self) -> list[Operation]:
        """What stands beside the inner loop."""
        return [op for op in self.outer.body.block.ops if op is not self.inner and not isinstance(op, scf.YieldOp)]

    def copies(self) -> tuple[list[CopyOp], list[CopyOp]]:
        """Before the inner loop, and after it."""
        copies = [op for op in self.around() if isinstance(op, CopyOp)]
        before = [op for op in copies if op.is_before_in_block(self.inner)]
        return before, [op for op in copies if op not in before]


def _fixed(nest: Nest) -> set[Operation]:
    """Scalars of the outer loop that are the same in all its iterations."""
    block, fixed = nest.outer.body.block, set[Operation]()
    beside = set[Operation | Block](nest.around())
    for op in nest.around():
        inside = [v.owner for v in op.operands if v is block.args[0] or v.owner in beside]
        if _is_scalar_code(op) and all(owner in fixed for owner in inside):
            fixed.add(op)
    return fixed


def _can_be_one(nest: Nest) -> bool:
    """Whether nothing but the place in both loops tells their iterations apart, and buffers go in as they come out, with
    nothing in between that touches where they came from."""
    block, changing = nest.outer.body.block, set[Operation | Block](nest.around()) - _fixed(nest)
    bounds = (nest.inner.lb, nest.inner.ub, nest.inner.step)
    if any(v is block.args[0] or v.owner in changing for v in bounds):
        return False
    if not all(_is_scalar_code(op) or isinstance(op, CopyOp) for op in nest.around()):
        return False
    before, after = nest.copies()
    touched = {v for op in nest.inner.body.walk() for v in (*reads(op), *writes(op))}
    if any(copy.source in touched for copy in before):
        return False
    there, back = [(c.source, c.target) for c in before], [(c.target, c.source) for c in after]
    return len(set(there)) == len(there) and set(there) == set(back) and not nest.outer.iter_args


def _add(ops: Iterable[Operation], before: Operation) -> None:
    Rewriter.insert_op(list(ops), InsertPoint.before(before))


def _trips(loop: scf.ForOp, before: Operation) -> SSAValue:
    """How many iterations a loop has."""
    span = loop.ub
    if not is_constant(loop.lb, 0):
        _add([difference := arith.SubiOp(loop.ub, loop.lb)], before)
        span = difference.result
    none = arith.ConstantOp.from_int_and_width(0, 32)
    _add([none], before)
    if not is_constant(loop.step, 1):
        _add([count := arith.CeilDivSIOp(span, loop.step)], before)
        span = count.result
    _add([trips := arith.MaxSIOp(span, none.result)], before)
    return trips.result


def _place(loop: scf.ForOp, number: SSAValue, block: Block) -> SSAValue:
    """The value that a loop counts with in an iteration."""
    if not is_constant(loop.step, 1):
        block.add_op(far := arith.MuliOp(number, loop.step))
        number = far.result
    if not is_constant(loop.lb, 0):
        block.add_op(place := arith.AddiOp(loop.lb, number))
        number = place.result
    number.name_hint = loop.body.block.args[0].name_hint
    return number


def _flatten(nest: Nest) -> None:
    outer, inner = nest.outer, nest.inner
    fixed = _fixed(nest)
    for op in [o for o in nest.around() if o in fixed]:
        op.detach()
        _add([op], outer)
    (before, after), rest = nest.copies(), [op for op in nest.around() if not isinstance(op, CopyOp)]
    rows, columns = _trips(outer, outer), _trips(inner, outer)
    count, start, step = (
        arith.MuliOp(rows, columns),
        arith.ConstantOp.from_int_and_width(0, 32),
        arith.ConstantOp.from_int_and_width(1, 32),
    )
    # An overlapped loop runs once even if it has no iteration: as the first of both loops, not with a division by 0.
    divisor = arith.MaxSIOp(columns, step.result)
    _add([count, start, step, divisor], outer)
    body = Block(arg_types=[i32])
    row, column = arith.DivSIOp(body.args[0], divisor.result), arith.RemSIOp(body.args[0], divisor.result)
    body.add_ops([row, column])
    for loop, number in ((outer, row.result), (inner, column.result)):
        loop.body.block.args[0].replace_all_uses_with(_place(loop, number, body))
    for op in (*rest, *list(inner.body.block.ops)):
        op.detach()
        body.add_op(op)
    flat = scf.ForOp(start.result, count.result, step.result, [], body)
    flat.attributes.update(inner.attributes)
    for op in (*before, flat, *after):
        if op.parent is not None:
            op.detach()
        _add([op], outer)
    Rewriter.erase_op(inner)
    Rewriter.erase_op(outer)


def _nests(kernel: tile.KernelOp) -> list[scf.ForOp]:
    """Loops with stages that stand in other loops."""
    loops = [o for o in kernel.walk() if isinstance(o, scf.ForOp) and STAGES in o.attributes]
    return [loop for loop in loops if loop.parent_op() is not kernel]


@dataclass(frozen=True)
class TilelangFlattenLoopsPass(ModulePass):
    """Makes one loop of a loop with stages and the loop that it stands in.

    ```
    scf.for %g = %c0 to %group step %c1 : i32 {
      %h = arith.addi %first, %g : i32
      tile.copy %sum, %acc
      scf.for %n0 = %lo to %hi step %c64 : i32 { ... } {stages = 3 : i64}
      tile.copy %acc, %sum
    }
    ```
    becomes
    ```
    %divisor = arith.maxsi %blocks, %c1 : i32
    tile.copy %sum, %acc
    scf.for %t = %c0 to %all step %c1 : i32 {
      %g = arith.divsi %t, %divisor : i32
      %h = arith.addi %first, %g : i32
      ... %n0, from arith.remsi %t, %divisor
    } {stages = 3 : i64}
    tile.copy %acc, %sum
    ```
    TileLang moves what stands before the outer loop into it where the inner one copies ahead: sums would start again, or
    from what registers held. A nest that is no such one, as where the bounds change, loses its stages, and so does a loop
    that carries numbers, which TileLang gives to one side only.
    """

    name = "tilelang-flatten-loops"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for kernel in [k for k in op.ops if isinstance(k, tile.KernelOp)]:
            for loop in [o for o in kernel.walk() if isinstance(o, scf.ForOp) and o.iter_args]:
                loop.attributes.pop(STAGES, None)
            for inner in _nests(kernel):
                outer = inner.parent_op()
                if isinstance(outer, scf.ForOp) and outer.parent_op() is kernel and _can_be_one(Nest(outer, inner)):
                    _flatten(Nest(outer, inner))
                else:
                    del inner.attributes[STAGES]
