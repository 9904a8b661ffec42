"""Scalar code on tensors: integers are exact, NaN propagates, and zero gradients stay zero."""

import math

import pytest
import torch
from xdsl.dialects import arith, func
from xdsl.dialects import math as math_dialect
from xdsl.dialects.builtin import f64

from attn_engine.interpreters.autograd import extremum
from attn_engine.interpreters.scalar import SCALAR_OPS, NoMeaningError, exact_dtype, oracle_dtypes, run_region
from tests.support.attn_cases import parse

NAN, INF = float("nan"), float("inf")
INTS = [-(2**63), -7, -2, -1, 0, 1, 2, 7, 2**63 - 1]


def run(body, *args, dtype_of=None):
    """Evaluates `body` on tensors named %a, %b, ...; it ends in func.return."""
    names = {torch.float64: "f32", torch.float32: "f32", torch.int64: "i64", torch.int32: "i32", torch.bool: "i1"}
    signature = ", ".join(f"%{'abc'[i]}: {names[x.dtype]}" for i, x in enumerate(args))
    return run_region(block_of(f"func.func @f({signature}) -> {body.split()[-1]} {{\n{body}\n}}"), args, dtype_of)[0]


def block_of(text):
    return next(op for op in parse(text).walk() if isinstance(op, func.FuncOp)).body.block


def binary(op, a, b, type_, result=None):
    return run(f"%r = {op} %a, %b : {type_}\nfunc.return %r : {result or type_}", a, b)


@pytest.mark.parametrize(
    ("op", "python"),
    [
        ("arith.floordivsi", lambda a, b: a // b),
        ("arith.divsi", lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)),
        ("arith.remsi", lambda a, b: int(math.copysign(1, a)) * (abs(a) % abs(b))),
        ("arith.ceildivsi", lambda a, b: -(-a // b)),
        ("arith.divui", lambda a, b: a % 2**64 // (b % 2**64)),
        ("arith.remui", lambda a, b: a % 2**64 % (b % 2**64)),
        ("arith.minsi", min),
        ("arith.maxui", lambda a, b: max(a % 2**64, b % 2**64)),
        ("arith.addi", lambda a, b: a + b),
        ("arith.muli", lambda a, b: a * b),
        ("arith.xori", lambda a, b: a ^ b),
    ],
)
def test_integers_are_exact(op, python):
    pairs = [(a, b) for a in INTS for b in INTS if b and (a, b) != (-(2**63), -1) and a != -(2**63)]
    a, b = (torch.tensor(x) for x in zip(*pairs, strict=True))
    wrapped = [(python(x, y) + 2**63) % 2**64 - 2**63 for x, y in pairs]
    assert binary(op, a, b, "i64").tolist() == wrapped


def test_a_quotient_by_zero_is_no_trap():
    a, b = torch.tensor([5, 6]), torch.tensor([0, 3])
    for op in ("arith.divsi", "arith.floordivsi", "arith.ceildivsi", "arith.divui"):
        assert binary(op, a, b, "i64")[1] == 2
    assert binary("arith.remsi", a, b, "i64")[1] == 0


@pytest.mark.parametrize("name", ["eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge"])
def test_integer_comparisons(name):
    compare = {"eq": "__eq__", "ne": "__ne__", "lt": "__lt__", "le": "__le__", "gt": "__gt__", "ge": "__ge__"}
    a, b = (x.reshape(-1) for x in torch.meshgrid(torch.tensor(INTS), torch.tensor(INTS), indexing="ij"))
    bits = 2**64 if name[0] == "u" else None
    method = compare.get(name) or compare[name[1:]]
    plain = [(x % bits, y % bits) if bits else (x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    want = [getattr(x, method)(y) for x, y in plain]
    assert binary(f"arith.cmpi {name},", a, b, "i64", "i1").tolist() == want


@pytest.mark.parametrize(
    ("name", "values", "with_nan"),
    [
        ("oeq", [False, True, False], False),
        ("one", [True, False, True], False),
        ("olt", [True, False, False], False),
        ("oge", [False, True, True], False),
        ("ord", [True, True, True], False),
        ("une", [True, False, True], True),
        ("ueq", [False, True, False], True),
        ("ugt", [False, False, True], True),
        ("ule", [True, True, False], True),
        ("uno", [False, False, False], True),
    ],
)
def test_float_comparisons(name, values, with_nan):
    a, b = torch.tensor([1.0, 2.0, 3.0, NAN, 1.0]), torch.tensor([2.0, 2.0, 2.0, 1.0, NAN])
    assert binary(f"arith.cmpf {name},", a, b, "f32", "i1").tolist() == [*values, with_nan, with_nan]


def test_extrema_propagate_nan_or_ignore_it():
    a, b = torch.tensor([1.0, NAN, 3.0]), torch.tensor([2.0, 2.0, NAN])
    assert binary("arith.maximumf", a, b, "f32").isnan().tolist() == [False, True, True]
    assert binary("arith.minimumf", a, b, "f32").isnan().tolist() == [False, True, True]
    assert binary("arith.maxnumf", a, b, "f32").tolist() == [2.0, 2.0, 3.0]


def test_casts():
    bits = torch.tensor([True, False])
    assert run("%r = arith.extsi %a : i1 to i64\nfunc.return %r : i64", bits).tolist() == [-1, 0]
    assert run("%r = arith.extui %a : i1 to i64\nfunc.return %r : i64", bits).tolist() == [1, 0]
    assert run("%r = arith.uitofp %a : i1 to f32\nfunc.return %r : f32", bits).tolist() == [1.0, 0.0]
    assert run("%r = arith.sitofp %a : i1 to f32\nfunc.return %r : f32", bits).tolist() == [-1.0, 0.0]
    reals = torch.tensor([-1.7, 1.7])
    assert run("%r = arith.fptosi %a : f32 to i64\nfunc.return %r : i64", reals).tolist() == [-1, 1]
    minus = torch.tensor([-1])
    assert run("%r = arith.uitofp %a : i64 to f32\nfunc.return %r : f32", minus).tolist() == [2.0**64]
    narrow = torch.tensor([-1], dtype=torch.int32)
    assert run("%r = arith.extui %a : i32 to i64\nfunc.return %r : i64", narrow).tolist() == [2**32 - 1]


def test_floats_are_real_numbers_or_what_their_type_says():
    body = "%h = arith.truncf %a : f32 to f16\n%r = arith.extf %h : f16 to f32\nfunc.return %r : f32"
    third = torch.tensor([1 / 3], dtype=torch.float64)
    assert run(body, third).tolist() == [1 / 3]
    single = third.float()
    assert run(body, single, dtype_of=exact_dtype).tolist() == [single.half().item()]
    assert oracle_dtypes(torch.float32)(f64) == torch.float32


def test_indices_count_from_the_end_and_never_leave_the_tensor():
    source = torch.tensor([10.0, 20.0, 30.0])
    block = block_of(
        "func.func @f(%t: tensor<?xf16>, %i: i64) -> f32 {\n%r = attn.load %t[%i] : tensor<?xf16> -> f32\n"
        "func.return %r : f32\n}"
    )
    index = torch.tensor([0, -1, -3, 99, -99])
    (loaded,) = run_region(block, [source.half(), index])
    assert loaded.dtype == torch.float64
    assert loaded.tolist() == [10.0, 30.0, 10.0, 30.0, 10.0]
    assert run_region(block, [torch.empty(0), index])[0].tolist() == [0.0] * 5


FINITE_BRANCHES = [
    ("math.log", 0.0),
    ("math.log", -1.0),
    ("math.sqrt", 0.0),
    ("math.rsqrt", 0.0),
    ("math.exp", 1000.0),
    ("math.acos", 1.0),
    ("math.cbrt", 0.0),
]


@pytest.mark.parametrize(("op", "at"), FINITE_BRANCHES)
def test_the_branch_not_taken_leaks_nothing(op, at):
    body = f"""
    %zero = arith.constant 0.0 : f32
    %y = {op} %a : f32
    %r = arith.select %b, %y, %zero : f32
    func.return %r : f32"""
    x = torch.tensor([at, 0.5], dtype=torch.float64, requires_grad=True)
    result = run(body, x, torch.tensor([False, True]))
    (grad,) = torch.autograd.grad(result.sum(), x)
    assert grad[0] == 0 and grad[1] != 0 and torch.isfinite(grad[1])


@pytest.mark.parametrize("op", ["mulf", "divf", "addf", "maximumf"])
def test_gradients_of_broadcast_operands_are_summed(op):
    a = torch.randn(3, 1, dtype=torch.float64, requires_grad=True)
    b = torch.rand(1, 4, dtype=torch.float64).add(1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, y: binary(f"arith.{op}", x, y, "f32"), (a, b))


def test_kinks_follow_torch():
    x = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.grad(run("%r = math.absf %a : f32\nfunc.return %r : f32", x), x)[0] == 0
    y = torch.zeros(1, dtype=torch.float64)
    assert torch.autograd.grad(binary("arith.maximumf", x, y, "f32"), x)[0] == 0.5


def test_a_tied_extremum_of_a_dead_row_has_no_gradient():
    x = torch.tensor([[NAN, 1.0], [INF, INF]], dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(extremum(x, True, True)[:, 0], x, torch.zeros(2, dtype=torch.float64))
    assert (grad == 0).all()


@pytest.mark.parametrize(
    ("op", "value", "want"),
    [("round", 2.5, 3.0), ("roundeven", 2.5, 2.0), ("round", -0.5, -1.0), ("trunc", -1.5, -1.0), ("cbrt", -8.0, -2.0)],
)
def test_roundings(op, value, want):
    assert run(f"%r = math.{op} %a : f32\nfunc.return %r : f32", torch.tensor([value])).item() == pytest.approx(want)


def test_every_op_of_arith_and_math_is_there_but_a_few():
    known = {op.name for op in SCALAR_OPS}
    every = {op.name for dialect in (arith.Arith, math_dialect.Math) for op in dialect.operations}
    assert every - known == {
        "arith.addui_extended",
        "arith.mului_extended",
        "arith.mulsi_extended",
        "math.ctlz",
        "math.cttz",
        "math.ctpop",
    }


def test_what_has_no_meaning_is_named():
    with pytest.raises(NoMeaningError, match=r"'math\.ctpop' is not scalar code"):
        run("%r = math.ctpop %a : i64\nfunc.return %r : i64", torch.tensor([1]))
