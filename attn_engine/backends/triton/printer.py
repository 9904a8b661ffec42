"""The state of printing one kernel: names, the kernel's parameters, and helpers that all rules share."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import IntegerType, i1
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.utils.hints import isa

from attn_engine.backends.code_writer import CodeWriter, Names
from attn_engine.backends.triton import types
from attn_engine.dialects import tile
from attn_engine.dialects.tile_types import DescriptorType
from attn_engine.errors import UnsupportedTileShapeError

RESERVED = ("tl", "triton", "torch", "KERNELS", "_add", "_max", "_min", "describe", "float", "range")
GRID_AXES = 3


class KernelPrinter:
    """Prints the ops of one kernel; a rule takes it and the op."""

    def __init__(self, writer: CodeWriter, kernel: tile.KernelOp):
        self.writer = writer
        self.kernel = kernel
        self.names = Names(RESERVED)
        self.axes: dict[SSAValue, tuple[int, ...]] = {}
        """Of each value inside a map: the axes of the map's shape along which it varies."""
        self.map_shape: tuple[int, ...] = ()
        self.grid = [self.names.fresh(f"grid_{axis}") for axis in range(GRID_AXES)]
        self.program = [self.names.fresh(f"program_{axis}") for axis in range(GRID_AXES)]
        self.strides: dict[str, list[str]] = {}
        self.signature: dict[str, str] = {}
        self._name_parameters()
        self._check_shapes()

    def _name_parameters(self) -> None:
        for argument in self.kernel.body.block.args:
            name = self.names.of(argument)
            self.signature[name] = types.signature(argument.type)
            if isinstance(argument.type, tile.GlobalType):
                ranks = range(argument.type.rank.data)
                self.strides[name] = [self.names.fresh(f"{name}_stride_{d}") for d in ranks]
                self.signature |= dict.fromkeys(self.strides[name], "stride")
        self.signature |= dict.fromkeys(self.grid, "i32")

    def _check_shapes(self) -> None:
        for op in self.kernel.walk():
            for result in op.results:
                if any(size & (size - 1) for size in tile.shape_of(result)):
                    raise UnsupportedTileShapeError(op.name, str(result.type), types.BACKEND_NAME)

    def scalars(self) -> list[SSAValue]:
        return [a for a in self.kernel.body.block.args if not isinstance(a.type, tile.GlobalType | DescriptorType)]

    def text(self, value: SSAValue) -> str:
        return self.names.of(value)

    def texts(self, values: Sequence[SSAValue]) -> list[str]:
        return [self.names.of(value) for value in values]

    def assign(self, op: Operation, expression: str, result: int = 0) -> None:
        self.writer.line(f"{self.names.of(op.results[result])} = {expression}")

    def reserve(self, op: Operation) -> str:
        """The name of the op's first result, or a fresh one, as the stem for helper variables."""
        return self.names.of(op.results[0]) if op.results else self.names.fresh("place")


def along(text: str, axis: int, rank: int) -> str:
    """A rank 1 expression laid along one axis of a tile: `x` -> `x[None, :]`."""
    return text if rank <= 1 else spread(text, (axis,), rank)


def spread(text: str, axes: Sequence[int], rank: int) -> str:
    """A tile with the given axes of a larger tile, ready to broadcast: `x` with [0] of rank 2 -> `x[:, None]`."""
    if not axes or len(axes) == rank:
        return text
    return f"{text}[{', '.join(':' if a in axes else 'None' for a in range(rank))}]"


def wide(text: str) -> str:
    """Addresses are computed in 64 bits."""
    return f"tl.cast({text}, tl.int64)"


def shape_text(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def cast_names(source: Attribute, target: Attribute) -> dict[str, str]:
    """What the spelling of a scalar op may ask for: its result type, and its operand type as unsigned."""
    is_integer = isa(source, IntegerType) and source != i1
    return {"type": types.dtype(target), "unsigned": types.unsigned(source) if is_integer else ""}
