"""A plan and its kernels under construction, and how kernels see the operands of an attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.dialects import scf
from xdsl.dialects.builtin import IntegerAttr, TensorType, i32, i64
from xdsl.ir import Attribute, Block, SSAValue
from xdsl.utils.hints import isa

from attn_engine.dialects import tile
from attn_engine.passes.lowering.scope import Index, Scope


@dataclass(frozen=True)
class Blocks:
    """What a schedule says about one kernel: rows of queries and keys per block, warps, pipeline stages."""

    m: int
    n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Head:
    """A head dim and the size of the tile that holds it."""

    size: int
    tile: int

    @property
    def padded(self) -> bool:
        return self.size != self.tile


def global_of(tensor: Attribute) -> tile.GlobalType:
    """How a kernel sees a tensor operand: rank and element type, sizes and strides at run time."""
    assert isa(tensor, TensorType[Attribute])
    return tile.GlobalType(tensor.get_num_dims(), tensor.element_type)


class Plan:
    """A `tile.plan` being written; arguments are added before anything is launched."""

    def __init__(self, name: str):
        self.name = name
        self.block = Block()
        self.scope = Scope(self.block)
        self.args: dict[str, SSAValue] = {}
        self._sizes: dict[tuple[SSAValue, int], SSAValue] = {}

    def argument(self, name: str, type_: Attribute) -> SSAValue:
        arg = self.block.insert_arg(type_, len(self.block.args))
        arg.name_hint = name
        self.args[name] = arg
        return arg

    def size(self, source: SSAValue, axis: int, hint: str) -> SSAValue:
        key = (source, axis)
        if key not in self._sizes:
            self._sizes[key] = self.scope.add(tile.DimOp(source, axis), hint).result
        return self._sizes[key]

    def finish(self) -> tile.PlanOp:
        self.scope.add(tile.EndOp())
        return tile.PlanOp(self.name, self.block)


class Kernel:
    """A `tile.kernel` being written. Each argument is taken from a value of the plan, once.

    Programs are numbered block, head, batch; with `batch_first`, the batches of a block and head run side by side.
    """

    def __init__(self, name: str, plan: Plan, blocks: Blocks, batch_first: bool = False):
        self.name, self.plan, self.blocks = name, plan, blocks
        self._axes = (1, 2, 0) if batch_first else (0, 1, 2)
        self.block = Block()
        self.scope = Scope(self.block)
        self.passed: dict[SSAValue, SSAValue] = {}

    def take(self, value: SSAValue) -> SSAValue:
        """The kernel's own argument for a value of the plan."""
        if value not in self.passed:
            arg = self.block.insert_arg(value.type, len(self.block.args))
            arg.name_hint = value.name_hint
            self.passed[value] = arg
        return self.passed[value]

    def program_id(self, axis: int, hint: str) -> SSAValue:
        return self.scope.add(tile.ProgramIdOp(self._axes[axis]), hint).result

    def launch(self, grid: Sequence[SSAValue]) -> tile.KernelOp:
        """Ends the kernel and launches it at the end of the plan, on a grid as programs are numbered."""
        self.scope.add(tile.EndOp())
        order = [grid[self._axes.index(axis)] for axis in range(len(grid))]
        self.plan.scope.add(tile.LaunchOp(self.name, order, list(self.passed)))
        attributes: dict[str, Attribute] = {
            "num_warps": IntegerAttr(self.blocks.num_warps, i64),
            "num_stages": IntegerAttr(self.blocks.num_stages, i64),
        }
        return tile.KernelOp(self.name, self.block, attributes)


def loop(
    scope: Scope, lo: Index, hi: Index, step: Index, carried: Sequence[SSAValue], hint: str
) -> tuple[scf.ForOp, Scope, SSAValue, list[SSAValue]]:
    """Opens an scf.for over i32; end it with `close`."""
    body = Block(arg_types=[i32, *(c.type for c in carried)])
    body.args[0].name_hint = hint
    for arg, value in zip(body.args[1:], carried, strict=True):
        arg.name_hint = value.name_hint
    op = scf.ForOp(scope.value(lo), scope.value(hi), scope.value(step), list(carried), body)
    scope.add(op)
    for result, value in zip(op.results, carried, strict=True):
        result.name_hint = value.name_hint
    return op, Scope(body), body.args[0], list(body.args[1:])


def close(scope: Scope, values: Sequence[SSAValue]) -> None:
    scope.add(scf.YieldOp(*values))
