"""The async level of the ``tile`` dialect: what a warp-specialised kernel is made of.

A program at this level starts with rings, barriers and descriptors and ends in `tile.roles`: groups of warps that
run different code and meet only at barriers. Everything that overlaps is explicit, so that an emitter prints
this level op by op. Roles are here; the rest is in
`tile_async_product`, `tile_async_copy`, `tile_async_memory` and `tile_async_view`.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import DenseArrayBase, TensorType, i32
from xdsl.ir import Attribute, Operation, Region, SSAValue
from xdsl.irdl import IRDLOperation, irdl_op_definition, prop_def, traits_def, var_operand_def, var_region_def
from xdsl.parser import Parser
from xdsl.printer import Printer
from xdsl.traits import IsolatedFromAbove
from xdsl.utils.exceptions import VerifyException

from attn_engine.dialects.tile import EndOp, ints, ints_of
from attn_engine.dialects.tile_async_copy import COPY_OPS, BarrierArriveOp
from attn_engine.dialects.tile_async_fragments import FRAGMENT_OPS
from attn_engine.dialects.tile_async_memory import MEMORY_OPS
from attn_engine.dialects.tile_async_product import PRODUCT_OPS
from attn_engine.dialects.tile_async_view import VIEW_OPS
from attn_engine.dialects.tile_types import (
    BarriersType,
    BufferType,
    DescriptorType,
    MmaLayoutAttr,
    PendingType,
)

_WARP = 32


@irdl_op_definition
class RolesOp(IRDLOperation):
    """Groups of warps that run different regions at the same time; the last op of a kernel but for `tile.end`.

    Role r is instantiated `counts[r]` times, each instance with `warps[r]` warps of `registers[r]` registers
    a thread. Regions are isolated; their block arguments are the number of the instance (i32, a
    constant for each) and then the captures: descriptors, rings, barriers, globals and scalars, never tiles. The first
    instance of the first role has the kernel's own warps (`num_warps`).

    ```
    tile.roles (%ks, %full) : (!tile.buffer<2x128x128xf16, shared>, !tile.barriers<2>)
      role count 2 warps 4 registers 240 {
      ^bb0(%wg: i32, %k: !tile.buffer<2x128x128xf16, shared>, %f: !tile.barriers<2>):
        tile.end
      }
      role count 1 warps 1 registers 24 {...}
    ```
    """

    name = "tile.roles"
    captures = var_operand_def()
    counts = prop_def(DenseArrayBase)
    warps = prop_def(DenseArrayBase)
    registers = prop_def(DenseArrayBase)
    bodies = var_region_def("single_block")
    traits = traits_def(IsolatedFromAbove())

    def __init__(
        self,
        captures: Sequence[SSAValue | Operation],
        counts: Sequence[int],
        warps: Sequence[int],
        registers: Sequence[int],
        bodies: Sequence[Region],
    ):
        super().__init__(
            operands=[list(captures)],
            properties={"counts": ints(counts), "warps": ints(warps), "registers": ints(registers)},
            regions=[list(bodies)],
        )

    @property
    def roles(self) -> list[tuple[Region, int, int, int]]:
        """Region, instances, warps and registers of each role."""
        numbers = (ints_of(attribute) for attribute in (self.counts, self.warps, self.registers))
        return list(zip(self.bodies, *numbers, strict=True))

    @classmethod
    def parse(cls, parser: Parser):
        unresolved = parser.parse_comma_separated_list(parser.Delimiter.PAREN, parser.parse_unresolved_operand)
        parser.parse_punctuation(":")
        types = parser.parse_comma_separated_list(parser.Delimiter.PAREN, parser.parse_type)
        captures = parser.resolve_operands(unresolved, types, parser.pos)
        numbers: list[tuple[int, ...]] = []
        bodies: list[Region] = []
        while parser.parse_optional_keyword("role"):
            numbers.append(tuple(_parse_number(parser, word) for word in ("count", "warps", "registers")))
            bodies.append(parser.parse_region())
        counts, warps, registers = ([row[n] for row in numbers] for n in range(3))
        return cls(captures, counts, warps, registers, bodies)

    def print(self, printer: Printer) -> None:
        printer.print_string(" ")
        with printer.in_parens():
            printer.print_list(self.captures, printer.print_operand)
        printer.print_string(" : ")
        with printer.in_parens():
            printer.print_list([c.type for c in self.captures], printer.print_attribute)
        for body, count, warps, registers in self.roles:
            printer.print_string(f" role count {count} warps {warps} registers {registers} ")
            printer.print_region(body)

    def verify_(self) -> None:
        if not self.bodies or not len(self.bodies) == len(self.counts) == len(self.warps) == len(self.registers):
            raise VerifyException("every role has a count, warps and registers")
        for capture in self.captures:
            if isinstance(capture.type, TensorType | PendingType):
                raise VerifyException(f"a role takes no tiles: {capture.type} must go through shared memory")
        want = [i32, *(c.type for c in self.captures)]
        for body, count, warps, registers in self.roles:
            if count < 1 or warps < 1 or registers < 24 or registers % 8:
                raise VerifyException(f"a role of {count} x {warps} warps with {registers} registers")
            if [a.type for a in body.block.args] != want:
                raise VerifyException("a role's arguments are its number (i32) and the captures")
            if not isinstance(body.block.last_op, EndOp):
                raise VerifyException("a role ends in tile.end")
            _check_arrivals(body, warps)


def _check_arrivals(body: Region, warps: int) -> None:
    """At barriers of threads, as many as a role has arrive."""
    for op in body.walk():
        if isinstance(op, BarrierArriveOp):
            assert isinstance(op.barriers.type, BarriersType)
            threads = op.barriers.type.threads.data
            if threads not in (1, warps * _WARP):
                raise VerifyException(f"a role of {warps} warps arrives at barriers of {threads} threads")


def _parse_number(parser: Parser, word: str) -> int:
    parser.parse_keyword(word)
    return parser.parse_integer(allow_boolean=False, allow_negative=False)


ASYNC_OPS: list[type[Operation]] = [RolesOp, *PRODUCT_OPS, *COPY_OPS, *MEMORY_OPS, *VIEW_OPS, *FRAGMENT_OPS]
ASYNC_ATTRIBUTES: list[type[Attribute]] = [
    BarriersType,
    BufferType,
    DescriptorType,
    MmaLayoutAttr,
    PendingType,
]
