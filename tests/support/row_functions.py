"""Row functions written as Python expressions, printed as the `row` region of an attention.

`attention(lambda r, s: r.exp(s) / r.sum(r.exp(s)))` is a parsed module. Its scores are the capture
`scores[q, kv]`, its mask the capture `visible[q, kv]`; `r.per_key` and `r.per_row` are captured numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from xdsl.dialects.builtin import ModuleOp
from xdsl.parser import Parser

from attn_engine.universe import make_context

CAPTURES = {
    "scores": "tensor<?x?xf32>",
    "visible": "tensor<?x?xi1>",
    "keys": "tensor<?xf32>",
    "rows": "tensor<?xf32>",
}


@dataclass(frozen=True)
class Value:
    row: Row
    name: str

    def __add__(self, other):
        return self.row.op("arith.addf", self, other)

    def __radd__(self, other):
        return self.row.op("arith.addf", other, self)

    def __sub__(self, other):
        return self.row.op("arith.subf", self, other)

    def __rsub__(self, other):
        return self.row.op("arith.subf", other, self)

    def __mul__(self, other):
        return self.row.op("arith.mulf", self, other)

    def __rmul__(self, other):
        return self.row.op("arith.mulf", other, self)

    def __truediv__(self, other):
        return self.row.op("arith.divf", self, other)

    def __rtruediv__(self, other):
        return self.row.op("arith.divf", other, self)

    def __neg__(self):
        return self.row.op("arith.negf", self)

    def __pow__(self, other):
        return self.row.op("math.powf", self, other)

    def __gt__(self, other):
        return self.row.compare("ogt", self, other)

    def equals(self, other):
        return self.row.compare("oeq", self, other)


@dataclass
class Row:
    lines: list[str] = field(default_factory=list)

    def emit(self, text: str) -> Value:
        name = f"%v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return Value(self, name)

    def value(self, x) -> Value:
        if isinstance(x, Value):
            return x
        text = {float("-inf"): "0xFF800000", float("inf"): "0x7F800000"}.get(x) or f"{x:.9e}"
        return self.emit(f"arith.constant {text} : f32")

    def op(self, name: str, *args) -> Value:
        names = ", ".join(self.value(a).name for a in args)
        return self.emit(f"{name} {names} : f32")

    def compare(self, predicate: str, a, b) -> Value:
        return self.emit(f"arith.cmpf {predicate}, {self.value(a).name}, {self.value(b).name} : f32")

    def select(self, condition: Value, a, b) -> Value:
        return self.emit(f"arith.select {condition.name}, {self.value(a).name}, {self.value(b).name} : f32")

    def reduce(self, kind: str, x) -> Value:
        return self.emit(f"attn.row_reduce {kind} {self.value(x).name}")

    def max(self, x) -> Value:
        return self.reduce("max", x)

    def min(self, x) -> Value:
        return self.reduce("min", x)

    def sum(self, x) -> Value:
        return self.reduce("sum", x)

    def count(self, x) -> Value:
        return self.reduce("count", x)

    def exp(self, x) -> Value:
        return self.op("math.exp", x)

    def exp2(self, x) -> Value:
        return self.op("math.exp2", x)

    def log(self, x) -> Value:
        return self.op("math.log", x)

    def log2(self, x) -> Value:
        return self.op("math.log2", x)

    def log1p(self, x) -> Value:
        return self.op("math.log1p", x)

    def sqrt(self, x) -> Value:
        return self.op("math.sqrt", x)

    def rsqrt(self, x) -> Value:
        return self.op("math.rsqrt", x)

    def abs(self, x) -> Value:
        return self.op("math.absf", x)

    def tanh(self, x) -> Value:
        return self.op("math.tanh", x)

    def maximum(self, a, b) -> Value:
        return self.op("arith.maximumf", a, b)

    def minimum(self, a, b) -> Value:
        return self.op("arith.minimumf", a, b)

    @property
    def per_key(self) -> Value:
        return self.emit("attn.load %keys_[%kv] : tensor<?xf32> -> f32")

    @property
    def per_row(self) -> Value:
        return self.emit("attn.load %rows_[%qi] : tensor<?xf32> -> f32")


def attention(function: Callable, outputs: int | None = None) -> ModuleOp:
    """A module with one attention; the function gives p or (p, row values...). `outputs` of these are outputs."""
    row = Row()
    results = function(row, Value(row, "%s"))
    p, *values = results if isinstance(results, tuple) else (results,)
    outputs = len(values) if outputs is None else outputs
    vector = "tensor<?x?x?xf32>"

    def types(word: str, number: int) -> str:
        return f" {word} {', '.join([vector] * number)}" if number else ""

    captures = "".join(f", %{n}_: {t}" for n, t in CAPTURES.items())
    names = ", ".join(["%o", *(f"%r{i}" for i in range(len(values)))])
    returned = ", ".join(["tensor<?x?x?x?xf32>", *[vector] * len(values)])
    yielded = ", ".join(v.name for v in (p, *values))
    body = "\n    ".join(row.lines)
    text = f"""
func.func @attention(%q: tensor<?x?x?x?xf32>, %k: tensor<?x?x?x?xf32>, %v: tensor<?x?x?x?xf32>, %scale: f32{", ".join(["", *(f"%{n}: {t}" for n, t in CAPTURES.items())])}) -> ({returned}) {{
  {names} = attn.attention %q, %k, %v scale %scale captures {", ".join(f"%{n}" for n in CAPTURES)} : tensor<?x?x?x?xf32>, tensor<?x?x?x?xf32>, tensor<?x?x?x?xf32> captures {", ".join(CAPTURES.values())} -> tensor<?x?x?x?xf32>{types("outputs", outputs)}{types("saved", len(values) - outputs)} score_mod {{
  ^bb0(%x: f32, %b: i64, %h: i64, %qi: i64, %kv: i64{captures}):
    %y = attn.load %scores_[%qi, %kv] : tensor<?x?xf32> -> f32
    attn.yield %y : f32
  }} mask {{
  ^bb0(%b: i64, %h: i64, %qi: i64, %kv: i64{captures}):
    %y = attn.load %visible_[%qi, %kv] : tensor<?x?xi1> -> i1
    attn.yield %y : i1
  }} row {{
  ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64{captures}):
    {body}
    attn.yield {yielded} : {", ".join(["f32"] * (1 + len(values)))}
  }}
  func.return {names} : {returned}
}}
"""
    module = Parser(make_context(), text).parse_module()
    module.verify()
    return module


INF = float("inf")
KEYS = 11


def hard_rows(keys: int = KEYS, magnitude: float = 3.0) -> Tensor:
    """Scores that break what only looks right: order, ties, a late maximum, infinities, offsets."""
    generator = torch.Generator().manual_seed(5)

    def normal() -> Tensor:
        return magnitude * torch.randn(keys, generator=generator, dtype=torch.float64)

    late, holes, early = normal(), normal(), normal()
    late[-1] += 40.0
    early[: keys // 2] = -INF
    holes[::3] = -INF
    return torch.stack(
        [
            normal().sort().values,
            normal().sort(descending=True).values,
            torch.full((keys,), 0.7, dtype=torch.float64),
            late,
            holes,
            early,
            torch.full((keys,), -INF, dtype=torch.float64),
            normal() - 300.0,
            normal() + 300.0,
            -normal().abs(),
            torch.zeros(keys, dtype=torch.float64),
            normal(),
        ]
    )


def inputs(scores: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """(q, k, v) and the captures: every row of scores with all keys visible, with some, and with none."""
    generator = torch.Generator().manual_seed(7)
    rows, keys = scores.shape
    some = torch.rand(rows, keys, generator=generator) < 0.6
    visible = torch.cat([torch.ones(rows, keys, dtype=torch.bool), some, torch.zeros(1, keys, dtype=torch.bool)])
    table = torch.cat([scores, scores, scores[-1:]])
    q = torch.zeros(1, 1, len(table), 1, dtype=torch.float64)
    k = torch.zeros(1, 1, keys, 1, dtype=torch.float64)
    v = torch.randn(1, 1, keys, 2, generator=generator, dtype=torch.float64)
    per_key = torch.rand(keys, generator=generator, dtype=torch.float64) + 0.5
    per_row = torch.rand(len(table), generator=generator, dtype=torch.float64) + 0.5
    return [q, k, v], [table, visible, per_key, per_row]
