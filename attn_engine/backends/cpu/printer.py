"""State and helpers of the printer of one kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from xdsl.ir import Attribute, Block, Operation, SSAValue

from attn_engine.backends.code_writer import CodeWriter, Names, find_rule
from attn_engine.backends.cpu.ownership import last_use, owned
from attn_engine.backends.cpu.types import dtype_of
from attn_engine.dialects import tile

BACKEND = "cpu"


Rules = Mapping[type[Operation], Callable[..., None]]


class KernelPrinter:
    """Prints the ops of one kernel.

    `axes` holds, for each value inside the current map, the axes of the result that it certainly has; a
    value that is not there may be a Python number. `uniform` holds scalars that are Python numbers.
    """

    def __init__(self, writer: CodeWriter, names: Names, kernel: tile.KernelOp, rules: Rules):
        self.writer = writer
        self.names = names
        self.rules = rules
        self.axes: dict[SSAValue, frozenset[int]] = {}
        self.uniform: set[SSAValue] = {a for a in kernel.body.block.args if not isinstance(a.type, tile.GlobalType)}
        self.written = {op.target for op in kernel.walk() if isinstance(op, tile.WriteAccess | tile.ScatterAddOp)}
        self.buffers = 0
        """Buffers in use at this point; loops one after the other have the same ones."""

    def print_block(self, block: Block) -> None:
        """Prints a block without its terminator."""
        for op in block.ops:
            if op is not block.last_op:
                find_rule(self.rules, op, BACKEND)(self, op)

    def buffer(self) -> int:
        """The number of a buffer that belongs to one op of the kernel."""
        self.buffers += 1
        return self.buffers

    def assign(self, op: Operation, expression: str) -> None:
        self.writer.line(f"{self.names.of(op.results[0])} = {expression}")

    def texts(self, values: Sequence[SSAValue]) -> list[str]:
        return [self.names.of(value) for value in values]

    def tuple(self, values: Sequence[SSAValue]) -> str:
        return tuple_of(self.texts(values))

    def is_tensor(self, value: SSAValue) -> bool:
        """Whether a value is a torch tensor whatever the batch."""
        return bool(self.axes.get(value)) or bool(tile.shape_of(value))

    def lends(self, value: SSAValue, op: Operation) -> bool:
        """Whether the result of `op` may take the memory of an operand: it has all its axes, and is read no more."""
        map_ = op.parent_op()
        if isinstance(map_, tile.MapOp):
            whole = len(self.axes.get(value, ())) == len(tile.shape_of(map_.outputs[0]))
        else:
            whole = bool(tile.shape_of(value))
        return whole and last_use(value, op) and owned(value, self.uniform)

    def tensor(self, value: SSAValue) -> str:
        """The text of a value as a tensor."""
        text = self.names.of(value)
        return text if self.is_tensor(value) else f"tensor({text}, {dtype_of(tile.element_of(value))})"


def tuple_of(texts: Sequence[str]) -> str:
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


def shape_text(type_: Attribute) -> str:
    return tuple_of([str(size) for size in tile.shape_of(type_)])
