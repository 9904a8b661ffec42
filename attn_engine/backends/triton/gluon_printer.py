"""The state of printing one function (a kernel or a role): names, layouts, and helpers that all rules share."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects import arith
from xdsl.dialects.builtin import DenseIntOrFPElementsAttr, FloatAttr, IntegerAttr
from xdsl.ir import Attribute, Block, Operation, SSAValue
from xdsl.utils.hints import isa

from attn_engine.backends.code_writer import CodeWriter, Names, python_literal
from attn_engine.backends.triton import gluon_types as types
from attn_engine.backends.triton.gluon_layout import LayoutTable
from attn_engine.backends.triton.gluon_types import Blocked, Layout, Mma
from attn_engine.dialects import tile
from attn_engine.errors import UnsupportedOpError

RESERVED = (
    *("gl", "tl", "gluon", "builtin", "ir", "torch", "tma", "mbarrier", "fence_async_shared", "describe", "layout_of"),
    *("warpgroup_mma", "warpgroup_mma_wait", "copy_in", "copy_out", "reduce_add_out", "processor_count"),
    *("async_copy", "arrive_apart"),
    *(
        "PIN",
        "PIN_WIDE",
        "PIN_WIDE_CONSTRAINTS",
        "HOLD_BACK",
        "pin_wide",
        "load_diagonals",
        "add_diagonals",
        "RECIPROCAL",
        "OPAQUE_ZERO",
        "WIDEN_PAIR",
        "widen_pairs",
        "KERNELS",
        "PLANS",
        "_add",
        "_max",
        "_min",
        "float",
        "range",
    ),
)


class Functions:
    """What the functions of one module share: their names, the finished ones, and the constants in use, layouts most of all."""

    def __init__(self):
        self.names = Names(RESERVED)
        self.constants: dict[str, str] = {}
        self.texts: list[str] = []


class FunctionPrinter:
    """Prints the ops of one function; a rule takes it and the op."""

    def __init__(self, functions: Functions, name: str, block: Block, warps: int, reserved: Sequence[str] = ()):
        self.functions = functions
        self.name = name
        self.warps = warps
        self.writer = CodeWriter()
        self.names = Names((*RESERVED, *reserved))
        self.layouts = LayoutTable(block, warps)
        self.strides: dict[str, list[str]] = {}
        self.map_axes: dict[SSAValue, tuple[int, ...]] = {}
        """Of each value inside a map: the axes of the map's shape along which it varies."""
        self.map_shape: tuple[int, ...] = ()
        self.map_layout = ""
        self.instance = ""
        """In a role: the compile-time constant that numbers its instances."""
        for layout in self.layouts.of.values():
            self._define(layout)

    def _define(self, layout: Layout) -> None:
        while not isinstance(layout, Mma):
            inner = getattr(layout, "of", None)
            if inner is None:
                return
            layout = inner
        self.functions.constants[layout.name] = layout.definition()

    # --- arguments

    def argument(self, value: SSAValue) -> list[str]:
        """The parameters of the text that carry an argument: a global tensor comes with its strides."""
        name = self.names.of(value)
        if not isinstance(value.type, tile.GlobalType):
            return [name]
        self.strides[name] = [self.names.fresh(f"{name}_stride_{d}") for d in range(value.type.rank.data)]
        return [name, *self.strides[name]]

    def passed(self, value: SSAValue) -> list[str]:
        """The same, where an argument is handed on."""
        name = self.names.of(value)
        return [name, *self.strides.get(name, [])]

    # --- values

    def text(self, value: SSAValue) -> str:
        return self.names.of(value)

    def texts(self, values: Sequence[SSAValue]) -> list[str]:
        return [self.names.of(value) for value in values]

    def assign(self, op: Operation, expression: str, result: int = 0) -> None:
        self.writer.line(f"{self.names.of(op.results[result])} = {expression}")

    def layout(self, layout: Layout) -> str:
        self._define(layout)
        return types.layout_text(layout, self.names)

    def layout_of(self, value: SSAValue) -> Layout:
        found = self.layouts.known(value)
        return found if found is not None else Blocked(tile.shape_of(value), self.warps)

    def tile(self, value: SSAValue, wanted: Layout | None = None) -> str:
        """A tile in the layout that a use wants; constants and ranges are made in it, others are converted."""
        owner = value.owner
        wanted = wanted or self.layout_of(value)
        if isinstance(owner, arith.ConstantOp):
            return self.constant_tile(owner, wanted)
        if isinstance(owner, tile.RangeOp):
            size = tile.shape_of(value)[0]
            return f"({self.text(owner.start)} + gl.arange(0, {size}, {self.layout(wanted)}))"
        if self.layout_of(value) == wanted:
            return self.text(value)
        return f"gl.convert_layout({self.text(value)}, {self.layout(wanted)})"

    def value(self, value: SSAValue, like: SSAValue) -> str:
        """A tile in the layout of another one; a scalar as it is."""
        return self.tile(value, self.layout_of(like)) if tile.shape_of(value) else self.text(value)

    def constant_tile(self, op: arith.ConstantOp, wanted: Layout) -> str:
        element, shape = tile.element_of(op.result), list(tile.shape_of(op.result))
        return f"gl.full({shape}, {splat(op)}, {types.dtype(element)}, {self.layout(wanted)})"


def splat(op: arith.ConstantOp) -> str:
    """The one number of a constant."""
    number = op.value
    if isa(number, DenseIntOrFPElementsAttr):
        one = tile.splat_of(number)
        if one is None:
            raise UnsupportedOpError("arith.constant of different elements", types.BACKEND_NAME)
        number = one
    if not isa(number, IntegerAttr) and not isa(number, FloatAttr):
        raise UnsupportedOpError(f"arith.constant {op.value}", types.BACKEND_NAME)
    return python_literal(number)


def spread(text: str, axes: Sequence[int], rank: int) -> str:
    """A tile with some axes of a larger one, ready to broadcast: `x` with [0] of rank 2 -> `x[:, None]`."""
    if not axes or len(axes) == rank:
        return text
    return f"{text}[{', '.join(':' if a in axes else 'None' for a in range(rank))}]"


def cast_names(source: Attribute, target: Attribute) -> dict[str, str]:
    """What the spelling of a scalar op may ask for: its result type, and its operand type as unsigned."""
    is_integer = str(source) in ("i8", "i16", "i32", "i64")
    return {"type": types.dtype(target), "unsigned": types.unsigned(source) if is_integer else ""}
