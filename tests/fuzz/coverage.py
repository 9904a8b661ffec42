"""What random cases are made of: every scalar op, reduction, capture rank and number of loops must be common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from attn_engine.dialects import attn
from attn_engine.passes.attn_derive_online import explain
from tests.fuzz.check import inputs_of, traced_of
from tests.fuzz.grammar import Case

SHARE = 0.02
ENOUGH = 400
"""With fewer cases a share of 2 % says little."""

_ARITH = (
    "addf addi andi cmpf cmpi divf floordivsi fptosi maximumf maxsi minimumf minsi mulf muli negf ori select shli "
    "shrsi sitofp subf subi uitofp xori"
)
_MATH = "absf ceil cos erf exp exp2 expm1 floor log log1p log2 powf roundeven rsqrt sin sqrt tanh trunc"
EXPECTED = (
    *(f"arith.{name}" for name in _ARITH.split()),
    *(f"math.{name}" for name in _MATH.split()),
    *("reduce sum", "reduce count", "reduce max split", "reduce max first", "reduce min split", "reduce min first"),
    *(f"capture of rank {rank}" for rank in range(5)),
    *(f"loops {count}" for count in (1, 2, 3, 4)),
)


def features(case: Case) -> set[str]:
    """Ops, reductions, ranks of captures and the number of forward loops of a case, after tracing."""
    module = traced_of(case, inputs_of(case)[1]).module
    attention = next(op for op in module.walk() if isinstance(op, attn.AttentionOp))
    found = {op.name for op in attention.walk() if op.name.startswith(("arith.", "math."))}
    reductions = [op for op in attention.walk() if isinstance(op, attn.RowReduceOp)]
    found |= {f"reduce {op.kind.data}" + (f" {op.ties.data}" if op.ties else "") for op in reductions}
    found |= {f"capture of rank {c.type.get_num_dims()}" for c in attention.captures}  # type: ignore[attr-defined]
    return found | {f"loops {explain(attention).passes}"}


@dataclass
class Coverage:
    """Counts over the cases that were compared."""

    cases: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, found: Iterable[str]) -> None:
        self.cases += 1
        self.counts.update(set(found))

    def rare(self) -> list[str]:
        """What is expected and in fewer than 2 % of the cases."""
        return [f"{name} ({self.counts[name]})" for name in EXPECTED if self.counts[name] < SHARE * self.cases]

    def report(self) -> str:
        rarest = sorted(EXPECTED, key=lambda name: self.counts[name])[:6]
        shown = ", ".join(f"{name} {100 * self.counts[name] / max(1, self.cases):.1f} %" for name in rarest)
        return f"{len(EXPECTED)} kinds of ops, reductions, captures and loops; the rarest: {shown}"
