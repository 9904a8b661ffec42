"""The state of printing one kernel: names, the kernel's parameters, and helpers that all rules share."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import IntegerAttr, i1
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.utils.hints import isa

from attn_engine.backends.code_writer import CodeWriter, Names
from attn_engine.backends.tilelang import types
from attn_engine.backends.tilelang.legalize import UNKNOWN, reach_of
from attn_engine.dialects import tile
from attn_engine.dialects.tile_types import BufferType

_PYTHON = "T tilelang torch contextlib functools KERNELS COMPILE CUDA HOPPER FLAGS DEPTHS product min range"
# TVM prints names as they are: in C++ they must neither be keywords nor hide a type or a function of the headers.
_CPP = """alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl const constexpr const_cast
continue decltype default delete do double dynamic_cast else enum explicit export extern false float for friend goto if
inline int long mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public register
reinterpret_cast return short signed sizeof static static_assert static_cast struct switch template this thread_local
throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq
half half_t bfloat16_t uchar uint ushort ulong float2 float4 int2 int4 dim3 tl cute std max min abs exp exp2 log log2 sqrt
rsqrt pow sin cos erf floor ceil round isnan isinf threadIdx blockIdx blockDim gridDim main_kernel call init"""
RESERVED = (*_PYTHON.split(), *_CPP.split())
GRID_AXES = 3


class KernelPrinter:
    """Prints the ops of one kernel; a rule takes it and the op."""

    def __init__(self, writer: CodeWriter, kernel: tile.KernelOp):
        self.writer = writer
        self.kernel = kernel
        self.names = Names((*RESERVED, program_name(kernel), kernel.sym_name.data))
        self.indices: list[str] = []
        """Inside a map: the loop variable of each axis."""
        self.depth = self.names.fresh("depth")
        self.grid = [self.names.fresh(f"grid_{axis}") for axis in range(GRID_AXES)]
        self.program = [self.names.fresh(f"program_{axis}") for axis in range(GRID_AXES)]
        self.tensors = [a for a in kernel.body.block.args if isinstance(a.type, tile.GlobalType)]
        self.sizes: dict[SSAValue, list[str]] = {}
        self.strides: dict[SSAValue, list[str]] = {}
        self.unit: dict[SSAValue, str] = {}
        """Of each tensor: the name of the fact that its last axis is contiguous and the rest is aligned."""
        self.ids: dict[Operation, str] = {}
        """By op: what a schedule of the kernel's threads calls it, where the kernel has one."""
        self.ahead = self.names.fresh("ahead")
        """The fact that the kernel runs by that schedule."""
        self.trip = ""
        """The number of the iteration, in a loop."""
        for argument in kernel.body.block.args:
            self.names.of(argument)
        for tensor in self.tensors:
            self._name_tensor(tensor)

    def _name_tensor(self, tensor: SSAValue) -> None:
        name, extents = self.names.of(tensor), reach_of(self.kernel, tensor, "extents")
        self.sizes[tensor] = [
            self.names.fresh(f"{name}_size_{axis}") if extent == UNKNOWN else str(extent)
            for axis, extent in enumerate(extents)
        ]
        self.strides[tensor] = [self.names.fresh(f"{name}_stride_{axis}") for axis in range(len(extents))]
        self.unit[tensor] = self.names.fresh(f"{name}_unit")

    def text(self, value: SSAValue) -> str:
        return self.names.of(value)

    def texts(self, values: Sequence[SSAValue]) -> list[str]:
        return [self.names.of(value) for value in values]

    def assign(self, op: Operation, expression: str) -> None:
        self.writer.line(f"{self.names.of(op.results[0])} = {expression}")

    def mark(self, op: Operation) -> list[str]:
        """What its statement is given so that a schedule can name it."""
        return [f'annotations={{T.WSID: "{self.ids[op]}"}}'] if op in self.ids else []

    def loop_variables(self, op: Operation, shape: Sequence[int]) -> tuple[list[str], str]:
        """Fresh loop variables for each axis, and the header of the loop over all of them that is an op's statement."""
        variables = [self.names.fresh("i") for _ in shape]
        return variables, f"for {', '.join(variables)} in T.Parallel({', '.join([*map(str, shape), *self.mark(op)])}):"


def program_name(kernel: tile.KernelOp) -> str:
    """The Python function that makes a kernel's program."""
    return f"{kernel.sym_name.data}_program"


def tuple_text(items: Sequence[str]) -> str:
    """`(64, 32)`, `(64,)`."""
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def element(text: str, indices: Sequence[str]) -> str:
    """One element of a buffer or tensor; a tensor without axes is passed as one with a single position."""
    return f"{text}[{', '.join(indices) or '0'}]"


def buffer_shape(value: SSAValue) -> tuple[int, ...]:
    assert isinstance(value.type, BufferType)
    return value.type.get_shape()


def quoted_dtype(type_: Attribute) -> str:
    """`"float16"`, of a buffer, a tensor or a scalar."""
    inner = type_.element_type if isinstance(type_, BufferType) else tile.element_of(type_)
    return f'"{types.dtype(inner)}"'


def is_flags(type_: Attribute) -> bool:
    """Whether elements of a tensor in memory are conditions. They are passed as bytes: what TileLang calls a kernel with, and
    what the kernel takes, are two types of a condition."""
    return tile.element_of(type_) == i1


def stored_dtype(type_: Attribute) -> str:
    """`"float16"`, of a tensor that a kernel is given."""
    return '"uint8"' if is_flags(type_) else quoted_dtype(type_)


def passed_as(text: str, type_: Attribute) -> str:
    """An argument of a plan, as a kernel takes it."""
    return f"{text}.view(torch.uint8)" if is_flags(type_) else text


def integer_attribute(op: Operation, name: str, default: int) -> int:
    value = op.attributes.get(name)
    return value.value.data if isa(value, IntegerAttr) else default
