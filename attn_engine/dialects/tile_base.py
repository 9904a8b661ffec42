"""What all of the ``tile`` dialect stands on: global tensors, shapes, and axes of operands."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import (
    ArrayAttr,
    BytesAttr,
    DenseArrayBase,
    DenseIntOrFPElementsAttr,
    IntAttr,
    IntegerAttr,
    TensorType,
    i32,
    i64,
)
from xdsl.dialects.utils import EnumAttribute
from xdsl.ir import (
    Attribute,
    ParametrizedAttribute,
    SSAValue,
    TypeAttribute,
)
from xdsl.irdl import (
    irdl_attr_definition,
    param_def,
)
from xdsl.parser import AttrParser
from xdsl.printer import Printer
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
    """Of a product: `ieee` is exact in the operand type; `tf32` may round f32 operands to 10 bits of mantissa.

    `tf32x3` keeps about 21 of them, in three products.
    """

    IEEE = "ieee"
    TF32 = "tf32"
    TF32X3 = "tf32x3"


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
    if isinstance(type_, TensorType | GlobalType):
        return type_.element_type  # pyright: ignore[reportUnknownVariableType]
    return type_


def splat_of(dense: DenseIntOrFPElementsAttr) -> Attribute | None:
    """The one number that a dense constant consists of, as a scalar attribute; None if its elements differ.

    Looks at bytes: unpacking every element of a tile costs milliseconds.
    """
    data, element = dense.data.data, dense.get_element_type()
    width = element.compile_time_size
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
