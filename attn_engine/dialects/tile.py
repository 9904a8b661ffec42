"""The ``tile`` dialect, value level: kernels over blocks of tensors, and host plans that launch them.

Values are static ``tensor<MxNxT>`` (pure SSA) and scalars; global memory is `!tile.global`.
Scalar work is plain ``arith``/``math``; *all* elementwise work on tensors is `tile.map`; loops are
``scf.for`` and branches ``scf.if``, both over any of these values. The buffered and async levels
(`tile_buffer`, `tile_async`) add buffers, copies and barriers to the same kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from xdsl.dialects.builtin import (
    I64,
    BytesAttr,
    ArrayAttr,
    DenseArrayBase,
    DenseIntOrFPElementsAttr,
    IntAttr,
    IntegerAttr,
    StringAttr,
    SymbolNameConstraint,
    SymbolRefAttr,
    TensorType,
    f32,
    i1,
    i32,
    i64,
)
from xdsl.dialects.utils import EnumAttribute
from xdsl.ir import (
    Attribute,
    Block,
    Dialect,
    Operation,
    ParametrizedAttribute,
    Region,
    SSAValue,
    TypeAttribute,
)
from xdsl.irdl import (
    AttrSizedOperandSegments,
    IRDLOperation,
    irdl_attr_definition,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    opt_prop_def,
    param_def,
    prop_def,
    region_def,
    result_def,
    traits_def,
    var_operand_def,
    var_result_def,
)
from xdsl.parser import AttrParser, Parser
from xdsl.printer import Printer
from xdsl.traits import (
    IsolatedFromAbove,
    IsTerminator,
    MemoryReadEffect,
    MemoryWriteEffect,
    Pure,
    SymbolOpInterface,
)
from xdsl.utils.exceptions import VerifyException
from xdsl.utils.str_enum import StrEnum

INDEX = (i32, i64)


@irdl_attr_definition
class GlobalType(ParametrizedAttribute, TypeAttribute):
    """A strided tensor in global memory: ``!tile.global<4 x bf16>`` has rank 4. Sizes and strides are dynamic.

    The address of an element is the sum of index times stride, in 64 bits.
    """

    name = "tile.global"
    rank: IntAttr = param_def()
    element_type: Attribute = param_def()

    def __init__(self, rank: int | IntAttr, element_type: Attribute):
        super().__init__(rank if isinstance(rank, IntAttr) else IntAttr(rank), element_type)

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            rank = parser.parse_integer(allow_boolean=False, allow_negative=False)
            parser.parse_keyword("x")
            return (IntAttr(rank), parser.parse_type())

    def print_parameters(self, printer: Printer) -> None:
        with printer.in_angle_brackets():
            printer.print_string(f"{self.rank.data} x ")
            printer.print_attribute(self.element_type)


class Reduction(StrEnum):
    SUM = "sum"
    MAX = "max"
    MIN = "min"


class Precision(StrEnum):
    """Of a product: `ieee` is exact in the operand type; `tf32` may round f32 operands to 10 bits of mantissa."""

    IEEE = "ieee"
    TF32 = "tf32"


@irdl_attr_definition
class ReductionAttr(EnumAttribute[Reduction]):
    name = "tile.reduction"


@irdl_attr_definition
class PrecisionAttr(EnumAttribute[Precision]):
    name = "tile.precision"


def shape_of(value: SSAValue | Attribute) -> tuple[int, ...]:
    """The static shape of a tile; () for a scalar."""
    type_ = value.type if isinstance(value, SSAValue) else value
    return tuple(type_.get_shape()) if isinstance(type_, TensorType) else ()


def element_of(value: SSAValue | Attribute) -> Attribute:
    """The element type of a tile or of a global tensor; a scalar's own type."""
    type_ = value.type if isinstance(value, SSAValue) else value
    return type_.element_type if isinstance(type_, TensorType | GlobalType) else type_


def splat_of(dense: DenseIntOrFPElementsAttr) -> Attribute | None:
    """The one number that a dense constant consists of, as a scalar attribute; None if its elements differ.

    Looks at bytes: unpacking every element of a tile costs milliseconds.
    """
    data, element = dense.data.data, dense.get_element_type()
    width = element.compile_time_size  # type: ignore[union-attr]
    if data != data[:width] * (len(data) // width):
        return None
    return DenseIntOrFPElementsAttr(TensorType(element, [1]), BytesAttr(data[:width])).get_attrs()[0]


def tile_type(shape: Sequence[int], element: Attribute) -> Attribute:
    """`tensor<shape x element>`, or the element type itself for an empty shape."""
    return TensorType(element, shape) if shape else element


def ints(values: Sequence[int]) -> DenseArrayBase:
    return DenseArrayBase.from_list(i64, list(values))


def ints_of(attr: DenseArrayBase) -> tuple[int, ...]:
    return tuple(attr.get_values())  # type: ignore[attr-defined]


# --- structure ---------------------------------------------------------------------------------


@irdl_op_definition
class EndOp(IRDLOperation):
    """Ends a kernel or a plan."""

    name = "tile.end"
    traits = traits_def(IsTerminator(), Pure())
    assembly_format = "attr-dict"


class _Callable(IRDLOperation):
    """A named region with typed, named arguments; its attributes are data for passes and emitters."""

    sym_name = prop_def(SymbolNameConstraint())
    body = region_def("single_block")

    def __init__(self, name: str, body: Region | Block, attributes: dict[str, Attribute] | None = None):
        region = body if isinstance(body, Region) else Region(body)
        super().__init__(
            properties={"sym_name": StringAttr(name)}, regions=[region], attributes=attributes or {}
        )

    @classmethod
    def parse(cls, parser: Parser):
        name = parser.parse_symbol_name()
        args = parser.parse_comma_separated_list(parser.Delimiter.PAREN, parser.parse_argument)
        attributes = parser.parse_optional_attr_dict_with_keyword()
        body = parser.parse_region(args)
        return cls(name.data, body, dict(attributes.data) if attributes else None)

    def print(self, printer: Printer) -> None:
        printer.print_string(" ")
        printer.print_symbol_name(self.sym_name.data)
        with printer.in_parens():
            printer.print_list(self.body.block.args, printer.print_block_argument)
        if self.attributes:
            printer.print_op_attributes(self.attributes, print_keyword=True)
        printer.print_string(" ")
        printer.print_region(self.body, print_entry_block_args=False)

    def verify_(self) -> None:
        if not isinstance(self.body.block.last_op, EndOp):
            raise VerifyException(f"{self.name} @{self.sym_name.data} must end in tile.end")


@irdl_op_definition
class KernelOp(_Callable):
    """One kernel: what each program of a grid of up to three axes does.

    Arguments are `!tile.global` and scalars. Attributes that backends read: `num_warps`, `num_stages`.

    ```
    tile.kernel @rowsum(%x: !tile.global<2 x f32>, %y: !tile.global<1 x f32>, %n: i32) attributes {num_warps = 4 : i64} {
      ...
      tile.end
    }
    ```
    """

    name = "tile.kernel"
    traits = traits_def(IsolatedFromAbove(), SymbolOpInterface())


@irdl_op_definition
class PlanOp(_Callable):
    """The host side of one operation: temporaries, fills and launches in order.

    Arguments are the tensors (inputs, then outputs written in place) and scalars of the caller; their
    name hints are their names. Sizes come from `tile.dim`; scalar arithmetic is `arith`.

    ```
    tile.plan @forward(%q: !tile.global<4 x bf16>, %o: !tile.global<4 x bf16>, %scale: f32) {
      %n = tile.dim %q, 2 : !tile.global<4 x bf16>
      %tmp = tile.alloc(%n) : !tile.global<1 x f32>
      tile.fill %tmp, 0.0 : !tile.global<1 x f32>
      tile.launch @kernel grid(%n, %one, %one) (%q, %tmp, %o, %n) : ...
      tile.end
    }
    ```
    """

    name = "tile.plan"
    traits = traits_def(IsolatedFromAbove(), SymbolOpInterface())


@irdl_op_definition
class DimOp(IRDLOperation):
    """The size of one dimension of a global tensor (plans and kernels)."""

    name = "tile.dim"
    source = operand_def(GlobalType)
    axis = prop_def(IntegerAttr[I64])
    result = result_def(i32)
    traits = traits_def(Pure())
    assembly_format = "$source `,` $axis attr-dict `:` type($source)"

    def __init__(self, source: SSAValue, axis: int):
        super().__init__(operands=[source], properties={"axis": IntegerAttr(axis, i64)}, result_types=[i32])


@irdl_op_definition
class AllocOp(IRDLOperation):
    """A temporary in global memory, contiguous, uninitialised; lives until the plan ends."""

    name = "tile.alloc"
    sizes = var_operand_def(i32)
    result = result_def(GlobalType)
    traits = traits_def(MemoryWriteEffect())
    assembly_format = "`(` $sizes `)` attr-dict `:` type($result)"

    def __init__(self, sizes: Sequence[SSAValue | Operation], result: GlobalType):
        super().__init__(operands=[list(sizes)], result_types=[result])

    def verify_(self) -> None:
        assert isinstance(self.result.type, GlobalType)
        if len(self.sizes) != self.result.type.rank.data:
            raise VerifyException(f"{len(self.sizes)} sizes for a temporary of rank {self.result.type.rank.data}")


@irdl_op_definition
class FillOp(IRDLOperation):
    """Sets every element of a global tensor to a scalar."""

    name = "tile.fill"
    target = operand_def(GlobalType)
    value = operand_def()
    traits = traits_def(MemoryWriteEffect())
    assembly_format = "$target `,` $value attr-dict `:` type($target) `,` type($value)"

    def __init__(self, target: SSAValue, value: SSAValue | Operation):
        super().__init__(operands=[target, value])

    def verify_(self) -> None:
        if self.value.type != element_of(self.target):
            raise VerifyException(f"value {self.value.type} does not match target {self.target.type}")


@irdl_op_definition
class LaunchOp(IRDLOperation):
    """Runs a kernel once per grid point; axis 0 is `tile.program_id 0`. An empty grid runs nothing."""

    name = "tile.launch"
    kernel = prop_def(SymbolRefAttr)
    grid = var_operand_def(i32)
    arguments = var_operand_def()
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(MemoryWriteEffect(), MemoryReadEffect())
    assembly_format = "$kernel `grid` `(` $grid `)` `args` `(` $arguments `)` attr-dict `:` type($arguments)"

    def __init__(self, kernel: str, grid: Sequence[SSAValue | Operation], arguments: Sequence[SSAValue | Operation]):
        super().__init__(
            operands=[list(grid), list(arguments)], properties={"kernel": SymbolRefAttr(kernel)}
        )

    def verify_(self) -> None:
        if not 1 <= len(self.grid) <= 3:
            raise VerifyException(f"a grid has one to three axes, got {len(self.grid)}")
        module = self.parent_op()
        module = module.parent_op() if module is not None else None
        for op in module.regions[0].block.ops if module is not None else ():
            if isinstance(op, KernelOp) and op.sym_name.data == self.kernel.root_reference.data:
                want, got = [a.type for a in op.body.block.args], [a.type for a in self.arguments]
                if want != got:
                    raise VerifyException(f"kernel @{op.sym_name.data} takes {want}, launched with {got}")


@irdl_op_definition
class ProgramIdOp(IRDLOperation):
    """This program's position on one axis of the grid."""

    name = "tile.program_id"
    axis = prop_def(IntegerAttr[I64])
    result = result_def(i32)
    traits = traits_def(Pure())
    assembly_format = "$axis attr-dict"

    def __init__(self, axis: int):
        super().__init__(properties={"axis": IntegerAttr(axis, i64)}, result_types=[i32])


# --- memory ------------------------------------------------------------------------------------


class Access(Protocol):
    """The part of an op that says where in global memory: of loads, stores and copies, at every level."""

    name: str

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
    rank, dims = memory.type.rank.data, op.dims.get_values()
    if len(op.indices) != rank:
        raise VerifyException(f"{memory.type} needs {rank} indices, got {len(op.indices)}")
    if len(dims) != len(shape_of(value)):
        raise VerifyException(f"dims {list(dims)} do not match the rank of {value}")
    if len(set(dims)) != len(dims) or any(not 0 <= d < rank for d in dims):
        raise VerifyException(f"dims {list(dims)} must be different axes of a tensor of rank {rank}")
    bounded = op.bounded.get_values()
    if len(bounded) != len(op.limits) or any(not 0 <= d < len(dims) for d in bounded):
        raise VerifyException(f"bounded {list(bounded)} needs one limit each, naming axes of the tile")
    types = {operand.type for operand in (*op.indices, *op.limits)}
    if len(types) > 1 or not types <= set(INDEX):
        raise VerifyException(f"indices and limits are all i32 or all i64, got {', '.join(sorted(map(str, types)))}")
    if not isinstance(op, AtomicAddOp) and element_of(value) != memory.type.element_type:
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
        parser.parse_punctuation(":")
        tensor = parser.resolve_operand(value, parser.parse_type())
        parser.parse_punctuation(",")
        return cls(tensor, parser.resolve_operand(target, parser.parse_type()), indices, dims, limits)

    def print(self, printer: Printer) -> None:
        printer.print_string(" ")
        printer.print_operand(self.value)
        printer.print_string(", ")
        printer.print_operand(self.target)
        print_access(printer, self)
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
    """Adds a tile (or one element) to global memory, each element atomically, in no particular order."""

    name = "tile.atomic_add"
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(MemoryWriteEffect(), MemoryReadEffect())

    def verify_(self) -> None:
        check_access(self, self.target, self.value.type)
        if element_of(self.value) != f32 or element_of(self.target) != f32:
            raise VerifyException("atomic_add is on f32")


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
    printer.print_string(f" dims [{', '.join(map(str, op.dims.get_values()))}]")
    if op.limits:
        printer.print_string(f" bounded [{', '.join(map(str, op.bounded.get_values()))}] limits")
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
    assembly_format = "$source `[` $indices `:` type($indices) `]` (`if` $guard^)? attr-dict `:` type($source) `->` type($result)"

    def __init__(
        self, source: SSAValue, indices: Sequence[SSAValue], guard: SSAValue | None, result: Attribute | None = None
    ):
        super().__init__(operands=[source, list(indices), guard], result_types=[result or element_of(source)])

    def verify_(self) -> None:
        assert isinstance(self.source.type, GlobalType)
        if len(self.indices) != self.source.type.rank.data:
            raise VerifyException(f"{self.source.type} needs {self.source.type.rank.data} indices, got {len(self.indices)}")
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
            raise VerifyException(f"{self.target.type} needs {self.target.type.rank.data} indices, got {len(self.indices)}")
        operands = [*self.indices, *([self.guard] if self.guard is not None else [])]
        check_axes(shape_of(self.value), operands, axes_of(self.axes))


# --- tensors -----------------------------------------------------------------------------------


def axes_attr(axes: Sequence[Sequence[int]]) -> ArrayAttr:
    return ArrayAttr([ArrayAttr([IntegerAttr(a, i64) for a in row]) for row in axes])


def axes_of(attr: ArrayAttr) -> list[tuple[int, ...]]:
    return [tuple(a.value.data for a in row) for row in attr]  # type: ignore[attr-defined]


def check_axes(shape: tuple[int, ...], operands: Sequence[SSAValue], axes: Sequence[tuple[int, ...]]) -> None:
    """Each operand is a scalar or a tile whose axes are the named axes of `shape`, in order."""
    if len(axes) != len(operands):
        raise VerifyException(f"axes has {len(axes)} entries for {len(operands)} operands")
    for n, (operand, named) in enumerate(zip(operands, axes, strict=True)):
        if any(not 0 <= a < len(shape) for a in named) or list(named) != sorted(set(named)):
            raise VerifyException(f"operand {n}: axes {list(named)} are not ascending axes of {shape}")
        if shape_of(operand) != tuple(shape[a] for a in named):
            raise VerifyException(f"operand {n}: {operand.type} does not match axes {list(named)} of shape {shape}")


@irdl_op_definition
class MapYieldOp(IRDLOperation):
    """Ends the region of a `tile.map` with the elements of its results."""

    name = "tile.yield"
    values = var_operand_def()
    traits = traits_def(IsTerminator(), Pure())
    assembly_format = "$values attr-dict `:` type($values)"

    def __init__(self, *values: SSAValue | Operation):
        super().__init__(operands=[list(values)])


@irdl_op_definition
class MapOp(IRDLOperation):
    """Elementwise work: a scalar region applied at every index of the result shape.

    `axes` gives, per operand, the axes of the result shape that it has: [0, 1] a whole tile, [0] one value
    per row, [1] one per column, [] a scalar or a `!tile.global` (read by `tile.gather`). The region is
    arith/math/select/casts and `tile.gather`, on element types, and is isolated from above.

    ```
    %p = tile.map (%s, %m) axes [[0, 1], [0]] : (tensor<64x32xf32>, tensor<64xf32>) -> tensor<64x32xf32> {
    ^bb0(%x: f32, %y: f32):
      %d = arith.subf %x, %y : f32
      %e = math.exp2 %d : f32
      tile.yield %e : f32
    }
    ```
    """

    name = "tile.map"
    inputs = var_operand_def()
    axes = prop_def(ArrayAttr)
    body = region_def("single_block")
    outputs = var_result_def(TensorType)
    traits = traits_def(IsolatedFromAbove(), MemoryReadEffect())

    def __init__(
        self,
        inputs: Sequence[SSAValue | Operation],
        axes: Sequence[Sequence[int]],
        result_types: Sequence[Attribute],
        body: Region | Block,
    ):
        super().__init__(
            operands=[list(inputs)],
            properties={"axes": axes_attr(axes)},
            result_types=[list(result_types)],
            regions=[body if isinstance(body, Region) else Region(body)],
        )

    @classmethod
    def parse(cls, parser: Parser):
        unresolved = parser.parse_comma_separated_list(parser.Delimiter.PAREN, parser.parse_unresolved_operand)
        parser.parse_keyword("axes")
        axes = parser.parse_comma_separated_list(
            parser.Delimiter.SQUARE,
            lambda: parser.parse_comma_separated_list(parser.Delimiter.SQUARE, parser.parse_integer),
        )
        parser.parse_punctuation(":")
        types = parser.parse_comma_separated_list(parser.Delimiter.PAREN, parser.parse_type)
        inputs = parser.resolve_operands(unresolved, types, parser.pos)
        parser.parse_punctuation("->")
        results = parser.parse_optional_comma_separated_list(parser.Delimiter.PAREN, parser.parse_type)
        return cls(inputs, axes, results if results is not None else [parser.parse_type()], parser.parse_region())

    def print(self, printer: Printer) -> None:
        printer.print_string(" ")
        with printer.in_parens():
            printer.print_list(self.inputs, printer.print_operand)
        printer.print_string(f" axes {[list(a) for a in axes_of(self.axes)]} : ")
        with printer.in_parens():
            printer.print_list([i.type for i in self.inputs], printer.print_attribute)
        printer.print_string(" -> ")
        types = [o.type for o in self.outputs]
        if len(types) == 1:
            printer.print_attribute(types[0])
        else:
            with printer.in_parens():
                printer.print_list(types, printer.print_attribute)
        printer.print_string(" ")
        printer.print_region(self.body)

    def verify_(self) -> None:
        if not self.outputs:
            raise VerifyException("a map has at least one result")
        shape = shape_of(self.outputs[0])
        if any(shape_of(o) != shape for o in self.outputs):
            raise VerifyException("all results of a map have the same shape")
        check_axes(shape, list(self.inputs), axes_of(self.axes))
        args = [a.type for a in self.body.block.args]
        want = [i.type if isinstance(i.type, GlobalType) else element_of(i) for i in self.inputs]
        if args != want:
            raise VerifyException(f"block arguments are {args}, operands give {want}")
        last = self.body.block.last_op
        if not isinstance(last, MapYieldOp) or [v.type for v in last.values] != [element_of(o) for o in self.outputs]:
            raise VerifyException("the region must end in tile.yield of the results' element types")


@irdl_op_definition
class RangeOp(IRDLOperation):
    """start, start + 1, ... as a tile of i32.

    ```
    %cols = tile.range %n0 : tensor<64xi32>
    ```
    """

    name = "tile.range"
    start = operand_def(i32)
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$start attr-dict `:` type($result)"

    def __init__(self, start: SSAValue | Operation, size: int):
        super().__init__(operands=[start], result_types=[TensorType(i32, [size])])

    def verify_(self) -> None:
        if len(shape_of(self.result)) != 1 or element_of(self.result) != i32:
            raise VerifyException(f"a range is a rank 1 tile of i32, got {self.result.type}")


@irdl_op_definition
class DotOp(IRDLOperation):
    """acc + a @ b, accumulated in f32.

    ```
    %s = tile.dot %q, %kt, %zero ieee : tensor<64x128xbf16>, tensor<128x32xbf16> -> tensor<64x32xf32>
    ```
    """

    name = "tile.dot"
    a = operand_def(TensorType)
    b = operand_def(TensorType)
    acc = operand_def(TensorType)
    precision = prop_def(PrecisionAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$a `,` $b `,` $acc $precision attr-dict `:` type($a) `,` type($b) `,` type($acc) `->` type($result)"

    def __init__(
        self,
        a: SSAValue | Operation,
        b: SSAValue | Operation,
        acc: SSAValue | Operation,
        precision: Precision = Precision.IEEE,
    ):
        super().__init__(
            operands=[a, b, acc],
            properties={"precision": PrecisionAttr(precision)},
            result_types=[SSAValue.get(acc).type],
        )

    def verify_(self) -> None:
        a, b, acc = shape_of(self.a), shape_of(self.b), shape_of(self.acc)
        if len(a) != 2 or len(b) != 2 or a[1] != b[0] or acc != (a[0], b[1]):
            raise VerifyException(f"shapes {a} @ {b} + {acc} do not fit")
        if element_of(self.a) != element_of(self.b):
            raise VerifyException(f"operands differ in type: {self.a.type} and {self.b.type}")
        if self.result.type != self.acc.type or element_of(self.acc) != f32:
            raise VerifyException(f"accumulator and result must be the same f32 tile, got {self.acc.type}")


@irdl_op_definition
class ReduceOp(IRDLOperation):
    """Reduces a tile along one axis (which disappears); rank 1 gives a scalar. A NaN anywhere gives NaN.

    ```
    %m = tile.reduce max %s, 1 : tensor<64x32xf32> -> tensor<64xf32>
    ```
    """

    name = "tile.reduce"
    kind = prop_def(ReductionAttr)
    axis = prop_def(IntegerAttr[I64])
    value = operand_def(TensorType)
    result = result_def()
    traits = traits_def(Pure())
    assembly_format = "$kind $value `,` $axis attr-dict `:` type($value) `->` type($result)"

    def __init__(self, kind: Reduction, value: SSAValue | Operation, axis: int):
        operand = SSAValue.get(value)
        shape = list(shape_of(operand))
        del shape[axis]
        super().__init__(
            operands=[value],
            properties={"kind": ReductionAttr(kind), "axis": IntegerAttr(axis, i64)},
            result_types=[tile_type(shape, element_of(operand))],
        )

    def verify_(self) -> None:
        shape, axis = list(shape_of(self.value)), self.axis.value.data
        if not 0 <= axis < len(shape):
            raise VerifyException(f"axis {axis} of {self.value.type}")
        del shape[axis]
        if self.result.type != tile_type(shape, element_of(self.value)):
            raise VerifyException(f"reducing axis {axis} of {self.value.type} does not give {self.result.type}")


@irdl_op_definition
class ScanOp(IRDLOperation):
    """Inclusive running reduction along one axis (`reverse` from the end).

    ```
    %g = tile.scan sum %log_decay, 0 : tensor<64xf32>
    ```
    """

    name = "tile.scan"
    kind = prop_def(ReductionAttr)
    axis = prop_def(IntegerAttr[I64])
    reverse = opt_prop_def(IntegerAttr[I64])
    value = operand_def(TensorType)
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$kind $value `,` $axis (`reverse` $reverse^)? attr-dict `:` type($value) `->` type($result)"

    def __init__(self, kind: Reduction, value: SSAValue | Operation, axis: int, reverse: bool = False):
        operand = SSAValue.get(value)
        super().__init__(
            operands=[value],
            properties={
                "kind": ReductionAttr(kind),
                "axis": IntegerAttr(axis, i64),
                "reverse": IntegerAttr(1, i64) if reverse else None,
            },
            result_types=[operand.type],
        )

    def verify_(self) -> None:
        if self.value.type != self.result.type:
            raise VerifyException(f"a scan keeps its type: {self.value.type} and {self.result.type}")
        if not 0 <= self.axis.value.data < len(shape_of(self.value)):
            raise VerifyException(f"axis {self.axis.value.data} of {self.value.type}")


@irdl_op_definition
class TransposeOp(IRDLOperation):
    """The transpose of a rank 2 tile."""

    name = "tile.transpose"
    value = operand_def(TensorType)
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$value attr-dict `:` type($value) `->` type($result)"

    def __init__(self, value: SSAValue | Operation):
        operand = SSAValue.get(value)
        super().__init__(
            operands=[value], result_types=[TensorType(element_of(operand), shape_of(operand)[::-1])]
        )

    def verify_(self) -> None:
        shape = shape_of(self.value)
        if len(shape) != 2 or self.result.type != TensorType(element_of(self.value), shape[::-1]):
            raise VerifyException(f"{self.result.type} is not the transpose of {self.value.type}")


@irdl_op_definition
class SliceOp(IRDLOperation):
    """A static part of a tile along one axis: [start, start + size of the result).

    ```
    %left = tile.slice %x, 1, 0 : tensor<64x192xbf16> -> tensor<64x128xbf16>
    ```
    """

    name = "tile.slice"
    value = operand_def(TensorType)
    axis = prop_def(IntegerAttr[I64])
    start = prop_def(IntegerAttr[I64])
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$value `,` $axis `,` $start attr-dict `:` type($value) `->` type($result)"

    def __init__(self, value: SSAValue | Operation, axis: int, start: int, size: int):
        operand = SSAValue.get(value)
        shape = list(shape_of(operand))
        shape[axis] = size
        super().__init__(
            operands=[value],
            properties={"axis": IntegerAttr(axis, i64), "start": IntegerAttr(start, i64)},
            result_types=[TensorType(element_of(operand), shape)],
        )

    def verify_(self) -> None:
        source, result = list(shape_of(self.value)), list(shape_of(self.result))
        axis, start = self.axis.value.data, self.start.value.data
        if not 0 <= axis < len(source) or len(result) != len(source):
            raise VerifyException(f"axis {axis} of {self.value.type}")
        if start < 0 or start + result[axis] > source[axis]:
            raise VerifyException(f"[{start}, {start + result[axis]}) is outside axis {axis} of {self.value.type}")
        source[axis] = result[axis]
        if source != result or element_of(self.value) != element_of(self.result):
            raise VerifyException(f"{self.result.type} is not a slice of {self.value.type} along axis {axis}")


@irdl_op_definition
class ConcatOp(IRDLOperation):
    """Tiles joined along one axis.

    ```
    %x = tile.concat %left, %right, 1 : tensor<64x128xbf16>, tensor<64x64xbf16> -> tensor<64x192xbf16>
    ```
    """

    name = "tile.concat"
    values = var_operand_def(TensorType)
    axis = prop_def(IntegerAttr[I64])
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$values `axis` $axis attr-dict `:` type($values) `->` type($result)"

    def __init__(self, values: Sequence[SSAValue | Operation], axis: int):
        operands = [SSAValue.get(v) for v in values]
        shape = list(shape_of(operands[0]))
        shape[axis] = sum(shape_of(v)[axis] for v in operands)
        super().__init__(
            operands=[operands],
            properties={"axis": IntegerAttr(axis, i64)},
            result_types=[TensorType(element_of(operands[0]), shape)],
        )

    def verify_(self) -> None:
        axis, result = self.axis.value.data, list(shape_of(self.result))
        total = 0
        for value in self.values:
            shape = list(shape_of(value))
            if len(shape) != len(result) or not 0 <= axis < len(result):
                raise VerifyException(f"{value.type} cannot be joined along axis {axis} to {self.result.type}")
            total += shape[axis]
            shape[axis] = result[axis]
            if shape != result or element_of(value) != element_of(self.result):
                raise VerifyException(f"{value.type} cannot be joined along axis {axis} to {self.result.type}")
        if total != result[axis]:
            raise VerifyException(f"parts have {total} along axis {axis}, the result {result[axis]}")


Tile = Dialect(
    "tile",
    [
        AllocOp,
        AtomicAddOp,
        ConcatOp,
        DimOp,
        DotOp,
        EndOp,
        FillOp,
        GatherOp,
        KernelOp,
        LaunchOp,
        LoadOp,
        MapOp,
        MapYieldOp,
        PlanOp,
        ProgramIdOp,
        RangeOp,
        ReduceOp,
        ScanOp,
        ScatterAddOp,
        SliceOp,
        StoreOp,
        TransposeOp,
    ],
    [GlobalType, PrecisionAttr, ReductionAttr],
)
