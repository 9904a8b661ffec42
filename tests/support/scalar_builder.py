"""Attentions from Python expressions: `row=lambda s, at: softmax(s)` becomes the IR of a row function.

Only for tests that need many functions in few lines; every operator is one operation, nothing is simplified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xdsl.dialects import arith, func, math
from xdsl.dialects.builtin import DYNAMIC_INDEX, FloatAttr, IntegerAttr, ModuleOp, TensorType, f32, i64
from xdsl.ir import Block, Operation, Region, SSAValue

from attn_engine.dialects import attn

UNARY: dict[str, Callable[[SSAValue], Operation]] = {
    "exp": math.ExpOp,
    "exp2": math.Exp2Op,
    "expm1": math.ExpM1Op,
    "log": math.LogOp,
    "log1p": math.Log1pOp,
    "log2": math.Log2Op,
    "sqrt": math.SqrtOp,
    "rsqrt": math.RsqrtOp,
    "tanh": math.TanhOp,
    "sin": math.SinOp,
    "cos": math.CosOp,
    "erf": math.ErfOp,
    "abs": math.AbsFOp,
    "floor": math.FloorOp,
    "atan": math.AtanOp,
    "cbrt": math.CbrtOp,
}
REDUCTIONS = {
    "sum": attn.ReduceKind.SUM,
    "max": attn.ReduceKind.MAX,
    "min": attn.ReduceKind.MIN,
    "count": attn.ReduceKind.COUNT,
}


class Value:
    """A scalar under construction; numbers become constants of the other side's type."""

    def __init__(self, block: Block, value: SSAValue):
        self.block = block
        self.value = value

    def make(self, op: Operation) -> Value:
        self.block.add_op(op)
        return Value(self.block, op.results[0])

    def other(self, x: Any) -> SSAValue:
        if isinstance(x, Value):
            return x.value
        number = FloatAttr(x, f32) if self.value.type == f32 else IntegerAttr(x, self.value.type)  # type: ignore[arg-type]
        return self.make(arith.ConstantOp(number)).value

    def binary(self, other: Any, real: Any, whole: Any) -> Value:
        return self.make((real if self.value.type == f32 else whole)(self.value, self.other(other)))

    def __add__(self, x: Any) -> Value:
        return self.binary(x, arith.AddfOp, arith.AddiOp)

    def __sub__(self, x: Any) -> Value:
        return self.binary(x, arith.SubfOp, arith.SubiOp)

    def __mul__(self, x: Any) -> Value:
        return self.binary(x, arith.MulfOp, arith.MuliOp)

    def __truediv__(self, x: Any) -> Value:
        return self.binary(x, arith.DivfOp, arith.DivSIOp)

    def __pow__(self, x: Any) -> Value:
        return self.binary(x, math.PowFOp, math.IPowIOp)

    def __radd__(self, x: Any) -> Value:
        return Value(self.block, self.other(x)) + self

    def __rsub__(self, x: Any) -> Value:
        return Value(self.block, self.other(x)) - self

    def __rmul__(self, x: Any) -> Value:
        return Value(self.block, self.other(x)) * self

    def __rtruediv__(self, x: Any) -> Value:
        return Value(self.block, self.other(x)) / self

    def __neg__(self) -> Value:
        return self.make(arith.NegfOp(self.value))

    def __and__(self, x: Value) -> Value:
        return self.make(arith.AndIOp(self.value, x.value))

    def compare(self, x: Any, real: str, whole: str) -> Value:
        if self.value.type == f32:
            return self.make(arith.CmpfOp(self.value, self.other(x), real))
        return self.make(arith.CmpiOp(self.value, self.other(x), whole))

    def __gt__(self, x: Any) -> Value:
        return self.compare(x, "ogt", "sgt")

    def __ge__(self, x: Any) -> Value:
        return self.compare(x, "oge", "sge")

    def __lt__(self, x: Any) -> Value:
        return self.compare(x, "olt", "slt")

    def equals(self, x: Any) -> Value:
        return self.compare(x, "oeq", "eq")

    def where(self, a: Any, b: Any) -> Value:
        model = a if isinstance(a, Value) else b
        a, b = (x.value if isinstance(x, Value) else model.other(x) for x in (a, b))
        return self.make(arith.SelectOp(self.value, a, b))

    def maximum(self, x: Any) -> Value:
        return self.make(arith.MaximumfOp(self.value, self.other(x)))

    def minimum(self, x: Any) -> Value:
        return self.make(arith.MinimumfOp(self.value, self.other(x)))

    def real(self) -> Value:
        return self.make(arith.SIToFPOp(self.value, f32))

    def reduce(self, kind: str, ties: attn.TieRule | None = None) -> Value:
        return self.make(attn.RowReduceOp(REDUCTIONS[kind], self.value, ties))

    def __getitem__(self, indices: Any) -> Value:
        indices = indices if isinstance(indices, tuple) else (indices,)
        element = self.value.type.element_type  # type: ignore[union-attr]
        result = f32 if element == f32 else element
        return self.make(attn.LoadOp(self.value, [i.value for i in indices], result))

    def __getattr__(self, name: str) -> Callable[[], Value]:
        if name in UNARY:
            return lambda: self.make(UNARY[name](self.value))
        if name in REDUCTIONS:
            return lambda: self.reduce(name)
        raise AttributeError(name)


class At:
    """Where a scalar stands: b, h, q, kv and the captures c."""

    def __init__(self, indices: Sequence[Value], captures: Sequence[Value]):
        self.b, self.h, self.q, self.kv = indices
        self.c = list(captures)


def region(leading: int, captures: Sequence[TensorType[Any]], function: Callable[..., Any]) -> Region:
    """A region of `leading` f32, four indices and captures, from `function(*leading, at)`."""
    block = Block(arg_types=[*[f32] * leading, *[i64] * 4, *captures])
    values = [Value(block, a) for a in block.args]
    found = function(*values[:leading], At(values[leading : leading + 4], values[leading + 4 :]))
    results = found if isinstance(found, tuple) else (found,)
    results = [r if isinstance(r, Value) else values[0].make(arith.ConstantOp(FloatAttr(r, f32))) for r in results]
    block.add_op(attn.YieldOp(*(r.value for r in results)))
    return Region(block)


def attention(
    row: Callable[..., Any],
    score_mod: Callable[..., Any] | None = None,
    mask: Callable[..., Any] | None = None,
    captures: Sequence[int] = (),
    integers: Sequence[int] = (),
    **mods: Callable[..., Any],
) -> ModuleOp:
    """func.func @attention of f32 tensors; `captures` are ranks, `integers` the positions of those that are i64."""
    wide, rows = ([DYNAMIC_INDEX] * n for n in (4, 3))
    tensor = TensorType(f32, wide)
    types = [TensorType(i64 if i in integers else f32, [DYNAMIC_INDEX] * rank) for i, rank in enumerate(captures)]
    body = region(1, types, row)
    outputs = [TensorType(f32, rows)] * (len(body.block.last_op.operands) - 1)  # type: ignore[union-attr]
    optional = [[region(1, types, f)] if (f := mods.get(f"{n}_mod")) else [] for n in ("query", "key", "value")]
    optional.append([region(1, types, score_mod)] if score_mod else [])
    optional.append([region(0, types, mask)] if mask else [])
    block = Block(arg_types=[tensor, tensor, tensor, f32, *types])
    for argument, name in zip(block.args, ("q", "k", "v", "scale", *(f"c{i}" for i in range(len(types)))), strict=True):
        argument.name_hint = name
    op = attn.AttentionOp(
        operands=[*block.args[:4], list(block.args[4:])],
        result_types=[tensor, outputs, []],
        regions=[*optional, body, *([] for _ in range(5))],
    )
    block.add_ops([op, func.ReturnOp(*op.results)])
    function = func.FuncOp("attention", ([a.type for a in block.args], [r.type for r in op.results]), Region(block))
    module = ModuleOp([function])
    module.verify()
    return module
