"""Functions of single elements on the operands of a recurrence, applied to tiles as they are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.dialects import arith
from xdsl.dialects.builtin import f32
from xdsl.ir import Block, SSAValue

from attn_engine.dialects import tile
from attn_engine.passes.lowering.frame import KernelCapture, cast, spread
from attn_engine.passes.lowering.kernel import Kernel
from attn_engine.passes.lowering.partition import Partition
from attn_engine.passes.lowering.program import Bound, Program
from attn_engine.passes.lowering.scope import Scope


@dataclass(frozen=True)
class Mod:
    """A region (element, b, h, position, channel, captures...) -> f32, and its captures as values of the plan."""

    block: Block
    captures: Sequence[SSAValue]

    def apply(
        self,
        kernel: Kernel,
        scope: Scope,
        raw: SSAValue,
        indices: Sequence[Bound | int],
        limits: Sequence[tuple[Bound, Bound]],
    ) -> SSAValue:
        """The tile that the region makes of `raw`.

        `indices` are b, h, position and channel, i32 or a number; elements whose index (the first of a pair of
        `limits`) is not below its limit (the second) stay 0: what is beyond an operand adds nothing.
        """
        program = Program(captures=[KernelCapture(kernel, c) for c in self.captures])
        shape = tile.shape_of(raw)
        element = cast(program, program.argument(Bound(raw, tuple(range(len(shape)))), "x"), f32)
        places = [self._index(program, i) for i in indices]
        result = program.inline(self.block, [element, *places]).operands[0]
        for index, limit in limits:
            inside = program.add(
                arith.CmpiOp(program.argument(index, "index"), program.argument(limit, "limit"), "slt"), "inside"
            )
            result = program.add(arith.SelectOp(inside, result, program.real(0.0)), result.name_hint)
        wanted = cast(program, result, tile.element_of(raw))
        return spread(scope, Partition(program, scope, shape, -1).run([wanted])[0], shape)

    def _index(self, program: Program, index: Bound | int) -> SSAValue:
        if isinstance(index, int):
            return program.add(arith.ConstantOp.from_int_and_width(index, 64), "index")
        return program.index(index, "index")
