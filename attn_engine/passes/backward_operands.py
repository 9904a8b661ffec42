"""Gradients through query_mod, key_mod and value_mod: from those of modified elements to elements and captures.

A mod is elementwise code that may also read its row: reductions over the channels, and other channels. The sweep that
serves row functions serves mods too, with channels in the place of keys.
"""

from __future__ import annotations

from xdsl.dialects import arith
from xdsl.dialects.builtin import IntegerAttr, TensorType, f32, i64
from xdsl.ir import Block, Region, SSAValue

from attn_engine.dialects import attn
from attn_engine.errors import UnsupportedGradientError
from attn_engine.ir.autodiff.graph import Graph, Needs, Slicer
from attn_engine.ir.autodiff.products import Products
from attn_engine.ir.autodiff.signs import Signs
from attn_engine.ir.channel_map import channel_table, is_involution, is_permutation, roll_of
from attn_engine.passes.backward_attained import Attained
from attn_engine.passes.backward_joint import OPERANDS, Wanted, results_of, simplified
from attn_engine.passes.backward_sweep import Accumulation, Arguments, Sweep

MODS = {"q": "query", "k": "key", "v": "value"}
INDICES = ("b", "h", "position", "channel")


def _mod(op: attn.AttentionOp, operand: str) -> Region | None:
    return getattr(op, f"{MODS[operand]}_mod")


def captures_of_mod(op: attn.AttentionOp, operand: str, wanted: Wanted) -> list[int]:
    """The captures with wanted gradients that the mod of an operand reads."""
    region = _mod(op, operand)
    if region is None:
        return []
    first = len(region.block.args) - len(op.captures)
    return [n for n in wanted.captures if region.block.args[first + n].first_use is not None]


def led_through(op: attn.AttentionOp, wanted: Wanted) -> frozenset[str]:
    """The operands whose modified elements need gradients: for themselves, or for captures of their mods."""
    return wanted.operands | {name for name in OPERANDS if captures_of_mod(op, name, wanted)}


def vjp(op: attn.AttentionOp, operand: str, wanted: Wanted) -> list[Region]:
    """(gradient of the modified element, element, indices, captures) -> gradient of the element."""
    region = _mod(op, operand)
    captured = captures_of_mod(op, operand, wanted)
    if region is None or (operand not in wanted.operands and not captured):
        return []
    type_ = getattr(op, operand).type
    assert isinstance(type_, TensorType)
    return [Region(_Backward(op, region, type_.get_shape()[3]).run(captured))]


class _Backward:
    """The reverse sweep over one mod."""

    def __init__(self, op: attn.AttentionOp, region: Region, channels: int):
        self.channels = channels
        self.graph = graph = Graph(simplified)
        self.gradient = graph.argument(f32, Needs.ELEMENT | Needs.BACKWARD, "g")
        self.element = graph.argument(f32, Needs.ELEMENT, "x")
        self.indices = [
            graph.argument(i64, Needs.ELEMENT if name == "channel" else Needs.NOTHING, name) for name in INDICES
        ]
        self.captures = [graph.argument(c.type, Needs.NOTHING, c.name_hint) for c in op.captures]
        found = graph.inline(region.block, [self.element, *self.indices, *self.captures])
        self.result = results_of(found, region.block)[0]
        # A result that is one number per row is one for each channel all the same.
        graph.needs[self.result] |= Needs.ELEMENT

    def run(self, captured: list[int]) -> Block:
        """The region; it accumulates the gradients of these captures."""
        graph = self.graph
        operations = list(graph.block.ops)
        total = graph.reduce(attn.ReduceKind.SUM, graph.mul(self.result, self.gradient))
        arguments = Arguments(self.element, self.gradient, tuple(self.indices), total, (), tuple(self.captures))
        attained = Attained(graph, arguments.indices[3])
        sweep = Sweep(graph, Products(graph, Signs(graph), self.result), self.result, (), arguments, attained)
        sweep.inverse = self._inverse
        value = sweep.run(operations, {self.element, *(self.captures[n] for n in captured)})
        values = [self.gradient, self.element, *self.indices, *self.captures]
        block = Block(arg_types=[v.type for v in values])
        for old, new in zip(values, block.args, strict=True):
            new.name_hint = old.name_hint
        slicer = Slicer(block, dict(zip(values, block.args, strict=True)))
        result = slicer.value(value)
        for accumulation in sweep.accumulations:
            self._accumulate(slicer, accumulation)
        block.add_op(attn.YieldOp(result))
        return block

    def _accumulate(self, slicer: Slicer, accumulation: Accumulation) -> None:
        """One number per row is added by its first channel alone."""
        value = accumulation.value
        if accumulation.per_row:
            graph = self.graph
            zero = graph.emit(arith.ConstantOp(IntegerAttr(0, i64)))
            is_first = graph.emit(arith.CmpiOp(self.indices[3], zero, "eq"))
            value = graph.select(is_first, value, graph.constant(0.0))
        load = accumulation.load
        indices = slicer.values(load.indices)
        slicer.append(attn.AccumulateGradOp(slicer.value(value), slicer.value(load.source), indices))

    def _inverse(self, op: attn.ChannelAtOp) -> SSAValue:
        """The channel that reads this one."""
        channel = self.indices[3]
        table = channel_table(op.index, channel, self.channels)
        if table is None or not is_permutation(table):
            raise UnsupportedGradientError(
                "a channel that several others read (write its part as a sum, torch.where(channel == i, x, 0.0).sum(),"
                " and a partner as a permutation, torch.where(channel < r, (channel + r // 2) % r, channel))"
            )
        if is_involution(table):
            return op.index
        by = roll_of(table)
        if by is None:
            raise UnsupportedGradientError("a permutation of channels that is neither its own inverse nor a roll")
        emit, number = self.graph.emit, self._number
        moved = emit(arith.SubiOp(channel, number(by)))
        rounds = emit(arith.FloorDivSIOp(moved, number(self.channels)))
        return emit(arith.SubiOp(moved, emit(arith.MuliOp(rounds, number(self.channels)))))

    def _number(self, number: int) -> SSAValue:
        return self.graph.emit(arith.ConstantOp(IntegerAttr(number, i64)))
