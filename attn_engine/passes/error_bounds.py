"""How far an absolute error of some values reaches in a kernel: bounds at every value, or the op that has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf

from xdsl.dialects import arith, math, scf
from xdsl.ir import Block, BlockArgument, Operation, SSAValue

from attn_engine.dialects import tile
from attn_engine.ir.walks import bottom_up
from attn_engine.passes.simplify_constants import constant_of

_ROUNDS = 4
"""An error that still grows after so many turns of a loop has no bound."""
_FAR = 1e30
"""Comparisons with numbers beyond this, infinities among them, do not depend on small errors."""
_SUMS = (arith.AddfOp, arith.SubfOp)
_CHOICES = (arith.MaximumfOp, arith.MinimumfOp, arith.MaxnumfOp, arith.MinnumfOp)
_SIGNS = (arith.NegfOp, math.AbsFOp)
_EXPONENTIALS = (math.ExpOp, math.Exp2Op)


@dataclass
class ErrorBounds:
    """Errors of the values of one kernel; `worst` is the largest that an exponent or a stored number has."""

    source: Callable[[Operation], float | None]
    """The absolute error of what an op computes, if it is one of those asked about."""
    errors: dict[SSAValue, float] = field(default_factory=dict[SSAValue, float])
    worst: float = 0.0

    def run(self, block: Block) -> float:
        """The largest error of an exponent or of a stored number; infinite where an error goes anywhere else."""
        for _ in range(_ROUNDS):
            before = dict(self.errors)
            self._block(block)
            if before == self.errors:
                return self.worst
        return inf

    def of(self, value: SSAValue) -> float:
        return self.errors.get(value, 0.0)

    def _put(self, value: SSAValue, error: float) -> None:
        if error > self.of(value):
            self.errors[value] = error

    def _block(self, block: Block) -> None:
        for op in block.ops:
            own = self.source(op)
            if own is not None and not any(self.of(operand) for operand in op.operands):
                self._put(op.results[0], own)
            elif isinstance(op, scf.ForOp):
                self._loop(op)
            elif isinstance(op, tile.MapOp):
                self._map(op)
            elif any(self.of(operand) for operand in op.operands):
                self._through(op)

    def _loop(self, op: scf.ForOp) -> None:
        body = op.body.block
        assert isinstance(body.last_op, scf.YieldOp)
        for init, argument, end, result in zip(
            op.iter_args, body.args[1:], body.last_op.operands, op.results, strict=True
        ):
            for target in (argument, result):
                self._put(target, max(self.of(init), self.of(end)))
        self._block(body)

    def _map(self, op: tile.MapOp) -> None:
        block = op.body.block
        for value, argument in zip(op.inputs, block.args, strict=True):
            self._put(argument, self.of(value))
        self._block(block)
        assert isinstance(block.last_op, tile.MapYieldOp)
        for value, output in zip(block.last_op.values, op.outputs, strict=True):
            self._put(output, self.of(value))

    def _through(self, op: Operation) -> None:
        errors = [self.of(operand) for operand in op.operands]
        if isinstance(op, scf.YieldOp | tile.MapYieldOp):
            return
        if isinstance(op, _SUMS):
            self._put(op.result, sum(errors))
        elif isinstance(op, (*_CHOICES, *_SIGNS, arith.SelectOp)):
            self._put(op.results[0], max(errors))
        elif isinstance(op, arith.MulfOp):
            self._put(op.result, _product(op, errors))
        elif isinstance(op, tile.ReduceOp) and op.kind.data is not tile.Reduction.SUM:
            self._put(op.result, errors[0])
        elif isinstance(op, (*_EXPONENTIALS, tile.StoreOp)):
            self.worst = max(self.worst, *errors)
        elif not _is_robust(op):
            self.worst = inf


def _product(op: arith.MulfOp, errors: list[float]) -> float:
    """|a| da' + |b| da, with the sizes of a and b where their factor has an error."""
    sizes = [size_of(operand) if error else 0.0 for operand, error in zip((op.rhs, op.lhs), errors, strict=True)]
    return sum(size * error for size, error in zip(sizes, errors, strict=True) if error)


def _is_robust(op: Operation) -> bool:
    numbers = [constant_of(operand) for operand in op.operands]
    return isinstance(op, arith.CmpfOp) and any(n is not None and abs(n) >= _FAR for n in numbers)


def size_of(value: SSAValue) -> float:
    """An upper bound of the size of a value that is made of constants; infinite for others."""
    sizes: dict[SSAValue, float] = {}
    return bottom_up(value, _sized_by, lambda v: _size(v, [sizes[s] for s in _sized_by(v)]), sizes)


def _sized_by(value: SSAValue) -> tuple[SSAValue, ...]:
    """The values whose sizes give that of a value."""
    if isinstance(value, BlockArgument):
        parent = value.block.parent_op()
        return (parent.inputs[value.index],) if isinstance(parent, tile.MapOp) else ()
    op = value.owner
    if isinstance(op, tile.MapOp):
        end = op.body.block.last_op
        assert isinstance(end, tile.MapYieldOp)
        return (end.values[op.outputs.index(value)],)  # type: ignore[arg-type]
    return (op.lhs, op.rhs) if isinstance(op, arith.SelectOp | arith.MulfOp) else ()


def _size(value: SSAValue, sizes: list[float]) -> float:
    number = constant_of(value)
    if number is not None:
        return abs(number)
    if isinstance(value.owner, arith.MulfOp):
        return sizes[0] * sizes[1]
    return 1.0 if isinstance(value.owner, math.TanhOp) else max(sizes, default=inf)


def maps_of(kernel: tile.KernelOp) -> Iterator[tile.MapOp]:
    return (op for op in kernel.walk() if isinstance(op, tile.MapOp))
