"""The state of printing one function: names, and how values become expressions."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import IntegerAttr
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.utils.hints import isa

from attn_engine.backends.code_writer import CodeWriter, Names
from attn_engine.backends.hip import types
from attn_engine.dialects import tile

_KEYWORDS = """
alignas alignof and and_eq asm attn auto bitand bitor bool break case catch char class compl const constexpr const_cast
continue decltype default delete do double dynamic_cast else enum explicit export extern false float for friend goto if
inline int long main mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public
register reinterpret_cast return short signed sizeof static static_assert static_cast struct switch template this
thread_local throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq
attn_tensor half warpSize threadIdx blockIdx blockDim gridDim asm typeof
"""
RESERVED = tuple(_KEYWORDS.split())


class FunctionPrinter:
    """Prints the ops of one kernel or plan; a rule takes it and the op."""

    def __init__(self, writer: CodeWriter, reserved: Sequence[str] = ()):
        self.writer = writer
        self.names = Names((*RESERVED, *reserved))

    def text(self, value: SSAValue) -> str:
        return self.names.of(value)

    def texts(self, values: Sequence[SSAValue]) -> list[str]:
        return [self.names.of(value) for value in values]

    def assign(self, op: Operation, expression: str) -> None:
        """`const int n = ...;`"""
        result = op.results[0]
        self.writer.line(f"const {types.parameter(result.type)} {self.names.of(result)} = {expression};")


class KernelPrinter(FunctionPrinter):
    """A kernel: its name in the text, its threads."""

    def __init__(self, writer: CodeWriter, kernel: tile.KernelOp, name: str, reserved: Sequence[str] = ()):
        super().__init__(writer, (*reserved, name))
        self.kernel = kernel
        self.name = name
        self.threads = integer(kernel.attributes["threads"])
        self.scratch: dict[Operation, str] = {}
        """Of each reduction: its scratch in LDS."""
        self.first = ""
        """Inside a map: the fragment whose elements a lane counts."""
        self.place = ""
        """Inside a map: the variable that knows where a lane's elements stand."""
        self.element_index = ""
        """Inside a map: the variable that counts a lane's elements."""


def integer(attribute: Attribute) -> int:
    assert isa(attribute, IntegerAttr)
    return attribute.value.data


def braced(texts: Sequence[str]) -> str:
    return ", ".join(texts)
