"""Layouts of the buffered level: who holds which element of a fragment, and how tiles lie in shared memory.

A target that lays out fragments itself (TileLang) has none of these; HIP kernels have one on every fragment.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import IntAttr, StringAttr
from xdsl.ir import Attribute, ParametrizedAttribute
from xdsl.irdl import irdl_attr_definition, param_def
from xdsl.parser import AttrParser
from xdsl.printer import Printer
from xdsl.utils.exceptions import VerifyException
from xdsl.utils.str_enum import StrEnum

WAVE = 64
"""Lanes of one wave of the devices with matrix fused multiply-add instructions."""


class Part(StrEnum):
    """Of a product m x k @ k x n: its accumulator, its left or its right operand."""

    ACC = "acc"
    A = "a"
    B = "b"


def _int(value: int | IntAttr) -> IntAttr:
    return value if isinstance(value, IntAttr) else IntAttr(value)


@irdl_attr_definition
class MfmaAttr(ParametrizedAttribute):
    """A fragment as the instruction m x n x k wants it: ``#tile.mfma<32x32x8, acc, 1x4>``.

    The fragment is cut into `rows` x `columns` waves of contiguous parts (an `a` operand along the rows only,
    a `b` operand along the columns only, each wave of the other axis holding a copy; so do further waves of the
    program, if it has more), and a wave's part into blocks of one instruction: m x n for `acc`, m x k for `a`, k x n
    for `b`. Within a block, `place` says which lane holds what; along k operands are held in runs of 4, in whatever
    order the instruction itself counts k, for a product does not depend on it. A `k` that the device's instruction does
    not reach is several of them.
    An `acc` and a `b` of the same n whose `run`s agree are held alike: products chain without a layout change.
    """

    name = "tile.mfma"
    m: IntAttr = param_def()
    n: IntAttr = param_def()
    k: IntAttr = param_def()
    part: StringAttr = param_def()
    rows: IntAttr = param_def()
    columns: IntAttr = param_def()

    def __init__(
        self,
        instruction: tuple[int | IntAttr, int | IntAttr, int | IntAttr],
        part: Part | StringAttr,
        waves: tuple[int | IntAttr, int | IntAttr],
    ):
        m, n, k = map(_int, instruction)
        name = part if isinstance(part, StringAttr) else StringAttr(part.value)
        super().__init__(m, n, k, name, *map(_int, waves))

    @property
    def instruction(self) -> tuple[int, int, int]:
        return self.m.data, self.n.data, self.k.data

    @property
    def waves(self) -> tuple[int, int]:
        return self.rows.data, self.columns.data

    @property
    def block(self) -> tuple[int, int]:
        """The shape that one instruction handles."""
        m, n, k = self.instruction
        return {Part.ACC: (m, n), Part.A: (m, k), Part.B: (k, n)}[Part(self.part.data)]

    @property
    def split(self) -> tuple[int, int]:
        """Into how many waves each axis of the fragment is cut."""
        rows, columns = self.waves
        return {Part.ACC: (rows, columns), Part.A: (rows, 1), Part.B: (1, columns)}[Part(self.part.data)]

    @property
    def registers(self) -> int:
        """Elements of a block that one lane holds."""
        height, width = self.block
        return height * width // WAVE

    @property
    def lane_axis(self) -> int:
        """The axis along which neighbouring lanes lie; a lane's elements run along the other one."""
        return 0 if self.part.data == Part.A else 1

    @property
    def run(self) -> int:
        """How many neighbouring elements, along the axis that is not the lanes', one lane holds."""
        return 4 if self.part.data == Part.ACC else min(4, self.registers)

    def place(self, lane: int, register: int) -> tuple[int, int]:
        """Row and column, within a block, of one register of one lane."""
        across = self.block[self.lane_axis]
        groups, run = WAVE // across, self.run
        along = groups * run * (register // run) + run * (lane // across) + register % run
        return (lane % across, along) if self.lane_axis == 0 else (along, lane % across)

    def with_part(self, part: Part) -> MfmaAttr:
        """The layout of another part of the same product."""
        return MfmaAttr((self.m, self.n, self.k), part, (self.rows, self.columns))

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            instruction = parser.parse_dimension_list()
            parser.parse_punctuation(",")
            part = parser.parse_str_enum(Part)
            parser.parse_punctuation(",")
            waves = parser.parse_dimension_list()
            if len(instruction) != 3 or len(waves) != 2:
                parser.raise_error("expected m x n x k, part, waves along rows x columns")
            return (*map(IntAttr, instruction), StringAttr(part.value), *map(IntAttr, waves))

    def print_parameters(self, printer: Printer) -> None:
        with printer.in_angle_brackets():
            instruction, waves = ("x".join(map(str, sizes)) for sizes in (self.instruction, self.waves))
            printer.print_string(f"{instruction}, {self.part.data}, {waves}")

    def verify(self) -> None:
        m, n, k = self.instruction
        if self.part.data not in tuple(Part):
            raise VerifyException(f"part '{self.part.data}' is none of {', '.join(Part)}")
        if m != n or m not in (16, 32) or k < 1 or (k & (k - 1)) or m * k < WAVE:
            raise VerifyException(f"no instruction has the shape {m}x{n}x{k}")
        if min(self.waves) < 1:
            raise VerifyException(f"waves along rows and columns are at least 1, got {self.waves}")


@irdl_attr_definition
class SliceLayoutAttr(ParametrizedAttribute):
    """A vector held where a fragment is, one axis removed: ``#tile.sliced<0, #tile.mfma<32x32x8, acc, 1x4>>``.

    A lane holds the elements of its rows (axis 1 removed) or columns (axis 0 removed), each once.
    """

    name = "tile.sliced"
    axis: IntAttr = param_def()
    parent: MfmaAttr = param_def()

    def __init__(self, axis: int | IntAttr, parent: MfmaAttr):
        super().__init__(_int(axis), parent)

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            axis = parser.parse_integer(allow_boolean=False, allow_negative=False)
            parser.parse_punctuation(",")
            return (IntAttr(axis), parser.parse_attribute())

    def print_parameters(self, printer: Printer) -> None:
        with printer.in_angle_brackets():
            printer.print_string(f"{self.axis.data}, ")
            printer.print_attribute(self.parent)

    def verify(self) -> None:
        if self.axis.data not in (0, 1):
            raise VerifyException(f"a fragment has the axes 0 and 1, got {self.axis.data}")


@irdl_attr_definition
class PaddedAttr(ParametrizedAttribute):
    """Rows in shared memory, each followed by unused elements, so that columns fall on different banks: ``#tile.padded<8>``.

    With a second number, ``#tile.padded<8, 16>``, runs of 4 columns change places in each group of that many: run r lies
    in the place of the first run of a pair if it is of the group's first half, of the second if of the other.
    """

    name = "tile.padded"
    elements: IntAttr = param_def()
    group: IntAttr = param_def()

    def __init__(self, elements: int | IntAttr, group: int | IntAttr = 0):
        super().__init__(_int(elements), _int(group))

    def column(self, column: int) -> int:
        """Where a column of a row lies."""
        group = self.group.data
        if not group:
            return column
        run, halves = column % group // 4, group // 8
        return column // group * group + (run % halves * 2 + run // halves) * 4 + column % 4

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            elements = parser.parse_integer(allow_boolean=False, allow_negative=False)
            grouped = parser.parse_optional_punctuation(",") is not None
            group = parser.parse_integer(allow_boolean=False, allow_negative=False) if grouped else 0
            return (IntAttr(elements), IntAttr(group))

    def print_parameters(self, printer: Printer) -> None:
        with printer.in_angle_brackets():
            printer.print_string(
                f"{self.elements.data}, {self.group.data}" if self.group.data else str(self.elements.data)
            )

    def verify(self) -> None:
        if self.group.data not in (0, 16, 32):
            raise VerifyException(f"columns are grouped by 16 or 32, got {self.group.data}")


@irdl_attr_definition
class SwizzledAttr(ParametrizedAttribute):
    """Rows in shared memory whose vectors are permuted: ``#tile.swizzled<8, 1, 8>``, vector, per phase, phases.

    Column c of row r lies at ((c / vector) xor ((r / per_phase) mod phases)) * vector + c mod vector.
    """

    name = "tile.swizzled"
    vector: IntAttr = param_def()
    per_phase: IntAttr = param_def()
    phases: IntAttr = param_def()

    def __init__(self, vector: int | IntAttr, per_phase: int | IntAttr, phases: int | IntAttr):
        super().__init__(_int(vector), _int(per_phase), _int(phases))

    def column(self, row: int, column: int) -> int:
        """Where a column of a row lies."""
        vector, phase = self.vector.data, row // self.per_phase.data % self.phases.data
        return (column // vector ^ phase) * vector + column % vector

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            numbers = parser.parse_comma_separated_list(parser.Delimiter.NONE, parser.parse_integer)
            if len(numbers) != 3:
                parser.raise_error("expected vector, per phase, phases")
            return tuple(map(IntAttr, numbers))

    def print_parameters(self, printer: Printer) -> None:
        with printer.in_angle_brackets():
            printer.print_string(", ".join(str(n.data) for n in (self.vector, self.per_phase, self.phases)))

    def verify(self) -> None:
        numbers = [n.data for n in (self.vector, self.per_phase, self.phases)]
        if any(n < 1 or n & (n - 1) for n in numbers):
            raise VerifyException(f"vector, per phase and phases are powers of two, got {numbers}")


@irdl_attr_definition
class StagedAttr(ParametrizedAttribute):
    """A fragment on its way to shared memory: each thread holds the vectors along an axis that it copies: ``#tile.staged<1>``.

    It is copied into, and copied to shared memory; nothing computes with it.
    """

    name = "tile.staged"
    axis: IntAttr = param_def()

    def __init__(self, axis: int | IntAttr):
        super().__init__(_int(axis))

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            return (IntAttr(parser.parse_integer(allow_boolean=False, allow_negative=False)),)

    def print_parameters(self, printer: Printer) -> None:
        with printer.in_angle_brackets():
            printer.print_string(str(self.axis.data))

    def verify(self) -> None:
        if self.axis.data not in (0, 1):
            raise VerifyException(f"a fragment has the axes 0 and 1, got {self.axis.data}")


FragmentLayout = MfmaAttr | SliceLayoutAttr
SharedLayout = PaddedAttr | SwizzledAttr
Ownership = tuple[int, int, int, tuple[int, int]] | tuple[str, int, object]


def ownership(layout: FragmentLayout) -> Ownership:
    """Equal for two layouts exactly if every lane holds the same elements of a fragment of the same shape."""
    if isinstance(layout, SliceLayoutAttr):
        return ("sliced", layout.axis.data, ownership(layout.parent))
    return (layout.lane_axis, layout.block[layout.lane_axis], layout.run, layout.split)


def check_shape(layout: FragmentLayout, shape: tuple[int, ...]) -> None:
    """Raises unless a fragment of this shape divides into waves and blocks."""
    if isinstance(layout, SliceLayoutAttr):
        kept = 1 - layout.axis.data
        sizes = (layout.parent.block[kept] * layout.parent.split[kept],)
    else:
        sizes = tuple(b * s for b, s in zip(layout.block, layout.split, strict=True))
    if len(sizes) != len(shape) or any(size % unit for size, unit in zip(shape, sizes, strict=True)):
        raise VerifyException(f"a fragment of shape {shape} does not divide into parts of {sizes} of layout {layout}")


def waves_of(layout: FragmentLayout) -> int:
    """How many waves share a fragment."""
    waves = (layout.parent if isinstance(layout, SliceLayoutAttr) else layout).waves
    return waves[0] * waves[1]
