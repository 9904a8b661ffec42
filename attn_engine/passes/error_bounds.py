"""How far an absolute error of some values reaches in a kernel: bounds at every value, or the op that has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
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
_OF_SCORES = 64.0
"""How much more an error counts that is a part of a score: scores are that large, and have been rounded themselves."""
_SUMS = (arith.AddfOp, arith.SubfOp)
_CHOICES = (arith.MaximumfOp, arith.MinimumfOp, arith.MaxnumfOp, arith.MinnumfOp)
_SIGNS = (arith.NegfOp, math.AbsFOp)
_EXPONENTIALS = (math.ExpOp, math.Exp2Op)


@dataclass(frozen=True)
class Error:
    """How far a value may be off."""

    absolute: float = 0.0
    relative: float = 0.0
    """Times factors of unknown size."""
    small: bool = False
    """Whether what is off may be much smaller than 1, and as exact as that: a sine near 0, not the sum of 1 and a cosine."""

    def __bool__(self) -> bool:
        return self.absolute > 0 or self.relative > 0

    def __add__(self, other: Error) -> Error:
        return Error(self.absolute + other.absolute, self.relative + other.relative, self.small or other.small)

    def __or__(self, other: Error) -> Error:
        """Of either."""
        absolute, relative = max(self.absolute, other.absolute), max(self.relative, other.relative)
        return Error(absolute, relative, self.small or other.small)

    def times(self, size: float) -> Error:
        """By a factor of this size, which may be unknown."""
        if size < inf:
            return replace(self, absolute=self.absolute * size, relative=self.relative * size)
        return replace(self, absolute=0.0, relative=self.absolute + self.relative)


@dataclass
class ErrorBounds:
    """Errors of the values of one kernel; `worst` is the largest that an exponent or a stored number has.

    An error times a factor of unknown size is that many times the factor. A score has been rounded by about as much when it gets
    there. So has what is rounded to 16 bits, unless all that its row multiplies the factor with may be next to nothing.
    """

    source: Callable[[Operation], float | None]
    """The absolute error of what an op computes, if it is one of those asked about."""
    small: Callable[[Operation], bool] = lambda op: True
    """Whether what it computes is known better than this where it is small, as a sine near 0, unlike a cosine near its zero."""
    errors: dict[SSAValue, Error] = field(default_factory=dict[SSAValue, Error])
    worst: float = 0.0

    def run(self, block: Block) -> float:
        """The largest error of an exponent or of a stored number; infinite where an error goes anywhere else."""
        for _ in range(_ROUNDS):
            before = dict(self.errors)
            self._block(block)
            if before == self.errors:
                return self.worst
        return inf

    def of(self, value: SSAValue) -> Error:
        return self.errors.get(value, Error())

    def _put(self, value: SSAValue, error: Error) -> None:
        if error:
            self.errors[value] = self.of(value) | error

    def _block(self, block: Block) -> None:
        for op in block.ops:
            own = self.source(op)
            if own is not None and not any(self.of(operand) for operand in op.operands):
                self._put(op.results[0], Error(own, small=self.small(op)))
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
                self._put(target, self.of(init) | self.of(end))
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
            self._put(op.result, _sum(op, errors))
        elif isinstance(op, (*_CHOICES, *_SIGNS, arith.SelectOp)):
            self._put(op.results[0], _any_of(errors))
        elif isinstance(op, arith.MulfOp):
            self._put(op.result, _product(op, errors))
        elif isinstance(op, tile.ReduceOp) and op.kind.data is not tile.Reduction.SUM:
            self._put(op.result, errors[0])
        elif isinstance(op, (*_EXPONENTIALS, tile.StoreOp)):
            self._end(max(e.absolute for e in errors), max(e.relative for e in errors) * _OF_SCORES)
        elif isinstance(op, arith.TruncFOp):
            self._end(inf if errors[0].absolute or errors[0].small else errors[0].relative)
        elif not _is_robust(op):
            self.worst = inf

    def _end(self, *errors: float) -> None:
        self.worst = max(self.worst, *errors)


def _any_of(errors: Sequence[Error]) -> Error:
    found = Error()
    for error in errors:
        found |= error
    return found


def _sum(op: arith.AddfOp | arith.SubfOp, errors: Sequence[Error]) -> Error:
    """With a number of at least 1, it is rounded as one of that size is, however small it is."""
    numbers = [constant_of(operand) for operand in op.operands]
    rounded = any(n is not None and abs(n) >= 1 for n in numbers)
    found = errors[0] + errors[1]
    return replace(found, small=False) if rounded else found


def _product(op: arith.MulfOp, errors: Sequence[Error]) -> Error:
    """|a| da' + |b| da, with the sizes of a and b where their factor has an error."""
    found = Error()
    for other, error in zip((op.rhs, op.lhs), errors, strict=True):
        found += error.times(size_of(other)) if error else error
    return found


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
        return (end.values[op.outputs.index(value)],)
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
