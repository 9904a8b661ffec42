"""Kernels, plans and what is only in plans: sizes, temporaries, fills, launches."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import (
    I64,
    IntegerAttr,
    StringAttr,
    SymbolNameConstraint,
    SymbolRefAttr,
    i32,
    i64,
)
from xdsl.ir import (
    Attribute,
    Block,
    Operation,
    Region,
    SSAValue,
)
from xdsl.irdl import (
    AttrSizedOperandSegments,
    IRDLOperation,
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
from xdsl.traits import (
    IsolatedFromAbove,
    IsTerminator,
    MemoryReadEffect,
    MemoryWriteEffect,
    Pure,
    SymbolOpInterface,
)
from xdsl.utils.exceptions import VerifyException

from attn_engine.dialects.tile_base import (
    GlobalType,
    element_of,
)


@irdl_op_definition
class EndOp(IRDLOperation):
    """Ends a kernel or a plan."""

    name = "tile.end"
    traits = traits_def(IsTerminator(), Pure())
    assembly_format = "attr-dict"


class _Callable(IRDLOperation):
    """A named region with typed, named arguments; its attributes are data for passes and emitters."""

    sym_name = prop_def(SymbolNameConstraint())
    body = region_def("single_block")

    def __init__(self, name: str, body: Region | Block, attributes: dict[str, Attribute] | None = None):
        region = body if isinstance(body, Region) else Region(body)
        super().__init__(properties={"sym_name": StringAttr(name)}, regions=[region], attributes=attributes or {})

    @classmethod
    def parse(cls, parser: Parser):
        name = parser.parse_symbol_name()
        args = parser.parse_comma_separated_list(parser.Delimiter.PAREN, parser.parse_argument)
        attributes = parser.parse_optional_attr_dict_with_keyword()
        body = parser.parse_region(args)
        return cls(name.data, body, dict(attributes.data) if attributes else None)

    def print(self, printer: Printer) -> None:
        printer.print_string(" ")
        printer.print_symbol_name(self.sym_name.data)
        with printer.in_parens():
            printer.print_list(self.body.block.args, printer.print_block_argument)
        if self.attributes:
            printer.print_op_attributes(self.attributes, print_keyword=True)
        printer.print_string(" ")
        printer.print_region(self.body, print_entry_block_args=False)

    def verify_(self) -> None:
        if not isinstance(self.body.block.last_op, EndOp):
            raise VerifyException(f"{self.name} @{self.sym_name.data} must end in tile.end")


@irdl_op_definition
class KernelOp(_Callable):
    """One kernel: what each program of a grid of up to three axes does.

    Arguments are `!tile.global` and scalars. Attributes that backends read: `num_warps`, `num_stages`.

    ```
    tile.kernel @rowsum(%x: !tile.global<2 x f32>, %y: !tile.global<1 x f32>, %n: i32) attributes {num_warps = 4 : i64} {
      ...
      tile.end
    }
    ```
    """

    name = "tile.kernel"
    traits = traits_def(IsolatedFromAbove(), SymbolOpInterface())


@irdl_op_definition
class PlanOp(_Callable):
    """The host side of one operation: temporaries, fills and launches in order.

    Arguments are the tensors (inputs, then outputs written in place) and scalars of the caller; their
    name hints are their names. Sizes come from `tile.dim`; scalar arithmetic is `arith`.

    ```
    tile.plan @forward(%q: !tile.global<4 x bf16>, %o: !tile.global<4 x bf16>, %scale: f32) {
      %n = tile.dim %q, 2 : !tile.global<4 x bf16>
      %tmp = tile.alloc(%n) : !tile.global<1 x f32>
      tile.fill %tmp, 0.0 : !tile.global<1 x f32>
      tile.launch @kernel grid(%n, %one, %one) (%q, %tmp, %o, %n) : ...
      tile.end
    }
    ```
    """

    name = "tile.plan"
    traits = traits_def(IsolatedFromAbove(), SymbolOpInterface())


@irdl_op_definition
class DimOp(IRDLOperation):
    """The size of one dimension of a global tensor (plans and kernels)."""

    name = "tile.dim"
    source = operand_def(GlobalType)
    axis = prop_def(IntegerAttr[I64])
    result = result_def(i32)
    traits = traits_def(Pure())
    assembly_format = "$source `,` $axis attr-dict `:` type($source)"

    def __init__(self, source: SSAValue, axis: int):
        super().__init__(operands=[source], properties={"axis": IntegerAttr(axis, i64)}, result_types=[i32])


@irdl_op_definition
class AllocOp(IRDLOperation):
    """A temporary in global memory, contiguous, uninitialised; lives until the plan ends."""

    name = "tile.alloc"
    sizes = var_operand_def(i32)
    result = result_def(GlobalType)
    traits = traits_def(MemoryWriteEffect())
    assembly_format = "`(` $sizes `)` attr-dict `:` type($result)"

    def __init__(self, sizes: Sequence[SSAValue | Operation], result: GlobalType):
        super().__init__(operands=[list(sizes)], result_types=[result])

    def verify_(self) -> None:
        assert isinstance(self.result.type, GlobalType)
        if len(self.sizes) != self.result.type.rank.data:
            raise VerifyException(f"{len(self.sizes)} sizes for a temporary of rank {self.result.type.rank.data}")


@irdl_op_definition
class FillOp(IRDLOperation):
    """Sets every element of a global tensor to a scalar."""

    name = "tile.fill"
    target = operand_def(GlobalType)
    value = operand_def()
    traits = traits_def(MemoryWriteEffect())
    assembly_format = "$target `,` $value attr-dict `:` type($target) `,` type($value)"

    def __init__(self, target: SSAValue, value: SSAValue | Operation):
        super().__init__(operands=[target, value])

    def verify_(self) -> None:
        if self.value.type != element_of(self.target):
            raise VerifyException(f"value {self.value.type} does not match target {self.target.type}")


@irdl_op_definition
class LaunchOp(IRDLOperation):
    """Runs a kernel once per grid point; axis 0 is `tile.program_id 0`. An empty grid runs nothing."""

    name = "tile.launch"
    kernel = prop_def(SymbolRefAttr)
    grid = var_operand_def(i32)
    arguments = var_operand_def()
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(MemoryWriteEffect(), MemoryReadEffect())
    assembly_format = "$kernel `grid` `(` $grid `)` `args` `(` $arguments `)` attr-dict `:` type($arguments)"

    def __init__(self, kernel: str, grid: Sequence[SSAValue | Operation], arguments: Sequence[SSAValue | Operation]):
        super().__init__(operands=[list(grid), list(arguments)], properties={"kernel": SymbolRefAttr(kernel)})

    def verify_(self) -> None:
        if not 1 <= len(self.grid) <= 3:
            raise VerifyException(f"a grid has one to three axes, got {len(self.grid)}")
        module = self.parent_op()
        module = module.parent_op() if module is not None else None
        for op in module.regions[0].block.ops if module is not None else ():
            if isinstance(op, KernelOp) and op.sym_name.data == self.kernel.root_reference.data:
                want, got = [a.type for a in op.body.block.args], [a.type for a in self.arguments]
                if want != got:
                    raise VerifyException(f"kernel @{op.sym_name.data} takes {want}, launched with {got}")


@irdl_op_definition
class ProgramIdOp(IRDLOperation):
    """This program's position on one axis of the grid."""

    name = "tile.program_id"
    axis = prop_def(IntegerAttr[I64])
    result = result_def(i32)
    traits = traits_def(Pure())
    assembly_format = "$axis attr-dict"

    def __init__(self, axis: int):
        super().__init__(properties={"axis": IntegerAttr(axis, i64)}, result_types=[i32])
