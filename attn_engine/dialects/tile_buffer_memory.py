"""The buffered level of the ``tile`` dialect, memory side: buffers, copies, barriers."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import DenseArrayBase, f32
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.irdl import (
    AttrSizedOperandSegments,
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    opt_prop_def,
    prop_def,
    result_def,
    traits_def,
    var_operand_def,
)
from xdsl.parser import Parser
from xdsl.printer import Printer
from xdsl.traits import MemoryReadEffect, MemoryWriteEffect
from xdsl.utils.exceptions import VerifyException

from attn_engine.dialects import tile
from attn_engine.dialects.tile_buffer_layout import (
    FragmentLayout,
    MfmaAttr,
    PaddedAttr,
    SliceLayoutAttr,
    StagedAttr,
    SwizzledAttr,
    check_shape,
    ownership,
)
from attn_engine.dialects.tile_types import BufferType, MemorySpace

_VIEWS = ("tile.slot",)
"""Ops whose result is a part of the buffer that is their first operand."""


def buffer_type(value: SSAValue) -> BufferType:
    """The type of a buffer; anything else is an error."""
    if not isinstance(value.type, BufferType):
        raise VerifyException(f"expected a buffer, got {value.type}")
    return value.type


def root(value: SSAValue) -> SSAValue:
    """The whole buffer that a buffer is a part of."""
    while isinstance(value.owner, Operation) and value.owner.name in _VIEWS:
        value = value.owner.operands[0]
    return value


def memory_of(value: SSAValue) -> SSAValue:
    """The buffer whose memory a buffer takes: others that are never needed at the same time may lie in it too."""
    value = root(value)
    host = value.owner.host if isinstance(value.owner, BufferAllocOp) else None
    return value if host is None else host


def fragment_layout(value: SSAValue) -> FragmentLayout | None:
    """The layout of a fragment, where its kernel has chosen one."""
    layout = value.owner.layout if isinstance(value.owner, BufferAllocOp) else None
    return layout if isinstance(layout, MfmaAttr | SliceLayoutAttr) else None


def is_fragment(value: SSAValue) -> bool:
    return buffer_type(value).memory_space is MemorySpace.REGISTER


def check_held_alike(a: SSAValue, b: SSAValue) -> None:
    """Two fragments are held alike: by both their layouts, or by the target's choice."""
    if not is_fragment(a) or not is_fragment(b):
        return
    first, second = fragment_layout(a), fragment_layout(b)
    if first is None or second is None:
        if first is not second:
            raise VerifyException("a fragment without a layout meets one that has a layout")
        return
    if ownership(first) != ownership(second):
        raise VerifyException(f"fragments are held differently: {first} and {second}; copy through shared memory")


@irdl_op_definition
class BufferAllocOp(IRDLOperation):
    """A buffer of the program, uninitialised, at the top of its kernel: in shared memory, or a fragment in registers.

    A fragment is one tile whose elements are spread over the threads of the program. Either the target
    decides who holds what, or `layout` does; in shared memory `layout` pads or swizzles. A tile `in` another lies in
    its memory: each of them is lost when the other is written.

    ```
    %ks = tile.buffer_alloc layout #tile.padded<8> : !tile.buffer<64x64xf16, shared>
    %ps = tile.buffer_alloc in %ks : !tile.buffer<32x32xf32, shared> in !tile.buffer<64x64xf16, shared>
    %s = tile.buffer_alloc layout #tile.mfma<32x32x8, acc, 1x4> : !tile.buffer<64x128xf32, register>
    ```
    """

    name = "tile.buffer_alloc"
    layout = opt_prop_def()
    host = opt_operand_def(BufferType)
    result = result_def(BufferType)
    traits = traits_def(MemoryWriteEffect())
    assembly_format = "(`layout` $layout^)? (`in` $host^)? attr-dict `:` type($result) (`in` type($host)^)?"

    def __init__(self, result: BufferType, layout: Attribute | None = None, host: SSAValue | None = None):
        super().__init__(operands=[host], properties={"layout": layout}, result_types=[result])

    @property
    def bytes(self) -> int:
        """Of the buffer, with what pads its rows."""
        type_ = buffer_type(self.result)
        padding = self.layout.elements.data if isinstance(self.layout, PaddedAttr) else 0
        columns = type_.get_shape()[-1]
        return type_.byte_size // columns * (columns + padding)

    def verify_(self) -> None:
        type_ = buffer_type(self.result)
        match type_.memory_space:
            case MemorySpace.SHARED:
                if self.layout is not None and not isinstance(self.layout, PaddedAttr | SwizzledAttr):
                    raise VerifyException(f"{self.layout} is no layout of shared memory")
            case MemorySpace.REGISTER:
                self._verify_fragment(type_)
            case space:
                raise VerifyException(f"a kernel allocates in shared or register, not in {space}")
        if self.host is not None:
            self._verify_host(self.host)
        kernel = self._kernel()
        if kernel is not None and self._is_first(kernel):
            from attn_engine.dialects.tile_buffer_check import check_kernel  # which knows every op of this level

            check_kernel(kernel)

    def _verify_host(self, host: SSAValue) -> None:
        outer = host.owner
        if not isinstance(outer, BufferAllocOp) or outer.host is not None:
            raise VerifyException("a buffer lies in one that is allocated, and lies in none itself")
        if is_fragment(self.result) or is_fragment(host) or self.bytes > outer.bytes:
            raise VerifyException(
                f"{self.result.type} does not lie in {host.type}: both are shared, the host no smaller"
            )

    def _verify_fragment(self, type_: BufferType) -> None:
        if self.layout is None:
            return
        if isinstance(self.layout, StagedAttr):
            self._verify_staged(type_)
            return
        if not isinstance(self.layout, MfmaAttr | SliceLayoutAttr):
            raise VerifyException(f"{self.layout} is no layout of a fragment")
        check_shape(self.layout, type_.get_shape())

    def _verify_staged(self, type_: BufferType) -> None:
        """A staged tile is filled, copied into, and copied to shared memory."""
        if len(type_.get_shape()) != 2:
            raise VerifyException(f"what is staged has rank 2, got {type_}")
        for use in self.result.uses:
            op = use.operation
            written = isinstance(op, BufferFillOp | CopyInOp) and op.target is self.result
            read = isinstance(op, CopyOp) and op.source is self.result and not is_fragment(op.target)
            if not written and not read:
                raise VerifyException(f"{op.name} of a staged tile, which is only copied to shared memory")

    def _kernel(self) -> tile.KernelOp | None:
        parent = self.parent_op()
        while parent is not None and not isinstance(parent, tile.KernelOp):
            parent = parent.parent_op()
        return parent

    def _is_first(self, kernel: tile.KernelOp) -> bool:
        """Rules for a whole kernel are checked once, by its first buffer."""
        return next(op for op in kernel.walk() if isinstance(op, BufferAllocOp)) is self


def shared_like(value: SSAValue, hint: str | None) -> BufferAllocOp:
    """A buffer in shared memory of the shape and elements of another one."""
    type_ = buffer_type(value)
    alloc = BufferAllocOp(BufferType(type_.get_shape(), type_.element_type, MemorySpace.SHARED))
    alloc.result.name_hint = hint
    return alloc


@irdl_op_definition
class BufferFillOp(IRDLOperation):
    """Sets every element of a buffer to a scalar.

    ```
    tile.buffer_fill %acc, %zero : !tile.buffer<64x64xf32, register>
    ```
    """

    name = "tile.buffer_fill"
    target = operand_def(BufferType)
    value = operand_def()
    traits = traits_def(MemoryWriteEffect())
    assembly_format = "$target `,` $value attr-dict `:` type($target) `,` type($value)"

    def __init__(self, target: SSAValue, value: SSAValue | Operation):
        super().__init__(operands=[target, value])

    def verify_(self) -> None:
        if self.value.type != buffer_type(self.target).element_type:
            raise VerifyException(f"value {self.value.type} does not match {self.target.type}")


# --- copies ------------------------------------------------------------------------------------


@irdl_op_definition
class CopyInOp(IRDLOperation):
    """Copies a tile of a global tensor into a buffer; indices, dims and limits as in `tile.load`, 0 beyond the limits.

    The whole buffer is written. Permuted `dims` store the transpose.

    ```
    tile.copy_in %k[%b, %h, %n0, %c0] dims [2, 3] bounded [0] limits(%skv) into %ks
      : !tile.global<4 x f16>, !tile.buffer<64x64xf16, shared>
    ```
    """

    name = "tile.copy_in"
    source = operand_def(tile.GlobalType)
    indices = var_operand_def()
    limits = var_operand_def()
    target = operand_def(BufferType)
    dims = prop_def(DenseArrayBase)
    bounded = prop_def(DenseArrayBase)
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())

    def __init__(
        self,
        source: SSAValue,
        indices: Sequence[SSAValue | Operation],
        dims: Sequence[int],
        target: SSAValue,
        limits: dict[int, SSAValue] | None = None,
    ):
        limits = limits or {}
        super().__init__(
            operands=[source, list(indices), [limits[t] for t in sorted(limits)], target],
            properties={"dims": tile.ints(dims), "bounded": tile.ints(sorted(limits))},
        )

    @classmethod
    def parse(cls, parser: Parser):
        source = parser.parse_unresolved_operand()
        indices, dims, limits = tile.parse_access(parser)
        parser.parse_keyword("into")
        target = parser.parse_unresolved_operand()
        attributes = parser.parse_optional_attr_dict()
        parser.parse_punctuation(":")
        memory = parser.resolve_operand(source, parser.parse_type())
        parser.parse_punctuation(",")
        op = cls(memory, indices, dims, parser.resolve_operand(target, parser.parse_type()), limits)
        op.attributes.update(attributes)
        return op

    def print(self, printer: Printer) -> None:
        printer.print_string(" ")
        printer.print_operand(self.source)
        tile.print_access(printer, self)
        printer.print_string(" into ")
        printer.print_operand(self.target)
        printer.print_op_attributes(self.attributes)
        printer.print_string(" : ")
        printer.print_attribute(self.source.type)
        printer.print_string(", ")
        printer.print_attribute(self.target.type)

    def verify_(self) -> None:
        tile.check_access(self, self.source, buffer_type(self.target).as_tile())


@irdl_op_definition
class CopyOutOp(tile.WriteAccess):
    """Copies a buffer to global memory; indices, dims and limits as in `tile.store`, elements outside are not written.

    ```
    tile.copy_out %of, %o[%b, %h, %q0, %c0] dims [2, 3] bounded [0] limits(%sq)
      : !tile.buffer<64x64xf16, register>, !tile.global<4 x f16>
    ```
    """

    name = "tile.copy_out"
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())

    def verify_(self) -> None:
        tile.check_access(self, self.target, buffer_type(self.value).as_tile())


@irdl_op_definition
class BufferAtomicAddOp(tile.WriteAccess):
    """Adds a fragment to global memory, each element atomically, in no particular order.

    ```
    tile.buffer_atomic_add %dq, %out[%b, %h, %q0, %c0] dims [2, 3] bounded [0] limits(%sq)
      : !tile.buffer<64x64xf32, register>, !tile.global<4 x f32>
    ```
    """

    name = "tile.buffer_atomic_add"
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())

    def verify_(self) -> None:
        type_ = buffer_type(self.value)
        tile.check_access(self, self.target, type_.as_tile())
        if type_.memory_space is not MemorySpace.REGISTER:
            raise VerifyException(f"what is added is a fragment, got {type_}")
        if type_.element_type != f32:
            raise VerifyException(f"atomic adds are on f32, got {type_}")


@irdl_op_definition
class CopyOp(IRDLOperation):
    """Copies a buffer to another of the same shape and element type, between or within shared memory and registers.

    Fragments copied to fragments are held alike; a change of layout goes through shared memory.

    ```
    tile.copy %pf, %ps : !tile.buffer<64x64xf16, register>, !tile.buffer<64x64xf16, shared>
    ```
    """

    name = "tile.copy"
    source = operand_def(BufferType)
    target = operand_def(BufferType)
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())
    assembly_format = "$source `,` $target attr-dict `:` type($source) `,` type($target)"

    def __init__(self, source: SSAValue, target: SSAValue):
        super().__init__(operands=[source, target])

    def verify_(self) -> None:
        if buffer_type(self.source).as_tile() != buffer_type(self.target).as_tile():
            raise VerifyException(f"{self.source.type} cannot be copied to {self.target.type}")
        if self.source is self.target:
            raise VerifyException("a buffer is copied to itself")
        check_held_alike(self.source, self.target)


@irdl_op_definition
class BarrierOp(IRDLOperation):
    """All threads of the program wait here; what they wrote to shared memory before is seen by all after it.

    Only in kernels with the attribute `explicit_barriers`; elsewhere the target places barriers itself.
    """

    name = "tile.barrier"
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())
    assembly_format = "attr-dict"

    def __init__(self):
        super().__init__()


BUFFER_MEMORY_OPS: list[type[Operation]] = [
    BarrierOp,
    BufferAllocOp,
    BufferAtomicAddOp,
    BufferFillOp,
    CopyInOp,
    CopyOp,
    CopyOutOp,
]
