"""What loops and branches carry: tensors in buffers, written in place where nothing reads the old value any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xdsl.dialects import scf
from xdsl.dialects.builtin import IntegerAttr, TensorType, i64
from xdsl.ir import Block, Operation, SSAValue
from xdsl.rewriter import Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_buffer_memory import CopyInOp, CopyOp, is_fragment
from attn_engine.dialects.tile_types import MemorySpace
from attn_engine.passes.memory.held import InBuffer, Memory, is_local_and_used_once

Convert = Callable[[Memory, Block], None]
"""Converts the ops of a block."""


def convert_for(memory: Memory, op: scf.ForOp, convert: Convert, stages: int) -> None:
    """A loop over tensors to a loop over buffers.

    ```
    %r = scf.for %i = ... iter_args(%a = %init) -> (tensor<64xf32>) { ...; scf.yield %next }
    ```
    becomes
    ```
    tile.copy %init, %a ; scf.for %i = ... { ...; tile.copy %next, %a }
    ```
    where a copy is made only if the value is not in the right buffer already. Numbers are carried as they were.
    """
    old = op.body.block
    end = old.last_op
    assert isinstance(end, scf.YieldOp)
    places = [n for n, init in enumerate(op.iter_args) if _is_tensor(init)]
    args = [old.args[1 + n] for n in places]
    carries = [_carry(memory, op.iter_args[n], arg, op) for n, arg in zip(places, args, strict=True)]
    for value, buffer in zip((*args, *(op.results[n] for n in places)), (*carries, *carries), strict=True):
        memory.held[value] = InBuffer(buffer)
    for n, buffer, arg in zip(places, carries, args, strict=True):
        _prefer(memory, end.operands[n], buffer, arg, old)
    new, body = _loop_of_numbers(memory, op)
    _move(old, body)
    before = len(memory.taken)
    convert(memory, body)
    _end(memory, end, carries)
    if stages > 1 and any(isinstance(inner, CopyInOp) for inner in body.ops):
        new.attributes["stages"] = IntegerAttr(stages, i64)
        return  # its tiles become rings of the target's own making
    memory.free += memory.taken[before:]
    del memory.taken[before:]


def _loop_of_numbers(memory: Memory, op: scf.ForOp) -> tuple[scf.ForOp, Block]:
    """The loop without its tensors, and its body, still empty."""
    old = op.body.block
    numbers = [n for n, init in enumerate(op.iter_args) if not _is_tensor(init)]
    kept = [old.args[0], *(old.args[1 + n] for n in numbers)]
    body = Block(arg_types=[arg.type for arg in kept])
    new = memory.insert(scf.ForOp(op.lb, op.ub, op.step, [op.iter_args[n] for n in numbers], body))
    results = [op.results[n] for n in numbers]
    for before, after in zip((*kept, *results), (*body.args, *new.results), strict=True):
        after.name_hint = before.name_hint
        before.replace_all_uses_with(after)
    return new, body


def convert_if(memory: Memory, op: scf.IfOp, convert: Convert) -> None:
    """Both branches write the buffers of results; numbers stay results."""
    tensors = list(filter(_is_tensor, op.results))
    numbers = [result for result in op.results if not _is_tensor(result)]
    targets = [memory.alloc(r.type, MemorySpace.REGISTER, r.name_hint) for r in tensors]
    for result, target in zip(tensors, targets, strict=True):
        memory.held[result] = InBuffer(target)
    regions = [region for region in (op.true_region, op.false_region) if region.blocks]
    bodies = [Block() for _ in regions]
    kinds = [number.type for number in numbers]
    new = memory.insert(scf.IfOp(op.cond, kinds, [bodies[0]], [bodies[1]] if len(bodies) == 2 else None))
    for before, after in zip(numbers, new.results, strict=True):
        after.name_hint = before.name_hint
        before.replace_all_uses_with(after)
    for region, body in zip(regions, bodies, strict=True):
        end = region.block.last_op
        assert isinstance(end, scf.YieldOp)
        _move(region.block, body)
        convert(memory, body)
        _end(memory, end, targets)


def _is_tensor(value: SSAValue) -> bool:
    return isinstance(value.type, TensorType)


def _move(source: Block, target: Block) -> None:
    for op in list(source.ops):
        op.detach()
        target.add_op(op)


def _carry(memory: Memory, init: SSAValue, arg: SSAValue, loop: scf.ForOp) -> SSAValue:
    """The buffer of one carry, with the initial value in it."""
    held = memory.held[init]
    is_own = is_local_and_used_once(init, loop.parent)
    if is_own and isinstance(held, InBuffer) and not held.transposed and is_fragment(held.buffer):
        return held.buffer
    buffer = memory.preferred.get(init) or memory.alloc(arg.type, MemorySpace.REGISTER, arg.name_hint)
    memory.move(init, buffer)
    return buffer


def _prefer(memory: Memory, value: SSAValue, buffer: SSAValue, arg: SSAValue, body: Block) -> None:
    """Lets `value` be written to the carry's buffer if the carry is not read after it is."""
    op = value.owner
    if not isinstance(op, tile.MapOp | tile.DotOp | tile.ReduceOp) or op.parent is not body:
        return
    if value in memory.preferred or _is_read_after(arg, op, body):
        return
    if isinstance(op, tile.DotOp) and arg in (op.a, op.b):
        return
    memory.preferred[value] = buffer
    if isinstance(op, tile.DotOp) and is_local_and_used_once(op.acc, body):
        _prefer(memory, op.acc, buffer, arg, body)


def _is_read_after(arg: SSAValue, op: Operation, body: Block) -> bool:
    position = {inner: n for n, inner in enumerate(body.ops)}
    return any(position[_ancestor(use.operation, body)] > position[op] for use in arg.uses)


def _ancestor(op: Operation, block: Block) -> Operation:
    """The op of the block that an op is in."""
    found = block.find_ancestor_op_in_block(op)
    assert found is not None
    return found


def _end(memory: Memory, end: scf.YieldOp, targets: Sequence[SSAValue]) -> None:
    """What is carried on, moved to its buffers as if at once: a buffer that is both read and written is saved first."""
    memory.at = end
    moves = list(zip(filter(_is_tensor, end.operands), targets, strict=True))
    written = {target for value, target in moves if not _is_in(memory, value, target)}
    for value, _ in moves:
        held = memory.held[value]
        if isinstance(held, InBuffer) and held.buffer in written:
            saved = memory.alloc(value.type, MemorySpace.REGISTER, value.name_hint)
            memory.insert(CopyOp(held.buffer, saved))
            memory.held[value] = InBuffer(saved)
    for value, target in moves:
        memory.move(value, target)
    Rewriter.replace_op(end, scf.YieldOp(*(value for value in end.operands if not _is_tensor(value))))


def _is_in(memory: Memory, value: SSAValue, buffer: SSAValue) -> bool:
    held = memory.held[value]
    return isinstance(held, InBuffer) and held.buffer is buffer
