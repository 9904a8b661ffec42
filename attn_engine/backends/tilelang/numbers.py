"""tilelang-keep-numbers: which numbers lie in a place of their own."""

from __future__ import annotations

from dataclasses import dataclass, field

from xdsl.context import Context
from xdsl.dialects import arith, scf
from xdsl.dialects.builtin import IntegerType, ModuleOp
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.backends.tilelang import types
from attn_engine.backends.tilelang.overlap import OVERLAP
from attn_engine.backends.tilelang.printer import integer_attribute
from attn_engine.backends.tilelang.vectors import Elementwise
from attn_engine.dialects import tile
from attn_engine.dialects.tile_buffer_map import BufferMapOp, KeepOp
from attn_engine.dialects.tile_buffer_memory import buffer_type
from attn_engine.dialects.tile_types import BufferType

KERNEL_LIMIT, ROW_LIMIT, MAP_LIMIT = 2, 6, 32
"""How many operations the expression behind a name may have: outside of maps, in a map of vectors, in one of tiles."""


def _copies_ahead(op: Operation) -> bool:
    """Whether it stands in a loop with stages, where TileLang loses what is kept."""
    parent = op.parent_op()
    while parent is not None:
        if isinstance(parent, scf.ForOp) and integer_attribute(parent, "stages", 1) > 1:
            return True
        parent = parent.parent_op()
    return False


def _keep(op: Operation) -> None:
    kept = KeepOp(op.results[0])
    Rewriter.insert_op(kept, InsertPoint.after(op))
    op.results[0].replace_uses_with_if(kept.result, lambda use: use.operation is not kept)


def _read(op: BufferMapOp) -> set[SSAValue]:
    """What a map's region computes from elements of buffers."""
    block = op.body.block
    found: set[SSAValue] = {a for a, v in zip(block.args, op.inputs, strict=True) if isinstance(v.type, BufferType)}
    for inner in block.ops:
        found.update(inner.results if found.intersection(inner.operands) else ())
    return found


def _keep_comparisons(op: BufferMapOp) -> None:
    """Of integers that are read from buffers, in a map that makes integers."""
    if all(isinstance(buffer_type(o).element_type, IntegerType) for o in op.outputs):
        read = _read(op)
        for inner in list(op.body.block.ops):
            if isinstance(inner, arith.CmpiOp) and read.intersection(inner.operands):
                _keep(inner)


@dataclass
class _Weights:
    """Of the numbers of a kernel: how many operations each stands for, once every name is replaced by its expression."""

    is_scheduled: bool
    """Whether all numbers outside of maps lie in places of their own anyway."""
    known: dict[SSAValue, int] = field(default_factory=dict[SSAValue, int])

    def of(self, value: SSAValue) -> int:
        return 0 if isinstance(value.owner, arith.ConstantOp) else self.known.get(value, 1)

    def limit(self, op: Operation) -> int:
        around = op.parent_op()
        if isinstance(around, Elementwise):
            return ROW_LIMIT if len(around.shape) == 1 else MAP_LIMIT
        return KERNEL_LIMIT

    def add(self, op: Operation) -> None:
        """Keeps the result of an op over the limit."""
        in_map = isinstance(op.parent_op(), Elementwise)
        if self.is_scheduled and not in_map:
            return
        written = types.spelling(op, is_choice=self.is_scheduled)
        weight = 1 + sum(written.count(f"{{{n}}}") * self.of(value) for n, value in enumerate(op.operands))
        if weight > self.limit(op) and (in_map or not _copies_ahead(op)):
            _keep(op)
        else:
            self.known[op.results[0]] = weight


@dataclass(frozen=True)
class TilelangKeepNumbersPass(ModulePass):
    """Keeps numbers in places of their own, where TVM would compute them again and again.

    ```
    %a = arith.addi %x, %c1 : i32
    %b = arith.addi %a, %c1 : i32
    %c = arith.muli %b, %y : i32
    ```
    becomes
    ```
    %a = arith.addi %x, %c1 : i32
    %b = arith.addi %a, %c1 : i32
    %b_1 = tile.keep %b : i32
    %c = arith.muli %b_1, %y : i32
    ```
    TVM replaces names by expressions, but not what is read from memory. Without a limit these double with every second
    use, and its proofs about indices take minutes: what is over the limit is kept, but not in a loop with stages, where
    TileLang loses it. In a map that makes integers so are comparisons of integers that are read from buffers.
    """

    name = "tilelang-keep-numbers"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for kernel in [k for k in op.ops if isinstance(k, tile.KernelOp)]:
            for inner in [o for o in kernel.walk() if isinstance(o, BufferMapOp)]:
                _keep_comparisons(inner)
            weights = _Weights(OVERLAP in kernel.attributes)
            for inner in [o for o in kernel.walk() if isinstance(o, types.SPELLED)]:
                if not any(isinstance(use.operation, KeepOp) for use in inner.results[0].uses):
                    weights.add(inner)
