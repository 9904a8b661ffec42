"""What a score reads or computes by the distance of its query and key, evaluated once for each distance.

A block of scores has as many distances as it has rows and columns together, and a sequence hardly more than twice its
length: a small kernel in front of those that loop over blocks keeps a number for each distance in memory, which these
read in place of a logarithm, a division or a guarded access for each score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from xdsl.dialects import arith
from xdsl.dialects.builtin import TensorType, f32, i64
from xdsl.ir import Block, BlockArgument, Operation, SSAValue

from attn_engine.dialects import attn, tile
from attn_engine.ir.walks import behind, bottom_up, operands_of
from attn_engine.passes.lowering.frame import Frame, Operands, spread
from attn_engine.passes.lowering.kernel import Blocks, Kernel
from attn_engine.passes.lowering.program import Bound, Table
from attn_engine.passes.lowering.scope import Scope

Slope = tuple[int, int]
"""How much an integer grows with the position of the query, and with that of the key."""

_AXES = ("b", "h", "q", "kv")
_SLOPES: dict[str, Slope] = {"b": (0, 0), "h": (0, 0), "q": (1, 0), "kv": (0, 1)}
_KEEP = (arith.ExtSIOp, arith.TruncIOp)
WORTH = 8
"""Operations for each score that a number in memory must save."""
_COSTS: dict[type[Operation], int] = {attn.LoadOp: WORTH, arith.DivfOp: WORTH, arith.ConstantOp: 0}
_FUNCTION = 4
"""Of an op of `math`, one with an instruction of its own."""
LOADED, GATHERED = "loaded", "gathered"
"""How kernels read them: in blocks of scores, or score by score."""
DISTANCES = 1024
"""That a program of these kernels looks at."""


def indices(block: Block) -> list[BlockArgument]:
    """The arguments b, h, q and kv of a region."""
    return [a for a in block.args if a.type == i64]


@dataclass
class ByDistance:
    """Which values of a region depend on positions through q - kv alone."""

    block: Block
    slopes: dict[SSAValue, Slope | None] = field(default_factory=dict[SSAValue, Slope | None])
    known: dict[SSAValue, bool] = field(default_factory=dict[SSAValue, bool])

    def holds(self, value: SSAValue) -> bool:
        return bottom_up(value, operands_of, self._holds, self.known)

    def moves(self, value: SSAValue) -> bool:
        """Whether positions matter to a value at all."""
        arguments = [v for v in behind([value]) if isinstance(v, BlockArgument) and v.type == i64]
        return any(self._axis(a) in ("q", "kv") for a in arguments)

    def heads(self, values: Sequence[SSAValue]) -> frozenset[str]:
        """Whether values depend on b, on h."""
        arguments = [v for v in behind(values) if isinstance(v, BlockArgument) and v.type == i64]
        return frozenset(self._axis(a) for a in arguments) & {"b", "h"}

    def _axis(self, argument: BlockArgument) -> str:
        return _AXES[indices(self.block).index(argument)]

    def _holds(self, value: SSAValue) -> bool:
        slope, owner = self._slope(value), value.owner
        if slope is not None:
            return slope[0] == -slope[1]
        if isinstance(owner, attn.RowReduceOp):
            return False
        if not isinstance(owner, Operation):
            return isinstance(value.type, TensorType)
        return all(self.known[o] for o in owner.operands) or self._compares_distance(owner)

    def _compares_distance(self, op: Operation) -> bool:
        """q >= kv + 3 says the same as q - kv >= 3."""
        if not isinstance(op, arith.CmpiOp):
            return False
        a, b = self._slope(op.lhs), self._slope(op.rhs)
        return a is not None and b is not None and a[0] - b[0] == -(a[1] - b[1])

    def _slope(self, value: SSAValue) -> Slope | None:
        """None for what is no sum of positions. Positions are too small for sums to overflow."""
        return bottom_up(value, operands_of, self._find, self.slopes)

    def _find(self, value: SSAValue) -> Slope | None:
        owner = value.owner
        if isinstance(value, BlockArgument):
            return _SLOPES[self._axis(value)] if value.type == i64 else None
        assert isinstance(owner, Operation)
        if isinstance(owner, arith.ConstantOp):
            return 0, 0
        if isinstance(owner, attn.RowReduceOp):
            return None  # of a row, whatever it reduces
        if isinstance(owner, _KEEP):
            return self.slopes[owner.operands[0]]
        if isinstance(owner, arith.AddiOp | arith.SubiOp):
            a, b = self.slopes[owner.lhs], self.slopes[owner.rhs]
            sign = 1 if isinstance(owner, arith.AddiOp) else -1
            return (a[0] + sign * b[0], a[1] + sign * b[1]) if a is not None and b is not None else None
        fixed = all(isinstance(o.type, TensorType) or self.slopes[o] == (0, 0) for o in owner.operands)
        return (0, 0) if fixed else None


def costly(block: Block) -> list[SSAValue]:
    """The largest parts of a region that depend on positions through their distance, and cost more than reading a number."""
    distances = ByDistance(block)
    covered: dict[SSAValue, bool] = {}
    found: list[SSAValue] = []
    for op in reversed(list(block.ops)):
        for value in op.results:
            if not distances.holds(value):
                continue
            whole = all(_within(use.operation, distances, covered) for use in value.uses)
            covered[value] = whole or value.type == f32
            if value.type == f32 and not whole and distances.moves(value) and _cost(value, distances) >= WORTH:
                found.append(value)
    return found[::-1]


def _within(user: Operation, distances: ByDistance, covered: Mapping[SSAValue, bool]) -> bool:
    """Whether what uses a part belongs to a larger one. Where contributions go is found apart."""
    if isinstance(user, attn.AccumulateGradOp):
        return all(map(distances.holds, user.indices))
    return bool(user.results) and all(distances.holds(r) and covered.get(r, False) for r in user.results)


def without_costly(block: Block) -> tuple[list[Operation], int]:
    """The ops of a region that are left when its costly parts are read from memory, and how many parts these are."""
    parts = costly(block)
    if not parts:
        return list(block.ops), 0
    ends = [o for op in block.ops if not op.results for o in op.operands]
    needed = {v.owner for v in behind(ends, lambda v: () if v in parts else operands_of(v)) if v not in parts}
    return [op for op in block.ops if op in needed or not op.results], len(parts)


def _cost(value: SSAValue, distances: ByDistance) -> int:
    """Of what a value needs for each score."""
    owners = {v.owner: None for v in behind([value]) if distances.moves(v)}
    return sum(_cost_of(op) for op in owners if isinstance(op, Operation))


def _cost_of(op: Operation) -> int:
    return _COSTS.get(type(op), _FUNCTION if op.name.startswith("math.") else 1)


@dataclass(frozen=True)
class DistanceTable:
    """One of them as a kernel sees it: [batch, heads, distances], of which the first two only where they matter."""

    kernel: Kernel
    numbers: SSAValue
    start: SSAValue
    axes: tuple[str, ...]

    @property
    def source(self) -> SSAValue:
        return self.kernel.take(self.numbers)

    @property
    def origin(self) -> SSAValue:
        return self.kernel.take(self.start)


@dataclass
class DistanceTables:
    """The temporaries of one plan, in f32; kv - q grows along the last axis of each.

    Those of a region are filled by one kernel, in front of the first kernel that asks for them.
    """

    name: str
    operands: Operands
    block: int
    """Queries, and keys, by which blocks may go beyond their tensors, on either side."""
    loaded: bool = False
    """Whether blocks of numbers are loaded as such, in front of the scores."""
    kernels: list[tile.KernelOp] = field(default_factory=list[tile.KernelOp])
    _found: dict[Block, dict[SSAValue, SSAValue]] = field(default_factory=dict[Block, dict[SSAValue, SSAValue]])

    def read(
        self, frame: Frame, scope: Scope, block: Block, q0: SSAValue, n0: SSAValue
    ) -> Mapping[SSAValue, Table | Bound]:
        """What a kernel reads in place of values of a region, for queries from `q0` on and keys from `n0` on."""
        if block not in self._found:
            self._found[block] = self._fill(block)
        found = self._found[block]
        axes = self._axes(block, list(found))
        tables = {value: DistanceTable(frame.kernel, numbers, self.origin, axes) for value, numbers in found.items()}
        if not self.loaded:
            return tables
        return {value: Bound(self._load(frame, scope, table, q0, n0), (0, 1)) for value, table in tables.items()}

    @staticmethod
    def _load(frame: Frame, scope: Scope, table: DistanceTable, q0: SSAValue, n0: SSAValue) -> SSAValue:
        lead = [place for axis, place in (("b", frame.b), ("h", frame.h)) if axis in table.axes]
        turned = frame.q_axis == 1
        starts = (n0, q0) if turned else (q0, n0)
        type_ = TensorType(f32, list(frame.shape))
        load = tile.LoadDiagonalsOp(table.source, [*lead, table.origin], *starts, type_, turned)
        return scope.add(load, "by_distance").result

    @staticmethod
    def _axes(block: Block, values: Sequence[SSAValue]) -> tuple[str, ...]:
        return tuple(axis for axis in ("b", "h") if axis in ByDistance(block).heads(values))

    def _measure(self) -> None:
        """The place of the distance 0, and how many there are."""
        operands, scope = self.operands, self.operands.plan.scope
        beyond = scope.value(self.block)
        self.origin = scope.add(arith.AddiOp(operands.sq, beyond), "origin").result
        keys = scope.add(arith.AddiOp(operands.skv, beyond), "keys").result
        self.length = scope.add(arith.AddiOp(self.origin, keys), "distances").result

    def _fill(self, block: Block) -> dict[SSAValue, SSAValue]:
        """Temporaries for the costly parts of a region, and the launch that fills them."""
        values = costly(block)
        if not values:
            return {}
        if not self.kernels:
            self._measure()
        operands, scope, axes = self.operands, self.operands.plan.scope, self._axes(block, values)
        sizes = [size for axis, size in (("b", operands.batch), ("h", operands.heads)) if axis in axes]
        memory = tile.GlobalType(len(sizes) + 1, f32)
        found: dict[SSAValue, SSAValue] = {
            value: scope.add(tile.AllocOp([*sizes, self.length], memory), "by_distance").result for value in values
        }
        kernel = Kernel(
            f"{self.name}_by_distance{len(self.kernels)}", operands.plan, Blocks(DISTANCES, DISTANCES, 4, 1)
        )
        self._kernel(kernel, block, found, axes)
        blocks = operands.blocks(self.length, DISTANCES, "distance_blocks")
        grid = [
            size if axis in axes else scope.value(1) for axis, size in (("h", operands.heads), ("b", operands.batch))
        ]
        self.kernels.append(kernel.launch([blocks, *grid]))
        return found

    def _kernel(self, kernel: Kernel, block: Block, found: Mapping[SSAValue, SSAValue], axes: tuple[str, ...]) -> None:
        """Computes values as if distances were queries, and the key the first one."""
        scope = kernel.scope
        i, h, b = (kernel.program_id(n, hint) for n, hint in enumerate(("i", "h", "b")))
        frame = Frame(self.operands, kernel, 0, b, h, h)
        start = scope.value(scope.times(i, DISTANCES, "first"))
        rows = scope.add(tile.RangeOp(start, DISTANCES), "rows").result
        program = frame.program(covered=False)
        origin, row = (
            program.argument(Bound(kernel.take(self.origin)), "origin"),
            program.argument(Bound(rows, (0,)), "row"),
        )
        q = program.add(arith.ExtSIOp(program.add(arith.SubiOp(origin, row), "distance"), i64), "q")
        kv = program.add(arith.ConstantOp.from_int_and_width(0, 64), "kv")
        nothing = program.argument(Bound(frame.take("scale")), "unused")
        known = dict(zip(indices(block), [*frame.heads(program), q, kv], strict=True))
        arguments = [known.get(a, nothing) for a in block.args if not isinstance(a.type, TensorType)]
        results = program.values(block, arguments, list(found))
        lead = [place for axis, place in (("b", b), ("h", h)) if axis in axes]
        limits = {0: kernel.take(self.length)}
        for value, numbers in zip(frame.run(program, scope, results), found.values(), strict=True):
            tensor = spread(scope, value, (DISTANCES,), (0,))
            scope.add(tile.StoreOp(tensor, kernel.take(numbers), [*lead, start], [len(lead)], limits))
