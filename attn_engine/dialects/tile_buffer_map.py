"""The buffered level of the ``tile`` dialect: scalar regions at every index of a shape, to buffers or scattered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from xdsl.dialects.builtin import I64, AnyFloatConstr, ArrayAttr, IntegerAttr, IntegerType, f32, i1, i32, i64
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.irdl import (
    AttrSizedOperandSegments,
    BaseAttr,
    IRDLOperation,
    VarConstraint,
    irdl_op_definition,
    operand_def,
    prop_def,
    region_def,
    result_def,
    traits_def,
    var_operand_def,
)
from xdsl.parser import Parser
from xdsl.printer import Printer
from xdsl.traits import IsolatedFromAbove, MemoryReadEffect, MemoryWriteEffect, Pure
from xdsl.utils.exceptions import VerifyException

from attn_engine.dialects import tile
from attn_engine.dialects.tile_buffer_layout import MfmaAttr, SliceLayoutAttr, ownership
from attn_engine.dialects.tile_buffer_memory import buffer_type, check_held_alike, fragment_layout, is_fragment, root
from attn_engine.dialects.tile_types import BufferType


@irdl_op_definition
class IndexOp(IRDLOperation):
    """The position along one axis of the element at hand, inside a `tile.buffer_map`.

    ```
    %col = tile.index 1
    ```
    """

    name = "tile.index"
    axis = prop_def(IntegerAttr[I64])
    result = result_def(i32)
    traits = traits_def(Pure())
    assembly_format = "$axis attr-dict"

    def __init__(self, axis: int):
        super().__init__(properties={"axis": IntegerAttr(axis, i64)}, result_types=[i32])

    def verify_(self) -> None:
        parent = self.parent_op()
        if not isinstance(parent, BufferMapOp | BufferScatterAddOp):
            raise VerifyException("tile.index stands in the region of a tile.buffer_map or a tile.buffer_scatter_add")
        if not 0 <= self.axis.value.data < len(parent.shape):
            raise VerifyException(f"axis {self.axis.value.data} of a map of shape {parent.shape}")


@irdl_op_definition
class KeepOp(IRDLOperation):
    """A number in a place of its own: what reads it does not compute it again.

    ```
    %kept = tile.keep %offset : i32
    ```
    """

    T: ClassVar = VarConstraint("T", AnyFloatConstr | BaseAttr(IntegerType))

    name = "tile.keep"
    value = operand_def(T)
    result = result_def(T)
    traits = traits_def(Pure())
    assembly_format = "$value attr-dict `:` type($value)"

    def __init__(self, value: SSAValue):
        super().__init__(operands=[value], result_types=[value.type])
        self.result.name_hint = value.name_hint


@irdl_op_definition
class BufferMapOp(IRDLOperation):
    """Elementwise work in place: a scalar region at every index of the outputs' shape.

    `axes` says of each input which axes of that shape it has, as in `tile.map`; a tile in shared memory may have them in
    another order. Inputs are fragments, shared buffers,
    scalars and globals (read by `tile.gather`), outputs are fragments. An input may be an output: each element is read
    before it is written. `tile.index` gives the place.

    ```
    tile.buffer_map (%s, %m) axes [[0, 1], [0]] into (%s)
      : (!tile.buffer<64x64xf32, register>, !tile.buffer<64xf32, register>) into (!tile.buffer<64x64xf32, register>) {
    ^bb0(%x: f32, %y: f32):
      %d = arith.subf %x, %y : f32
      %e = math.exp2 %d : f32
      tile.yield %e : f32
    }
    ```
    """

    name = "tile.buffer_map"
    inputs = var_operand_def()
    outputs = var_operand_def(BufferType)
    axes = prop_def(ArrayAttr)
    body = region_def("single_block")
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(IsolatedFromAbove(), MemoryReadEffect(), MemoryWriteEffect())

    def __init__(
        self,
        inputs: Sequence[SSAValue | Operation],
        axes: Sequence[Sequence[int]],
        outputs: Sequence[SSAValue],
        body: Region | Block,
    ):
        super().__init__(
            operands=[list(inputs), list(outputs)],
            properties={"axes": tile.axes_attr(axes)},
            regions=[body if isinstance(body, Region) else Region(body)],
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape over which the region runs."""
        return buffer_type(self.outputs[0]).get_shape()

    @classmethod
    def parse(cls, parser: Parser):
        inputs, axes = _parse_inputs(parser)
        parser.parse_keyword("into")
        outputs = parser.parse_comma_separated_list(parser.Delimiter.PAREN, parser.parse_unresolved_operand)
        parser.parse_punctuation(":")
        read = parser.parse_comma_separated_list(parser.Delimiter.PAREN, parser.parse_type)
        parser.parse_keyword("into")
        written = parser.parse_comma_separated_list(parser.Delimiter.PAREN, parser.parse_type)
        return cls(
            parser.resolve_operands(inputs, read, parser.pos),
            axes,
            parser.resolve_operands(outputs, written, parser.pos),
            parser.parse_region(),
        )

    def print(self, printer: Printer) -> None:
        printer.print_string(" ")
        _print_inputs(printer, self)
        with printer.in_parens():
            printer.print_list(self.outputs, printer.print_operand)
        for word, values in ((" : ", self.inputs), (" into ", self.outputs)):
            printer.print_string(word)
            with printer.in_parens():
                printer.print_list([v.type for v in values], printer.print_attribute)
        printer.print_string(" ")
        printer.print_region(self.body)

    def verify_(self) -> None:
        if not self.outputs:
            raise VerifyException("a map writes at least one buffer")
        if any(buffer_type(o).get_shape() != self.shape for o in self.outputs):
            raise VerifyException("all outputs of a map have the same shape")
        if len({root(o) for o in self.outputs}) != len(self.outputs):
            raise VerifyException("a map writes the same buffer twice")
        for output in self.outputs:
            if not is_fragment(output):
                raise VerifyException(f"a map writes fragments, got {output.type}")
            check_held_alike(output, self.outputs[0])
        _check_inputs(self, self.outputs[0])
        for number, value in enumerate(self.inputs):
            if root(value) in map(root, self.outputs) and buffer_type(value).get_shape() != self.shape:
                raise VerifyException(f"operand {number} is written while other elements of it are still read")
        _check_body(self)
        results = [buffer_type(o).element_type for o in self.outputs]
        if [v.type for v in yielded(self)] != results:
            raise VerifyException("the region must end in tile.yield of the outputs' element types")


@irdl_op_definition
class BufferScatterAddOp(IRDLOperation):
    """Adds at computed places of global memory: a scalar region at every index of the first input's shape, a fragment.

    The region yields what is added (f32), its indices, and whether it is added at all; each element is added once,
    atomically, in no particular order. Inputs and `axes` are as in `tile.buffer_map`.

    ```
    tile.buffer_scatter_add (%d, %h, %n0) axes [[0, 1], [], []] into %dw
      : (!tile.buffer<64x64xf32, register>, i64, i32) into !tile.global<2 x f32> {
    ^bb0(%x: f32, %head: i64, %start: i32):
      %j = tile.index 1
      %kv = arith.addi %start, %j : i32
      %inside = arith.constant true
      tile.yield %x, %head, %kv, %inside : f32, i64, i32, i1
    }
    ```
    """

    name = "tile.buffer_scatter_add"
    inputs = var_operand_def()
    target = operand_def(tile.GlobalType)
    axes = prop_def(ArrayAttr)
    body = region_def("single_block")
    traits = traits_def(IsolatedFromAbove(), MemoryReadEffect(), MemoryWriteEffect())

    def __init__(
        self,
        inputs: Sequence[SSAValue | Operation],
        axes: Sequence[Sequence[int]],
        target: SSAValue,
        body: Region | Block,
    ):
        super().__init__(
            operands=[list(inputs), target],
            properties={"axes": tile.axes_attr(axes)},
            regions=[body if isinstance(body, Region) else Region(body)],
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape over which the region runs."""
        return buffer_type(self.inputs[0]).get_shape()

    @classmethod
    def parse(cls, parser: Parser):
        inputs, axes = _parse_inputs(parser)
        parser.parse_keyword("into")
        target = parser.parse_unresolved_operand()
        parser.parse_punctuation(":")
        read = parser.parse_comma_separated_list(parser.Delimiter.PAREN, parser.parse_type)
        parser.parse_keyword("into")
        memory = parser.resolve_operand(target, parser.parse_type())
        return cls(parser.resolve_operands(inputs, read, parser.pos), axes, memory, parser.parse_region())

    def print(self, printer: Printer) -> None:
        printer.print_string(" ")
        _print_inputs(printer, self)
        printer.print_operand(self.target)
        printer.print_string(" : ")
        with printer.in_parens():
            printer.print_list([v.type for v in self.inputs], printer.print_attribute)
        printer.print_string(" into ")
        printer.print_attribute(self.target.type)
        printer.print_string(" ")
        printer.print_region(self.body)

    def verify_(self) -> None:
        if not self.inputs or not isinstance(self.inputs[0].type, BufferType) or not is_fragment(self.inputs[0]):
            raise VerifyException("the first operand is a fragment, whose shape the region runs over")
        _check_inputs(self, self.inputs[0])
        _check_body(self)
        assert isinstance(self.target.type, tile.GlobalType)
        if self.target.type.element_type != f32:
            raise VerifyException(f"what is added to is f32, got {self.target.type}")
        types, rank = [v.type for v in yielded(self)], self.target.type.rank.data
        if (
            len(types) != rank + 2
            or types[0] != f32
            or types[-1] != i1
            or any(t not in (i32, i64) for t in types[1:-1])
        ):
            raise VerifyException(f"the region must end in tile.yield of an f32, {rank} indices and an i1, got {types}")


# --- what both have ----------------------------------------------------------------------------


def yielded(op: BufferMapOp | BufferScatterAddOp) -> Sequence[SSAValue]:
    """What the region gives for one index."""
    last = op.body.block.last_op
    return last.values if isinstance(last, tile.MapYieldOp) else ()


def _parse_inputs(parser: Parser):
    inputs = parser.parse_comma_separated_list(parser.Delimiter.PAREN, parser.parse_unresolved_operand)
    parser.parse_keyword("axes")
    axes = parser.parse_comma_separated_list(
        parser.Delimiter.SQUARE,
        lambda: parser.parse_comma_separated_list(parser.Delimiter.SQUARE, parser.parse_integer),
    )
    return inputs, axes


def _print_inputs(printer: Printer, op: BufferMapOp | BufferScatterAddOp) -> None:
    with printer.in_parens():
        printer.print_list(op.inputs, printer.print_operand)
    printer.print_string(f" axes {[list(a) for a in tile.axes_of(op.axes)]} into ")


def _check_inputs(op: BufferMapOp | BufferScatterAddOp, like: SSAValue) -> None:
    """Inputs have the named axes of the op's shape, and are held as the fragment `like` is."""
    axes = tile.axes_of(op.axes)
    if len(axes) != len(op.inputs):
        raise VerifyException(f"axes has {len(axes)} entries for {len(op.inputs)} operands")
    for number, (value, named) in enumerate(zip(op.inputs, axes, strict=True)):
        _check_input(number, value, named, op.shape)
        if isinstance(value.type, BufferType) and is_fragment(value):
            _check_layout(number, value, named, like)


def _check_input(number: int, value: SSAValue, axes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if any(not 0 <= a < len(shape) for a in axes) or len(set(axes)) != len(axes):
        raise VerifyException(f"operand {number}: axes {list(axes)} are not axes of {shape}")
    if list(axes) != sorted(axes) and is_fragment(value):
        raise VerifyException(
            f"operand {number}: axes {list(axes)} are not ascending; only shared memory is read turned"
        )
    have = value.type.get_shape() if isinstance(value.type, BufferType) else ()
    if have != tuple(shape[a] for a in axes):
        raise VerifyException(f"operand {number}: {value.type} does not match axes {list(axes)} of shape {shape}")


def _check_layout(number: int, value: SSAValue, axes: tuple[int, ...], like: SSAValue) -> None:
    if len(axes) == len(buffer_type(like).get_shape()):
        check_held_alike(value, like)
        return
    mine, held = fragment_layout(like), fragment_layout(value)
    if mine is None or held is None:
        if mine is not held:
            raise VerifyException("a fragment without a layout meets one that has a layout")
        return
    assert isinstance(mine, MfmaAttr)
    want = SliceLayoutAttr(1 - axes[0], mine)
    if ownership(held) != ownership(want):
        raise VerifyException(f"operand {number} is held as {held}, the map wants it as {want}")


def _check_body(op: BufferMapOp | BufferScatterAddOp) -> None:
    args = [a.type for a in op.body.block.args]
    want: list[Attribute] = [v.type.element_type if isinstance(v.type, BufferType) else v.type for v in op.inputs]
    if args != want:
        raise VerifyException(f"block arguments are {args}, operands give {want}")
