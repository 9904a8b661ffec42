"""`tile-stage-maps`: elementwise work in stages, each as soon as the products that it needs are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.dialects.builtin import TensorType
from xdsl.ir import Block, BlockArgument, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import Rewriter

from attn_engine.dialects import tile
from attn_engine.passes.hopper.edit import Before
from attn_engine.passes.hopper.steps import signatures, step_bodies

Input = tuple[SSAValue, tuple[int, ...]]
"""A value that a map reads, and the axes of the map's shape that it has."""


# --- fusion ------------------------------------------------------------------------------------


def _only_reader(op: tile.MapOp) -> tile.MapOp | None:
    """The map of the same shape that alone reads all results of this one, element by element."""
    readers = {use.operation for output in op.outputs for use in output.uses}
    reader = next(iter(readers), None)
    if len(readers) != 1 or not isinstance(reader, tile.MapOp) or reader.parent is not op.parent:
        return None
    return reader if tile.shape_of(reader.outputs[0]) == tile.shape_of(op.outputs[0]) else None


def _inputs(op: tile.MapOp) -> list[Input]:
    return list(zip(op.inputs, tile.axes_of(op.axes), strict=True))


def _fuse(first: tile.MapOp, second: tile.MapOp) -> None:
    """One map that does both, in place of the second."""
    mine = [i for i in _inputs(second) if i[0].owner is not first]
    wanted = list(dict.fromkeys([*_inputs(first), *mine]))
    body = Block(arg_types=[tile.element_of(v) if a else v.type for v, a in wanted])
    known: dict[Input, SSAValue] = dict(zip(wanted, body.args, strict=True))
    mapping: dict[SSAValue, SSAValue] = {}
    for op in (first, second):
        for source, argument in zip(_inputs(op), op.body.block.args, strict=True):
            if source in known:
                known[source].name_hint = known[source].name_hint or argument.name_hint
                mapping[argument] = known[source]
            else:
                end = first.body.block.last_op
                assert isinstance(end, tile.MapYieldOp)
                value = end.values[first.outputs.index(source[0])]
                mapping[argument] = mapping.get(value, value)
        for inner in op.body.block.ops:
            if op is second or not isinstance(inner, tile.MapYieldOp):
                body.add_op(inner.clone(value_mapper=mapping))
    new = tile.MapOp([v for v, _ in wanted], [a for _, a in wanted], [o.type for o in second.outputs], body)
    _replace(second, [new], list(new.outputs))
    Rewriter.erase_op(first)


def _replace(op: tile.MapOp, new: Sequence[tile.MapOp], results: Sequence[SSAValue]) -> None:
    scope = Before(op)
    for made in new:
        scope.add(made)
    for old, result in zip(op.outputs, results, strict=True):
        result.name_hint = old.name_hint
        old.replace_all_uses_with(result)
    Rewriter.erase_op(op)


def _share_turned(op: tile.MapOp) -> None:
    """A result that is only turned becomes one with another that is the same value: turned ones lie in shared memory."""
    end = op.body.block.last_op
    assert isinstance(end, tile.MapYieldOp)
    ends, results, kept = list(end.values), list(range(len(op.outputs))), list(range(len(op.outputs)))
    for n, output in enumerate(op.outputs):
        first = ends.index(ends[n])
        if first < n and all(isinstance(use.operation, tile.TransposeOp) for use in output.uses):
            results[n] = first
            kept.remove(n)
    if len(kept) == len(ends):
        return
    body = op.detach_region(0).detach_block(0)
    Rewriter.replace_op(end, tile.MapYieldOp(*(ends[n] for n in kept)))
    sources = _inputs(op)
    new = tile.MapOp([v for v, _ in sources], [a for _, a in sources], [op.outputs[n].type for n in kept], body)
    _replace(op, [new], [new.outputs[kept.index(n)] for n in results])


# --- splitting ---------------------------------------------------------------------------------


def _levels(body: Block) -> dict[SSAValue, int]:
    """Of each value of a loop's body: the number of the last product that it depends on; 0 needs none."""
    levels: dict[SSAValue, int] = {}
    products = 0
    for op in body.ops:
        level = max((levels.get(o, 0) for o in op.operands), default=0)
        if isinstance(op, tile.DotOp):
            products += 1
            level = products
        levels.update((result, level) for result in op.results)
    return levels


def _inner_levels(op: tile.MapOp, levels: dict[SSAValue, int]) -> dict[SSAValue, int]:
    """The same inside of a map. What is read from memory is read once, so it counts as needing a product."""
    found: dict[SSAValue, int] = {a: levels.get(v, 0) for a, v in zip(op.body.block.args, op.inputs, strict=True)}
    for inner in op.body.block.ops:
        level = max((found[o] for o in inner.operands), default=0)
        level = max(level, 1) if isinstance(inner, tile.GatherOp) else level
        found.update((result, level) for result in inner.results)
    return found


class _Split:
    """A map whose ops of `level` and below move into a map of their own."""

    def __init__(self, op: tile.MapOp, inner: dict[SSAValue, int], level: int):
        self.op, self.inner, self.level = op, inner, level
        end = op.body.block.last_op
        assert isinstance(end, tile.MapYieldOp)
        self.ends = list(end.values)

    def run(self) -> tuple[tile.MapOp, tile.MapOp]:
        """Puts two maps in place of the one."""
        early = [n for n, v in enumerate(self.ends) if self.inner[v] <= self.level]
        late = [n for n in range(len(self.ends)) if n not in early]
        crossing = self._crossing()
        first_values = list(dict.fromkeys([*(self.ends[n] for n in early), *crossing]))
        first = self._map(first_values, {})
        passed = dict(zip(first_values, first.outputs, strict=True))
        second = self._map([self.ends[n] for n in late], {v: passed[v] for v in crossing})
        results: list[SSAValue] = [*self.op.outputs]
        for n in early:
            results[n] = passed[self.ends[n]]
        for n, output in zip(late, second.outputs, strict=True):
            results[n] = output
        for value in crossing:
            passed[value].name_hint = value.name_hint
        _replace(self.op, [first, second], results)
        return first, second

    def _crossing(self) -> list[SSAValue]:
        """What the late part takes from the early one: what needs no product it computes again."""
        found: dict[SSAValue, None] = {}
        for op in self.op.body.block.ops:
            if not isinstance(op, tile.MapYieldOp) and max(map(self.inner.__getitem__, op.results)) > self.level:
                for operand in op.operands:
                    if isinstance(operand.owner, Operation) and 0 < self.inner[operand] <= self.level:
                        found.setdefault(operand)
        return list(found)

    def _map(self, values: Sequence[SSAValue], given: dict[SSAValue, SSAValue]) -> tile.MapOp:
        """A map of just some values; those in `given` are inputs."""
        ops, arguments = self._needed(values, set(given))
        rank = tuple(range(len(tile.shape_of(self.op.outputs[0]))))
        sources = [(a, i) for a, i in zip(self.op.body.block.args, _inputs(self.op), strict=True) if a in arguments]
        sources += [(v, (result, rank)) for v, result in given.items()]
        body = Block(arg_types=[old.type for old, _ in sources])
        mapping: dict[SSAValue, SSAValue] = {}
        for (old, _), new in zip(sources, body.args, strict=True):
            new.name_hint, mapping[old] = old.name_hint, new
        for op in ops:
            body.add_op(op.clone(value_mapper=mapping))
        body.add_op(tile.MapYieldOp(*(mapping[v] for v in values)))
        shape = tile.shape_of(self.op.outputs[0])
        types = [TensorType(v.type, shape) for v in values]
        return tile.MapOp([i[0] for _, i in sources], [i[1] for _, i in sources], types, body)

    def _needed(self, values: Sequence[SSAValue], given: set[SSAValue]) -> tuple[list[Operation], set[SSAValue]]:
        ops, arguments, work = set[Operation](), set[SSAValue](), list(values)
        while work:
            value = work.pop()
            if value in given:
                continue
            if isinstance(value, BlockArgument):
                arguments.add(value)
            elif isinstance(value.owner, Operation) and value.owner not in ops:
                ops.add(value.owner)
                work.extend(value.owner.operands)
        return [op for op in self.op.body.block.ops if op in ops], arguments


def _split(op: tile.MapOp, levels: dict[SSAValue, int]) -> None:
    """Cuts a map once for each product that a part of it has to wait for."""
    while True:
        inner = _inner_levels(op, levels)
        computed = {inner[r] for o in op.body.block.ops for r in o.results} - {0}
        if len(computed) < 2:
            return
        lowest = min(computed)
        first, op = _Split(op, inner, lowest).run()
        levels.update((output, lowest) for output in first.outputs)


def stage(body: Block) -> None:
    """Fuses the maps of a loop's body, then cuts them by the products that they wait for."""
    while True:
        pairs = ((op, _only_reader(op)) for op in body.ops if isinstance(op, tile.MapOp))
        found = next(((a, b) for a, b in pairs if b is not None), None)
        if found is None:
            break
        _fuse(*found)
    for op in [o for o in body.ops if isinstance(o, tile.MapOp)]:
        _share_turned(op)
    levels = _levels(body)
    for op in [o for o in body.ops if isinstance(o, tile.MapOp)]:
        _split(op, levels)


@dataclass(frozen=True)
class TileStageMapsPass(ModulePass):
    """Cuts the maps of a loop with several products into stages, so that the first starts when the first product ends.

    Maps that feed only one other are joined with it first: less crosses between stages then. What depends on no product
    (positions, the mask) is computed in each stage that needs it.

    ```
    %x = tile.dot %k, %qt, %zero; %dp = tile.dot %v, %dot, %zero
    %p, %ds = tile.map (%x, %dp) { p of x; ds = p * dp }
    ```
    becomes
    ```
    %x = tile.dot %k, %qt, %zero; %dp = tile.dot %v, %dot, %zero
    %p, %wide = tile.map (%x) { p of x }
    %ds = tile.map (%dp, %wide) { ds = wide * dp }
    ```
    """

    name = "tile-stage-maps"

    plan: str = "backward"
    """The plan whose kernels are changed."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for signature in signatures(op, self.plan):
            for body in list(step_bodies(signature.kernel.body.block)):
                stage(body)
