"""`tile-merge-loops`: the loops of a role over blocks of keys become one, which can be overlapped from end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from xdsl.context import Context
from xdsl.dialects import arith, builtin, scf
from xdsl.dialects.builtin import i32
from xdsl.ir import Block, BlockArgument, Operation, Region, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async import RolesOp
from attn_engine.dialects.tile_async_product import DotOperandOp, PinOp, ReducePartialOp, WaitOp
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.ir.async_schedule import AsyncSchedule
from attn_engine.passes.hopper.edit import Before, yields
from attn_engine.passes.hopper.form import find_plan, signature_of
from attn_engine.passes.hopper.pin import behind, pin_weights, round_alone
from attn_engine.passes.hopper.slicing import is_scalar_code
from attn_engine.passes.lowering.scope import Scope

_TILES = (tile.MapOp, tile.ReduceOp, tile.RangeOp, tile.ScanOp, tile.TransposeOp, PinOp, ReducePartialOp)


@dataclass
class _Kind:
    """The body of one loop, or of several that are alike: what all kinds do alike, and what lies between the products."""

    body: Block
    frame: list[Operation]
    middle: list[Operation]
    mapping: dict[SSAValue, SSAValue] = field(default_factory=dict[SSAValue, SSAValue])

    @classmethod
    def of(cls, body: Block) -> _Kind:
        ops = list(body.ops)[:-1]
        late = behind(ops, _accumulators(body)) | _operands(ops)
        middle = [o for o in ops if _is_tile(o) and o not in late]
        frame = [o for o in ops if o not in middle and not is_scalar_code(o)]
        return cls(body, frame, middle)

    def inner(self, value: SSAValue) -> bool:
        return value.owner in self.middle


def _is_tile(op: Operation) -> bool:
    return isinstance(op, _TILES) or (isinstance(op, arith.ConstantOp) and not is_scalar_code(op))


def _accumulators(body: Block) -> list[SSAValue]:
    """The carries that products add to: the result of the last wait comes back as one of them."""
    waits = [o for o in body.ops if isinstance(o, WaitOp)]
    ends = yields(body).operands
    return [body.args[n + 1] for n, end in enumerate(ends) if any(end in wait.values for wait in waits)]


def _operands(ops: Sequence[Operation]) -> set[Operation]:
    """Maps that round weights alone, and the moves of their results."""
    moves = [o for o in ops if isinstance(o, DotOperandOp)]
    return {o for move in moves for o in (move, move.value.owner) if isinstance(o, Operation)}


class _Merge:
    """One role. `t` counts the positions of all loops, one behind the other."""

    def __init__(self, loops: list[scf.ForOp]):
        self.loops = loops
        self.kinds: list[_Kind] = []
        self.kind_of: list[int] = []
        for loop in loops:
            same = next(
                (n for n, k in enumerate(self.kinds) if loop.body.block.is_structurally_equivalent(k.body)), None
            )
            if same is None:
                self.kinds.append(_Kind.of(loop.body.block))
            self.kind_of.append(len(self.kinds) - 1 if same is None else same)
        names = [[type(o) for o in kind.frame] for kind in self.kinds]
        if any(found != names[0] for found in names):
            raise AsyncUnsupportedError("its loops over keys differ in more than the arithmetic on scores")
        self.known: dict[tuple[object, ...], Operation] = {}
        self.chosen: dict[tuple[SSAValue, ...], SSAValue] = {}

    def run(self) -> None:
        first, last = self.loops[0], self.loops[-1]
        self._hoist()
        scope = Before(first)
        ends, bases = self._places(scope)
        inits = list(first.iter_args)
        block = Block(arg_types=[i32, *(v.type for v in inits)])
        for old, new in zip(first.body.block.args, block.args, strict=True):
            new.name_hint = old.name_hint
        block.args[0].name_hint = "t"
        self._body(block, ends, bases)
        zero = scope.value(0)
        merged = scope.add(scf.ForOp(zero, ends[-1], first.step, inits, block))
        for old, new in zip(last.results, merged.results, strict=True):
            new.name_hint = old.name_hint
            old.replace_all_uses_with(new)
        for loop in reversed(self.loops):
            Rewriter.erase_op(loop)

    def _hoist(self) -> None:
        """What stands between the loops, bounds say, moves in front of them."""
        first = self.loops[0]
        for before, loop in zip(self.loops, self.loops[1:], strict=False):
            if list(loop.iter_args) != list(before.results):
                raise AsyncUnsupportedError("something is done to the states between its loops over keys")
            op = before.next_op
            while op is not None and op is not loop:
                following = op.next_op
                op.detach()
                first.parent_block().insert_op_before(op, first)  # type: ignore[union-attr]
                op = following

    def _places(self, scope: Before) -> tuple[list[SSAValue], list[SSAValue]]:
        """Of each loop: where its positions end, and what to add to a position for the first key of a block."""
        ends: list[SSAValue] = []
        bases: list[SSAValue] = []
        for loop in self.loops:
            length = scope.add(arith.SubiOp(loop.ub, loop.lb), "length").result
            less = scope.add(arith.SubiOp(loop.step, scope.value(1))).result
            up = scope.add(arith.AddiOp(length, less)).result
            whole = scope.add(arith.MuliOp(scope.add(arith.DivSIOp(up, loop.step)).result, loop.step)).result
            steps = scope.value(scope.larger(whole, 0, "steps"))
            bases.append(scope.add(arith.SubiOp(loop.lb, ends[-1]), "base").result if ends else loop.lb)
            ends.append(scope.add(arith.AddiOp(ends[-1], steps), "end").result if ends else steps)
        return ends, bases

    # --- the body

    def _body(self, block: Block, ends: list[SSAValue], bases: list[SSAValue]) -> None:
        self.scope = scope = Scope(block)
        position = block.args[0]
        below = [scope.add(arith.CmpiOp(position, end, "slt"), "below").result for end in ends[:-1]]
        self.is_kind = self._flags(scope, below)
        base = bases[-1]
        for test, own in zip(reversed(below), reversed(bases[:-1]), strict=True):
            base = scope.add(arith.SelectOp(test, own, base), "base").result
        start = scope.add(arith.AddiOp(position, base), "n0").result
        for kind in self.kinds:
            kind.mapping |= dict(zip(kind.body.args, [start, *block.args[1:]], strict=True))
        columns = list(zip(*(kind.frame for kind in self.kinds), strict=True))
        for values in (vs for row in columns for vs in zip(*(op.operands for op in row), strict=True)):
            if values[0].type == i32:
                self._unified(values)  # in front of all: copies stay beside their barriers
        exported = False
        for row in columns:
            if not exported and any(
                kind.inner(v) for kind, op in zip(self.kinds, row, strict=True) for v in op.operands
            ):
                self._branch(columns)
                exported = True
            self._frame(row)
        if not exported:
            self._branch(columns)
        results = zip(*(yields(kind.body).operands for kind in self.kinds), strict=True)
        scope.add(scf.YieldOp(*[self._unified(values) for values in results]))

    def _flags(self, scope: Scope, below: Sequence[SSAValue]) -> list[SSAValue]:
        """For each kind but the last: whether the position belongs to it."""
        flags: list[SSAValue] = []
        for number in range(len(self.kinds) - 1):
            flag = scope.add(arith.ConstantOp.from_int_and_width(int(self.kind_of[-1] == number), 1)).result
            for test, kind in zip(reversed(below), reversed(self.kind_of[:-1]), strict=True):
                mine = scope.add(arith.ConstantOp.from_int_and_width(int(kind == number), 1)).result
                flag = scope.add(arith.SelectOp(test, mine, flag), "partial").result
            flags.append(flag)
        return flags

    def _frame(self, row: Sequence[Operation]) -> None:
        """One op for all kinds."""
        operands = [self._unified(values) for values in zip(*(op.operands for op in row), strict=True)]
        mapping = dict(zip(row[0].operands, operands, strict=True))
        new = self.scope.add(row[0].clone(value_mapper=dict(mapping)))
        for kind, op in zip(self.kinds, row, strict=True):
            kind.mapping |= dict(zip(op.results, new.results, strict=True))

    def _unified(self, values: Sequence[SSAValue]) -> SSAValue:
        """One value for what the kinds have at a place: selected, where they differ."""
        found = tuple(self._resolved(kind, value) for kind, value in zip(self.kinds, values, strict=True))
        if found in self.chosen:
            return self.chosen[found]
        result = found[-1]
        for value, flag in zip(reversed(found[:-1]), reversed(self.is_kind), strict=True):
            if value is not result:
                if value.type != i32:
                    raise AsyncUnsupportedError("its loops over keys take different tiles")
                result = self.scope.add(arith.SelectOp(flag, value, result), value.name_hint or "chosen").result
        self.chosen[found] = result
        return result

    def _resolved(self, kind: _Kind, value: SSAValue) -> SSAValue:
        """The value in the merged loop; scalar code is written once, though several kinds have it."""
        owner = value.owner
        if value in kind.mapping or not isinstance(owner, Operation) or owner.parent is not kind.body:
            return kind.mapping.get(value, value)
        operands = tuple(self._resolved(kind, o) for o in owner.operands)
        key = (type(owner), str(owner.properties), operands)
        if key not in self.known:
            mapping = dict(zip(owner.operands, operands, strict=True))
            self.known[key] = self.scope.add(owner.clone(value_mapper=mapping))
        kind.mapping |= dict(zip(owner.results, self.known[key].results, strict=True))
        return kind.mapping[value]

    # --- between the products

    def _branch(self, columns: Sequence[Sequence[Operation]]) -> None:
        """The arithmetic of each kind in a branch of its own; what later ops and the next step need of it comes out."""
        places = [values for row in columns for values in zip(*(op.operands for op in row), strict=True)]
        places += list(zip(*(yields(kind.body).operands for kind in self.kinds), strict=True))
        wanted = [vs for vs in dict.fromkeys(places) if any(k.inner(v) for k, v in zip(self.kinds, vs, strict=True))]
        if not wanted:
            return
        # Arithmetic that no kind has of its own needs no branch.
        results = self._choice(self.scope, 0, wanted)
        for values, result in zip(wanted, results, strict=True):
            for kind, value in zip(self.kinds, values, strict=True):
                kind.mapping[value] = result

    def _choice(self, scope: Scope, number: int, wanted: Sequence[Sequence[SSAValue]]) -> Sequence[SSAValue]:
        """The values wanted, by kinds from `number` on."""
        if number == len(self.kinds) - 1:
            return self._arithmetic(scope, number, wanted)
        blocks = [Block(), Block()]
        inner = [Scope(block) for block in blocks]
        values = [self._arithmetic(inner[0], number, wanted), self._choice(inner[1], number + 1, wanted)]
        for own, found in zip(inner, values, strict=True):
            own.add(scf.YieldOp(*found))
        types = [v.type for v in values[0]]
        op = scope.add(scf.IfOp(self.is_kind[number], types, Region(blocks[0]), Region(blocks[1])))
        for result, value in zip(op.results, values[0], strict=True):
            result.name_hint = value.name_hint
        return op.results

    def _arithmetic(self, scope: Scope, number: int, wanted: Sequence[Sequence[SSAValue]]) -> list[SSAValue]:
        """What lies between the products of one kind, and scalar code that only it needs."""
        kind = self.kinds[number]
        needed = [o for o in kind.body.ops if o in kind.middle or is_scalar_code(o)]
        used = _behind(kind.middle, set(kind.mapping))
        mapping = dict(kind.mapping)
        for op in needed:
            if op in kind.middle or op in used:
                scope.add(op.clone(value_mapper=mapping))
        return [mapping.get(values[number], values[number]) for values in wanted]


def _behind(ops: Sequence[Operation], known: set[SSAValue]) -> set[Operation]:
    """Scalar code that ops need and that is not known yet."""
    found, work = set[Operation](), [o for op in ops for inner in op.walk() for o in inner.operands]
    while work:
        value = work.pop()
        owner = value.owner
        if value in known or isinstance(value, BlockArgument) or owner in found or not isinstance(owner, Operation):
            continue
        if is_scalar_code(owner):
            found.add(owner)
            work.extend(owner.operands)
    return found


@dataclass(frozen=True)
class TileMergeLoopsPass(ModulePass):
    """Makes one loop of the loops of each role over blocks of keys: those that a mask cuts, and those that it leaves whole.

    What every loop does, copies, products and waits, stands in the merged loop once. The arithmetic between the products
    is that of the loop that a block belongs to, in branches: all threads of a role take the same one.

    ```
    %a1 = scf.for %n = %lo to %hi ... { %s = wait 0, %p; %w = masked(%s, %n); product with %w }
    %a2 = scf.for %n = %lo2 to %hi2 ... { %s = wait 0, %p; %w = weights(%s); product with %w }
    ```
    becomes
    ```
    %a2 = scf.for %t = 0 to %length1 + %length2 ... {
      %partial = arith.cmpi slt, %t, %length1
      %n = %t + (%partial ? %lo : %lo2 - %length1)
      %s = wait 0, %p
      %w = scf.if %partial { yield masked(%s, %n) } else { yield weights(%s) }
      product with %w
    }
    ```
    """

    name = "tile-merge-loops"

    plan: str = "forward"
    """The plan whose kernel is changed."""
    pin: bool = AsyncSchedule.pin
    """Whether to keep the assembler from hoisting the wait for the output above the exponentials."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        plan = find_plan(op, self.plan)
        if plan is None:
            raise AsyncUnsupportedError(f"no plan is named @{self.plan}")
        kernel = signature_of(op, plan).kernel
        roles = next((o for o in kernel.body.block.ops if isinstance(o, RolesOp)), None)
        if roles is None:
            raise AsyncUnsupportedError("its kernel has no roles: run tile-specialize-warps first")
        for region in roles.bodies:
            body = next(o for o in region.block.ops if isinstance(o, scf.WhileOp)).after_region.block
            loops = [o for o in body.ops if isinstance(o, scf.ForOp)]
            if len(loops) > 1:
                for loop in loops:
                    round_alone(loop.body.block)
                    if self.pin:
                        pin_weights(loop.body.block)
                _Merge(loops).run()
