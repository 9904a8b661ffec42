"""Every scalar op that the backend spells, in one map kernel each, against the scalar interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attn_engine.backends.triton import types
from attn_engine.backends.triton.emit import emit
from attn_engine.backends.triton.emit_map import SCALAR_RULES
from attn_engine.backends.triton.interpret import interpret
from attn_engine.dialects import tile
from attn_engine.interpreters.scalar import exact_dtype, run_region
from attn_engine.passes.expand_functions import FLOAT_FUNCTIONS, INTEGER_FUNCTIONS
from attn_engine.passes.tile_expand_math import TileExpandMathPass
from attn_engine.universe import make_context
from tests.backends.triton_support import map_kernel, parse, run

torch.set_num_threads(1)
SIZE = 1024
REALS = (0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, math.inf, -math.inf, math.nan, 1e-20, 1e20)
WHOLES = (0, 1, -1, 2, -2, 7, -7, 8, 100, -100, 2**31 - 1, -(2**31))


def operand(element: str, seed: int) -> Tensor:
    """Random values after all pairs of special ones."""
    generator = torch.Generator().manual_seed(seed)
    if element == "i1":
        return torch.randint(0, 2, (SIZE,), generator=generator).bool()
    if element.startswith("i"):
        special = torch.tensor(WHOLES)
        rest = torch.randint(-50, 50, (SIZE,), generator=generator)
        dtype = torch.int32 if element == "i32" else torch.int64
    else:
        special = torch.tensor(REALS)
        rest = torch.randn(SIZE, generator=generator) * 3
        dtype = {"f32": torch.float32, "f16": torch.float16}[element]
    pairs = torch.cartesian_prod(special, special)[:, seed % 2]
    return torch.cat([pairs, rest])[:SIZE].to(dtype)


def meaning(text: str, operands: list[Tensor]) -> Tensor:
    maps = [op for op in parse(text).walk() if isinstance(op, tile.MapOp)]
    return run_region(maps[0].body.block, operands, exact_dtype)[0]


def check(body: str, elements: list[str], result: str, rtol: float, operands: list[Tensor] | None = None):
    text = map_kernel(body, elements, result, SIZE)
    operands = operands or [operand(e, n) for n, e in enumerate(elements)]
    expected = meaning(text, operands)
    out = torch.empty(SIZE, dtype=expected.dtype)
    run(text, "plan", *operands, out)
    torch.testing.assert_close(out, expected, rtol=rtol, atol=1e-37 if out.is_floating_point() else 0, equal_nan=True)
    assert out.unique().numel() > 1


def simple(op: str, count: int, element: str) -> str:
    names = ", ".join(f"%{n}" for n in "abc"[:count])
    return f"    %y = {op} {names} : {element}\n    tile.yield %y : {element}"


EXACT_FLOATS = ["addf", "subf", "mulf", "divf", "maximumf", "minimumf", "maxnumf", "minnumf"]
INTEGERS = ["addi", "subi", "muli", "maxsi", "minsi", "andi", "ori", "xori", "maxui", "minui"]
DIVISIONS = ["divsi", "remsi", "floordivsi", "ceildivsi"]
ANY_REAL = [
    "absf",
    "ceil",
    "floor",
    "trunc",
    "roundeven",
    "exp",
    "exp2",
    "expm1",
    "erf",
    "tanh",
    "sinh",
    "cosh",
    "asinh",
    "atan",
    "cbrt",
]
POSITIVE = ["log", "log2", "log10", "log1p", "sqrt", "rsqrt"]
UNIT = ["asin", "acos", "atanh"]
FINITE = ["sin", "cos", "tan", "round"]
BINARY = {"powf": 1e-5, "atan2": 1e-6, "copysign": 0.0}
UNSIGNED = ["divui", "remui", "shli", "shrsi", "shrui"]
MORE = ["fma", "absi", "ipowi", "fpowi", "acosh"]  # in test_more_functions
CASTS = {
    "extf": ("f16", "f32"),
    "truncf": ("f32", "f16"),
    "sitofp": ("i32", "f32"),
    "uitofp": ("i32", "f32"),
    "extsi": ("i32", "i64"),
    "extui": ("i32", "i64"),
    "trunci": ("i64", "i32"),
    "bitcast": ("f32", "i32"),
    "sitofp i1": ("i1", "f32"),
    "uitofp i1": ("i1", "f32"),
    "extsi i1": ("i1", "i64"),
    "extui i1": ("i1", "i64"),
    "trunci i1": ("i32", "i1"),
}
TESTED = {f"arith.{n}" for n in ("negf", "select", "constant", "cmpi", "cmpf", "fptosi")}
TESTED |= {f"arith.{n.split()[0]}" for n in [*EXACT_FLOATS, *INTEGERS, *DIVISIONS, *UNSIGNED, *CASTS]}
TESTED |= {f"math.{n}" for n in [*ANY_REAL, *POSITIVE, *UNIT, *FINITE, *BINARY, *MORE]}


@pytest.mark.parametrize("name", EXACT_FLOATS)
def test_floats(name: str):
    check(simple(f"arith.{name}", 2, "f32"), ["f32", "f32"], "f32", 2e-7)


@pytest.mark.parametrize("element", ["i32", "i64"])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str, element: str):
    check(simple(f"arith.{name}", 2, element), [element, element], element, 0)


@pytest.mark.parametrize("element", ["i32", "i64"])
@pytest.mark.parametrize("name", DIVISIONS)
def test_integer_division(name: str, element: str):
    a, b = operand(element, 0), operand(element, 1)
    b[b == 0] = 3
    a[a == -(2**31)] = -5
    check(simple(f"arith.{name}", 2, element), [element, element], element, 0, [a, b])


@pytest.mark.parametrize("name", UNSIGNED)
def test_shifts_and_unsigned(name: str):
    a, b = operand("i32", 0), operand("i32", 1).abs() % 31 + 1
    check(simple(f"arith.{name}", 2, "i32"), ["i32", "i32"], "i32", 0, [a, b])


def test_negation_keeps_the_sign_of_zero():
    out = torch.empty(SIZE)
    x = torch.nan_to_num(operand("f32", 0))
    run(map_kernel(simple("arith.negf", 1, "f32"), ["f32"], "f32", SIZE), "plan", x, out)
    assert torch.equal(torch.signbit(out), torch.signbit(x).logical_not())


@pytest.mark.parametrize("name", ANY_REAL)
def test_functions(name: str):
    check(simple(f"math.{name}", 1, "f32"), ["f32"], "f32", 1e-6)


@pytest.mark.parametrize("name", POSITIVE)
def test_functions_of_positive_numbers(name: str):
    check(simple(f"math.{name}", 1, "f32"), ["f32"], "f32", 1e-6, [operand("f32", 0).abs()])


@pytest.mark.parametrize("name", UNIT)
def test_functions_of_small_numbers(name: str):
    check(simple(f"math.{name}", 1, "f32"), ["f32"], "f32", 1e-6, [operand("f32", 0).clamp(-1, 1)])


@pytest.mark.parametrize("name", FINITE)
def test_functions_of_finite_numbers(name: str):
    check(simple(f"math.{name}", 1, "f32"), ["f32"], "f32", 1e-6, [torch.randn(SIZE) * 3])


@pytest.mark.parametrize(("name", "rtol"), BINARY.items())
def test_functions_of_two_numbers(name: str, rtol: float):
    check(simple(f"math.{name}", 2, "f32"), ["f32", "f32"], "f32", rtol)


def test_more_functions():
    check(simple("math.fma", 3, "f32"), ["f32"] * 3, "f32", 1e-6, [torch.randn(SIZE).abs() for _ in range(3)])
    check(simple("math.absi", 1, "i64"), ["i64"], "i64", 0)
    check(simple("math.acosh", 1, "f32"), ["f32"], "f32", 1e-6, [torch.rand(SIZE) * 9 + 1])
    base, exponent = torch.randint(-9, 10, (SIZE,)), torch.randint(-4, 18, (SIZE,))
    check(simple("math.ipowi", 2, "i64"), ["i64"] * 2, "i64", 0, [base, exponent])
    body = "    %y = math.fpowi %a, %b : f32, i32\n    tile.yield %y : f32"
    check(body, ["f32", "i32"], "f32", 1e-5, [torch.randn(SIZE), torch.randint(-4, 5, (SIZE,), dtype=torch.int32)])


@pytest.mark.parametrize("predicate", ["eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge"])
def test_integer_comparisons(predicate: str):
    body = f"    %y = arith.cmpi {predicate}, %a, %b : i32\n    tile.yield %y : i1"
    check(body, ["i32", "i32"], "i1", 0)


@pytest.mark.parametrize(
    "predicate",
    ["oeq", "ogt", "oge", "olt", "ole", "one", "ord", "ueq", "ugt", "uge", "ult", "ule", "une", "uno"],
)
def test_float_comparisons(predicate: str):
    body = f"    %y = arith.cmpf {predicate}, %a, %b : f32\n    tile.yield %y : i1"
    check(body, ["f32", "f32"], "i1", 0)
    number = "    %c = arith.constant 1.0 : f32\n"
    check(f"{number}    %y = arith.cmpf {predicate}, %a, %c : f32\n    tile.yield %y : i1", ["f32"], "i1", 0)
    check(f"{number}    %y = arith.cmpf {predicate}, %c, %a : f32\n    tile.yield %y : i1", ["f32"], "i1", 0)
    both = f"{number}    %d = arith.cmpf {predicate}, %c, %c : f32\n    %e = arith.cmpf olt, %a, %c : f32\n"
    check(f"{both}    %y = arith.xori %e, %d : i1\n    tile.yield %y : i1", ["f32"], "i1", 0)


@pytest.mark.parametrize("name", CASTS)
def test_casts(name: str):
    source, target = CASTS[name]
    op = f"arith.{name.split()[0]}"
    check(f"    %y = {op} %a : {source} to {target}\n    tile.yield %y : {target}", [source], target, 0)


def test_float_to_integer_truncates():
    body = "    %y = arith.fptosi %a : f32 to i32\n    tile.yield %y : i32"
    check(body, ["f32"], "i32", 0, [torch.randn(SIZE) * 9])


def test_select_and_constants():
    body = "    %c = arith.constant 0xFF800000 : f32\n    %y = arith.select %b, %a, %c : f32\n    tile.yield %y : f32"
    check(body, ["f32", "i1"], "f32", 0)


def test_every_rule_has_a_test():
    rules = {op.name for op in (*SCALAR_RULES, *types.SCALAR_OPS, *FLOAT_FUNCTIONS, *INTEGER_FUNCTIONS)}
    assert rules <= TESTED, sorted(rules - TESTED)


def test_erf_for_targets_without_one():
    module = parse(map_kernel(simple("math.erf", 1, "f32"), ["f32"], "f32", SIZE))
    TileExpandMathPass().apply(make_context(), module)
    source = emit(module)
    assert "tl.erf" not in source
    x, out = torch.linspace(-5, 5, SIZE), torch.empty(SIZE)
    interpret(source)["plan"](x, out)
    torch.testing.assert_close(out, torch.erf(x.double()).float(), rtol=3e-7, atol=0)
