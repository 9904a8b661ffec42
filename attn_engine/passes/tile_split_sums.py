"""`tile-split-sums`: sums over the keys in parts that no threads exchange, added up once behind the loops."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from xdsl.context import Context
from xdsl.dialects import arith, builtin, scf
from xdsl.dialects.builtin import DenseIntOrFPElementsAttr, TensorType, f32
from xdsl.ir import Block, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_product import ReducePartialOp
from attn_engine.ir.walks import behind, bottom_up, operands_of
from attn_engine.passes.hopper.edit import After, drop_unread, erase_unused, extend_for, yield_more, yields
from attn_engine.passes.hopper.form import is_zero, read_forward
from attn_engine.passes.hopper.pin import GROUPS, WIDTH

_BOUNDS = 3
"""Operands of a loop in front of its states."""


def _is_linear(value: SSAValue, linear: set[SSAValue]) -> bool | None:
    """Whether a scalar is a sum of terms with one factor among `linear` each; None if it is something else of them."""
    known: dict[SSAValue, bool | None] = dict.fromkeys(linear, True)
    return bottom_up(value, operands_of, lambda v: _joins(v.owner, [known[o] for o in operands_of(v)]), known)


def _joins(op: Operation | Block, found: list[bool | None]) -> bool | None:
    """The same of an op, by what its operands are."""
    if not any(f is not False for f in found):
        return False
    sums = isinstance(op, arith.AddfOp | arith.SubfOp) and found == [True, True]
    scaled = isinstance(op, arith.MulfOp) and sorted(map(str, found)) == ["False", "True"]
    divided = isinstance(op, arith.DivfOp) and found == [True, False]
    return True if sums or scaled or divided or (isinstance(op, arith.NegfOp) and found == [True]) else None


def _depends(value: SSAValue, on: SSAValue) -> bool:
    return any(found is on for found in behind([value]))


def _ends(op: tile.MapOp) -> tile.MapYieldOp:
    end = op.body.block.last_op
    assert isinstance(end, tile.MapYieldOp)
    return end


def _users(value: SSAValue) -> list[tuple[Operation, int]]:
    return [(use.operation, use.index) for use in value.uses]


Place = tuple[Operation, int]
"""An operand of an op."""


@dataclass
class _Sums:
    """The parts of sums, by the vector whose elements they add up to."""

    parts: dict[SSAValue, SSAValue] = field(default_factory=dict[SSAValue, SSAValue])
    carries: list[tuple[scf.ForOp, int]] = field(default_factory=list[tuple[scf.ForOp, int]])
    """Loops, in order, and the numbers of their states that are in parts now."""

    def is_sum(self, value: SSAValue, assumed: frozenset[SSAValue] = frozenset(), user: Place | None = None) -> bool:
        """Whether a vector is a sum over keys whose parts may be found apart: of a loop's, `user` alone may need it."""
        op = value.owner
        if value in assumed:
            return True
        if isinstance(op, tile.ReduceOp):
            return op.kind.data is tile.Reduction.SUM and op.axis.value.data == 1 and tile.element_of(value) == f32
        if isinstance(op, tile.MapOp):
            number = op.outputs.index(value)
            return _is_linear(_ends(op).values[number], self._linear(op, assumed, user)) is True
        if isinstance(op, scf.ForOp):
            return self._is_state(op, op.results.index(value), assumed, user)
        return is_zero(value)

    def _is_state(self, loop: scf.ForOp, number: int, assumed: frozenset[SSAValue], user: Place | None) -> bool:
        argument, end = loop.body.block.args[number + 1], yields(loop.body.block)
        alone = _only_feeds(argument, (end, number)) and (user is None or _only_feeds(loop.results[number], user))
        if not alone or not self.is_sum(loop.iter_args[number], assumed, (loop, _BOUNDS + number)):
            return False
        return self.is_sum(end.operands[number], assumed | {argument})

    def _linear(self, op: tile.MapOp, assumed: frozenset[SSAValue], user: Place | None = None) -> set[SSAValue]:
        pairs = zip(op.body.block.args, op.inputs, strict=True)
        return {a for a, i in pairs if isinstance(i.type, TensorType) and self.is_sum(i, assumed, user)}

    def of(self, value: SSAValue) -> SSAValue:
        """[rows, 4], whose rows add up to a vector that is a sum."""
        if value not in self.parts:
            self.parts[value] = self._make(value)
            self.parts[value].name_hint = value.name_hint
        return self.parts[value]

    def _make(self, value: SSAValue) -> SSAValue:
        op, type_ = value.owner, TensorType(f32, [*tile.shape_of(value), GROUPS])
        if isinstance(op, tile.ReduceOp):
            return After(op).add(ReducePartialOp(op.kind, op.value, GROUPS, WIDTH)).result
        if isinstance(op, arith.ConstantOp):
            return After(op).add(arith.ConstantOp(DenseIntOrFPElementsAttr.from_list(type_, [0.0]), type_)).result
        if isinstance(op, tile.MapOp):
            return self._map(op, op.outputs.index(value), type_)
        assert isinstance(op, scf.ForOp)
        return self._loop(op, op.results.index(value))

    def _map(self, op: tile.MapOp, number: int, type_: TensorType[builtin.Float32Type]) -> SSAValue:
        """The scalar formula of one vector, on parts of what it is linear in."""
        end, arguments = _ends(op).values[number], op.body.block.args
        linear = {a for a in self._linear(op, frozenset(self.parts)) if _depends(end, a)}
        for n, argument in enumerate(arguments):
            if argument in linear:
                self.of(op.inputs[n])  # Loops become others, and their results with them, before inputs are read.
        inputs = [self.of(i) if a in linear else i for a, i in zip(arguments, op.inputs, strict=True)]
        axes = [(0, 1) if a in linear else x for a, x in zip(arguments, tile.axes_of(op.axes), strict=True)]
        new = tile.MapOp(inputs, axes, [type_], op.body.clone())
        _ends(new).operands = [_ends(new).values[number]]
        return _pruned(After(op).add(new)).outputs[0]

    def _loop(self, op: scf.ForOp, number: int) -> SSAValue:
        init, hint = self.of(op.iter_args[number]), op.results[number].name_hint or "sums"
        was = list(op.results)
        new, (argument,) = extend_for(op, [init], [hint])
        now = dict[SSAValue, SSAValue](zip(was, new.results, strict=False))
        self.parts = {now.get(key, key): now.get(part, part) for key, part in self.parts.items()}
        self.carries = [(new if loop is op else loop, n) for loop, n in self.carries]
        body = new.body.block
        self.parts[body.args[number + 1]] = argument
        yield_more(body, [self.of(yields(body).operands[number])])
        self.carries.append((new, number))
        self.parts[new.results[number]] = new.results[-1]
        return new.results[-1]


def _only_feeds(value: SSAValue, place: Place) -> bool:
    """Whether what depends on a vector is an operand there, and nothing else."""
    work = [value]
    while work:
        for user, index in _users(work.pop()):
            if isinstance(user, tile.MapOp):
                inner = user.body.block.args[index]
                pairs = zip(user.outputs, _ends(user).values, strict=True)
                work += [output for output, end in pairs if _depends(end, inner)]
            elif (user, index) != place:
                return False
    return True


def _pruned(op: tile.MapOp) -> tile.MapOp:
    """The map without results that nothing uses (of several), ops that nothing needs, and inputs that these took."""
    end = _ends(op)
    kept = [n for n, output in enumerate(op.outputs) if output.uses] or [0]
    end.operands = [end.values[n] for n in kept]
    erase_unused(op.body.block)
    drop_unread(op)
    types = [op.outputs[n].type for n in kept]
    new = tile.MapOp(op.inputs, tile.axes_of(op.axes), types, op.detach_region(op.body))
    Rewriter.insert_op(new, InsertPoint.before(op))
    for n, output in zip(kept, new.outputs, strict=True):
        output.name_hint = op.outputs[n].name_hint
        op.outputs[n].replace_all_uses_with(output)
    Rewriter.erase_op(op)
    return new


def _drop(loop: scf.ForOp, number: int) -> scf.ForOp:
    """The loop without a state that only its own next value is made of."""
    body = loop.body.block
    end, argument = yields(body), body.args[number + 1]
    end.operands = [o for n, o in enumerate(end.operands) if n != number]
    _erase_dead(body.ops)
    body.erase_arg(argument)
    inits = [i for n, i in enumerate(loop.iter_args) if n != number]
    new = scf.ForOp(loop.lb, loop.ub, loop.step, inits, loop.detach_region(loop.body))
    Rewriter.insert_op(new, InsertPoint.before(loop))
    for old, result in zip([r for n, r in enumerate(loop.results) if n != number], new.results, strict=True):
        result.name_hint = old.name_hint
        old.replace_all_uses_with(result)
    Rewriter.erase_op(loop)
    return new


def _erase_dead(ops: Iterable[Operation]) -> None:
    """Maps and reductions, or the results of maps, that nothing uses."""
    for op in reversed(list(ops)):
        if not isinstance(op, tile.MapOp | tile.ReduceOp) or all(r.uses for r in op.results):
            continue
        if any(r.uses for r in op.results):
            assert isinstance(op, tile.MapOp)
            _pruned(op)
        else:
            Rewriter.erase_op(op)


def split(loop: scf.ForOp, number: int) -> None:
    """Finds a state of the last loop in parts."""
    sums, result = _Sums(), loop.results[number]
    parts = sums.of(result)
    last, _ = sums.carries[-1]
    total = After(last).add(tile.ReduceOp(tile.Reduction.SUM, parts, 1), "total").result
    last.results[number].replace_all_uses_with(total)
    for carrier in reversed(list(dict.fromkeys(loop for loop, _ in sums.carries))):
        kept = carrier
        for n in sorted((n for loop, n in sums.carries if loop is carrier), reverse=True):
            kept = _drop(kept, n)
        assert kept.parent is not None
        _erase_dead(kept.parent.ops)


def _candidate(loop: scf.ForOp) -> int | None:
    """The number of a state that is a sum."""
    for number, result in enumerate(loop.results):
        vector = isinstance(result.type, TensorType) and len(tile.shape_of(result)) == 1
        if vector and result.uses and _Sums().is_sum(result):
            return number
    return None


@dataclass(frozen=True)
class TileSplitSumsPass(ModulePass):
    """Keeps each sum over the keys of a row in four parts, one for each thread that holds columns of it.

    That of the weights, which softmax divides by, is one: every step scales it and adds. Steps then exchange nothing
    between threads for it; what they add up to is found behind the loops. States that are used before are left alone.

    ```
    scf.for ... iter_args(%l = %zero) { %r = tile.reduce sum %p, 1; %l1 = map(%l, %alpha, %r) { l * alpha + r } }
    ```
    becomes
    ```
    %parts = scf.for ... iter_args(%l4 = %zero4) {
      %r4 = tile.reduce_partial sum %p groups 4 width 2
      %l41 = map(%l4, %alpha, %r4) { l * alpha + r }
    }
    %l = tile.reduce sum %parts, 1
    ```
    """

    name = "tile-split-sums"

    plan: str = "forward"
    """The plan whose kernel is changed."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        body = read_forward(op, self.plan).kernel.body.block
        while True:
            loop = [o for o in body.ops if isinstance(o, scf.ForOp)][-1]
            number = _candidate(loop)
            if number is None:
                return
            split(loop, number)
