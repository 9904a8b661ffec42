"""From an offline row function to states, loops and an epilogue: the decisions of derive-online.

Every reduction becomes a *state*, carried through one loop over the keys. A reduction belongs to
the loop of the reductions that it reads where `attn_engine.ir.separation` proves its argument
one-pass, else to the next one. The weight of the values is the last node, in the last loop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import networkx as nx
from xdsl.dialects import arith
from xdsl.dialects.builtin import FloatAttr
from xdsl.ir import Block, Operation, SSAValue

from attn_engine.dialects.attn import ReduceKind, RowReduceOp
from attn_engine.errors import RowValueError
from attn_engine.ir.algebra import Algebra, add, make_sum, scale
from attn_engine.ir.autodiff.graph import IDENTITY
from attn_engine.ir.dead_rows import tells_dead_rows
from attn_engine.ir.expression import GROUP, ONE, Atom, Key, Sum, show, show_atom
from attn_engine.ir.normal_form import NormalForms
from attn_engine.ir.separation import Refusal, Separation, describe, separate, separate_extremum
from attn_engine.ir.value_range import value_range

WEIGHT = "weight"


@dataclass(frozen=True)
class State:
    """A number per row, carried through loop `level`: the reduction of a separated element."""

    atom: Atom
    kind: ReduceKind
    level: int
    separation: Separation
    detects_dead_rows: bool


@dataclass(frozen=True)
class Verdict:
    """Why a node (a reduction or the weight) stands in its loop."""

    node: str
    level: int
    one_pass: bool
    detail: str
    culprit: str = ""


@dataclass(frozen=True)
class OnlineReport:
    """What derive-online proved about one row function, as text."""

    reductions: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    passes: int
    rescale: tuple[str, ...]
    epilogue: str

    def __str__(self) -> str:
        lines = [f"{self.passes} loop{'s' if self.passes > 1 else ''} over the keys"]
        for v in self.verdicts:
            reason = "" if v.one_pass else f" (not earlier: {v.detail}: {v.culprit})"
            lines.append(f"  loop {v.level}: {v.node}{reason}")
        lines.append(f"  rescaled by: {', '.join(self.rescale) or 'nothing'}")
        lines.append(f"  epilogue: {self.epilogue}")
        return "\n".join(lines)


@dataclass
class OnlinePlan:
    """States in the order in which a loop computes them, and what the row function yields."""

    algebra: Algebra = field(default_factory=Algebra)
    forms: NormalForms = field(init=False)
    states: list[State] = field(default_factory=list[State])
    verdicts: list[Verdict] = field(default_factory=list[Verdict])
    weight: Separation = field(default_factory=lambda: Separation(ONE))
    outputs: list[SSAValue] = field(default_factory=list[SSAValue])
    levels: int = 1

    @property
    def dead_row_states(self) -> list[State]:
        """States by which an epilogue knows a dead row: extrema, else the count."""
        extrema = [s for s in self.states if s.detects_dead_rows]
        return extrema or [s for s in self.states if s.kind is ReduceKind.COUNT]

    def report(self) -> OnlineReport:
        scales = [
            f"exp(-({show(s.coefficient)}) * {show_atom(s.atom)})"
            for separation in [*(s.separation for s in self.states), self.weight]
            for s in separation.stabilisers
        ]
        return OnlineReport(
            reductions=tuple(v.node for v in self.verdicts[:-1]),
            verdicts=tuple(self.verdicts),
            passes=self.levels,
            rescale=tuple(dict.fromkeys(scales)),
            epilogue=show(self.weight.row),
        )


def plan_online(row: Block) -> OnlinePlan:
    """Plans the loops of one row function."""
    planner = _Planner(row)
    return planner.plan


class _Planner:
    def __init__(self, row: Block):
        self.plan = OnlinePlan()
        assert row.last_op is not None
        weight, *outputs = row.last_op.operands
        self._needed = _backward_slice([weight, *outputs])
        self._levels: dict[int, int] = {}
        self._reduced: dict[Operation, Sum] = {}
        forms = NormalForms(row, self.plan.algebra, self._reduction)
        self.plan.forms = forms
        self.plan.outputs = outputs
        for output in outputs:
            if forms[output].on_kv:
                raise RowValueError(output.name_hint or show(forms[output]))
        self._place_weight(weight, forms[weight])
        self._drop_unused()
        self._count_if_needed(row)
        self.plan.states.sort(key=lambda s: s.level)

    def _running(self, level: int) -> frozenset[int]:
        return frozenset(n for n, at in self._levels.items() if at == level)

    def _level_of(self, value: Sum) -> int:
        return max((self._levels[n] for n in value.states), default=0)

    def _separated(self, kind: ReduceKind, value: Sum, level: int) -> Separation | Refusal:
        if kind is ReduceKind.COUNT:
            return Separation(ONE)
        split = separate if kind is ReduceKind.SUM else separate_extremum
        return split(self.plan.algebra, value, self._running(level))

    def _settled(self, name: str, kind: ReduceKind, source: SSAValue, value: Sum, level: int) -> tuple[Separation, int]:
        """The separation of a node and its loop, at `level` or, where that is refused, the next."""
        result = self._separated(kind, value, level)
        if isinstance(result, Separation):
            self.plan.verdicts.append(Verdict(name, level, True, describe(result)))
            whole = (
                not result.stabilisers and not result.additive and result.row == ONE and kind is not ReduceKind.COUNT
            )
            return self._as_written(result, source, level) if whole or result.element == value else result, level
        if not value.states & self._running(level):
            self.plan.verdicts.append(Verdict(name, level, True, show(value)))
            return self._as_written(Separation(value), source, level), level
        self.plan.verdicts.append(Verdict(name, level + 1, False, result.reason, show(result.culprit)))
        again = self._separated(kind, value, level + 1)
        if isinstance(again, Separation):
            return again, level + 1
        return self._as_written(Separation(value), source, level + 1), level + 1

    def _as_written(self, separation: Separation, source: SSAValue, level: int) -> Separation:
        """With the user's own code, if every reduction in it (one that cancels too) is final before this loop."""
        final = all(self._levels[n] < level for n in self._reads(source))
        return replace(separation, source=source) if final else separation

    def _reads(self, source: SSAValue) -> frozenset[int]:
        """The states behind the reductions that a value reads as it is written."""
        reductions = _reductions_read(source)
        return frozenset[int]().union(*(self._reduced[r].states for r in reductions))

    def _reduction(self, op: RowReduceOp, value: Sum) -> Sum:
        kind = ReduceKind(op.kind.data)
        if op not in self._needed:
            return self.plan.algebra.reduction(op, value, ("unused", op.result))
        name = op.result.name_hint or f"{kind.value}({show(value)})"
        number = _positive_number(self.plan.algebra, value) if kind in (ReduceKind.MAX, ReduceKind.MIN) else 1.0
        value = scale(value, 1 / number)
        if parts := self._separate_terms(kind, value, self._level_of(value)):
            return self._sum_of_terms(op, name, parts, self._level_of(value))
        separation, level = self._settled(name, kind, op.value, value, self._level_of(value))
        if number != 1.0 and not value.states:
            separation = replace(separation, source=None)
        elif number != 1.0 and separation.source is not None:
            separation, number = replace(separation, element=scale(value, number)), 1.0
        state = self._state(op, kind, separation, level)
        whole = add(state, separation.row) if separation.additive else self.plan.algebra.mul(state, separation.row)
        self._reduced[op] = scale(whole, number)
        return self._reduced[op]

    def _separate_terms(self, kind: ReduceKind, value: Sum, level: int) -> list[Separation]:
        """The terms of a sum that is one-pass only term by term: all nonnegative, so that nothing cancels."""
        if kind is not ReduceKind.SUM or isinstance(self._separated(kind, value, level), Separation):
            return []
        terms = [make_sum([term]) for term in value.terms]
        found = [s for t in terms if isinstance(s := self._separated(kind, t, level), Separation)]
        return found if len(found) == len(terms) and all(value_range(t).nonnegative for t in terms) else []

    def _sum_of_terms(self, op: RowReduceOp, name: str, parts: list[Separation], level: int) -> Sum:
        """The reduction as a sum of states, one per term."""
        for part in parts:
            self.plan.verdicts.append(Verdict(f"{name}, a term of it", level, True, describe(part)))
        states = [self._state(op, ReduceKind.SUM, part, level) for part in parts]
        mul = self.plan.algebra.mul
        self._reduced[op] = add(*(mul(state, part.row) for state, part in zip(states, parts, strict=True)))
        return self._reduced[op]

    def _state(self, op: RowReduceOp, kind: ReduceKind, separation: Separation, level: int) -> Sum:
        """The state of a separated element, shared by equal ones."""
        tag: Key = tuple((s.atom, s.coefficient) for s in separation.stabilisers)
        value = self.plan.algebra.reduction(op, separation.element, tag)
        assert value.atom is not None
        number = value.atom.number
        if number not in self._levels:
            self._levels[number] = level
            self.plan.states.append(State(value.atom, kind, level, separation, tells_dead_rows(op)))
        return value

    def _inputs(self, separation: Separation) -> frozenset[int]:
        """The states that a separated value is computed from."""
        read = self._reads(separation.source) if separation.source is not None else separation.element.states
        return read.union(separation.row.states, *(s.atom.states for s in separation.stabilisers))

    def _drop_unused(self) -> None:
        """Keeps the states that a result reads, and extrema, by which a row may be dead."""
        graph: nx.DiGraph[int] = nx.DiGraph()
        for state in self.plan.states:
            graph.add_node(state.atom.number)
            inputs = self._inputs(state.separation)
            graph.add_edges_from((n, state.atom.number) for n in inputs)
        roots = self._inputs(self.plan.weight).union(*(self._reads(o) for o in self.plan.outputs))
        roots |= {s.atom.number for s in self.plan.states if s.detects_dead_rows}
        kept = set(roots).union(*(nx.ancestors(graph, n) for n in roots if n in graph))
        self.plan.states = [s for s in self.plan.states if s.atom.number in kept]

    def _place_weight(self, source: SSAValue, value: Sum) -> None:
        read = frozenset[int]().union(*(self._reads(o) for o in self.plan.outputs))
        read |= {s.atom.number for s in self.plan.states if s.detects_dead_rows}
        last = max((self._levels[n] for n in read), default=0)
        level = max(last, self._level_of(value))
        self.plan.weight, level = self._settled(WEIGHT, ReduceKind.SUM, source, value, level)
        self.plan.levels = level + 1

    def _count_if_needed(self, row: Block) -> None:
        """A count of visible keys, where nothing else tells that there are none and it matters."""
        plan = self.plan
        if plan.dead_row_states:
            return
        identities = {s.atom.number: IDENTITY[s.kind] for s in plan.states}
        factor = evaluate(plan.weight.row, identities)
        if not plan.outputs and factor is not None and math.isfinite(factor):
            return
        kept = {s.atom.number for s in plan.states}
        self._levels = {n: level for n, level in self._levels.items() if n in kept}
        op = RowReduceOp(ReduceKind.COUNT, row.args[0])
        self._state(op, ReduceKind.COUNT, Separation(ONE), 0)
        op.erase()


def _backward_slice(values: list[SSAValue]) -> set[Operation]:
    """The operations that the values depend on."""
    seen: set[Operation] = set()
    stack = list(values)
    while stack:
        owner = stack.pop().owner
        if isinstance(owner, Operation) and owner not in seen:
            seen.add(owner)
            stack.extend(owner.operands)
    return seen


def _reductions_read(source: SSAValue) -> set[RowReduceOp]:
    """The reductions that a value reads, not those within their arguments."""
    found: set[RowReduceOp] = set()
    seen: set[SSAValue] = set()
    stack = [source]
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        if isinstance(value.owner, RowReduceOp):
            found.add(value.owner)
        elif isinstance(value.owner, Operation):
            stack.extend(value.owner.operands)
    return found


def _positive_number(algebra: Algebra, value: Sum) -> float:
    """A constant factor, so that the maxima of s and of s * log2(e) are one state."""
    _, number = algebra.as_product(value)
    return number if number > 0 else 1.0


def evaluate(value: Sum, states: dict[int, float]) -> float | None:
    """The number that a row value has for these states; None where it reads anything else."""
    return _evaluate(value, {**states})


def _evaluate(value: Sum, known: dict[int, float | None]) -> float | None:
    total = 0.0
    for product, coefficient in value.terms:
        exponent = _evaluate(product.exponent, known)
        if exponent is None:
            return None
        term = coefficient * (math.exp(exponent) if exponent < 700 else math.inf)
        for atom, power in product.factors:
            if atom.number not in known:
                known[atom.number] = _evaluate_atom(atom, known)
            base = known[atom.number]
            if base is None or (base < 0 and power.denominator != 1):
                return None
            if base == 0 and power < 0:
                return math.inf
            term *= base ** float(power)
        total += term
    return total


def _evaluate_atom(atom: Atom, known: dict[int, float | None]) -> float | None:
    operation = atom.operation
    if isinstance(operation, arith.ConstantOp) and isinstance(operation.value, FloatAttr):
        return operation.value.value.data
    args = [_evaluate(a, known) for a in atom.args]
    numbers = [a for a in args if a is not None]
    if not args or len(numbers) < len(args):
        return None
    match atom.name:
        case "arith.maximumf" | "arith.maxnumf":
            return max(numbers)
        case "arith.minimumf" | "arith.minnumf":
            return min(numbers)
        case "math.absf":
            return abs(numbers[0])
        case _:
            return numbers[0] if atom.name == GROUP else None
