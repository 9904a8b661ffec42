"""The async level built by constructors, as passes build it, is what the text says."""

from __future__ import annotations

import pytest
from xdsl.dialects import arith
from xdsl.dialects.builtin import IntegerAttr, ModuleOp, TensorType, f16, f32, i1, i32
from xdsl.ir import Block, Region, SSAValue
from xdsl.parser import Parser
from xdsl.utils.exceptions import VerifyException

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async import RolesOp
from attn_engine.dialects.tile_async_copy import (
    AsyncLoadOp,
    AsyncReduceAddOp,
    AsyncStoreOp,
    AsyncStoreWaitOp,
    BarrierArriveOp,
    BarrierExpectOp,
    BarrierWaitOp,
    MakeBarriersOp,
    ProxyFenceOp,
)
from attn_engine.dialects.tile_async_memory import (
    CellReadOp,
    CellWriteOp,
    DescribeOp,
    FetchAddOp,
    ProcessorCountOp,
    ReadOp,
    WriteOp,
)
from attn_engine.dialects.tile_async_product import (
    AsyncDotOp,
    DotOperandOp,
    OpaqueZeroOp,
    PinOp,
    ReducePartialOp,
    WaitOp,
)
from attn_engine.dialects.tile_async_view import AliasSlotOp, PartOp, RingOp, SlotOp, TransposedSlotOp
from attn_engine.dialects.tile_types import (
    BarriersType,
    BufferType,
    DescriptorType,
    MemorySpace,
    MmaLayoutAttr,
    PendingType,
)
from attn_engine.universe import make_context

LAYOUT = MmaLayoutAttr(4, 1, 64)
BLOCK = BufferType([64, 64], f16)
COUNTER = tile.GlobalType(1, i32)


def number(value: int) -> arith.ConstantOp:
    return arith.ConstantOp(IntegerAttr(value, 32))


def consumer(
    number_: SSAValue, ring: SSAValue, cells: SSAValue, full: SSAValue, out: SSAValue, target: SSAValue
) -> list[object]:
    zero, yes = number(0), arith.ConstantOp(IntegerAttr(1, i1))
    opaque = OpaqueZeroOp(number_)
    slot = SlotOp(ring, opaque)
    flipped = TransposedSlotOp(slot)
    half = PartOp(flipped, 1, zero, 32)
    cell = CellReadOp(cells, zero)
    read = ReadOp(slot)
    operand = DotOperandOp(read, LAYOUT)
    first = AsyncDotOp(operand, flipped, None, LAYOUT)
    second = AsyncDotOp(slot, flipped, first, LAYOUT)
    narrow = AsyncDotOp(slot, half, None, MmaLayoutAttr(4, 1, 32))
    wait = WaitOp(0, [second, narrow])
    partial = ReducePartialOp(tile.ReductionAttr(tile.Reduction.SUM), wait.values[0], 4, 2)
    pin = PinOp(partial)
    place = SlotOp(out, zero)
    write = WriteOp(wait.values[0], place)
    alias = AliasSlotOp(place, BufferType([64, 128], f16))
    store = AsyncStoreOp(place, target, [cell, zero])
    add = AsyncReduceAddOp(place, target, [cell, zero])
    arrive = BarrierArriveOp(full, zero, SSAValue.get(yes))
    start = [
        zero,
        yes,
        opaque,
        slot,
        flipped,
        half,
        BarrierWaitOp(full, zero, zero),
        cell,
        read,
        operand,
        first,
        second,
        narrow,
    ]
    return [
        *start,
        wait,
        partial,
        pin,
        place,
        write,
        alias,
        ProxyFenceOp(),
        store,
        add,
        AsyncStoreWaitOp(),
        arrive,
        tile.EndOp(),
    ]


def producer(ring: SSAValue, cells: SSAValue, full: SSAValue, source: SSAValue, counter: SSAValue) -> list[object]:
    zero = number(0)
    slot = SlotOp(ring, zero)
    load = AsyncLoadOp(source, [zero, zero, zero], slot, full, zero)
    fetch = FetchAddOp(counter, zero, zero)
    return [
        zero,
        slot,
        BarrierExpectOp(full, zero, load.byte_size),
        load,
        fetch,
        CellWriteOp(fetch, cells, zero),
        tile.EndOp(),
    ]


def build() -> ModuleOp:
    source_type, target_type = DescriptorType([1, 64, 64], f16), DescriptorType([64, 64], f32)
    kernel = Block(arg_types=[source_type, target_type, COUNTER])
    ring, cells, out = (
        RingOp(BufferType([2, 64, 64], f16)),
        RingOp(BufferType([2], i32)),
        RingOp(BufferType([1, 64, 64], f32)),
    )
    full = MakeBarriersOp(2, 1)
    captures = [*kernel.args, *(op.result for op in (ring, cells, out, full))]
    blocks = [Block(arg_types=[i32, *(c.type for c in captures)]) for _ in range(2)]
    index, source, target, counter, ring_, cells_, out_, full_ = blocks[0].args
    blocks[0].add_ops(consumer(index, ring_, cells_, full_, out_, target))
    _, source, target, counter, ring_, cells_, out_, full_ = blocks[1].args
    blocks[1].add_ops(producer(ring_, cells_, full_, source, counter))
    roles = RolesOp(captures, [2, 1], [4, 1], [160, 24], [Region(block) for block in blocks])
    kernel.add_ops([ring, cells, out, full, roles, tile.EndOp()])
    plan = Block(arg_types=[tile.GlobalType(3, f16), tile.GlobalType(2, f32), COUNTER])
    x, y = DescribeOp(plan.args[0], [1, 64, 64]), DescribeOp(plan.args[1], [64, 64])
    programs = ProcessorCountOp()
    plan.add_ops([x, y, programs, tile.LaunchOp("kernel", [programs], [x, y, plan.args[2]]), tile.EndOp()])
    return ModuleOp([tile.KernelOp("kernel", kernel), tile.PlanOp("plan", plan)])


def test_constructors_verify_and_print_what_parses():
    module = build()
    module.verify()
    parsed = Parser(make_context(), str(module)).parse_module()
    parsed.verify()
    assert str(parsed) == str(module)


def test_arrivals_of_threads_are_those_of_a_whole_role():
    text = str(build()).replace("!tile.barriers<2>", "!tile.barriers<2, 128>")
    module = Parser(make_context(), text).parse_module()
    module.verify()
    assert str(module) == text
    few = Parser(make_context(), text.replace("<2, 128>", "<2, 64>")).parse_module()
    with pytest.raises(VerifyException, match="4 warps arrives at barriers of 64 threads"):
        few.verify()
    with pytest.raises(VerifyException, match="at least one thread"):
        BarriersType(2, 0)


def test_types_are_equal_by_all_their_parameters():
    kinds = [
        BufferType([2, 3], f16), BufferType([3, 2], f16), BufferType([2, 3], f32), BufferType([2, 3], f16, MemorySpace.GLOBAL),
        DescriptorType([2, 3], f16), DescriptorType([2, 4], f16), DescriptorType([2, 3], f32),
        BarriersType(1), BarriersType(2), BarriersType(2, 128), PendingType(TensorType(f32, [2])), PendingType(TensorType(f32, [3])),
        MmaLayoutAttr(4, 1, 64), MmaLayoutAttr(4, 1, 128), MmaLayoutAttr(8, 1, 64), MmaLayoutAttr(4, 2, 64),
    ]  # fmt: skip
    assert len(set(kinds)) == len(kinds)
    assert BufferType([2, 3], f16) == BufferType([2, 3], f16)
    assert [BLOCK.byte_size, DescriptorType([2, 3], f32).byte_size] == [8192, 24]
