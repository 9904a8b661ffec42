"""The async level of the ``tile`` dialect: products in flight and the fences that schedule around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from xdsl.dialects.builtin import I64, IntegerAttr, TensorType, f32, i32, i64
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.irdl import (
    BaseAttr,
    IRDLOperation,
    VarConstraint,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    opt_prop_def,
    prop_def,
    result_def,
    traits_def,
    var_operand_def,
    var_result_def,
)
from xdsl.traits import MemoryReadEffect, MemoryWriteEffect, Pure
from xdsl.utils.exceptions import VerifyException

from attn_engine.dialects.tile import ReductionAttr, element_of, shape_of
from attn_engine.dialects.tile_types import BufferType, MmaLayoutAttr, PendingType


def _parts(value: SSAValue) -> tuple[tuple[int, ...], Attribute]:
    """Shape and element type of a tile, a buffer, or the value of a product in flight."""
    type_ = value.type.value if isinstance(value.type, PendingType) else value.type
    if isinstance(type_, BufferType):
        return type_.get_shape(), type_.element_type
    return shape_of(type_), element_of(type_)


# --- products ----------------------------------------------------------------------------------


@irdl_op_definition
class AsyncDotOp(IRDLOperation):
    """Starts a @ b (+ acc), accumulated in f32, and gives its result as pending.

    `b` is in shared memory, `a` there or in registers, `acc` in registers or itself pending (absent: zero). The
    products of one role complete in the order in which they were started. Slots must not be refilled
    and `acc` is gone (overwritten in place) from here on.

    ```
    %st = tile.async_dot %q, %kt layout <4x1, 128>
      : tensor<64x128xf16>, !tile.buffer<128x128xf16, shared> -> !tile.pending<tensor<64x128xf32>>
    %ot = tile.async_dot %p, %v, %o layout <4x1, 128>
      : tensor<64x128xf16>, !tile.buffer<128x128xf16, shared>, tensor<64x128xf32> -> !tile.pending<tensor<64x128xf32>>
    ```
    """

    name = "tile.async_dot"
    a = operand_def(TensorType.constr() | BaseAttr(BufferType))
    b = operand_def(BufferType)
    acc = opt_operand_def(TensorType.constr() | BaseAttr(PendingType))
    layout = prop_def(MmaLayoutAttr)
    result = result_def(PendingType)
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())
    assembly_format = (
        "$a `,` $b (`,` $acc^)? `layout` $layout attr-dict"
        " `:` type($a) `,` type($b) (`,` type($acc)^)? `->` type($result)"
    )

    def __init__(
        self,
        a: SSAValue | Operation,
        b: SSAValue | Operation,
        acc: SSAValue | Operation | None,
        layout: MmaLayoutAttr,
    ):
        (m, _), (_, n) = _parts(SSAValue.get(a))[0], _parts(SSAValue.get(b))[0]
        super().__init__(
            operands=[a, b, acc],
            properties={"layout": layout},
            result_types=[PendingType(TensorType(f32, [m, n]))],
        )

    def verify_(self) -> None:
        (a, a_type), (b, b_type), (result, r_type) = _parts(self.a), _parts(self.b), _parts(self.result)
        if len(a) != 2 or len(b) != 2 or a[1] != b[0] or result != (a[0], b[1]) or r_type != f32:
            raise VerifyException(f"shapes {a} @ {b} -> {result} of {r_type} do not fit")
        if a_type != b_type:
            raise VerifyException(f"operands differ in type: {self.a.type} and {self.b.type}")
        if self.acc is not None and _parts(self.acc) != (result, r_type):
            raise VerifyException(f"the accumulator is {self.acc.type}, the result {self.result.type}")
        rows, columns = 16 * self.layout.rows.data, self.layout.n.data * self.layout.columns.data
        if result[0] % rows or result[1] % columns:
            raise VerifyException(f"instructions of {rows} x {columns} in all do not divide a result of {result}")
        self._verify_accumulator()
        self._verify_pending()

    def _verify_accumulator(self) -> None:
        if self.acc is None:
            return
        others = [use for use in self.acc.uses if isinstance(use.operation, AsyncDotOp) and use.index == 2]
        if len(others) > 1:
            raise VerifyException("the accumulator is consumed by more than one product")

    def _verify_pending(self) -> None:
        """In flight within one block only: a product across a loop's back edge would be serialised."""
        uses = list(self.result.uses)
        if len(uses) != 1 or not isinstance(uses[0].operation, AsyncDotOp | WaitOp):
            raise VerifyException("a pending product is used by one tile.wait or as one accumulator, nothing else")
        if uses[0].operation.parent_block() is not self.parent_block():
            raise VerifyException("a pending product is waited for in the block that starts it")


@irdl_op_definition
class WaitOp(IRDLOperation):
    """Blocks this role until at most `count` of its products are in flight, and gives the values of those named.

    ```
    %s = tile.wait 1, %st : !tile.pending<tensor<64x128xf32>> -> tensor<64x128xf32>
    ```
    """

    name = "tile.wait"
    count = prop_def(IntegerAttr[I64])
    pending = var_operand_def(PendingType)
    values = var_result_def(TensorType)
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())
    assembly_format = "$count `,` $pending attr-dict `:` type($pending) `->` type($values)"

    def __init__(self, count: int, pending: Sequence[SSAValue | Operation]):
        values = [SSAValue.get(p).type for p in pending]
        super().__init__(
            operands=[list(pending)],
            properties={"count": IntegerAttr(count, i64)},
            result_types=[[v.value for v in values if isinstance(v, PendingType)]],
        )

    def verify_(self) -> None:
        if not self.pending or len(self.pending) != len(self.values):
            raise VerifyException(f"{len(self.pending)} pending products give {len(self.values)} values")
        for pending, value in zip(self.pending, self.values, strict=True):
            if pending.type != PendingType(value.type):
                raise VerifyException(f"waiting for {pending.type} does not give {value.type}")
            later = self._started_after(pending)
            if self.count.value.data > later:
                raise VerifyException(
                    f"with {self.count.value.data} products in flight, one with {later} started after it may be unfinished"
                )

    def _started_after(self, pending: SSAValue) -> int:
        """How many products this block starts between the one of `pending` and this wait."""
        count, op = 0, self.prev_op
        while op is not None and op is not pending.owner:
            count += isinstance(op, AsyncDotOp)
            op = op.prev_op
        return count


@irdl_op_definition
class DotOperandOp(IRDLOperation):
    """Moves a tile here and now into the registers from which a product of this layout reads its `a`; an identity.

    ```
    %pa = tile.dot_operand %p layout <4x1, 128> : tensor<64x128xf16>
    ```
    """

    name = "tile.dot_operand"
    T: ClassVar = VarConstraint("T", TensorType.constr())
    value = operand_def(T)
    layout = prop_def(MmaLayoutAttr)
    result = result_def(T)
    traits = traits_def(Pure())
    assembly_format = "$value `layout` $layout attr-dict `:` type($value)"

    def __init__(self, value: SSAValue | Operation, layout: MmaLayoutAttr):
        super().__init__(operands=[value], properties={"layout": layout}, result_types=[SSAValue.get(value).type])


@irdl_op_definition
class ReducePartialOp(IRDLOperation):
    """Reduces the columns of a rank 2 tile to `groups`, with column c in group (c // width) % groups.

    With the groups that one thread holds nothing is exchanged between threads; `tile.reduce` along
    axis 1 of the result completes the reduction. Elements of a group are taken in their order, or with `tree` that many
    neighbours at a time first.

    ```
    %l4 = tile.reduce_partial sum %p groups 4 width 2 : tensor<64x128xf32> -> tensor<64x4xf32>
    ```
    """

    name = "tile.reduce_partial"
    kind = prop_def(ReductionAttr)
    value = operand_def(TensorType)
    groups = prop_def(IntegerAttr[I64])
    width = prop_def(IntegerAttr[I64])
    tree = opt_prop_def(IntegerAttr[I64])
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = (
        "$kind $value `groups` $groups `width` $width (`tree` $tree^)? attr-dict `:` type($value) `->` type($result)"
    )

    def __init__(
        self, kind: ReductionAttr, value: SSAValue | Operation, groups: int, width: int, tree: int | None = None
    ):
        operand = SSAValue.get(value)
        sizes = {"groups": groups, "width": width, **({"tree": tree} if tree is not None else {})}
        super().__init__(
            operands=[value],
            properties={"kind": kind, **{name: IntegerAttr(size, i64) for name, size in sizes.items()}},
            result_types=[TensorType(element_of(operand), [shape_of(operand)[0], groups])],
        )

    def verify_(self) -> None:
        shape, groups, width = shape_of(self.value), self.groups.value.data, self.width.value.data
        if len(shape) != 2 or groups < 1 or width < 1 or shape[1] % (groups * width):
            raise VerifyException(f"{groups} groups of width {width} do not divide the columns of {self.value.type}")
        if self.tree is not None and (self.tree.value.data < 2 or shape[1] % (groups * width * self.tree.value.data)):
            raise VerifyException(
                f"trees of {self.tree.value.data} do not divide {shape[1] // (groups * width)} elements"
            )
        if self.result.type != TensorType(element_of(self.value), [shape[0], groups]):
            raise VerifyException(f"{groups} groups of {self.value.type} do not give {self.result.type}")


@irdl_op_definition
class SplitColumnsOp(IRDLOperation):
    """The two halves of the columns of a rank 2 tile: a matter of names, every thread keeps what it holds.

    ```
    %low, %high = tile.split_columns %x : tensor<64x128xf32> -> tensor<64x64xf32>
    ```
    """

    name = "tile.split_columns"
    T: ClassVar = VarConstraint("T", TensorType.constr())
    value = operand_def(TensorType)
    low = result_def(T)
    high = result_def(T)
    traits = traits_def(Pure())
    assembly_format = "$value attr-dict `:` type($value) `->` type($low)"

    def __init__(self, value: SSAValue | Operation):
        operand = SSAValue.get(value)
        rows, columns = shape_of(operand)
        half = TensorType(element_of(operand), [rows, columns // 2])
        super().__init__(operands=[value], result_types=[half, half])

    def verify_(self) -> None:
        _check_halves(self.value, self.low)


@irdl_op_definition
class JoinColumnsOp(IRDLOperation):
    """A rank 2 tile from the halves of its columns: what `tile.split_columns` takes apart.

    ```
    %p = tile.join_columns %low, %high : tensor<64x64xf16> -> tensor<64x128xf16>
    ```
    """

    name = "tile.join_columns"
    T: ClassVar = VarConstraint("T", TensorType.constr())
    low = operand_def(T)
    high = operand_def(T)
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$low `,` $high attr-dict `:` type($low) `->` type($result)"

    def __init__(self, low: SSAValue | Operation, high: SSAValue | Operation):
        operand = SSAValue.get(low)
        rows, columns = shape_of(operand)
        super().__init__(operands=[low, high], result_types=[TensorType(element_of(operand), [rows, 2 * columns])])

    def verify_(self) -> None:
        _check_halves(self.result, self.low)


def _check_halves(whole: SSAValue, half: SSAValue) -> None:
    shape, part = shape_of(whole), shape_of(half)
    if len(shape) != 2 or part != (shape[0], shape[1] / 2) or element_of(whole) != element_of(half):
        raise VerifyException(f"{half.type} is not half of the columns of {whole.type}")


# --- scheduling fences -------------------------------------------------------------------------


@irdl_op_definition
class PinOp(IRDLOperation):
    """An identity that fixes a point of time: what the value depends on is computed before any later wait of the role.

    Without it an assembler may hoist the wait for a product above independent work that was to overlap with it.

    ```
    %lp = tile.pin %l : tensor<64x4xf32>
    ```
    """

    name = "tile.pin"
    T: ClassVar = VarConstraint("T", TensorType.constr())
    value = operand_def(T)
    result = result_def(T)
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())
    assembly_format = "$value attr-dict `:` type($value)"

    def __init__(self, value: SSAValue | Operation):
        super().__init__(operands=[value], result_types=[SSAValue.get(value).type])

    def verify_(self) -> None:
        if element_of(self.value) != f32:
            raise VerifyException(f"a pin is on f32 tiles, got {self.value.type}")


@irdl_op_definition
class HoldBackOp(IRDLOperation):
    """An identity whose result is known only where it stands: what depends on it is not computed before.

    Without it an assembler may put that arithmetic between the instructions of a product which it was to overlap with.

    ```
    %late = tile.hold_back %scale
    ```
    """

    name = "tile.hold_back"
    value = operand_def(f32)
    result = result_def(f32)
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())
    assembly_format = "$value attr-dict"

    def __init__(self, value: SSAValue | Operation):
        super().__init__(operands=[value], result_types=[f32])


@irdl_op_definition
class OpaqueZeroOp(IRDLOperation):
    """The i32 0, as a value that changes with its operand as far as a compiler can tell.

    Indexing a resident buffer with it inside of a loop keeps operand addresses from being hoisted into registers.

    ```
    %zero = tile.opaque_zero %j
    ```
    """

    name = "tile.opaque_zero"
    source = operand_def(i32)
    result = result_def(i32)
    traits = traits_def(Pure())
    assembly_format = "$source attr-dict"

    def __init__(self, source: SSAValue | Operation):
        super().__init__(operands=[source], result_types=[i32])


PRODUCT_OPS: list[type[Operation]] = [
    AsyncDotOp,
    DotOperandOp,
    HoldBackOp,
    JoinColumnsOp,
    OpaqueZeroOp,
    PinOp,
    ReducePartialOp,
    SplitColumnsOp,
    WaitOp,
]
