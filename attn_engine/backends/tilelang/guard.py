"""Masks in a branch of their own: a block whose elements are all visible skips them.

Whether they are is told from the mask's comparisons by what their two sides are at most and at least in the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.dialects import arith, scf
from xdsl.dialects.builtin import IntegerType
from xdsl.ir import Block, BlockArgument, Operation, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_buffer_check import reads, writes
from attn_engine.dialects.tile_buffer_map import BufferMapOp, IndexOp
from attn_engine.dialects.tile_buffer_memory import buffer_type
from attn_engine.dialects.tile_types import BufferType
from attn_engine.ir.walks import behind
from attn_engine.passes.simplify_rule import predicate_of

_LESS, _MORE = ("slt", "sle"), ("sgt", "sge")
"""The comparisons that bounds can decide."""


@dataclass
class _Extremes:
    """Scalars that bound the values of a map's region over a whole block. New ops go before the map."""

    op: BufferMapOp

    def always(self, condition: SSAValue) -> SSAValue | None:
        """A scalar that is true only if a condition holds for every element; None if nothing can be told."""
        match condition.owner:
            case arith.AndIOp() | arith.OrIOp() as both:
                left, right = self.always(both.lhs), self.always(both.rhs)
                return self._add(type(both)(left, right)) if left and right else None
            case arith.CmpiOp() as compare if (name := predicate_of(compare)) in (*_LESS, *_MORE):
                left, right = self.extreme(compare.lhs, name in _LESS), self.extreme(compare.rhs, name in _MORE)
                return self._add(arith.CmpiOp(left, right, name)) if left and right else None
            case _:
                return None

    def extreme(self, value: SSAValue, most: bool) -> SSAValue | None:
        """What a value is at most, or at least."""
        if isinstance(value, BlockArgument):
            outside = self.op.inputs[value.index]
            return outside if isinstance(outside.type, IntegerType) else None
        match value.owner:
            case IndexOp() as index:
                last = self.op.shape[index.axis.value.data] - 1
                return self._add(arith.ConstantOp.from_int_and_width(last if most else 0, 32))
            case arith.ConstantOp() as constant:
                return self._add(constant.clone())
            case arith.AddiOp() | arith.MinSIOp() | arith.MaxSIOp() as both:
                return self._both(both, most, most)
            case arith.SubiOp() as both:
                return self._both(both, most, not most)
            case arith.ExtSIOp() as wider:
                inner = self.extreme(wider.input, most)
                return self._add(wider.clone({wider.input: inner})) if inner else None
            case _:
                return None

    def _both(self, op: arith.SignlessIntegerBinaryOperation, left: bool, right: bool) -> SSAValue | None:
        first, second = self.extreme(op.lhs, left), self.extreme(op.rhs, right)
        return self._add(type(op)(first, second)) if first and second else None

    def _add(self, op: Operation) -> SSAValue:
        Rewriter.insert_op(op, InsertPoint.before(self.op))
        return op.results[0]


def guard_masks(body: Block) -> None:
    """Splits the masks of a loop's maps off, each in an `scf.if` that whole blocks skip."""
    for op in [o for o in body.ops if isinstance(o, BufferMapOp)]:
        selects = dict(_masked(op))
        conditions = {select.cond for select in selects.values()}
        if len(conditions) != 1:
            continue
        (condition,) = conditions
        whole = _Extremes(op).always(condition)
        if whole is not None:
            _split(op, selects, condition, whole)


def _masked(op: BufferMapOp) -> Iterator[tuple[int, arith.SelectOp]]:
    """Outputs that are a value where it is visible, else a constant, and that nothing else is computed from."""
    end = op.body.block.last_op
    assert end is not None
    for number, value in enumerate(end.operands):
        if not isinstance(value.owner, arith.SelectOp) or not isinstance(value.owner.rhs.owner, arith.ConstantOp):
            continue
        if all(use.operation is end for use in value.uses):
            yield number, value.owner


def _split(op: BufferMapOp, selects: dict[int, arith.SelectOp], condition: SSAValue, whole: SSAValue) -> None:
    mask = _mask_map(op, list(selects), selects, condition)
    true = arith.ConstantOp.from_int_and_width(1, 1)
    partial = arith.XOrIOp(whole, true)
    partial.result.name_hint = "partial"
    Rewriter.insert_op([true, partial, scf.IfOp(partial, [], [mask, scf.YieldOp()])], InsertPoint.after(op))
    for select in selects.values():
        select.result.replace_all_uses_with(select.lhs)
    _drop_unused(op)
    _drop_copy(op)


def _mask_map(
    op: BufferMapOp, numbers: list[int], selects: dict[int, arith.SelectOp], condition: SSAValue
) -> BufferMapOp:
    """The selects alone, in place."""
    used = set(behind([condition]))
    scalars = [n for n, arg in enumerate(op.body.block.args) if arg in used]
    outputs = [op.outputs[n] for n in numbers]
    types = [buffer_type(o).element_type for o in outputs] + [op.body.block.args[n].type for n in scalars]
    block = Block(arg_types=types)
    new: dict[SSAValue, SSAValue] = dict(
        zip((op.body.block.args[n] for n in scalars), block.args[len(outputs) :], strict=True)
    )
    for inner in op.body.block.ops:
        if any(result in used for result in inner.results):
            block.add_op(copy := inner.clone(value_mapper=new))
            new.update(zip(inner.results, copy.results, strict=True))
    values: list[SSAValue] = []
    for number, value in zip(numbers, block.args, strict=False):
        constant = selects[number].rhs.owner
        assert isinstance(constant, Operation)
        block.add_op(other := constant.clone())
        block.add_op(chosen := arith.SelectOp(new[condition], value, other.results[0]))
        values.append(chosen.result)
    block.add_op(tile.MapYieldOp(*values))
    axes = tile.axes_of(op.axes)
    everywhere = tuple(range(len(op.shape)))
    inputs = [*outputs, *(op.inputs[n] for n in scalars)]
    return BufferMapOp(inputs, [*(everywhere for _ in outputs), *(axes[n] for n in scalars)], outputs, block)


def _drop_unused(op: BufferMapOp) -> None:
    for inner in reversed(list(op.body.block.ops)):
        if inner.results and not any(result.uses for result in inner.results):
            Rewriter.erase_op(inner)


def _drop_copy(op: BufferMapOp) -> None:
    """A map that gives on what it reads is left out, its output being its input, if nothing else needs both."""
    end = op.body.block.last_op
    assert end is not None
    value = end.operands[0]
    if len(op.outputs) > 1 or not isinstance(value, BlockArgument) or len(op.body.block.ops) > 1:
        return
    source, target = op.inputs[value.index], op.outputs[0]
    if source.type != target.type or not isinstance(source.type, BufferType):
        return
    later = [use.operation for use in source.uses if use.operation is not op]
    if any(source in reads(o) or source not in writes(o) for o in later):
        return
    target.replace_all_uses_with(source)
    alloc = target.owner
    Rewriter.erase_op(op)
    if isinstance(alloc, Operation):
        Rewriter.erase_op(alloc)
