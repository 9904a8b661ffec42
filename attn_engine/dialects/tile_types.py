"""Types that the buffered and the async level of the ``tile`` dialect share."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from xdsl.dialects.builtin import ArrayAttr, FixedBitwidthType, IntAttr, StringAttr
from xdsl.ir import Attribute, ParametrizedAttribute, TypeAttribute
from xdsl.irdl import irdl_attr_definition, param_def
from xdsl.parser import AttrParser
from xdsl.printer import Printer
from xdsl.utils.exceptions import VerifyException
from xdsl.utils.str_enum import StrEnum

from attn_engine.dialects.tile import tile_type


class MemorySpace(StrEnum):
    """Where a buffer lives: `global` (a plan's temporary), `shared` (one program), `register` (fragments of the
    threads of one role), `tmem` (tensor memory of newer devices)."""

    GLOBAL = "global"
    SHARED = "shared"
    REGISTER = "register"
    TMEM = "tmem"


def _parse_shape(parser: AttrParser) -> tuple[ArrayAttr[IntAttr], Attribute]:
    shape, element = parser.parse_ranked_shape()
    if any(size < 0 for size in shape):
        parser.raise_error("shapes of buffers and blocks are static")
    return ArrayAttr([IntAttr(size) for size in shape]), element


def _print_shape(printer: Printer, shape: Sequence[int], element: Attribute) -> None:
    printer.print_string("".join(f"{size}x" for size in shape))
    printer.print_attribute(element)


def _shape_attr(shape: Sequence[int] | ArrayAttr[IntAttr]) -> ArrayAttr[IntAttr]:
    return shape if isinstance(shape, ArrayAttr) else ArrayAttr([IntAttr(size) for size in shape])


class _Shaped(ParametrizedAttribute):
    """A static shape of elements; the parameters stand in the subclasses, for equality is that of a class's own."""

    shape: ArrayAttr[IntAttr]
    element_type: Attribute

    def get_shape(self) -> tuple[int, ...]:
        return tuple(size.data for size in self.shape)

    @property
    def byte_size(self) -> int:
        """Bytes of one block; `i1` takes a byte."""
        assert isinstance(self.element_type, FixedBitwidthType)
        return prod(self.get_shape()) * max(1, self.element_type.bitwidth // 8)

    def verify(self) -> None:
        if any(size < 1 for size in self.get_shape()):
            raise VerifyException(f"sizes of a shape must be positive, got {list(self.get_shape())}")
        if not isinstance(self.element_type, FixedBitwidthType):
            raise VerifyException(f"elements must have a fixed bit width, got {self.element_type}")


@irdl_attr_definition
class BufferType(_Shaped, TypeAttribute):
    """A block of memory with a static shape: ``!tile.buffer<2x64x128xf16, shared>``. Mutable: reads and writes are ops."""

    name = "tile.buffer"
    shape: ArrayAttr[IntAttr] = param_def()
    element_type: Attribute = param_def()
    space: StringAttr = param_def()

    def __init__(
        self,
        shape: Sequence[int] | ArrayAttr[IntAttr],
        element_type: Attribute,
        space: MemorySpace | StringAttr = MemorySpace.SHARED,
    ):
        name = space if isinstance(space, StringAttr) else StringAttr(space.value)
        super().__init__(_shape_attr(shape), element_type, name)

    @property
    def memory_space(self) -> MemorySpace:
        return MemorySpace(self.space.data)

    def verify(self) -> None:
        super().verify()
        if self.space.data not in tuple(MemorySpace):
            raise VerifyException(f"space '{self.space.data}' is none of {', '.join(MemorySpace)}")

    def as_tile(self) -> Attribute:
        """The type of the value that a read of the whole buffer gives."""
        return tile_type(self.get_shape(), self.element_type)

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            shape, element = _parse_shape(parser)
            parser.parse_punctuation(",")
            return (shape, element, StringAttr(parser.parse_str_enum(MemorySpace).value))

    def print_parameters(self, printer: Printer) -> None:
        with printer.in_angle_brackets():
            _print_shape(printer, self.get_shape(), self.element_type)
            printer.print_string(f", {self.space.data}")


@irdl_attr_definition
class DescriptorType(_Shaped, TypeAttribute):
    """A view of a global tensor through which blocks are copied asynchronously: ``!tile.descriptor<1x1x64x128xf16>``.

    The shape is that of one block and its rank is that of the tensor; sizes and strides of the tensor
    are dynamic. Elements outside of the tensor read as 0 and are not written.
    """

    name = "tile.descriptor"
    shape: ArrayAttr[IntAttr] = param_def()
    element_type: Attribute = param_def()

    def __init__(self, shape: Sequence[int] | ArrayAttr[IntAttr], element_type: Attribute):
        super().__init__(_shape_attr(shape), element_type)

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            return _parse_shape(parser)

    def print_parameters(self, printer: Printer) -> None:
        with printer.in_angle_brackets():
            _print_shape(printer, self.get_shape(), self.element_type)


@irdl_attr_definition
class BarriersType(ParametrizedAttribute, TypeAttribute):
    """An array of barriers in shared memory, used one at a time by index: ``!tile.barriers<2>``.

    A barrier counts phases from 0. A phase ends when all its arrivals have come and all the bytes that it was
    told to expect have landed; the next phase then begins with the same arrival count.

    For an arrival the warps of a role meet, and one thread arrives. At ``!tile.barriers<2, 128>`` all 128 threads of a
    role do, each when it gets there: an arrival has come with the last of them. Reads and writes by threads are not
    ordered before it, products that a thread has waited for are.
    """

    name = "tile.barriers"
    size: IntAttr = param_def()
    threads: IntAttr = param_def()

    def __init__(self, size: int | IntAttr, threads: int | IntAttr = 1):
        super().__init__(*(v if isinstance(v, IntAttr) else IntAttr(v) for v in (size, threads)))

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            size = parser.parse_integer(allow_boolean=False, allow_negative=False)
            more = parser.parse_optional_punctuation(",") is not None
            threads = parser.parse_integer(allow_boolean=False, allow_negative=False) if more else 1
            return (IntAttr(size), IntAttr(threads))

    def print_parameters(self, printer: Printer) -> None:
        threads = f", {self.threads.data}" if self.threads.data > 1 else ""
        with printer.in_angle_brackets():
            printer.print_string(f"{self.size.data}{threads}")

    def verify(self) -> None:
        if self.size.data < 1:
            raise VerifyException(f"an array of barriers holds at least one, got {self.size.data}")
        if self.threads.data < 1:
            raise VerifyException(f"an arrival is of at least one thread, got {self.threads.data}")


@irdl_attr_definition
class PendingType(ParametrizedAttribute, TypeAttribute):
    """A value that an asynchronous product is still computing: ``!tile.pending<tensor<64x128xf32>>``.

    Only `tile.wait` turns it into the value.
    """

    name = "tile.pending"
    value: Attribute = param_def()


@irdl_attr_definition
class MmaLayoutAttr(ParametrizedAttribute):
    """How the warps of a role share the result of a product: ``#tile.mma<4x1, 128>``.

    `rows` x `columns` warps, each group of four of them along the rows issuing one warpgroup instruction
    of 64 rows and `n` columns.
    """

    name = "tile.mma"
    rows: IntAttr = param_def()
    columns: IntAttr = param_def()
    n: IntAttr = param_def()

    def __init__(self, rows: int | IntAttr, columns: int | IntAttr, n: int | IntAttr):
        super().__init__(*(v if isinstance(v, IntAttr) else IntAttr(v) for v in (rows, columns, n)))

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            warps = parser.parse_dimension_list()
            if len(warps) != 2:
                parser.raise_error("expected warps along rows x columns")
            parser.parse_punctuation(",")
            n = parser.parse_integer(allow_boolean=False, allow_negative=False)
            return (IntAttr(warps[0]), IntAttr(warps[1]), IntAttr(n))

    def print_parameters(self, printer: Printer) -> None:
        with printer.in_angle_brackets():
            printer.print_string(f"{self.rows.data}x{self.columns.data}, {self.n.data}")

    def verify(self) -> None:
        if self.rows.data < 4 or self.rows.data % 4 or self.columns.data < 1:
            raise VerifyException(f"warps along the rows come in fours, got {self.rows.data}x{self.columns.data}")
        if self.n.data % 8 or not 8 <= self.n.data <= 256:
            raise VerifyException(f"an instruction has 8 to 256 columns in steps of 8, got {self.n.data}")
