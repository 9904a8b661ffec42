"""The dk/dv kernel: a block of keys, loops over the heads of its group and blocks of queries, scores transposed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from xdsl.dialects import arith
from xdsl.ir import SSAValue

from attn_engine.dialects import attn, tile
from attn_engine.passes.lowering.batch_sums import BatchSums
from attn_engine.passes.lowering.diagonals import DiagonalSums
from attn_engine.passes.lowering.forward import store_rows
from attn_engine.passes.lowering.frame import Frame, Operands, cast, spread
from attn_engine.passes.lowering.gradients import counted, flush, in_range, places_of, summed
from attn_engine.passes.lowering.kernel import Kernel, close, loop
from attn_engine.passes.lowering.partition import Partition
from attn_engine.passes.lowering.program import Bound
from attn_engine.passes.lowering.query_gradients import contribution, element, operand_gradient
from attn_engine.passes.lowering.query_sums import QuerySums
from attn_engine.passes.lowering.ranges import over, spans
from attn_engine.passes.lowering.scope import Scope
from attn_engine.passes.lowering.score_gradients import ScoreGradient
from attn_engine.passes.simplify_rule import predicate_of

_ROWS = 6
"""Arguments of element code in front of numbers per row: score, gradient of its weight, b, h, q and kv."""


@dataclass
class KeyGradients:
    """`carried` are the contributions of a key, summed over the queries of one head; `query_sums` where dq is added up.

    `only` are the gradients that this kernel finds, `blockwise` the contributions that leave as a block of every step, and
    `diagonals` those that are summed along diagonals of it first.
    """

    op: attn.BackwardOp
    operands: Operands
    kernel: Kernel
    vectors: list[SSAValue]
    carried: list[int]
    query_sums: QuerySums | None = None
    only: Sequence[str] = ("dk", "dv")
    diagonals: Mapping[int, DiagonalSums] = field(default_factory=dict[int, DiagonalSums])
    blockwise: Mapping[int, ScoreGradient | BatchSums] = field(default_factory=dict[int, ScoreGradient | BatchSums])

    def _finds(self, name: str) -> bool:
        return name in self.only and self.frame.leads(name)

    def build(self) -> None:
        kernel, scope, operands, op = self.kernel, self.kernel.scope, self.operands, self.op
        i, hk, b = (kernel.program_id(n, hint) for n, hint in enumerate(("i", "hk", "b")))
        n = kernel.blocks.n
        self.frame = frame = Frame(operands, kernel, 1, b, hk, hk)
        n0 = self.n0 = scope.value(scope.times(i, n, "n0"))
        self.kv_index = scope.add(tile.RangeOp(n0, n), "cols").result
        k = frame.rows(scope, "k", hk, n0, n, operands.qk, frame.skv)
        self.k = frame.modified(scope, k, op.key_mod, hk, n0, frame.skv, operands.qk)
        v = frame.rows(scope, "v", hk, n0, n, operands.vo, frame.skv)
        self.v = frame.modified(scope, v, op.value_mod, hk, n0, frame.skv, operands.vo)
        sums: list[SSAValue] = []
        if self._finds("dk"):
            sums.append(scope.splat([n, operands.qk.tile], 0.0, "dk"))
        if self._finds("dv"):
            sums.append(scope.splat([n, operands.vo.tile], 0.0, "dv"))
        group = kernel.take(operands.group)
        outer, body, member, inside = loop(scope, 0, group, 1, sums, "g")
        h = body.add(arith.MuliOp(hk, group), "h").result
        frame.h = body.add(arith.AddiOp(h, member), "h").result
        close(body, self._head(body, inside))
        frame.h = hk
        results = dict(zip([name for name in ("dk", "dv") if self._finds(name)], outer.results, strict=True))
        self._store(scope, results, k, v)

    def _head(self, scope: Scope, sums: list[SSAValue]) -> list[SSAValue]:
        """One query head of the group; contributions leave here, as their place may depend on the head."""
        frame, n = self.frame, self.kernel.blocks.n
        # Keys beyond the end are zeros, but weights of theirs may be infinite: a sum over keys must not see them.
        apart = self.query_sums is not None and not self.query_sums.alike
        runs = list(spans(frame, scope, (self.n0, n), self.kernel.blocks.m, transposed=True, ends_masked=apart))
        carried = [scope.splat([n], 0.0, "d") for _ in self.carried]
        final = over(scope, runs, self.kernel.blocks.m, [*carried, *sums], "q0", self._block)
        for number, value in zip(self.carried, final, strict=False):
            self._flush(scope, number, value)
        return final[len(carried) :]

    def _block(self, scope: Scope, q0: SSAValue, masked: bool, inside: list[SSAValue]) -> list[SSAValue]:
        frame, operands, op, m = self.frame, self.operands, self.op, self.kernel.blocks.m
        loaded = frame.rows(scope, "q", frame.h, q0, m, operands.qk, frame.sq if masked else None)
        q = frame.modified(scope, loaded, op.query_mod, frame.h, q0, frame.sq, operands.qk)
        d_o = frame.rows(scope, "d_o", frame.h, q0, m, operands.vo, frame.sq if masked else None)
        limit = frame.sq if masked else None
        rows = [frame.vector(scope, self.kernel.take(v), q0, m, limit, v.name_hint or "row") for v in self.vectors]
        x, dp = self._scores(scope, q), frame.product(scope, self.v, d_o, "dp")
        program = frame.program()
        program.tables = frame.tables(scope, op.element.block, q0, self.n0)
        q_index = scope.add(tile.RangeOp(q0, m), "rows").result
        index = frame.place(program, q_index, self.kv_index, masked)
        if masked:
            frame.see(program, index, [(index[2], frame.sq), (index[3], frame.skv)])
        elif self.query_sums is not None and self.query_sums.alike and not operands.whole:
            # No step is masked for the sake of the last keys alone.
            program.visible = program.below(index[3], Bound(frame.skv))
        p, dx = element(frame, program, op, x, dp, index, rows)
        count = len(self.carried)
        wanted = [
            program.add(
                arith.AddfOp(program.argument(Bound(old, (0,)), "d"), summed(program, program.contributions[c])), "d"
            )
            for c, old in zip(self.carried, inside, strict=False)
        ]
        operand_of = {"dk": dx, "dv": p}
        names = [n for n in operand_of if self._finds(n) or (n == "dk" and self.query_sums is not None)]
        wanted += [cast(program, operand_of[n], operands.element) for n in names]
        # Keys beyond the end are masked where queries are.
        values = [program.contributions[c].value for c in self.diagonals]
        wanted += [counted(frame, program, value, index[3], frame.skv) for value in values]
        wanted += [contribution(frame, program, c, index[2], self.blockwise) for c in self.blockwise]
        program.fold_factors(frame.q_axis)
        found = Partition(program, scope, frame.shape, frame.q_axis).run(wanted)
        self._leave(scope, found[len(found) - len(self.diagonals) - len(self.blockwise) :], q0)
        new = [spread(scope, f, frame.shape, (0,)) for f in found[:count]]
        factors = {n: spread(scope, f, frame.shape) for n, f in zip(names, found[count:], strict=False)}
        sums = [n for n in names if self._finds(n)]
        for name, old in zip(sums, inside[count:], strict=True):
            new.append(frame.dot(scope, factors[name], q if name == "dk" else d_o, old, name))
        if self.query_sums is not None:
            self.query_sums.add(frame, scope, factors["dk"], self.k, q0, limit)
        return new

    def _leave(self, scope: Scope, found: Sequence[Bound], q0: SSAValue) -> None:
        """Blocks of contributions, with keys along their rows, as memory has them, or their sums along diagonals."""
        for sums, value in zip(self.diagonals.values(), found, strict=False):
            sums.add(self.frame, scope, spread(scope, value, self.frame.shape), q0, self.n0)
        for gradient, value in zip(self.blockwise.values(), found[len(self.diagonals) :], strict=True):
            whole = spread(scope, value, self.frame.shape)
            turned = scope.add(tile.TransposeOp(whole), value.value.name_hint or "d").result
            gradient.leave(self.frame, scope, turned, q0, self.n0)

    def _scores(self, scope: Scope, q: SSAValue) -> SSAValue:
        """Scores with keys along the rows; rounded as the other kernels round them where equality of scores counts."""
        if not compares_scores(self.op):
            return self.frame.product(scope, self.k, q, "x")
        return scope.add(tile.TransposeOp(self.frame.product(scope, q, self.k, "x")), "x").result

    def _store(self, scope: Scope, results: Mapping[str, SSAValue], k: SSAValue, v: SSAValue) -> None:
        frame, operands = self.frame, self.operands
        for name, loaded, head, vjp, factor in (
            ("dk", k, operands.qk, self.op.key_vjp, frame.take("scale")),
            ("dv", v, operands.vo, self.op.value_vjp, None),
        ):
            if name in results:
                value = operand_gradient(frame, scope, results[name], loaded, vjp, frame.hk, self.n0, head, factor)
                store_rows(frame, scope, value, name, frame.hk, self.n0, head.size, head.padded, frame.skv)

    def _flush(self, scope: Scope, number: int, value: SSAValue) -> None:
        frame, region = self.frame, self.op.element.block
        program = frame.program()
        value = in_range(frame, scope, Bound(value, (0,)), Bound(self.kv_index, (0,)), frame.skv)
        nothing = program.argument(Bound(frame.take("scale")), "unused")
        # The place depends on no query: any index stands for q.
        b, h = frame.heads(program)
        kv = program.index(Bound(self.kv_index, (0,)), "kv", Bound(frame.skv))
        target = places_of(
            frame, scope, region, program, [nothing, nothing, b, h, h, kv, *[nothing] * len(self.vectors)], number
        )
        flush(frame, scope, target, Bound(value, (0,)), frame.shape)


def compares_scores(op: attn.BackwardOp) -> bool:
    """Whether the element code compares scores with what a row of them has left: a weight that a key has for being the maximum.

    Equality with anything else, such as a captured number, is a kink: either side of it is right.
    """
    block = op.element.block
    first = len(block.args) - len(op.captures)
    scores: set[SSAValue] = {block.args[0]}
    rows = set[SSAValue](block.args[_ROWS:first])
    for inner in block.ops:
        equals = isinstance(inner, arith.CmpfOp) and predicate_of(inner) == "oeq"
        if equals and scores.intersection(inner.operands) and rows.intersection(inner.operands):
            return True
        for found in (scores, rows):
            if found.intersection(inner.operands):
                found.update(inner.results)
    return False
