"""The async level of the ``tile`` dialect, memory side: descriptors, generic accesses, counters.

Two proxies reach shared memory. `tile.read` and `tile.write` go through the generic one;
`tile.async_load`, `tile.async_store` and `tile.async_dot` through the async one. A generic write and any later
asynchronous access of the same slot, or a generic read and a later copy into it, need a `tile.proxy_fence` in
between, in the role that made the generic access.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import TensorType, i32
from xdsl.ir import Operation, SSAValue
from xdsl.irdl import (
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    result_def,
    traits_def,
)
from xdsl.traits import MemoryReadEffect, MemoryWriteEffect, Pure
from xdsl.utils.exceptions import VerifyException

from attn_engine.dialects.tile import GlobalType, element_of
from attn_engine.dialects.tile_types import BufferType, DescriptorType


@irdl_op_definition
class DescribeOp(IRDLOperation):
    """Makes a descriptor of a global tensor, for copies of blocks of one shape (plans only).

    ```
    %qd = tile.describe %q : !tile.global<4 x f16> -> !tile.descriptor<1x1x64x128xf16>
    ```
    """

    name = "tile.describe"
    source = operand_def(GlobalType)
    result = result_def(DescriptorType)
    traits = traits_def(Pure())
    assembly_format = "$source attr-dict `:` type($source) `->` type($result)"

    def __init__(self, source: SSAValue, block: Sequence[int]):
        super().__init__(
            operands=[source],
            result_types=[DescriptorType(block, element_of(source))],
        )

    def verify_(self) -> None:
        assert isinstance(self.source.type, GlobalType)
        assert isinstance(self.result.type, DescriptorType)
        source, result = self.source.type, self.result.type
        if len(result.get_shape()) != source.rank.data or result.element_type != source.element_type:
            raise VerifyException(f"{result} has another rank or element type than {source}")


@irdl_op_definition
class ProcessorCountOp(IRDLOperation):
    """The number of multiprocessors of the device, the natural grid of a persistent kernel (plans only).

    ```
    %processors = tile.processor_count
    ```
    """

    name = "tile.processor_count"
    result = result_def(i32)
    traits = traits_def(Pure())
    assembly_format = "attr-dict"

    def __init__(self):
        super().__init__(result_types=[i32])


# --- generic accesses --------------------------------------------------------------------------


@irdl_op_definition
class ReadOp(IRDLOperation):
    """Reads a whole buffer into a tile, through the generic proxy; complete when the next op starts.

    ```
    %q = tile.read %slot : !tile.buffer<64x128xf16, shared> -> tensor<64x128xf16>
    ```
    """

    name = "tile.read"
    source = operand_def(BufferType)
    result = result_def(TensorType)
    traits = traits_def(MemoryReadEffect())
    assembly_format = "$source attr-dict `:` type($source) `->` type($result)"

    def __init__(self, source: SSAValue | Operation):
        type_ = SSAValue.get(source).type
        assert isinstance(type_, BufferType)
        super().__init__(operands=[source], result_types=[type_.as_tile()])

    def verify_(self) -> None:
        assert isinstance(self.source.type, BufferType)
        if self.result.type != self.source.type.as_tile():
            raise VerifyException(f"reading {self.source.type} does not give {self.result.type}")


@irdl_op_definition
class WriteOp(IRDLOperation):
    """Writes a tile to a whole buffer, through the generic proxy.

    ```
    tile.write %o, %slot : tensor<64x128xf16>, !tile.buffer<64x128xf16, shared>
    ```
    """

    name = "tile.write"
    value = operand_def(TensorType)
    target = operand_def(BufferType)
    traits = traits_def(MemoryWriteEffect())
    assembly_format = "$value `,` $target attr-dict `:` type($value) `,` type($target)"

    def __init__(self, value: SSAValue | Operation, target: SSAValue | Operation):
        super().__init__(operands=[value, target])

    def verify_(self) -> None:
        assert isinstance(self.target.type, BufferType)
        if self.value.type != self.target.type.as_tile():
            raise VerifyException(f"{self.value.type} does not fill {self.target.type}")


def _check_cells(cells: SSAValue, value: SSAValue) -> None:
    if not isinstance(cells.type, BufferType) or len(cells.type.get_shape()) != 1:
        raise VerifyException(f"cells are a buffer of rank 1, got {cells.type}")
    if value.type != cells.type.element_type:
        raise VerifyException(f"{value.type} is not an element of {cells.type}")


@irdl_op_definition
class CellReadOp(IRDLOperation):
    """Reads one scalar of a rank 1 buffer; every thread of the role gets it.

    ```
    %tile = tile.cell_read %cells[%i] : !tile.buffer<2xi32, shared> -> i32
    ```
    """

    name = "tile.cell_read"
    cells = operand_def(BufferType)
    index = operand_def(i32)
    result = result_def()
    traits = traits_def(MemoryReadEffect())
    assembly_format = "$cells `[` $index `]` attr-dict `:` type($cells) `->` type($result)"

    def __init__(self, cells: SSAValue, index: SSAValue | Operation):
        super().__init__(operands=[cells, index], result_types=[element_of_buffer(cells)])

    def verify_(self) -> None:
        _check_cells(self.cells, self.result)


@irdl_op_definition
class CellWriteOp(IRDLOperation):
    """Writes one scalar of a rank 1 buffer, for the role as a whole.

    ```
    tile.cell_write %next, %cells[%i] : !tile.buffer<2xi32, shared>
    ```
    """

    name = "tile.cell_write"
    value = operand_def(i32)
    cells = operand_def(BufferType)
    index = operand_def(i32)
    traits = traits_def(MemoryWriteEffect())
    assembly_format = "$value `,` $cells `[` $index `]` attr-dict `:` type($cells)"

    def __init__(self, value: SSAValue | Operation, cells: SSAValue, index: SSAValue | Operation):
        super().__init__(operands=[value, cells, index])

    def verify_(self) -> None:
        _check_cells(self.cells, self.value)


def element_of_buffer(value: SSAValue):
    """The element type of a buffer."""
    assert isinstance(value.type, BufferType)
    return value.type.element_type


@irdl_op_definition
class FetchAddOp(IRDLOperation):
    """Adds to one element of a rank 1 global tensor atomically and gives its old value, once for the whole role.

    ```
    %old = tile.fetch_add %counter[%c0], %c1 : !tile.global<1 x i32>
    ```
    """

    name = "tile.fetch_add"
    target = operand_def(GlobalType)
    index = operand_def(i32)
    value = operand_def(i32)
    result = result_def(i32)
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())
    assembly_format = "$target `[` $index `]` `,` $value attr-dict `:` type($target)"

    def __init__(self, target: SSAValue, index: SSAValue | Operation, value: SSAValue | Operation):
        super().__init__(operands=[target, index, value], result_types=[i32])

    def verify_(self) -> None:
        if self.target.type != GlobalType(1, i32):
            raise VerifyException(f"a counter is a !tile.global<1 x i32>, got {self.target.type}")


MEMORY_OPS: list[type[Operation]] = [
    CellReadOp,
    CellWriteOp,
    DescribeOp,
    FetchAddOp,
    ProcessorCountOp,
    ReadOp,
    WriteOp,
]
