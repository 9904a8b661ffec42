"""How types, scalar ops and layouts are spelled in Gluon, the dialect of Triton with explicit layouts."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects import math
from xdsl.dialects.builtin import FixedBitwidthType
from xdsl.ir import Attribute, Operation, SSAValue

from attn_engine.backends.code_writer import Names
from attn_engine.backends.triton import types
from attn_engine.dialects.tile_types import BufferType, DescriptorType, MmaLayoutAttr

BACKEND_NAME = "gluon"


def _gluon(spelling: str) -> str:
    """Triton's spelling with Gluon's module; what Gluon does not export stays Triton's."""
    return spelling.replace("tl.", "gl.").replace("gl.PropagateNan", "tl.PropagateNan")


SCALAR_OPS: dict[type[Operation], str] = {op: _gluon(text) for op, text in types.SCALAR_OPS.items()}
FROM_BOOL: dict[type[Operation], str] = {op: _gluon(text) for op, text in types.FROM_BOOL.items()}
FROM_INTEGER: dict[type[Operation], str] = {op: _gluon(text) for op, text in types.FROM_INTEGER.items()}
APPROXIMATE: dict[type[Operation], str] = {math.SinOp: "SINE", math.CosOp: "COSINE", math.Log2Op: "LOGARITHM"}
"""Constants of the text that hold the hardware's own instruction."""
ROUNDING = 1.5 * 2.0**23
TRUNCATE = _gluon(types.TRUNCATE)
TRUNCATE_TO_BOOL = types.TRUNCATE_TO_BOOL
CMPI = tuple(_gluon(text) for text in types.CMPI)
CMPF = types.CMPF


def dtype(element: Attribute) -> str:
    """`f16` -> `gl.float16`."""
    return _gluon(types.dtype(element))


def unsigned(element: Attribute) -> str:
    """`i32` -> `gl.uint32`."""
    return _gluon(types.unsigned(element))


def bits(element: Attribute) -> int:
    assert isinstance(element, FixedBitwidthType)
    return element.bitwidth


def shared_layout(type_: BufferType | DescriptorType, rank: int) -> str:
    """The swizzled layout that copies and products share, for a block of the last `rank` axes."""
    block = list(type_.get_shape()[-rank:])
    return f"gl.NVMMASharedLayout.get_default_for({block}, {dtype(type_.element_type)})"


def signature(type_: Attribute) -> str:
    """The type of a kernel argument: `fp16[1, 1, 64, 128]` for a descriptor, else as Triton's compiler names it."""
    if isinstance(type_, DescriptorType):
        return f"{types.signature(type_.element_type)}{list(type_.get_shape())}"
    return types.signature(type_)


_WARP = 32
_VECTOR = 4

# --- layouts of tiles in registers -------------------------------------------------------------


@dataclass(frozen=True)
class Mma:
    """Of a product's result: warps along both axes, and the instruction's n and k."""

    rows: int
    columns: int
    n: int
    k: int

    @property
    def name(self) -> str:
        """The constant of the text that holds it."""
        return f"MMA_{self.rows}x{self.columns}_{self.n}x{self.k}"

    def definition(self) -> str:
        return f"gl.NVMMADistributedLayout([3, 0], [{self.rows}, {self.columns}], [16, {self.n}, {self.k}])"


@dataclass(frozen=True)
class Operand:
    """Of the first operand of a product with that result."""

    of: Mma
    width: int


@dataclass(frozen=True)
class Slice:
    """Of a tile that lacks one axis of another."""

    axis: int
    of: Layout


@dataclass(frozen=True)
class Own:
    """Whatever layout the compiler gave to a value."""

    value: SSAValue


@dataclass(frozen=True)
class Blocked:
    """Some neighbours along the last axis a thread, a warp along that axis as far as it goes.

    Of a row of a matrix as many as 16 bytes hold of the narrowest elements, of a vector up to four.
    """

    shape: tuple[int, ...]
    warps: int

    def text(self) -> str:
        *outer, last = self.shape
        ones = [1] * len(outer)
        size = min(2 * _VECTOR, last) if outer else max(1, min(_VECTOR, last // _WARP))
        across = min(_WARP, last // size)
        threads = [*ones[:-1], _WARP // across, across] if outer else [_WARP]
        warps = [*ones[:-1], self.warps, 1] if outer else [self.warps]
        return f"gl.BlockedLayout({[*ones, size]}, {threads}, {warps}, {list(reversed(range(len(self.shape))))})"


@dataclass(frozen=True)
class Lanes:
    """Of sums over the columns of a product's result, but for those of the four threads that share a row: [rows, 4]."""

    rows: int
    warps: int

    def text(self) -> str:
        """A warp has 16 rows at a time, a thread two of them, eight apart."""
        rounds = (self.rows // (16 * self.warps)).bit_length() - 1
        registers = [[8, 0], *([16 * self.warps << n, 0] for n in range(rounds))]
        warps = [[16 << n, 0] for n in range(self.warps.bit_length() - 1)]
        threads = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
        return f"gl.DistributedLinearLayout({registers}, {threads}, {warps}, [], [{self.rows}, 4])"


Layout = Mma | Operand | Slice | Own | Blocked | Lanes

_INSTRUCTION_K_BITS = 256
_REGISTER_BITS = 32


def mma_layout(layout: MmaLayoutAttr, operand: Attribute) -> Mma:
    """The layout of a product of operands of that element type."""
    return Mma(layout.rows.data, layout.columns.data, layout.n.data, _INSTRUCTION_K_BITS // bits(operand))


def operand_layout(layout: MmaLayoutAttr, operand: Attribute) -> Operand:
    """Of a product's first operand: a register holds neighbours along the columns."""
    return Operand(mma_layout(layout, operand), _REGISTER_BITS // bits(operand))


def restricted(layout: Layout, axes: tuple[int, ...], rank: int) -> Layout:
    """Of a tile with the given axes of a tile of that rank and layout."""
    for axis in reversed(range(rank)):
        if axis not in axes:
            layout = Slice(axis, layout)
    return layout


def layout_text(layout: Layout, names: Names) -> str:
    """A layout as an expression of the generated text."""
    match layout:
        case Mma():
            return layout.name
        case Operand():
            return f"gl.DotOperandLayout(0, {layout.of.name}, {layout.width})"
        case Slice():
            return f"gl.SliceLayout({layout.axis}, {layout_text(layout.of, names)})"
        case Own():
            return f"{names.of(layout.value)}.type.layout"
        case Blocked() | Lanes():
            return layout.text()
