"""Maps and scatters over values to those over buffers: numbers, positions and cheap truth values become code of the region."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from xdsl.dialects import arith
from xdsl.dialects.builtin import IntegerType, i1, i32
from xdsl.ir import Attribute, Block, Operation, SSAValue

from attn_engine.dialects import tile
from attn_engine.dialects.tile_buffer_compute import BufferMapOp, BufferScatterAddOp, IndexOp
from attn_engine.dialects.tile_buffer_memory import is_fragment
from attn_engine.dialects.tile_types import BufferType
from attn_engine.passes.memory.held import InBuffer, Memory, Positions, Recomputed, Splat


@dataclass
class Body:
    """The region of a new map, and what it reads."""

    memory: Memory
    block: Block = field(default_factory=Block)
    inputs: list[SSAValue] = field(default_factory=list[SSAValue])
    axes: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])

    def add(self, op: Operation, hint: str | None) -> SSAValue:
        self.block.add_op(op)
        op.results[0].name_hint = hint
        return op.results[0]

    def argument(self, value: SSAValue, type_: Attribute, axes: tuple[int, ...], hint: str | None) -> SSAValue:
        self.inputs.append(value)
        self.axes.append(axes)
        new = self.block.insert_arg(type_, len(self.block.args))
        new.name_hint = hint
        return new

    def element(self, value: SSAValue, axes: tuple[int, ...], hint: str | None) -> SSAValue:
        """One element of a value of the kernel that has the named axes of the map."""
        held = self.memory.held.get(value)
        match held:
            case None:
                return self.argument(value, value.type, axes, hint)
            case Splat(number):
                return self.add(arith.ConstantOp(number), hint)  # type: ignore[arg-type]
            case Positions(start):
                return self.add(
                    arith.AddiOp(self.argument(start, i32, (), "start"), self.add(IndexOp(axes[0]), hint)), hint
                )
            case Recomputed(op, output):
                return self.outputs(op, [output], axes)[0]
            case InBuffer():
                return self._read(value, axes, hint)

    def _read(self, value: SSAValue, axes: tuple[int, ...], hint: str | None) -> SSAValue:
        held = self.memory.held[value]
        if isinstance(held, InBuffer) and held.transposed and not is_fragment(held.buffer):
            buffer, axes = held.buffer, axes[::-1]
        else:
            buffer = self.memory.buffer(value)
        assert isinstance(buffer.type, BufferType)
        read = self.argument(buffer, buffer.type.element_type, axes, hint)
        return self.add(arith.TruncIOp(read, i1), hint) if tile.element_of(value) == i1 else read

    def outputs(self, op: tile.MapOp, wanted: Sequence[int], axes: tuple[int, ...]) -> list[SSAValue]:
        """Some outputs of a map whose axes are the named axes of this one."""
        old, end = op.body.block, op.body.block.last_op
        assert end is not None
        roots = [end.operands[n] for n in wanted]
        ops, args = needed(old, roots)
        mapping: dict[SSAValue, SSAValue] = {}
        for arg, value, named in zip(old.args, op.inputs, tile.axes_of(op.axes), strict=True):
            if arg in args:
                mapping[arg] = self.element(value, tuple(axes[a] for a in named), arg.name_hint)
        for inner in ops:
            clone = inner.clone(value_mapper=mapping)
            self.block.add_op(clone)
            for before, after in zip(inner.results, clone.results, strict=True):
                mapping[before] = after
                after.name_hint = before.name_hint
        return [mapping[root] for root in roots]


def needed(block: Block, roots: Sequence[SSAValue]) -> tuple[list[Operation], set[SSAValue]]:
    """The ops of a region, in order, and its arguments that some of its values depend on."""
    values, ops = set(roots), list[Operation]()
    for op in reversed(list(block.ops)):
        if any(result in values for result in op.results):
            ops.append(op)
            values.update(op.operands)
    return ops[::-1], {arg for arg in block.args if arg in values}


def _is_cheap(memory: Memory, op: tile.MapOp, output: int) -> bool:
    """Whether an output is an integer or a truth value of positions, scalars and vectors of integers, not loaded anew."""
    end = op.body.block.last_op
    assert end is not None
    if not isinstance(tile.element_of(op.outputs[output]), IntegerType):
        return False
    ops, args = needed(op.body.block, [end.operands[output]])
    if any(isinstance(inner, tile.GatherOp) for inner in ops):
        return False
    return all(_stays(memory, op.inputs[arg.index]) for arg in op.body.block.args if arg in args)


def _stays(memory: Memory, value: SSAValue) -> bool:
    """Whether a value can be read later as well: nothing overwrites it, and it is no large tile."""
    if not isinstance(memory.held.get(value), InBuffer):
        return True
    is_vector = len(tile.shape_of(value)) == 1 and isinstance(tile.element_of(value), IntegerType)
    return is_vector and isinstance(value.owner, tile.MapOp) and value not in memory.preferred


def convert_map(memory: Memory, op: tile.MapOp) -> None:
    """One map in place, of those outputs that are held in buffers."""
    kept: list[int] = []
    for number, output in enumerate(op.outputs):
        if _is_cheap(memory, op, number):
            memory.held[output] = Recomputed(op, number)
        else:
            kept.append(number)
    if not kept:
        return
    body = Body(memory)
    values = body.outputs(op, kept, tuple(range(len(tile.shape_of(op.outputs[0])))))
    values = [body.add(arith.ExtUIOp(v, i32), v.name_hint) if v.type == i1 else v for v in values]
    body.block.add_op(tile.MapYieldOp(*values))
    outputs = [op.outputs[n] for n in kept]
    memory.insert(BufferMapOp(body.inputs, body.axes, [memory.target(o) for o in outputs], body.block))
    for output in outputs:
        memory.share(output)


def convert_scatter(memory: Memory, op: tile.ScatterAddOp) -> None:
    """A scatter whose places and guard are computed element by element, from what they are held as."""
    body = Body(memory)
    everywhere = tuple(range(len(tile.shape_of(op.value))))
    first = memory.buffer(op.value)
    values = [body.argument(first, tile.element_of(op.value), everywhere, op.value.name_hint)]
    operands = [*op.indices, *([op.guard] if op.guard is not None else [])]
    for operand, axes in zip(operands, tile.axes_of(op.axes), strict=True):
        values.append(body.element(operand, axes, operand.name_hint))
    if op.guard is None:
        values.append(body.add(arith.ConstantOp.from_int_and_width(1, 1), "always"))
    body.block.add_op(tile.MapYieldOp(*values))
    memory.insert(BufferScatterAddOp(body.inputs, body.axes, op.target, body.block))
