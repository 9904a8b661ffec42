"""hip-prefetch: the next block is on its way while this one is computed with."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, scf
from xdsl.dialects.builtin import IntegerAttr, ModuleOp
from xdsl.ir import Block, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter
from xdsl.traits import Pure
from xdsl.utils.hints import isa

from attn_engine.dialects import tile
from attn_engine.dialects import tile_buffer_compute as compute
from attn_engine.dialects import tile_buffer_memory as memory
from attn_engine.dialects.tile_buffer_layout import StagedAttr
from attn_engine.dialects.tile_types import BufferType, MemorySpace
from attn_engine.passes.scalar_code import Code


@dataclass
class _Copy:
    """A copy of the loop that can run one iteration ahead, and what its indices and limits need of the loop's body."""

    op: memory.CopyInOp
    scalars: list[Operation]
    staged: memory.BufferAllocOp

    def insert_into(self, block: Block, index: SSAValue, place: SSAValue) -> None:
        """Appends the copy, as it is where the loop's index is `place`."""
        mapping: dict[SSAValue, SSAValue] = {index: place, self.op.target: self.staged.result}
        for op in (*self.scalars, self.op):
            clone = op.clone(value_mapper=mapping)
            block.add_op(clone)
            for before, after in zip(op.results, clone.results, strict=True):
                after.name_hint = before.name_hint


def _scalars(op: Operation, loop: scf.ForOp) -> list[Operation] | None:
    """The scalar ops of the loop's body that an op's operands come from, in order; None if other ops are among them, or
    what the loop carries, which is known only when its turn has come."""
    body, found, stack = loop.body.block, set[Operation](), list(op.operands)
    while stack:
        value = stack.pop()
        if value in body.args[1:]:
            return None
        owner = value.owner
        if not isinstance(owner, Operation) or owner.parent is not body or owner in found:
            continue
        if not owner.has_trait(Pure()):
            return None
        found.add(owner)
        stack += owner.operands
    return [inner for inner in body.ops if inner in found]


def _staged(op: memory.CopyInOp) -> memory.BufferAllocOp | None:
    """Where the next tile waits: in the vectors that threads copy, or held as its fragment is."""
    alloc, type_ = op.target.owner, memory.buffer_type(op.target)
    assert isinstance(alloc, memory.BufferAllocOp) and isinstance(op.source.type, tile.GlobalType)
    held = BufferType(type_.get_shape(), type_.element_type, MemorySpace.REGISTER)
    rank, dims = len(type_.get_shape()), tile.ints_of(op.dims)
    if memory.is_fragment(op.target) and rank == 1:
        new = memory.BufferAllocOp(held, alloc.layout)
    elif not memory.is_fragment(op.target) and rank == 2:
        new = memory.BufferAllocOp(held, StagedAttr(0 if dims[0] == op.source.type.rank.data - 1 else 1))
    else:
        return None
    new.result.name_hint = f"next_{op.target.name_hint or 'v'}"
    return new


def _writes(loop: scf.ForOp, source: SSAValue) -> bool:
    """Whether the loop may change what a copy reads."""
    stores = (op for op in loop.body.walk() if isinstance(op, tile.WriteAccess | compute.BufferScatterAddOp))
    return any(op.target is source for op in stores)


def _copies(loop: scf.ForOp) -> list[_Copy]:
    found: list[_Copy] = []
    for op in loop.body.block.ops:
        if isinstance(op, memory.CopyInOp) and not _writes(loop, op.source):
            scalars, staged = _scalars(op, loop), _staged(op)
            if scalars is not None and staged is not None:
                found.append(_Copy(op, scalars, staged))
    return found


# --- rewriting ---------------------------------------------------------------------------------


def _first(loop: scf.ForOp, copies: list[_Copy]) -> scf.IfOp:
    """Before the loop: the first block, or zeros where the loop does not run."""
    block, otherwise = Block(), Block()
    for copy in copies:
        copy.insert_into(block, loop.body.block.args[0], loop.lb)
        code = Code()
        zero = code.constant(0.0, memory.buffer_type(copy.staged.result).element_type)
        otherwise.add_ops([*code.ops, memory.BufferFillOp(copy.staged.result, zero.value)])
    for end in (block, otherwise):
        end.add_op(scf.YieldOp())
    runs = arith.CmpiOp(loop.lb, loop.ub, "slt")
    Rewriter.insert_op(runs, InsertPoint.before(loop))
    return scf.IfOp(runs, [], [block], [otherwise])


def _next(loop: scf.ForOp, copies: list[_Copy]) -> list[Operation]:
    """In the loop: the block after this one, if there is one."""
    index = loop.body.block.args[0]
    place = arith.AddiOp(index, loop.step)
    more = arith.CmpiOp(place, loop.ub, "slt")
    place.result.name_hint, more.result.name_hint = f"next_{index.name_hint or 'i'}", "more"
    block = Block()
    for copy in copies:
        copy.insert_into(block, index, place.result)
    block.add_op(scf.YieldOp())
    return [place, more, scf.IfOp(more, [], [block])]


def _after_copies(copies: list[_Copy]) -> Operation:
    """The last copy, or the barrier that follows if it is for these copies: it should not wait for the next ones."""
    last = copies[-1].op
    op = last.next_op
    while op is not None and not isinstance(op, memory.BarrierOp) and not any(map(_in_lds, op.operands)):
        op = op.next_op
    return op if isinstance(op, memory.BarrierOp) else last


def _in_lds(value: SSAValue) -> bool:
    return isinstance(value.type, BufferType) and not memory.is_fragment(value)


def _prefetch(kernel: tile.KernelOp, loop: scf.ForOp) -> None:
    copies = _copies(loop)
    if not copies:
        return
    Rewriter.insert_op([copy.staged for copy in copies], InsertPoint.at_start(kernel.body.block))
    Rewriter.insert_op(_first(loop, copies), InsertPoint.before(loop))
    Rewriter.insert_op(_next(loop, copies), InsertPoint.after(_after_copies(copies)))
    for copy in copies:
        Rewriter.replace_op(copy.op, memory.CopyOp(copy.staged.result, copy.op.target))


def _is_staged(loop: scf.ForOp) -> bool:
    stages = loop.attributes.pop("stages", None)
    return isa(stages, IntegerAttr) and stages.value.data > 1


@dataclass(frozen=True)
class HipPrefetchPass(ModulePass):
    """In loops with `stages`, tiles are loaded to registers one iteration ahead, and written to LDS when it is their turn.

    ```
    scf.for %n0 = %lo to %hi step %c64 : i32 {
      tile.barrier
      tile.copy_in %k[%n0, %c0] dims [0, 1] into %ks : ...
      tile.barrier
      tile.gemm %ks, %q, %s ieee : ...
    } {stages = 2 : i64}
    ```
    becomes
    ```
    %runs = arith.cmpi slt, %lo, %hi : i32
    scf.if %runs { tile.copy_in %k[%lo, %c0] dims [0, 1] into %next_ks : ... } else { tile.buffer_fill %next_ks, %zero : ... }
    scf.for %n0 = %lo to %hi step %c64 : i32 {
      tile.barrier
      tile.copy %next_ks, %ks : ...
      tile.barrier
      %next_n0 = arith.addi %n0, %c64 : i32
      %more = arith.cmpi slt, %next_n0, %hi : i32
      scf.if %more { tile.copy_in %k[%next_n0, %c0] dims [0, 1] into %next_ks : ... }
      tile.gemm %ks, %q, %s ieee : ...
    }
    ```
    LDS holds one block, whatever `stages` says: registers are what there is more of.
    """

    name = "hip-prefetch"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for kernel in [k for k in op.ops if isinstance(k, tile.KernelOp)]:
            for loop in [inner for inner in kernel.walk() if isinstance(inner, scf.ForOp)]:
                if _is_staged(loop):
                    _prefetch(kernel, loop)
