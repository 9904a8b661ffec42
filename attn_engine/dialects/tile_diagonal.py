"""Tiles and the numbers of their diagonals in memory: what is read by the distance of two positions, and its gradients."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import TensorType, UnitAttr, f32, i32
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import (
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    opt_prop_def,
    result_def,
    traits_def,
    var_operand_def,
)
from xdsl.traits import MemoryReadEffect, MemoryWriteEffect
from xdsl.utils.exceptions import VerifyException

from attn_engine.dialects.tile_base import GlobalType, element_of, shape_of

_MATRIX = 2


@irdl_op_definition
class LoadDiagonalsOp(IRDLOperation):
    """A matrix with one number in each of its diagonals: at `origin + column - row` of the last axis, by positions.

    The other indices say where on the axes before it; `rows` and `columns` are the positions of the first row and the
    first column. All places must be inside of the memory, in which numbers of the last axis are neighbours. `turned`, the
    place is `origin + row - column`. `held` says that threads hold the matrix as products give it.

    ```
    %d = tile.load_diagonals %numbers[%h, %origin] from %q0, %n0 : !tile.global<2 x f32> -> tensor<64x32xf32>
    ```
    """

    name = "tile.load_diagonals"
    source = operand_def(GlobalType)
    rows = operand_def(i32)
    columns = operand_def(i32)
    indices = var_operand_def(i32)
    turned = opt_prop_def(UnitAttr)
    held = opt_prop_def(UnitAttr)
    result = result_def(TensorType)
    traits = traits_def(MemoryReadEffect())
    assembly_format = "$source `[` $indices `]` `from` $rows `,` $columns (`turned` $turned^)? (`held` $held^)? attr-dict `:` type($source) `->` type($result)"

    def __init__(
        self,
        source: SSAValue,
        indices: Sequence[SSAValue],
        rows: SSAValue,
        columns: SSAValue,
        result: Attribute,
        turned: bool = False,
    ):
        super().__init__(
            operands=[source, rows, columns, list(indices)],
            properties={"turned": UnitAttr()} if turned else {},
            result_types=[result],
        )

    def verify_(self) -> None:
        assert isinstance(self.source.type, GlobalType)
        if len(self.indices) != self.source.type.rank.data or not self.indices:
            raise VerifyException(
                f"{self.source.type} needs {self.source.type.rank.data} indices, got {len(self.indices)}"
            )
        if len(shape_of(self.result)) != _MATRIX:
            raise VerifyException(f"{self.result.type} has no diagonals")
        if element_of(self.result) != element_of(self.source):
            raise VerifyException(f"{self.result.type} does not match the elements of {self.source.type}")


@irdl_op_definition
class AddDiagonalsOp(IRDLOperation):
    """Adds each element of a matrix to the place of its diagonal, atomically: at `start + column - row` of the last axis.

    The other indices say where on the axes before it. All places must be inside of the memory. `turned`, the place is
    `start + row - column`. `held` says that threads hold the matrix as products give it.

    ```
    tile.add_diagonals %d, %sums[%h, %start] : tensor<64x32xf32>, !tile.global<2 x f32>
    ```
    """

    name = "tile.add_diagonals"
    value = operand_def()
    target = operand_def(GlobalType)
    indices = var_operand_def(i32)
    turned = opt_prop_def(UnitAttr)
    held = opt_prop_def(UnitAttr)
    traits = traits_def(MemoryWriteEffect(), MemoryReadEffect())
    assembly_format = "$value `,` $target `[` $indices `]` (`turned` $turned^)? (`held` $held^)? attr-dict `:` type($value) `,` type($target)"

    def __init__(self, value: SSAValue, target: SSAValue, indices: Sequence[SSAValue], turned: bool = False):
        properties = {"turned": UnitAttr()} if turned else {}
        super().__init__(operands=[value, target, list(indices)], properties=properties)

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
