"""The CPU backend: scalar ops against the tile interpreter, for operands that do and do not vary."""

from __future__ import annotations

import pytest
import torch

from tests.support.cpu import G4, LOAD, STORE, XY, check, program, xy

SCALARS = {
    "i": ["addi", "subi", "muli", "divsi", "remsi", "floordivsi", "ceildivsi", "minsi", "maxsi", "andi", "ori", "xori"],
    "shift": ["shli", "shrsi", "shrui"],
    "f": ["addf", "subf", "mulf", "divf", "maximumf", "minimumf", "maxnumf", "minnumf"],
}


@pytest.mark.parametrize("width", ["i32", "i64"])
@pytest.mark.parametrize("op", [*SCALARS["i"], *SCALARS["shift"]])
def test_integer_op(op: str, width: str):
    """On tensors in a map, on scalars that differ between programs, and on ones that do not."""
    big = 2**31 - 3 if width == "i32" else 2**63 - 3
    third = "%second = arith.constant 3" if op in SCALARS["shift"] else f"%second = arith.constant {-big}"
    ext = "" if width == "i32" else "%hw = arith.extsi %h1 : i32 to i64\n"
    h = "%h1" if width == "i32" else "%hw"
    body = f"""%h1 = arith.addi %h, %c1 : i32
      {ext}%n = tile.range %c1 : tensor<4xi32>
      %first = arith.constant {big} : {width}
      {third} : {width}
      %mine = arith.addi {h}, %second : {width}
      %u = arith.{op} %first, %second : {width}
      %p = arith.{op} %first, {h} : {width}
      %q = arith.{op} %mine, {h} : {width}
      %m = tile.map (%n, %first, %p) axes [[0], [], []] : (tensor<4xi32>, {width}, {width}) -> tensor<4x{width}> {{
      ^bb0(%a: i32, %e: {width}, %f: {width}):
        %z = arith.constant 1 : {width}
        {f"%w = arith.extsi %a : i32 to {width}" if width == "i64" else "%zero = arith.constant 0 : i32" + chr(10) + "%w = arith.addi %a, %zero : i32"}
        %d = arith.{op} %e, %w : {width}
        %g = arith.{op} %f, %z : {width}
        %s = arith.xori %d, %g : {width}
        tile.yield %s : {width}
      }}
      %c5 = arith.constant 5 : i32
      %c6 = arith.constant 6 : i32
      tile.store %m, %y[%b, %h, %c0] dims [2] : tensor<4x{width}>, !tile.global<3 x {width}>
      tile.store %u, %y[%b, %h, %c4] dims [] : {width}, !tile.global<3 x {width}>
      tile.store %p, %y[%b, %h, %c5] dims [] : {width}, !tile.global<3 x {width}>
      tile.store %q, %y[%b, %h, %c6] dims [] : {width}, !tile.global<3 x {width}>"""
    y = torch.zeros(2, 3, 7, dtype=torch.int32 if width == "i32" else torch.int64)
    check(program(body, f"%y: !tile.global<3 x {width}>", (1, 3, 2)), [y])


def float_program(expression: str) -> str:
    body = f"""%row = tile.load %x[%b, %h, %c0, %c0] dims [3] : {G4} -> tensor<4xf32>
      {LOAD}
      %mine = tile.load %x[%b, %h, %c1, %c1] dims [] : {G4} -> f32
      %r = tile.map (%t, %row, %mine) axes [[0, 1], [1], []] : (tensor<4x4xf32>, tensor<4xf32>, f32) -> tensor<4x4xf32> {{
      ^bb0(%a: f32, %e: f32, %f: f32):
        %half = arith.constant 0.5 : f32
        {expression}
        tile.yield %out : f32
      }}
      {STORE}"""
    return program(body, XY)


@pytest.mark.parametrize("op", SCALARS["f"])
@pytest.mark.parametrize(("left", "right"), [("a", "e"), ("half", "a"), ("e", "half"), ("f", "half")])
def test_float_op(op: str, left: str, right: str):
    x, y = xy()
    x[0, 0, :4, 0] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0])
    check(float_program(f"%out = arith.{op} %{left}, %{right} : f32"), [x, y])


FUNCTIONS = "absf ceil cos erf exp exp2 expm1 floor log log10 log1p log2 round roundeven rsqrt sin sqrt tan tanh trunc atan sinh cosh cbrt"


@pytest.mark.parametrize("function", FUNCTIONS.split())
def test_float_function(function: str):
    text = f"%p = math.{function} %a : f32\n%m = math.{function} %f : f32\n%out = arith.addf %p, %m : f32"
    x, y = xy()
    check(float_program(text), [x.abs() if function.startswith(("log", "sqrt", "rsqrt")) else x, y], rtol=2e-5)


@pytest.mark.parametrize(
    "predicate",
    ["false", "oeq", "ogt", "oge", "olt", "ole", "one", "ord", "ueq", "ugt", "uge", "ult", "ule", "une", "uno", "true"],
)
def test_float_comparison(predicate: str):
    text = f"%p = arith.cmpf {predicate}, %a, %f : f32\n%out = arith.select %p, %half, %e : f32"
    x, y = xy()
    x[:, :, ::2, 1] = torch.nan
    x[:, :, 1, 1] = x[:, :, 1, 2]
    check(float_program(text), [x, y])


@pytest.mark.parametrize("predicate", ["eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge"])
def test_integer_comparison(predicate: str):
    text = f"""%ia = arith.fptosi %a : f32 to i32
        %j = arith.fptosi %f : f32 to i32
        %p = arith.cmpi {predicate}, %ia, %j : i32
        %k = arith.extsi %p : i1 to i32
        %m = arith.extui %p : i1 to i64
        %k2 = arith.extsi %k : i32 to i64
        %s = arith.subi %k2, %m : i64
        %out = arith.sitofp %s : i64 to f32"""
    x, y = xy()
    check(float_program(text), [x * 3, y])


CASTS = {
    "bitcast": "%p = arith.bitcast %a : f32 to i32\n%out = arith.bitcast %p : i32 to f32",
    "half": "%p = arith.truncf %f : f32 to f16\n%q = arith.extf %p : f16 to f32\n%out = arith.addf %q, %a : f32",
    "bfloat": "%p = arith.truncf %a : f32 to bf16\n%out = arith.extf %p : bf16 to f32",
    "narrow": "%p = arith.fptosi %a : f32 to i64\n%q = arith.trunci %p : i64 to i1\n%r = arith.uitofp %q : i1 to f32\n%out = arith.addf %r, %f : f32",
    "negate": "%p = arith.negf %f : f32\n%out = arith.mulf %p, %a : f32",
    "fma": "%out = math.fma %a, %e, %half : f32",
    "constants_only": "%p = math.exp2 %half : f32\n%q = arith.divf %half, %p : f32\n%out = arith.maximumf %q, %half : f32",
    "choice_of_scalars": "%p = arith.cmpf olt, %f, %half : f32\n%out = arith.select %p, %half, %f : f32",
}


@pytest.mark.parametrize("name", CASTS)
def test_cast(name: str):
    check(float_program(CASTS[name]), xy())


def test_large_choice_is_exact():
    """Choices on bit patterns keep NaN, infinities and signed zeros."""
    from attn_engine.backends.cpu.support import select

    x = torch.randn(64, 512)
    x[0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    condition = torch.rand(1, 512) > 0.5
    condition[:, :4] = True
    for then, otherwise in ((x, -torch.inf), (x, 0.0), (0.0, x), (x, x + 1), (torch.nan, x)):
        got, want = select(condition, then, otherwise), torch.where(condition, then, otherwise)
        assert isinstance(got, torch.Tensor)
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))
