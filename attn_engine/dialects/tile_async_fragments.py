"""The async level of the ``tile`` dialect: tiles in the order in which the threads of a warpgroup hold them.

Thread l of warp w of a warpgroup holds of a product of 64 rows, for every eight columns j, the elements at
(16 w + 8 h + l // 4, 8 j + 2 (l % 4) + e) for h and e in 0, 1. Row 32 w + l of its fragments are these, at column 4 j + 2 h + e:
all of a thread in a row. In rounds, they are in row 4 j + w at column 4 l + 2 h + e: those of a warp's threads beside each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import I64, IntegerAttr, TensorType, f32, i32, i64
from xdsl.ir import Operation, SSAValue
from xdsl.irdl import (
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    opt_prop_def,
    prop_def,
    result_def,
    traits_def,
    var_operand_def,
)
from xdsl.traits import MemoryReadEffect, MemoryWriteEffect, Pure
from xdsl.utils.exceptions import VerifyException

from attn_engine.dialects.tile import GlobalType, element_of, shape_of

ROWS, THREADS, COLUMNS = 64, 128, 8
"""Of a product of one warpgroup, and of the columns that one round of its threads holds."""
WARPS, TOGETHER = 4, 128
"""Of a warpgroup; numbers of one warp in one round."""


def shape_of_fragments(columns: int, in_rounds: bool) -> list[int]:
    """The shape of the fragments of a tile of 64 rows with so many columns."""
    return [columns // COLUMNS * WARPS, TOGETHER] if in_rounds else [THREADS, columns * ROWS // THREADS]


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
        shape = shape_of_fragments(shape_of(operand)[1], in_rounds=False)
        super().__init__(operands=[value], result_types=[TensorType(element_of(operand), shape)])

    def verify_(self) -> None:
        columns = _columns_of_product(self.value)
        if self.result.type != TensorType(element_of(self.value), shape_of_fragments(columns, in_rounds=False)):
            raise VerifyException(f"fragments of {self.value.type} are not {self.result.type}")


def _columns_of_product(value: SSAValue) -> int:
    rows, columns = shape_of(value)
    if rows != ROWS or columns % COLUMNS:
        raise VerifyException(f"fragments are of {ROWS} rows and whole {COLUMNS} columns, got {value.type}")
    return columns


@irdl_op_definition
class AddFragmentsOp(IRDLOperation):
    """Adds a tile of 64 rows to memory, which holds its fragments in rounds, from a row on that is a multiple of theirs.

    Each thread adds sixteen bytes at a time of what it holds, each number atomically, in no particular order. The
    rows of the memory are those of fragments and lie behind each other.

    ```
    tile.add_fragments %dq, %sums[%b, %h, %row] : tensor<64x64xf32>, !tile.global<4 x f32>
    ```
    """

    name = "tile.add_fragments"
    value = operand_def(TensorType)
    target = operand_def(GlobalType)
    indices = var_operand_def(i32)
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())
    assembly_format = "$value `,` $target `[` $indices `]` attr-dict `:` type($value) `,` type($target)"

    def __init__(self, value: SSAValue | Operation, target: SSAValue, indices: Sequence[SSAValue | Operation]):
        super().__init__(operands=[value, target, list(indices)])

    @property
    def rows(self) -> int:
        """Of the memory."""
        return shape_of_fragments(shape_of(self.value)[1], in_rounds=True)[0]

    def verify_(self) -> None:
        _columns_of_product(self.value)
        assert isinstance(self.target.type, GlobalType)
        if (element_of(self.value), self.target.type.element_type) != (f32, f32):
            raise VerifyException(f"fragments are added in f32, got {self.value.type} to {self.target.type}")
        if len(self.indices) != self.target.type.rank.data - 1:
            raise VerifyException(f"{len(self.indices)} indices say no row of {self.target.type}")


@irdl_op_definition
class FromFragmentsOp(IRDLOperation):
    """Tiles of 64 rows from their fragments: `parts` beside each other, then the next 64 rows.

    With `rounds` the fragments of each part are in so many rounds.

    ```
    %dq = tile.from_fragments %f parts 2 : tensor<256x32xf32> -> tensor<64x128xf32>
    %dq = tile.from_fragments %g parts 2 rounds 8 : tensor<64x128xf32> -> tensor<64x128xf32>
    ```
    """

    name = "tile.from_fragments"
    value = operand_def(TensorType)
    parts = prop_def(IntegerAttr[I64])
    rounds = opt_prop_def(IntegerAttr[I64])
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$value `parts` $parts (`rounds` $rounds^)? attr-dict `:` type($value) `->` type($result)"

    def __init__(self, value: SSAValue | Operation, parts: int, rounds: int | None = None):
        operand = SSAValue.get(value)
        numbers = {"parts": parts, **({"rounds": rounds} if rounds is not None else {})}
        super().__init__(
            operands=[value],
            properties={name: IntegerAttr(number, i64) for name, number in numbers.items()},
            result_types=[TensorType(element_of(operand), self._whole(operand, parts, rounds))],
        )

    @staticmethod
    def _whole(value: SSAValue, parts: int, rounds: int | None) -> list[int]:
        """The shape of the tiles that fragments are of."""
        (rows, wide), columns = shape_of(value), rounds * COLUMNS if rounds is not None else None
        if columns is None:
            columns = wide * THREADS // ROWS
        each = shape_of_fragments(columns, rounds is not None)[0] * parts
        return [rows // each * ROWS, columns * parts]

    def verify_(self) -> None:
        (rows, wide), parts = shape_of(self.value), self.parts.value.data
        rounds = self.rounds.value.data if self.rounds is not None else None
        columns = wide * THREADS // ROWS if rounds is None else rounds * COLUMNS
        if parts < 1 or columns < COLUMNS or columns % COLUMNS:
            raise VerifyException(f"{self.value.type} are not fragments of {parts} tiles beside each other")
        high, across = shape_of_fragments(columns, rounds is not None)
        if rows % (high * parts) or across != wide:
            raise VerifyException(f"{self.value.type} are not fragments of {parts} tiles beside each other")
        if self.result.type != TensorType(element_of(self.value), self._whole(self.value, parts, rounds)):
            raise VerifyException(f"{parts} tiles beside each other from {self.value.type} are not {self.result.type}")


FRAGMENT_OPS: list[type[Operation]] = [AddFragmentsOp, FromFragmentsOp, ToFragmentsOp]
