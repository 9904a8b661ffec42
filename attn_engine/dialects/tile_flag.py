"""The value level of the ``tile`` dialect between programs: one waits for what another one has stored."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import i32
from xdsl.ir import Operation, SSAValue
from xdsl.irdl import IRDLOperation, irdl_op_definition, operand_def, traits_def, var_operand_def
from xdsl.traits import MemoryReadEffect, MemoryWriteEffect
from xdsl.utils.exceptions import VerifyException

from attn_engine.dialects.tile_base import GlobalType


class _FlagOp(IRDLOperation):
    flags = operand_def(GlobalType)
    indices = var_operand_def(i32)

    def __init__(self, flags: SSAValue, indices: Sequence[SSAValue | Operation]):
        super().__init__(operands=[flags, list(indices)])

    def verify_(self) -> None:
        assert isinstance(self.flags.type, GlobalType)
        if self.flags.type.element_type != i32:
            raise VerifyException(f"flags are i32, got {self.flags.type}")
        if len(self.indices) != self.flags.type.rank.data:
            raise VerifyException(
                f"{self.flags.type} needs {self.flags.type.rank.data} indices, got {len(self.indices)}"
            )


_PLACE = "$flags `[` $indices `]` attr-dict `:` type($flags)"


@irdl_op_definition
class SignalOp(_FlagOp):
    """Sets a flag to 1 after everything that this program has stored: whoever has awaited the flag sees that.

    ```
    tile.signal %flags[%n, %h] : !tile.global<2 x i32>
    ```
    """

    name = "tile.signal"
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())
    assembly_format = _PLACE


@irdl_op_definition
class AwaitOp(_FlagOp):
    """Waits until a flag is not 0.

    The program that signals must come earlier in the grid, whose last axis varies slowest: devices start programs in
    that order, and one that waits keeps its place.

    ```
    tile.await %flags[%n, %h] : !tile.global<2 x i32>
    ```
    """

    name = "tile.await"
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())
    assembly_format = _PLACE


@irdl_op_definition
class AwaitTurnOp(_FlagOp):
    """Waits until so many programs have passed on the turn at one place.

    Those that must do so come earlier in the grid, as for `tile.await`.

    ```
    tile.await_turn %turns[%b, %h, %n], %i : !tile.global<3 x i32>
    ```
    """

    name = "tile.await_turn"
    number = operand_def(i32)
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())
    assembly_format = "$flags `[` $indices `]` `,` $number attr-dict `:` type($flags)"

    def __init__(self, flags: SSAValue, indices: Sequence[SSAValue | Operation], number: SSAValue):
        IRDLOperation.__init__(self, operands=[number, flags, list(indices)])  # own operands come first


@irdl_op_definition
class PassTurnOp(_FlagOp):
    """Passes the turn at one place on, once what this role has copied out of its slots has reached memory.

    ```
    tile.pass_turn %turns[%b, %h, %n] : !tile.global<3 x i32>
    ```
    """

    name = "tile.pass_turn"
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())
    assembly_format = _PLACE


FLAG_OPS: list[type[Operation]] = [AwaitOp, AwaitTurnOp, PassTurnOp, SignalOp]
