"""The async level of the ``tile`` dialect: barriers, asynchronous copies, the fence between the two proxies."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import I64, IntegerAttr, bf16, f16, f32, i1, i32, i64
from xdsl.ir import Operation, SSAValue
from xdsl.irdl import (
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    prop_def,
    result_def,
    traits_def,
    var_operand_def,
)
from xdsl.traits import MemoryReadEffect, MemoryWriteEffect
from xdsl.utils.exceptions import VerifyException

from attn_engine.dialects.tile_types import BarriersType, BufferType, DescriptorType, MemorySpace

# --- barriers ----------------------------------------------------------------------------------


@irdl_op_definition
class MakeBarriersOp(IRDLOperation):
    """Barriers whose phases each end after `count` arrivals; ready for every role and for copies.

    ```
    %k_empty = tile.make_barriers count 2 : !tile.barriers<2>
    ```
    """

    name = "tile.make_barriers"
    count = prop_def(IntegerAttr[I64])
    result = result_def(BarriersType)
    traits = traits_def(MemoryWriteEffect())
    assembly_format = "`count` $count attr-dict `:` type($result)"

    def __init__(self, size: int, count: int, threads: int = 1):
        super().__init__(properties={"count": IntegerAttr(count, i64)}, result_types=[BarriersType(size, threads)])

    def verify_(self) -> None:
        if self.count.value.data < 1:
            raise VerifyException(f"a phase needs at least one arrival, got {self.count.value.data}")


@irdl_op_definition
class BarrierExpectOp(IRDLOperation):
    """One arrival that adds `bytes` to what the current phase waits for; the copies are issued after it.

    ```
    tile.barrier_expect %k_full[%i], 32768 : !tile.barriers<2>
    ```
    """

    name = "tile.barrier_expect"
    barriers = operand_def(BarriersType)
    index = operand_def(i32)
    bytes = prop_def(IntegerAttr[I64])
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())
    assembly_format = "$barriers `[` $index `]` `,` $bytes attr-dict `:` type($barriers)"

    def __init__(self, barriers: SSAValue, index: SSAValue | Operation, size: int):
        super().__init__(operands=[barriers, index], properties={"bytes": IntegerAttr(size, i64)})

    def verify_(self) -> None:
        """The bytes are those of the copies onto the same barrier in the same block."""
        block = self.parent_block()
        if block is None:
            return
        same = [op for op in block.ops if self._on_same(op)]
        expected = sum(op.bytes.value.data for op in same if isinstance(op, BarrierExpectOp))
        copied = sum(op.byte_size for op in same if isinstance(op, AsyncLoadOp))
        if expected != copied:
            raise VerifyException(f"the barrier expects {expected} bytes, copies onto it bring {copied}")

    def _on_same(self, op: Operation) -> bool:
        return isinstance(op, BarrierExpectOp | AsyncLoadOp) and op.barriers is self.barriers and op.index is self.index


@irdl_op_definition
class BarrierArriveOp(IRDLOperation):
    """One arrival of this role, after all that it did before; with `if`, only where the condition holds.

    At barriers of threads, each thread arrives for itself (`BarriersType`).

    ```
    tile.barrier_arrive %v_empty[%i] if %later : !tile.barriers<2>
    ```
    """

    name = "tile.barrier_arrive"
    barriers = operand_def(BarriersType)
    index = operand_def(i32)
    condition = opt_operand_def(i1)
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())
    assembly_format = "$barriers `[` $index `]` (`if` $condition^)? attr-dict `:` type($barriers)"

    def __init__(self, barriers: SSAValue, index: SSAValue | Operation, condition: SSAValue | None = None):
        super().__init__(operands=[barriers, index, condition])


@irdl_op_definition
class BarrierWaitOp(IRDLOperation):
    """Blocks this role until a phase of the given parity (0 or 1) is the last that has ended.

    Before the first phase ends, waiting for parity 1 passes at once: an empty slot needs no first arrival.

    ```
    tile.barrier_wait %k_full[%i], %parity : !tile.barriers<2>
    ```
    """

    name = "tile.barrier_wait"
    barriers = operand_def(BarriersType)
    index = operand_def(i32)
    parity = operand_def(i32)
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())
    assembly_format = "$barriers `[` $index `]` `,` $parity attr-dict `:` type($barriers)"

    def __init__(self, barriers: SSAValue, index: SSAValue | Operation, parity: SSAValue | Operation):
        super().__init__(operands=[barriers, index, parity])


# --- asynchronous copies -----------------------------------------------------------------------


def _check_copy(descriptor: SSAValue, coordinates: Sequence[SSAValue], buffer: SSAValue) -> None:
    assert isinstance(descriptor.type, DescriptorType) and isinstance(buffer.type, BufferType)
    block, shape = descriptor.type.get_shape(), buffer.type.get_shape()
    if len(coordinates) != len(block):
        raise VerifyException(f"{descriptor.type} needs {len(block)} coordinates, got {len(coordinates)}")
    lead = len(block) - len(shape)
    fits = lead >= 0 and block[lead:] == shape and all(size == 1 for size in block[:lead])
    if not fits or descriptor.type.element_type != buffer.type.element_type:
        raise VerifyException(f"a block of {descriptor.type} does not fit {buffer.type}")
    if buffer.type.memory_space is not MemorySpace.SHARED:
        raise VerifyException(f"asynchronous copies use shared memory, got {buffer.type}")


@irdl_op_definition
class AsyncLoadOp(IRDLOperation):
    """Starts the copy of the block at `coordinates` into a slot; its bytes land on a barrier.

    The slot holds nothing defined until the barrier's phase has been waited for. Elements outside of the tensor are 0.

    ```
    tile.async_load %kd[%b, %h, %n0, %c0], %slot, %k_full[%i]
      : !tile.descriptor<1x1x128x128xf16>, !tile.buffer<128x128xf16, shared>, !tile.barriers<2>
    ```
    """

    name = "tile.async_load"
    descriptor = operand_def(DescriptorType)
    coordinates = var_operand_def(i32)
    target = operand_def(BufferType)
    barriers = operand_def(BarriersType)
    index = operand_def(i32)
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())
    assembly_format = (
        "$descriptor `[` $coordinates `]` `,` $target `,` $barriers `[` $index `]` attr-dict"
        " `:` type($descriptor) `,` type($target) `,` type($barriers)"
    )

    def __init__(
        self,
        descriptor: SSAValue,
        coordinates: Sequence[SSAValue | Operation],
        target: SSAValue | Operation,
        barriers: SSAValue,
        index: SSAValue | Operation,
    ):
        super().__init__(operands=[descriptor, list(coordinates), target, barriers, index])

    @property
    def byte_size(self) -> int:
        """Bytes that the copy brings, those outside of the tensor included."""
        assert isinstance(self.descriptor.type, DescriptorType)
        return self.descriptor.type.byte_size

    def verify_(self) -> None:
        _check_copy(self.descriptor, self.coordinates, self.target)


class _FromSlotOp(IRDLOperation):
    source = operand_def(BufferType)
    descriptor = operand_def(DescriptorType)
    coordinates = var_operand_def(i32)

    def __init__(self, source: SSAValue | Operation, descriptor: SSAValue, coordinates: Sequence[SSAValue | Operation]):
        super().__init__(operands=[source, descriptor, list(coordinates)])

    def verify_(self) -> None:
        _check_copy(self.descriptor, self.coordinates, self.source)


_FROM_SLOT = "$source `,` $descriptor `[` $coordinates `]` attr-dict `:` type($source) `,` type($descriptor)"


@irdl_op_definition
class AsyncStoreOp(_FromSlotOp):
    """Starts the copy of a slot to the block at `coordinates`; elements outside of the tensor are not written.

    The slot may be written again after `tile.async_store_wait`.

    ```
    tile.async_store %slot, %od[%b, %h, %m0, %c0] : !tile.buffer<64x128xf16, shared>, !tile.descriptor<1x1x64x128xf16>
    ```
    """

    name = "tile.async_store"
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())
    assembly_format = _FROM_SLOT


@irdl_op_definition
class AsyncReduceAddOp(_FromSlotOp):
    """Like `tile.async_store`, but adds the elements atomically to those in memory (f32, or of 16 bits: each sum is rounded).

    ```
    tile.async_reduce_add %slot, %dqd[%b, %h, %m0, %c0] : !tile.buffer<64x64xf32, shared>, !tile.descriptor<1x1x64x64xf32>
    ```
    """

    name = "tile.async_reduce_add"
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())
    assembly_format = _FROM_SLOT

    def verify_(self) -> None:
        super().verify_()
        assert isinstance(self.source.type, BufferType)
        if self.source.type.element_type not in (f32, f16, bf16):
            raise VerifyException(f"an asynchronous reduction is on f32, f16 or bf16, got {self.source.type}")


@irdl_op_definition
class AsyncStoreWaitOp(IRDLOperation):
    """Blocks this role until at most `pending` of its asynchronous stores still read their slots.

    ```
    tile.async_store_wait 0
    ```
    """

    name = "tile.async_store_wait"
    pending = prop_def(IntegerAttr[I64])
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())
    assembly_format = "$pending attr-dict"

    def __init__(self, pending: int = 0):
        super().__init__(properties={"pending": IntegerAttr(pending, i64)})

    def verify_(self) -> None:
        if self.pending.value.data < 0:
            raise VerifyException(f"pending is a count, got {self.pending.value.data}")


@irdl_op_definition
class ProxyFenceOp(IRDLOperation):
    """Orders this role's generic accesses of shared memory before asynchronous ones that follow.

    ```
    tile.write %o, %slot : tensor<64x128xf16>, !tile.buffer<64x128xf16, shared>
    tile.proxy_fence
    tile.async_store %slot, %od[%b, %h, %m0, %c0] : ...
    ```
    """

    name = "tile.proxy_fence"
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())
    assembly_format = "attr-dict"

    def __init__(self):
        super().__init__()


COPY_OPS: list[type[Operation]] = [
    AsyncLoadOp,
    AsyncReduceAddOp,
    AsyncStoreOp,
    AsyncStoreWaitOp,
    BarrierArriveOp,
    BarrierExpectOp,
    BarrierWaitOp,
    MakeBarriersOp,
    ProxyFenceOp,
]
