"""The buffered level of the ``tile`` dialect, products that are not waited for at once.

A `tile.gemm` with the attribute `pending` only starts: its buffers are neither read nor written until a
`tile.wait_products`. One that is also `late` starts in the next iteration of its loop, right behind the first product
there that is not, and after the loop for the last; its result is what it would be in its place. Interpreters compute in
order.
"""

from __future__ import annotations

from xdsl.dialects.builtin import I64, IntegerAttr, i64
from xdsl.ir import Operation
from xdsl.irdl import IRDLOperation, irdl_op_definition, opt_prop_def, prop_def, traits_def
from xdsl.traits import MemoryReadEffect, MemoryWriteEffect
from xdsl.utils.exceptions import VerifyException

PENDING, LATE = "pending", "late"


@irdl_op_definition
class WaitProductsOp(IRDLOperation):
    """Waits until all pending products but the `count` youngest are done; in the first iteration of a loop all but `first`.

    ```
    tile.wait_products 1 first 0
    tile.wait_products 0
    ```
    """

    name = "tile.wait_products"
    count = prop_def(IntegerAttr[I64])
    first = opt_prop_def(IntegerAttr[I64])
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())
    assembly_format = "$count (`first` $first^)? attr-dict"

    def __init__(self, count: int, first: int | None = None):
        super().__init__(
            properties={
                "count": IntegerAttr(count, i64),
                "first": IntegerAttr(first, i64) if first is not None else None,
            }
        )

    def verify_(self) -> None:
        if self.count.value.data < 0:
            raise VerifyException(f"{self.count.value.data} products cannot be left pending")


BUFFER_PENDING_OPS: list[type[Operation]] = [WaitProductsOp]
