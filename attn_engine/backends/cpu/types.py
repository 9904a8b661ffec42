"""How types and scalar ops are spelled in torch.

A scalar of the IR is a Python number where every program has the same, else a tensor [z, y]; in a map
it may be either. `Python` spellings work on both; `Torch` spellings need tensors, so that the emitter
wraps what may be a number.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects import arith, math
from xdsl.ir import Attribute, Operation

from attn_engine.backends.plan_python import TORCH_DTYPES


def dtype_of(type_: Attribute) -> str:
    """The torch dtype of a scalar type, as text."""
    return TORCH_DTYPES[str(type_)]


@dataclass(frozen=True)
class Python:
    """An expression that works on numbers and tensors alike."""

    text: str


@dataclass(frozen=True)
class Torch:
    """An expression on tensors."""

    text: str


@dataclass(frozen=True)
class Wrapping:
    """Integer arithmetic that wraps at its width; `i1` is the spelling for i1."""

    text: str
    i1: str


Spelling = Python | Torch | Wrapping

SPELLINGS: dict[type[Operation], Spelling] = {
    arith.AddiOp: Wrapping("{0} + {1}", "{0} ^ {1}"),
    arith.SubiOp: Wrapping("{0} - {1}", "{0} ^ {1}"),
    arith.MuliOp: Wrapping("{0} * {1}", "{0} & {1}"),
    arith.ShLIOp: Wrapping("{0} << {1}", "{0} & ({1} ^ True)"),
    arith.ShRSIOp: Python("{0} >> {1}"),
    arith.ShRUIOp: Python("shrui({0}, {1}, {bits})"),
    arith.DivSIOp: Python("divsi({0}, {1})"),
    arith.FloorDivSIOp: Python("floordivsi({0}, {1})"),
    arith.CeilDivSIOp: Python("-floordivsi(-{0}, {1})"),
    arith.RemSIOp: Python("remsi({0}, {1})"),
    arith.MinSIOp: Python("minsi({0}, {1})"),
    arith.MaxSIOp: Python("maxsi({0}, {1})"),
    arith.AndIOp: Python("{0} & {1}"),
    arith.OrIOp: Python("{0} | {1}"),
    arith.XOrIOp: Python("{0} ^ {1}"),
    arith.AddfOp: Python("{0} + {1}"),
    arith.SubfOp: Python("{0} - {1}"),
    arith.MulfOp: Python("{0} * {1}"),
    arith.DivfOp: Torch("{0} / {1}"),
    arith.NegfOp: Python("-{0}"),
    arith.MaximumfOp: Torch("torch.maximum({0}, {1})"),
    arith.MinimumfOp: Torch("torch.minimum({0}, {1})"),
    arith.MaxnumfOp: Torch("torch.fmax({0}, {1})"),
    arith.MinnumfOp: Torch("torch.fmin({0}, {1})"),
    arith.ExtFOp: Python("cast({0}, {dtype})"),
    arith.TruncFOp: Python("cast({0}, {dtype})"),
    arith.ExtSIOp: Python("extsi({0}, {dtype})"),
    arith.ExtUIOp: Python("extui({0}, {dtype})"),
    arith.TruncIOp: Python("trunci({0}, {dtype})"),
    arith.SIToFPOp: Python("sitofp({0}, {dtype})"),
    arith.UIToFPOp: Python("cast(extui({0}, torch.int64), {dtype})"),
    arith.FPToSIOp: Python("cast({0}, {dtype})"),
    arith.BitcastOp: Torch("{0}.view({dtype})"),
    math.AbsFOp: Python("abs({0})"),
    math.AbsIOp: Python("abs({0})"),
    math.AcosOp: Torch("torch.acos({0})"),
    math.AcoshOp: Torch("torch.acosh({0})"),
    math.AsinOp: Torch("torch.asin({0})"),
    math.AsinhOp: Torch("torch.asinh({0})"),
    math.AtanOp: Torch("torch.atan({0})"),
    math.AtanhOp: Torch("torch.atanh({0})"),
    math.Atan2Op: Torch("torch.atan2({0}, {1})"),
    math.CeilOp: Torch("torch.ceil({0})"),
    math.CopySignOp: Torch("torch.copysign({0}, {1})"),
    math.CosOp: Torch("torch.cos({0})"),
    math.CoshOp: Torch("torch.cosh({0})"),
    math.ErfOp: Torch("torch.erf({0})"),
    math.ExpOp: Torch("torch.exp({0})"),
    math.Exp2Op: Torch("torch.exp2({0})"),
    math.ExpM1Op: Torch("torch.expm1({0})"),
    math.FloorOp: Torch("torch.floor({0})"),
    math.FPowIOp: Torch("torch.pow({0}, {1})"),
    math.IPowIOp: Torch("torch.pow({0}, {1})"),
    math.LogOp: Torch("torch.log({0})"),
    math.Log10Op: Torch("torch.log10({0})"),
    math.Log1pOp: Torch("torch.log1p({0})"),
    math.Log2Op: Torch("torch.log2({0})"),
    math.PowFOp: Torch("torch.pow({0}, {1})"),
    math.RoundEvenOp: Torch("torch.round({0})"),
    math.RsqrtOp: Torch("torch.rsqrt({0})"),
    math.SinOp: Torch("torch.sin({0})"),
    math.SinhOp: Torch("torch.sinh({0})"),
    math.SqrtOp: Torch("torch.sqrt({0})"),
    math.TanOp: Torch("torch.tan({0})"),
    math.TanhOp: Torch("torch.tanh({0})"),
    math.TruncOp: Torch("torch.trunc({0})"),
}

# Spellings that can write into the memory of an operand: `{out}` is that operand or None. The operands must be
# tensors, except the second of arithmetic.
IN_PLACE: dict[type[Operation], str] = {
    arith.AddfOp: "torch.add({0}, {1}, out={out})",
    arith.SubfOp: "torch.sub({0}, {1}, out={out})",
    arith.MulfOp: "torch.mul({0}, {1}, out={out})",
    arith.DivfOp: "torch.div({0}, {1}, out={out})",
    arith.MaximumfOp: "torch.maximum({0}, {1}, out={out})",
    arith.MinimumfOp: "torch.minimum({0}, {1}, out={out})",
    arith.NegfOp: "torch.neg({0}, out={out})",
    math.ExpOp: "torch.exp({0}, out={out})",
    math.Exp2Op: "torch.exp2({0}, out={out})",
    math.LogOp: "torch.log({0}, out={out})",
    math.Log2Op: "torch.log2({0}, out={out})",
    math.SqrtOp: "torch.sqrt({0}, out={out})",
    math.RsqrtOp: "torch.rsqrt({0}, out={out})",
    math.TanhOp: "torch.tanh({0}, out={out})",
    math.ErfOp: "torch.erf({0}, out={out})",
    math.AbsFOp: "torch.abs({0}, out={out})",
}

# By predicate number. Negation is `^ True`, which is right for a bool and for a bool tensor.
INTEGER_COMPARISONS = ("{0} == {1}", "{0} != {1}", "{0} < {1}", "{0} <= {1}", "{0} > {1}", "{0} >= {1}")
FLOAT_COMPARISONS = (
    "({0} != {0}) & False",
    "{0} == {1}",
    "{0} > {1}",
    "{0} >= {1}",
    "{0} < {1}",
    "{0} <= {1}",
    "({0} < {1}) | ({0} > {1})",
    "({0} == {0}) & ({1} == {1})",
    "({0} < {1}) ^ ({0} > {1}) ^ True",
    "({0} <= {1}) ^ True",
    "({0} < {1}) ^ True",
    "({0} >= {1}) ^ True",
    "({0} > {1}) ^ True",
    "{0} != {1}",
    "({0} != {0}) | ({1} != {1})",
    "({0} == {0}) | True",
)


def bits_of(type_: Attribute) -> int:
    """The width of an integer type; 0 for others."""
    name = str(type_)
    return int(name[1:]) if name[0] == "i" and name[1:].isdigit() else 0
