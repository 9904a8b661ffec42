"""`tile-join-loops`: loops in a row that do the same to other blocks become one loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from xdsl.context import Context
from xdsl.dialects import arith, builtin, scf
from xdsl.dialects.builtin import IntegerAttr, IntegerType
from xdsl.ir import Block, BlockArgument, IRNode, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import tile
from attn_engine.passes.hopper.edit import Before
from attn_engine.passes.hopper.steps import launched
from attn_engine.passes.lowering.scope import Index
from attn_engine.passes.tile_hoist import movable, written_by

Chain = list[scf.ForOp]
"""Loops of which each takes what the one before it leaves, and nothing else does."""
First = dict[SSAValue, SSAValue]
"""Of values that are computed again, the one that was computed first."""


@dataclass
class _Loop:
    """A loop whose body is cut in two: integers that follow from its position, and the work that is done there."""

    op: scf.ForOp
    places: list[Operation] = field(default_factory=list[Operation])
    """Integer arithmetic on the position, and constants that nothing else uses, in order."""
    work: list[Operation] = field(default_factory=list[Operation])
    known: set[SSAValue] = field(default_factory=set[SSAValue])
    """The position, and what follows from it."""

    def __post_init__(self) -> None:
        self.known.add(self.block.args[0])
        for op in self.block.ops:
            follows = any(o in self.known for o in op.operands) and all(map(self._is_known, op.operands))
            if follows and op.name.startswith("arith.") and all(isinstance(r.type, IntegerType) for r in op.results):
                self.known.update(op.results)
        for op in self.block.ops:
            (self.places if self._is_place(op) else self.work).append(op)

    @property
    def block(self) -> Block:
        return self.op.body.block

    def _is_known(self, value: SSAValue) -> bool:
        """Whether a value follows from the position and what stands outside of the loop."""
        block = value.block if isinstance(value, BlockArgument) else value.owner.parent
        return value in self.known or block is not self.block or isinstance(value.owner, arith.ConstantOp)

    def _is_place(self, op: Operation) -> bool:
        if isinstance(op, arith.ConstantOp):
            users = [use.operation for use in op.result.uses]
            return all(user.parent is self.block and self._is_place(user) for user in users)
        return any(result in self.known for result in op.results)

    def pairs(self, other: _Loop, first: First) -> dict[SSAValue, SSAValue] | None:
        """The values from the position that the work uses, and those in their place in another loop; None if its work differs.

        `first` is one of all values in front of the loops that are the same.
        """
        step = _index(self.op.step)
        if not isinstance(step, int) or step != _index(other.op.step) or len(self.work) != len(other.work):
            return None
        context: dict[IRNode | SSAValue, IRNode | SSAValue] = dict(
            zip(self.block.args[1:], other.block.args[1:], strict=True)
        )
        context[self.block] = other.block
        found: dict[SSAValue, SSAValue] = {}
        for mine, its in zip(self.work, other.work, strict=True):
            for a, b in zip(_operands(mine), _operands(its), strict=False):
                if (a in self.known) != (b in other.known) or (a in found and found[a] is not b):
                    return None
                if a in self.known:
                    found[a] = context[a] = b
                elif a not in context and first.get(a, a) is first.get(b, b):
                    context[a] = b
            if not mine.is_structurally_equivalent(its, context):
                return None
        return found


def _operands(op: Operation) -> Iterator[SSAValue]:
    for inner in op.walk():
        yield from inner.operands


@dataclass
class _Group:
    """Loops of equal work: the first one, and the others with what stands in the place of its values."""

    first: _Loop
    others: list[tuple[_Loop, dict[SSAValue, SSAValue]]] = field(
        default_factory=list[tuple[_Loop, dict[SSAValue, SSAValue]]]
    )

    def takes(self, loop: _Loop, first: First) -> bool:
        pairs = self.first.pairs(loop, first)
        if pairs is not None:
            self.others.append((loop, pairs))
        return pairs is not None

    def build(self, anchor: Operation, high: SSAValue, carried: Sequence[SSAValue]) -> list[SSAValue]:
        """One loop over the blocks of all of them, up to `high`, in front of `anchor`; its results."""
        old = self.first.op
        new = scf.ForOp(old.lb, high, old.step, carried, old.detach_region(old.body))
        Rewriter.insert_op(new, InsertPoint.before(anchor))
        for was, now in zip(old.results, new.results, strict=True):
            now.name_hint = was.name_hint
        return list(new.results)

    def join(self, scope: Before) -> SSAValue:
        """Lets the first loop go on over the blocks of the others; where it ends."""
        if not self.others:
            return self.first.op.ub
        loop, step = self.first.op, _index(self.first.op.step)
        assert isinstance(step, int)
        end = scope.plus(_index(loop.lb), _length(scope, loop, step), "end")
        ends: list[SSAValue] = []
        shifts: list[SSAValue] = []
        for other, _ in self.others:
            ends.append(scope.value(end))
            shifts.append(scope.value(scope.minus(_index(other.op.lb), end, "shift")))
            end = scope.plus(end, _length(scope, other.op, step), "end")
        self._choose(ends, shifts)
        return scope.value(end)

    def _choose(self, ends: Sequence[SSAValue], shifts: Sequence[SSAValue]) -> None:
        """Behind the end of one loop, positions are those of the next."""
        first, block = self.first, self.first.block
        for op in reversed(first.places):
            op.detach()
            _prepend(block, op)
        scope = Before(first.work[0])
        chosen = {mine: mine for mine in self.others[0][1]}
        for (loop, pairs), end, shift in zip(self.others, ends, shifts, strict=True):
            position = scope.add(arith.AddiOp(block.args[0], shift), "position").result
            mapping: dict[SSAValue, SSAValue] = {loop.block.args[0]: position}
            for op in loop.places:
                scope.add(op.clone(value_mapper=mapping))
            before = scope.add(arith.CmpiOp(block.args[0], end, "slt"), "before").result
            for mine, its in pairs.items():
                choice = arith.SelectOp(before, chosen[mine], mapping[its])
                chosen[mine] = scope.add(choice, mine.name_hint or "place").result
        inside = {inner for op in first.work for inner in op.walk()}
        for mine, choice in chosen.items():
            mine.replace_uses_with_if(choice, lambda use: use.operation in inside)


def _prepend(block: Block, op: Operation) -> None:
    first = block.first_op
    assert first is not None
    block.insert_op_before(op, first)


def _length(scope: Before, loop: scf.ForOp, step: int) -> Index:
    """Of a loop's range, in whole steps."""
    distance = scope.minus(_index(loop.ub), _index(loop.lb), "length")
    return scope.round_up(scope.larger(distance, 0, "length"), step, "length")


def _index(value: SSAValue) -> Index:
    """A value as an index: a number if it is a constant."""
    owner = value.owner
    constant = isinstance(owner, arith.ConstantOp) and isinstance(owner.value, IntegerAttr)
    return owner.value.value.data if constant else value  # type: ignore[union-attr]


def _chains(block: Block, written: set[SSAValue]) -> Iterator[Chain]:
    """The chains of loops of a block, in order."""
    loops = [op for op in block.ops if isinstance(op, scf.ForOp)]
    chain = loops[:1]
    for before, loop in pairwise(loops):
        if not _follows(before, loop, written):
            yield chain
            chain = []
        chain.append(loop)
    yield chain


def _follows(before: scf.ForOp, loop: scf.ForOp, written: set[SSAValue]) -> bool:
    """Whether a loop goes on where another ends, with nothing in between that cannot come before both."""
    users = {use.operation for result in before.results for use in result.uses}
    alone = list(loop.iter_args) == list(before.results) and users <= {loop}
    return alone and all(movable(op, written) for op in _between(before, loop))


def _between(start: Operation, end: Operation) -> Iterator[Operation]:
    op = start.next_op
    while op is not None and op is not end:
        yield op
        op = op.next_op


def _computed_again(block: Block, written: set[SSAValue]) -> First:
    """Values of a block, and of those around it, that an earlier op of them has: ranges of blocks bring the same hoisted
    code each."""
    first: First = {}
    known: dict[tuple[object, ...], list[Operation]] = {}
    for op in [op for around in _around(block) for op in around.ops]:
        if not movable(op, written):
            continue
        operands = tuple(first.get(o, o) for o in op.operands)
        key = (op.name, operands, tuple(sorted(op.properties.items())), tuple(op.result_types))
        same = known.setdefault(key, [])
        for other in same:
            if all(a.is_structurally_equivalent(b) for a, b in zip(op.regions, other.regions, strict=True)):
                first.update(zip(op.results, other.results, strict=True))
                break
        else:
            same.append(op)
    return first


def _around(block: Block) -> list[Block]:
    """A block and those that it stands in, from the kernel's on."""
    found, parent = [block], block.parent_op()
    while parent is not None and not isinstance(parent, tile.KernelOp):
        assert parent.parent is not None
        found.insert(0, parent.parent)
        parent = parent.parent_op()
    return found


def _join(chain: Chain, written: set[SSAValue]) -> None:
    groups: list[_Group] = []
    block = chain[0].parent
    assert block is not None
    first = _computed_again(block, written)
    for loop in map(_Loop, chain):
        if not any(group.takes(loop, first) for group in groups):
            groups.append(_Group(loop))
    if len(groups) == len(chain):
        return
    between = list(_between(chain[0], chain[-1]))
    results, anchor = list(chain[-1].results), chain[-1].next_op
    assert anchor is not None
    # Bounds come before all loops: who takes blocks out of one looks at all of them first.
    ends = [group.join(Before(anchor)) for group in groups]
    values: list[SSAValue] = list(chain[0].iter_args)
    for group, end in zip(groups, ends, strict=True):
        values = group.build(anchor, end, values)
    for was, now in zip(results, values, strict=True):
        was.replace_all_uses_with(now)
    for op in [chain[-1], *reversed(between), chain[0]]:
        if op in chain or not any(result.uses for result in op.results):
            Rewriter.erase_op(op)


def kernels_of(module: builtin.ModuleOp) -> list[tile.KernelOp]:
    return [op for op in module.ops if isinstance(op, tile.KernelOp)]


@dataclass(frozen=True)
class TileJoinLoopsPass(ModulePass):
    """Makes one loop of those in a row whose bodies differ in nothing but where their blocks start.

    A mask with several ranges of blocks has a loop over the masked blocks of each and one over its full blocks: two loops
    are left, with the code of two bodies, however many ranges there are. Steps must mean the same in any order, as
    those of an online function and of sums do: masked blocks of all ranges come first, if those of the first range do.

    ```
    %a = scf.for %n = %lo0 to %hi0 step %s iter_args(...) { masked body at %n }
    %b = scf.for %n = %lo1 to %hi1 step %s iter_args(... = %a) { body at %n }
    %c = scf.for %n = %lo2 to %hi2 step %s iter_args(... = %b) { masked body at %n }
    %d = scf.for %n = %lo3 to %hi3 step %s iter_args(... = %c) { body at %n }
    ```
    becomes
    ```
    %c = scf.for %p = %lo0 to %end step %s iter_args(...) {
      %n = arith.select (%p < %end0), %p, (%p + %shift)
      masked body at %n
    }
    %d = scf.for %p = %lo1 to ... step %s iter_args(... = %c) { ...; body at %n }
    ```
    """

    name = "tile-join-loops"

    plan: str = "forward"
    """The plan whose kernels are changed; all kernels if empty."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for kernel in [s.kernel for s in launched(op, self.plan)] if self.plan else kernels_of(op):
            written, loops = written_by(kernel), [o for o in kernel.walk() if isinstance(o, scf.ForOp)]
            for block in [kernel.body.block, *(loop.body.block for loop in loops)]:
                for chain in [chain for chain in _chains(block, written) if len(chain) > 1]:
                    _join(chain, written)
