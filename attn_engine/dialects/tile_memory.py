"""Reads and writes of global memory at the value level: tiles with bounds, single elements with guards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from xdsl.dialects.builtin import ArrayAttr, DenseArrayBase, bf16, f16, f32, i1, i32, i64
from xdsl.ir import (
    Attribute,
    Operation,
    SSAValue,
)
from xdsl.irdl import (
    AttrSizedOperandSegments,
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    prop_def,
    result_def,
    traits_def,
    var_operand_def,
)
from xdsl.parser import Parser
from xdsl.printer import Printer
from xdsl.traits import (
    MemoryReadEffect,
    MemoryWriteEffect,
)
from xdsl.utils.exceptions import VerifyException

from attn_engine.dialects.tile_base import (
    INDEX,
    GlobalType,
    axes_attr,
    axes_of,
    check_axes,
    element_of,
    ints,
    ints_of,
    shape_of,
)


class Access(Protocol):
    """The part of an op that says where in global memory: of loads, stores and copies, at every level."""

    @property
    def indices(self) -> Sequence[SSAValue]: ...
    @property
    def limits(self) -> Sequence[SSAValue]: ...
    @property
    def dims(self) -> DenseArrayBase: ...
    @property
    def bounded(self) -> DenseArrayBase: ...


def check_access(op: Access, memory: SSAValue, value: Attribute) -> None:
    """The indices, dims and limits of an access fit the memory and the tile."""
    assert isinstance(memory.type, GlobalType)
    rank, dims = memory.type.rank.data, ints_of(op.dims)
    if len(op.indices) != rank:
        raise VerifyException(f"{memory.type} needs {rank} indices, got {len(op.indices)}")
    if len(dims) != len(shape_of(value)):
        raise VerifyException(f"dims {list(dims)} do not match the rank of {value}")
    if len(set(dims)) != len(dims) or any(not 0 <= d < rank for d in dims):
        raise VerifyException(f"dims {list(dims)} must be different axes of a tensor of rank {rank}")
    bounded = ints_of(op.bounded)
    if len(bounded) != len(op.limits) or any(not 0 <= d < len(dims) for d in bounded):
        raise VerifyException(f"bounded {list(bounded)} needs one limit each, naming axes of the tile")
    types = {operand.type for operand in (*op.indices, *op.limits)}
    if len(types) > 1 or not types <= set(INDEX):
        raise VerifyException(f"indices and limits are all i32 or all i64, got {', '.join(sorted(map(str, types)))}")
    if element_of(value) != memory.type.element_type:
        raise VerifyException(f"{value} does not match the elements of {memory.type}")


@irdl_op_definition
class LoadOp(IRDLOperation):
    """Reads a tile (or, with `dims []`, one element) of a global tensor.

    `indices` has one entry per axis of the source. Tile axis t runs along source axis `dims[t]`,
    from the index given there; the other indices are fixed. For each entry t of `bounded` there is
    a limit: elements whose absolute index on that axis is >= the limit (or negative) are not
    read and give 0. Permuted `dims` read a transposed tile.

    ```
    %k = tile.load %K[%b, %h, %n0, %c0] dims [2, 3] bounded [0] limits(%skv)
         : !tile.global<4 x bf16> -> tensor<64x128xbf16>
    ```
    """

    name = "tile.load"
    source = operand_def(GlobalType)
    indices = var_operand_def()
    limits = var_operand_def()
    dims = prop_def(DenseArrayBase)
    bounded = prop_def(DenseArrayBase)
    result = result_def()
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(MemoryReadEffect())

    def __init__(
        self,
        source: SSAValue,
        indices: Sequence[SSAValue | Operation],
        dims: Sequence[int],
        result: Attribute,
        limits: dict[int, SSAValue] | None = None,
    ):
        limits = limits or {}
        super().__init__(
            operands=[source, list(indices), [limits[t] for t in sorted(limits)]],
            properties={"dims": ints(dims), "bounded": ints(sorted(limits))},
            result_types=[result],
        )

    @classmethod
    def parse(cls, parser: Parser):
        source = parser.parse_unresolved_operand()
        indices, dims, limits = parse_access(parser)
        parser.parse_punctuation(":")
        memory = parser.resolve_operand(source, parser.parse_type())
        parser.parse_punctuation("->")
        return cls(memory, indices, dims, parser.parse_type(), limits)

    def print(self, printer: Printer) -> None:
        printer.print_string(" ")
        printer.print_operand(self.source)
        print_access(printer, self)
        printer.print_string(" : ")
        printer.print_attribute(self.source.type)
        printer.print_string(" -> ")
        printer.print_attribute(self.result.type)

    def verify_(self) -> None:
        check_access(self, self.source, self.result.type)


class WriteAccess(IRDLOperation):
    """What stores, atomic adds and copies to global memory have in common."""

    value = operand_def()
    target = operand_def(GlobalType)
    indices = var_operand_def()
    limits = var_operand_def()
    dims = prop_def(DenseArrayBase)
    bounded = prop_def(DenseArrayBase)

    def __init__(
        self,
        value: SSAValue | Operation,
        target: SSAValue,
        indices: Sequence[SSAValue | Operation],
        dims: Sequence[int],
        limits: dict[int, SSAValue] | None = None,
    ):
        limits = limits or {}
        super().__init__(
            operands=[value, target, list(indices), [limits[t] for t in sorted(limits)]],
            properties={"dims": ints(dims), "bounded": ints(sorted(limits))},
        )

    @classmethod
    def parse(cls, parser: Parser):
        value = parser.parse_unresolved_operand()
        parser.parse_punctuation(",")
        target = parser.parse_unresolved_operand()
        indices, dims, limits = parse_access(parser)
        attributes = parser.parse_optional_attr_dict()
        parser.parse_punctuation(":")
        tensor = parser.resolve_operand(value, parser.parse_type())
        parser.parse_punctuation(",")
        op = cls(tensor, parser.resolve_operand(target, parser.parse_type()), indices, dims, limits)
        op.attributes.update(attributes)
        return op

    def print(self, printer: Printer) -> None:
        printer.print_string(" ")
        printer.print_operand(self.value)
        printer.print_string(", ")
        printer.print_operand(self.target)
        print_access(printer, self)
        printer.print_op_attributes(self.attributes)
        printer.print_string(" : ")
        printer.print_attribute(self.value.type)
        printer.print_string(", ")
        printer.print_attribute(self.target.type)


@irdl_op_definition
class StoreOp(WriteAccess):
    """Writes a tile (or one element); indices, dims and limits as in `tile.load`, elements outside are not written."""

    name = "tile.store"
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(MemoryWriteEffect())

    def verify_(self) -> None:
        check_access(self, self.target, self.value.type)


@irdl_op_definition
class AtomicAddOp(WriteAccess):
    """Adds a tile (or one element) to global memory, each element atomically, in no particular order.

    Floats are f32, or of 16 bits, to which each addition rounds; sums of i64 are the same in every order.
    """

    name = "tile.atomic_add"
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(MemoryWriteEffect(), MemoryReadEffect())

    def verify_(self) -> None:
        check_access(self, self.target, self.value.type)
        types = {element_of(self.value), element_of(self.target)}
        if types not in ({f32}, {f16}, {bf16}, {i64}):
            raise VerifyException("atomic_add is on f32, f16, bf16 or i64")


@irdl_op_definition
class AtomicMaxOp(WriteAccess):
    """Raises one element of global memory to a number that is larger, atomically: f32, neither negative nor NaN.

    ```
    tile.atomic_max %size, %peak[%c0] dims [] : f32, !tile.global<1 x f32>
    ```
    """

    name = "tile.atomic_max"
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(MemoryWriteEffect(), MemoryReadEffect())

    def verify_(self) -> None:
        check_access(self, self.target, self.value.type)
        if self.value.type != f32:
            raise VerifyException(f"atomic_max is of one f32, got {self.value.type}")


def parse_access(parser: Parser):
    """`[%i, %j]`, or `[%i, %j : i64]` where indices and limits are i64; then dims, then limits."""
    with parser.in_square_brackets():
        unresolved = (
            parser.parse_optional_undelimited_comma_separated_list(
                parser.parse_optional_unresolved_operand, parser.parse_unresolved_operand
            )
            or []
        )
        type_ = parser.parse_type() if parser.parse_optional_punctuation(":") else i32
    indices = [parser.resolve_operand(i, type_) for i in unresolved]
    parser.parse_keyword("dims")
    dims = parser.parse_comma_separated_list(parser.Delimiter.SQUARE, parser.parse_integer)
    limits: dict[int, SSAValue] = {}
    if parser.parse_optional_keyword("bounded"):
        axes = parser.parse_comma_separated_list(parser.Delimiter.SQUARE, parser.parse_integer)
        parser.parse_keyword("limits")
        values = parser.parse_comma_separated_list(parser.Delimiter.PAREN, lambda: parser.parse_operand(type_))
        limits = dict(zip(axes, values, strict=True))
    return indices, dims, limits


def print_access(printer: Printer, op: Access) -> None:
    """Prints what `parse_access` reads."""
    with printer.in_square_brackets():
        printer.print_list(op.indices, printer.print_operand)
        if op.indices and op.indices[0].type != i32:
            printer.print_string(" : ")
            printer.print_attribute(op.indices[0].type)
    printer.print_string(f" dims [{', '.join(map(str, ints_of(op.dims)))}]")
    if op.limits:
        printer.print_string(f" bounded [{', '.join(map(str, ints_of(op.bounded)))}] limits")
        with printer.in_parens():
            printer.print_list(op.limits, printer.print_operand)


@irdl_op_definition
class GatherOp(IRDLOperation):
    """Reads one element at computed indices, 0 where the guard is false; scalar code, also inside `tile.map`.

    ```
    %w = tile.gather %slopes[%h] if %ok : !tile.global<1 x f32> -> f32
    ```
    """

    name = "tile.gather"
    source = operand_def(GlobalType)
    indices = var_operand_def()
    guard = opt_operand_def(i1)
    result = result_def()
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(MemoryReadEffect())
    assembly_format = (
        "$source `[` $indices `:` type($indices) `]` (`if` $guard^)? attr-dict `:` type($source) `->` type($result)"
    )

    def __init__(
        self, source: SSAValue, indices: Sequence[SSAValue], guard: SSAValue | None, result: Attribute | None = None
    ):
        super().__init__(operands=[source, list(indices), guard], result_types=[result or element_of(source)])

    def verify_(self) -> None:
        assert isinstance(self.source.type, GlobalType)
        if len(self.indices) != self.source.type.rank.data:
            raise VerifyException(
                f"{self.source.type} needs {self.source.type.rank.data} indices, got {len(self.indices)}"
            )
        if any(i.type not in INDEX for i in self.indices):
            raise VerifyException("indices are i32 or i64")
        if self.result.type != self.source.type.element_type:
            raise VerifyException(f"result {self.result.type} does not match {self.source.type}")


@irdl_op_definition
class ScatterAddOp(IRDLOperation):
    """Adds each element of a tile at its own computed place, atomically; `where` guards.

    `axes` says, for each index and then for the guard (if present), which axes of the value's
    shape that operand has, as in `tile.map`.

    ```
    tile.scatter_add %d, %w[%h, %bucket] where %visible axes [[], [0, 1], [0, 1]]
      : tensor<64x64xf32>, !tile.global<2 x f32>, i64, tensor<64x64xi64> where tensor<64x64xi1>
    ```
    """

    name = "tile.scatter_add"
    value = operand_def()
    target = operand_def(GlobalType)
    indices = var_operand_def()
    guard = opt_operand_def()
    axes = prop_def(ArrayAttr)
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(MemoryWriteEffect(), MemoryReadEffect())
    assembly_format = (
        "$value `,` $target `[` $indices `]` (`where` $guard^)? `axes` $axes attr-dict"
        " `:` type($value) `,` type($target) `,` type($indices) (`where` type($guard)^)?"
    )

    def __init__(
        self,
        value: SSAValue,
        target: SSAValue,
        indices: Sequence[SSAValue],
        guard: SSAValue | None,
        axes: Sequence[Sequence[int]],
    ):
        super().__init__(operands=[value, target, list(indices), guard], properties={"axes": axes_attr(axes)})

    def verify_(self) -> None:
        assert isinstance(self.target.type, GlobalType)
        if len(self.indices) != self.target.type.rank.data:
            raise VerifyException(
                f"{self.target.type} needs {self.target.type.rank.data} indices, got {len(self.indices)}"
            )
        operands = [*self.indices, *([self.guard] if self.guard is not None else [])]
        check_axes(shape_of(self.value), operands, axes_of(self.axes))
