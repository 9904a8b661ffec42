"""attn-narrow-integers: ranges hold every value, and narrowed code gives what 64 bits gave."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xdsl.dialects import arith, math
from xdsl.dialects.builtin import IntegerType, i1, i64
from xdsl.ir import Block, Region

from attn_engine.dialects import attn
from attn_engine.ir.intervals import INT64, IntRange
from attn_engine.passes.attn_narrow_integers import Narrower
from attn_engine.passes.simplify_constants import COMPARE_INTEGERS, INTEGER, constant, constant_of

BOUNDS = st.tuples(*[st.integers(-20, 20)] * 2).map(lambda p: IntRange(min(p), max(p)))
OPERATIONS = {
    "add": (lambda a, b: a + b, IntRange.__add__),
    "subtract": (lambda a, b: a - b, IntRange.__sub__),
    "multiply": (lambda a, b: a * b, IntRange.__mul__),
    "maximum": (max, IntRange.maximum),
    "minimum": (min, IntRange.minimum),
    "floor": (lambda a, b: a // b if b else None, IntRange.floor_divide),
    "remainder": (INTEGER[arith.RemSIOp], IntRange.remainder),
    "and": (lambda a, b: a & b, IntRange.bits_of_both),
    "or": (lambda a, b: a | b, IntRange.bits_of_any),
    "exclusive or": (lambda a, b: a ^ b, IntRange.bits_of_any),
}
WIDER = ("remainder", "and", "or", "exclusive or")
"""Whose bounds are not the smallest."""
SHIFTS = {"left": (lambda a, b: a << b, IntRange.shift_left), "right": (lambda a, b: a >> b, IntRange.shift_right)}


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=60)
@given(BOUNDS, BOUNDS)
def test_ranges_hold_every_value(name, a, b):
    compute, bound = OPERATIONS[name]
    values = [compute(x, y) for x in range(a.lo, a.hi + 1) for y in range(b.lo, b.hi + 1)]
    defined = [v for v in values if v is not None]
    found = bound(a, b)
    assert (found is None) == (not defined)
    if found is not None:
        assert found.lo <= min(defined) and max(defined) <= found.hi
        if name not in WIDER:
            assert found == IntRange.of(*defined)


@pytest.mark.parametrize("name", SHIFTS)
@given(BOUNDS, st.tuples(*[st.integers(0, 31)] * 2).map(lambda p: IntRange(min(p), max(p))))
def test_ranges_of_shifts(name, a, by):
    compute, bound = SHIFTS[name]
    values = [compute(x, y) for x in range(a.lo, a.hi + 1) for y in range(by.lo, by.hi + 1)]
    assert bound(a, by) == IntRange.of(*values)
    assert bound(a, IntRange(by.lo, 32)) is None and bound(a, IntRange(-1, by.hi)) is None


@given(BOUNDS)
def test_the_range_of_a_size(a):
    assert abs(a) == IntRange.of(*(abs(x) for x in range(a.lo, a.hi + 1)))


# --- random code at the ends of its inputs ------------------------------------------------------

LARGEST = (1 << 30) - 1
BINARY = [arith.AddiOp, arith.SubiOp, arith.MuliOp, arith.MaxSIOp, arith.MinSIOp, arith.FloorDivSIOp, arith.RemSIOp]
BINARY += [arith.AndIOp, arith.OrIOp, arith.XOrIOp, arith.ShLIOp, arith.ShRSIOp]
NUMBERS = [0, 1, -1, 2, 3, 7, -5, 2**15, 2**30, -(2**31), 2**31 - 1, 2**31, 2**40, -(2**63)]


def _wrap(value, bits):
    return (value + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))


def run(block, args):
    """What the block yields, each operation in its own width; None is undefined."""
    env = dict(zip(block.args, args, strict=True))
    for op in block.ops:
        values = [env[v] for v in op.operands]
        if isinstance(op, attn.YieldOp):
            return values
        bits = op.results[0].type.width.data if isinstance(op.results[0].type, IntegerType) else 64
        if isinstance(op, arith.ConstantOp):
            result = constant_of(op.result)
        elif any(v is None for v in values):
            result = None
        elif isinstance(op, arith.CmpiOp):
            name = arith.CMPI_COMPARISON_OPERATIONS[op.predicate.value.data]
            result = int(COMPARE_INTEGERS[name](*values))
        elif isinstance(op, arith.SelectOp):
            result = values[1] if values[0] else values[2]
        elif type(op) in INTEGER:
            result = INTEGER[type(op)](*values)
        else:
            result = abs(values[0]) if isinstance(op, math.AbsIOp) else values[0]
        env[op.results[0]] = result if result is None or bits == 1 else _wrap(result, bits)
    raise AssertionError("no attn.yield")


@st.composite
def blocks(draw):
    """Random code on two positions and an integer of which nothing is known."""
    block = Block(arg_types=[i64, i64, i1])
    load = block.args[2]
    wide = [block.args[0], block.args[1]]
    block.add_op(unknown := arith.SelectOp(load, *[c.result for c in _constants(block, draw)]))
    wide.append(unknown.result)
    flags = [load]

    def pick():
        if draw(st.integers(0, 3)) == 0:
            block.add_op(op := constant(draw(st.sampled_from(NUMBERS)), i64))
            return op.result
        return draw(st.sampled_from(wide))

    for _ in range(draw(st.integers(1, 10))):
        kind = draw(st.sampled_from(["binary", "binary", "abs", "compare", "select"]))
        if kind == "compare":
            block.add_op(op := arith.CmpiOp(pick(), pick(), draw(st.sampled_from(list(COMPARE_INTEGERS)))))
            flags.append(op.result)
            continue
        op = {
            "binary": lambda: draw(st.sampled_from(BINARY))(pick(), pick()),
            "abs": lambda: math.AbsIOp(pick()),
            "select": lambda: arith.SelectOp(draw(st.sampled_from(flags)), pick(), pick()),
        }[kind]()
        block.add_op(op)
        wide.append(op.results[0])
    block.add_op(attn.YieldOp(*wide, *flags))
    return block


def _constants(block, draw):
    pair = [constant(draw(st.sampled_from(NUMBERS)), i64) for _ in range(2)]
    block.add_ops(pair)
    return pair


ENDS = [0, 1, 5, LARGEST - 1, LARGEST]


@settings(max_examples=120, deadline=None)
@given(blocks())
def test_narrowed_code_gives_the_same(block):
    narrowed = Region(block).clone().block
    Narrower(narrowed).apply()
    narrowed.verify()
    for q in ENDS:
        for kv in ENDS:
            for flag in (0, 1):
                before, after = run(block, [q, kv, flag]), run(narrowed, [q, kv, flag])
                assert all(a is None or a == b for a, b in zip(before, after, strict=True))


def test_an_unknown_integer_stays_wide_and_a_bounded_one_does_not():
    assert not INT64.fits(32) and IntRange(0, LARGEST).fits(32)
    assert INT64.minimum(IntRange.of(5)).maximum(IntRange.of(0)) == IntRange(0, 5)


@pytest.mark.parametrize("divisor", [3, -4])
def test_a_modulus_of_positions_is_narrow(divisor):
    block = Block(arg_types=[i64, i64])
    number = constant(divisor, i64)
    difference = arith.SubiOp(block.args[0], block.args[1])
    quotient = arith.FloorDivSIOp(difference, number)
    product = arith.MuliOp(quotient, number)
    remainder = arith.SubiOp(difference, product)
    squared = arith.MuliOp(remainder, remainder)
    block.add_ops([number, difference, quotient, product, remainder, squared, attn.YieldOp(squared)])
    narrowed = Region(block).clone().block
    Narrower(narrowed).apply()
    wide = [op for op in narrowed.ops if isinstance(op, arith.MuliOp | arith.SubiOp) and op.result.type == i64]
    assert not wide
    for q, kv in [(0, 0), (5, 1), (1, 5), (LARGEST, 0), (0, LARGEST)]:
        assert run(narrowed, [q, kv]) == [((q - kv) % divisor) ** 2]
