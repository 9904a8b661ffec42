"""tilelang-widen-blocks: kernels whose tiles leave a thread too few registers get more threads."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from xdsl.context import Context
from xdsl.dialects import scf
from xdsl.dialects.builtin import FixedBitwidthType, IntegerAttr, ModuleOp, i64
from xdsl.ir import Block, Operation, SSAValue
from xdsl.passes import ModulePass

from attn_engine.backends.tilelang.printer import integer_attribute
from attn_engine.backends.tilelang.tiles import is_tile
from attn_engine.dialects import tile
from attn_engine.dialects.tile_buffer_check import reads, writes
from attn_engine.dialects.tile_buffer_compute import GemmOp, SplitAttr
from attn_engine.dialects.tile_buffer_memory import buffer_type
from attn_engine.passes.tile_assign_memory import split_of

WARP = 32
REGISTER = 32
"""Bits of one."""


def _registers(tile_: SSAValue) -> int:
    """What all threads together need for a tile."""
    type_ = buffer_type(tile_)
    bits = type_.element_type.bitwidth if isinstance(type_.element_type, FixedBitwidthType) else REGISTER
    return prod(type_.get_shape()) * bits // REGISTER


@dataclass
class Held:
    """The tiles that are held at a time, found from the last op to the first."""

    most: int = 0
    """Registers that they take where they take most."""
    sizes: dict[SSAValue, int] = field(default_factory=dict[SSAValue, int])

    def before(self, block: Block, after: set[SSAValue]) -> set[SSAValue]:
        """The tiles that are read in a block, or after it, and written before it."""
        held = set(after)
        for op in reversed(list(block.ops)):
            held = self._before(op, held)
        return held

    def _before(self, op: Operation, after: set[SSAValue]) -> set[SSAValue]:
        if isinstance(op, scf.ForOp):
            again = after | self.before(op.body.block, after)
            return after | self.before(op.body.block, again)
        if isinstance(op, scf.IfOp):
            return set[SSAValue]().union(*(self.before(r.block, after) if r.blocks else after for r in op.regions))
        written = set(filter(is_tile, writes(op)))
        self._see(after | written)
        held = (after - written) | set(filter(is_tile, reads(op)))
        self._see(held)
        return held

    def _see(self, tiles: set[SSAValue]) -> None:
        for one in tiles - self.sizes.keys():
            self.sizes[one] = _registers(one)
        self.most = max(self.most, sum(self.sizes[one] for one in tiles))


@dataclass(frozen=True)
class TilelangWidenBlocksPass(ModulePass):
    """Doubles the threads of a kernel as long as its tiles need more registers of a thread than they may take.

    ```
    tile.kernel @k(...) attributes {threads = 128 : i64} {     needs 160 registers of each thread
      tile.gemm %a, %b, %s ieee split rows : ...
    ```
    becomes
    ```
    tile.kernel @k(...) attributes {threads = 256 : i64} {
      tile.gemm %a, %b, %s ieee split both : ...
    ```
    Counted are the tiles that are held at a time, of which each thread has its share: those that are written before and
    read after an op, or in the next iteration of a loop. What is left is for addresses, vectors and operands on their way.
    """

    name = "tilelang-widen-blocks"

    registers: int = 128
    """That tiles may take of a thread: half of what it has on an NVIDIA GPU."""

    threads: int = 256
    """Of the widest block: with more, each has fewer registers."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for kernel in [k for k in op.ops if isinstance(k, tile.KernelOp)]:
            held, threads = Held(), integer_attribute(kernel, "threads", 128)
            held.before(kernel.body.block, set())
            before = threads
            while held.most > self.registers * threads and 2 * threads <= self.threads:
                threads *= 2
            if threads != before:
                kernel.attributes["threads"] = IntegerAttr(threads, i64)
                for product in [p for p in kernel.walk() if isinstance(p, GemmOp)]:
                    rows = buffer_type(product.acc).get_shape()[0]
                    product.split = SplitAttr(split_of(rows, threads // WARP))
