"""Sums along the diagonals of a tile, added to memory: gradients of tables that are read by the distance of two positions."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import f32, i32
from xdsl.ir import SSAValue
from xdsl.irdl import IRDLOperation, irdl_op_definition, operand_def, traits_def, var_operand_def
from xdsl.traits import MemoryReadEffect, MemoryWriteEffect
from xdsl.utils.exceptions import VerifyException

from attn_engine.dialects.tile_base import GlobalType, element_of, shape_of

_MATRIX = 2


@irdl_op_definition
class AddDiagonalsOp(IRDLOperation):
    """Adds each element of a matrix to the place of its diagonal, atomically: at `start + column - row` of the last axis.

    The other indices say where on the axes before it. All places must be inside of the memory.

    ```
    tile.add_diagonals %d, %sums[%h, %start] : tensor<64x32xf32>, !tile.global<2 x f32>
    ```
    """

    name = "tile.add_diagonals"
    value = operand_def()
    target = operand_def(GlobalType)
    indices = var_operand_def(i32)
    traits = traits_def(MemoryWriteEffect(), MemoryReadEffect())
    assembly_format = "$value `,` $target `[` $indices `]` attr-dict `:` type($value) `,` type($target)"

    def __init__(self, value: SSAValue, target: SSAValue, indices: Sequence[SSAValue]):
        super().__init__(operands=[value, target, list(indices)])

    def verify_(self) -> None:
        assert isinstance(self.target.type, GlobalType)
        if len(self.indices) != self.target.type.rank.data or not self.indices:
            raise VerifyException(
                f"{self.target.type} needs {self.target.type.rank.data} indices, got {len(self.indices)}"
            )
        if len(shape_of(self.value)) != _MATRIX:
            raise VerifyException(f"{self.value.type} has no diagonals")
        if element_of(self.value) != f32 or element_of(self.target) != f32:
            raise VerifyException("add_diagonals is on f32")
