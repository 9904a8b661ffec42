"""hip-place-barriers: a barrier wherever one wave could overtake another in LDS."""

from __future__ import annotations

from dataclasses import dataclass, field

from xdsl.context import Context
from xdsl.dialects import scf
from xdsl.dialects.builtin import ModuleOp, UnitAttr
from xdsl.ir import Block, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects import tile_buffer_memory as memory
from attn_engine.dialects.tile_buffer_check import reads, writes
from attn_engine.dialects.tile_types import BufferType, MemorySpace


def _is_shared(value: SSAValue) -> bool:
    return isinstance(value.type, BufferType) and value.type.memory_space is MemorySpace.SHARED


def _read(op: Operation) -> set[SSAValue]:
    return {memory.memory_of(value) for value in reads(op) if _is_shared(value)}


def _written(op: Operation) -> set[SSAValue]:
    return {memory.memory_of(value) for value in writes(op) if _is_shared(value)}


@dataclass
class _Since:
    """What has been read and written since the last barrier, on some path."""

    read: set[SSAValue] = field(default_factory=set[SSAValue])
    written: set[SSAValue] = field(default_factory=set[SSAValue])

    def joined(self, other: _Since) -> _Since:
        return _Since(self.read | other.read, self.written | other.written)

    def after(self, op: Operation) -> _Since:
        return _Since(self.read | _read(op), self.written | _written(op))

    def needs_barrier(self, op: Operation) -> bool:
        return bool(_written(op) & (self.read | self.written) or _read(op) & self.written)


def _place(block: Block, since: _Since) -> _Since:
    """Inserts barriers into a block that is entered in a state; the state at its end."""
    for op in list(block.ops):
        if isinstance(op, scf.ForOp):
            # What the body does last is what it finds when it comes round; it may also run not even once.
            round_trip = since
            for inner in op.body.walk():
                round_trip = round_trip.after(inner)
            since = since.joined(_place(op.body.block, round_trip))
        elif isinstance(op, scf.IfOp):
            ends = [_place(region.block, since) for region in op.regions if region.blocks]
            since = ends[0].joined(ends[1] if len(ends) == 2 else since)
        else:
            if since.needs_barrier(op):
                Rewriter.insert_op(memory.BarrierOp(), InsertPoint.before(op))
                since = _Since()
            since = since.after(op)
    return since


@dataclass(frozen=True)
class HipPlaceBarriersPass(ModulePass):
    """Adds the barriers of a kernel, and the attribute `explicit_barriers`.

    ```
    scf.for %n0 = %c0 to %n step %c64 : i32 {
      tile.copy_in %k[%n0, %c0] dims [0, 1] into %ks : ...
      tile.gemm %ks, %q, %s ieee : ...
    }
    ```
    becomes
    ```
    scf.for %n0 = %c0 to %n step %c64 : i32 {
      tile.barrier
      tile.copy_in %k[%n0, %c0] dims [0, 1] into %ks : ...
      tile.barrier
      tile.gemm %ks, %q, %s ieee : ...
    }
    ```
    """

    name = "hip-place-barriers"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for kernel in [k for k in op.ops if isinstance(k, tile.KernelOp)]:
            kernel.attributes["explicit_barriers"] = UnitAttr()
            _place(kernel.body.block, _Since())
