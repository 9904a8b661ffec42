"""The async level of the ``tile`` dialect: tiles in the order in which the threads of a warpgroup hold them.

Thread l of warp w of a warpgroup holds of a product of 64 rows, for every eight columns j, the elements at
(16 w + 8 h + l // 4, 8 j + 2 (l % 4) + e) for h and e in 0, 1. Row 32 w + l of its fragments are these, at column 4 j + 2 h + e.
"""

from __future__ import annotations

from xdsl.dialects.builtin import I64, IntegerAttr, TensorType, i64
from xdsl.ir import Operation, SSAValue
from xdsl.irdl import IRDLOperation, irdl_op_definition, operand_def, prop_def, result_def, traits_def
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

from attn_engine.dialects.tile import element_of, shape_of

ROWS, THREADS, COLUMNS = 64, 128, 8
"""Of a product of one warpgroup, and of the columns that one round of its threads holds."""


@irdl_op_definition
class ToFragmentsOp(IRDLOperation):
    """The fragments of a tile of 64 rows: a thread a row. In registers nothing moves.

    ```
    %f = tile.to_fragments %dq : tensor<64x64xf32> -> tensor<128x32xf32>
    ```
    """

    name = "tile.to_fragments"
    value = operand_def(TensorType)
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$value attr-dict `:` type($value) `->` type($result)"

    def __init__(self, value: SSAValue | Operation):
        operand = SSAValue.get(value)
        shape = [THREADS, shape_of(operand)[1] * ROWS // THREADS]
        super().__init__(operands=[value], result_types=[TensorType(element_of(operand), shape)])

    def verify_(self) -> None:
        rows, columns = shape_of(self.value)
        if rows != ROWS or columns % COLUMNS:
            raise VerifyException(f"fragments are of {ROWS} rows and whole {COLUMNS} columns, got {self.value.type}")
        if self.result.type != TensorType(element_of(self.value), [THREADS, columns * ROWS // THREADS]):
            raise VerifyException(f"fragments of {self.value.type} are not {self.result.type}")


@irdl_op_definition
class FromFragmentsOp(IRDLOperation):
    """Tiles of 64 rows from their fragments: `parts` beside each other, then the next 64 rows.

    ```
    %dq = tile.from_fragments %f parts 2 : tensor<256x32xf32> -> tensor<64x128xf32>
    ```
    """

    name = "tile.from_fragments"
    value = operand_def(TensorType)
    parts = prop_def(IntegerAttr[I64])
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$value `parts` $parts attr-dict `:` type($value) `->` type($result)"

    def __init__(self, value: SSAValue | Operation, parts: int):
        rows, columns = shape_of(SSAValue.get(value))
        shape = [rows // (THREADS * parts) * ROWS, columns * THREADS // ROWS * parts]
        super().__init__(
            operands=[value],
            properties={"parts": IntegerAttr(parts, i64)},
            result_types=[TensorType(element_of(SSAValue.get(value)), shape)],
        )

    def verify_(self) -> None:
        (rows, columns), parts = shape_of(self.value), self.parts.value.data
        if parts < 1 or rows % (THREADS * parts) or columns * THREADS % (ROWS * COLUMNS):
            raise VerifyException(f"{self.value.type} are not fragments of {parts} tiles beside each other")
        want = [rows // (THREADS * parts) * ROWS, columns * THREADS // ROWS * parts]
        if self.result.type != TensorType(element_of(self.value), want):
            raise VerifyException(f"{parts} tiles beside each other from {self.value.type} are not {self.result.type}")


FRAGMENT_OPS: list[type[Operation]] = [ToFragmentsOp, FromFragmentsOp]
