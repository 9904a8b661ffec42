"""`tile-fragment-sums`: sums in memory that only the plan's kernels see lie there as threads hold them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, builtin, scf
from xdsl.dialects.builtin import TensorType, f32
from xdsl.ir import Block, BlockArgument, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async import RolesOp
from attn_engine.dialects.tile_async_copy import AsyncReduceAddOp, AsyncStoreWaitOp, ProxyFenceOp
from attn_engine.dialects.tile_async_fragments import (
    COLUMNS,
    ROWS,
    AddFragmentsOp,
    FromFragmentsOp,
    ToFragmentsOp,
    shape_of_fragments,
)
from attn_engine.dialects.tile_async_memory import DescribeOp, ReadOp, WriteOp
from attn_engine.dialects.tile_async_view import RingOp, SlotOp
from attn_engine.dialects.tile_types import BufferType, DescriptorType
from attn_engine.passes.hopper.edit import Before, Signature
from attn_engine.passes.hopper.own_steps import has_own_steps
from attn_engine.passes.hopper.steps import kernels_at_async_level, launched
from attn_engine.passes.simplify_constants import constant_of

_RANK = 4


@dataclass
class _Sums:
    """A temporary of the plan, the descriptor by which one kernel adds to it, and the loads of the kernel that reads it."""

    memory: tile.AllocOp
    describe: DescribeOp
    adds: Signature
    argument: SSAValue
    """Of the kernel that adds."""
    loads: list[tile.LoadOp]
    columns: int
    """Of the block that one consumer adds."""
    parts: int
    """Blocks beside each other."""
    slots: bool
    """Whether they leave through slots of shared memory."""
    late: bool = False
    """Whether the first step adds what belongs to no rows."""
    beyond: SSAValue | None = None
    """In the kernel that adds: the number of the block of rows that threads add that to, which nobody reads."""

    @property
    def _roles(self) -> list[RolesOp]:
        return [op for op in self.adds.kernel.body.block.ops if isinstance(op, RolesOp)]

    @property
    def shape(self) -> list[int]:
        """Of the fragments of one block."""
        return shape_of_fragments(self.columns, not self.slots)

    @property
    def rows(self) -> int:
        """That hold 64 rows of sums."""
        return self.parts * self.shape[0]

    @classmethod
    def of(
        cls, adds: Signature, argument: BlockArgument, others: list[Signature], slots: bool, late: bool
    ) -> _Sums | None:
        """None for what is added to otherwise, or read in another form."""
        describe = adds.passed(argument).owner
        if not isinstance(describe, DescribeOp) or not isinstance(describe.source.owner, tile.AllocOp):
            return None
        memory = describe.source.owner
        users = {use.operation for use in memory.result.uses}
        readers = [s for s in others if s.launch in users]
        known = {describe, *(s.launch for s in readers)}
        if any(o not in known and not isinstance(o, tile.FillOp) for o in users) or len(readers) != 1:
            return None
        loads = _loads(readers[0], memory.result)
        assert isinstance(describe.result.type, DescriptorType)
        *_, rows, columns = describe.result.type.get_shape()
        shapes = {tile.shape_of(load.result) for load in loads or ()}
        if len(shapes) != 1 or rows != ROWS or columns % COLUMNS:
            return None
        assert loads is not None
        high, wide = shapes.pop()
        if high % ROWS:
            return None
        return cls(memory, describe, adds, argument, loads, columns, wide // columns, slots, late)

    # --- rewriting

    def run(self) -> None:
        self._allocate()
        self._read()
        self._add()

    def _allocate(self) -> None:
        """Whole blocks of 64 rows; sizes that are no multiple of it have room for more.

        Copies leave out what is beyond the tensor, threads do not: the last step may have a block for each consumer, and the
        first one has what belongs nowhere.
        """
        scope, (batch, heads, rows, _) = Before(self.memory), self.memory.sizes
        blocks = scope.add(arith.CeilDivSIOp(rows, scope.value(ROWS)), "blocks").result
        below = self._roles[0].roles[0][1] // self.parts
        if not self.slots and below > 1:
            blocks = scope.add(arith.AddiOp(blocks, scope.value(below - 1)), "blocks").result
        if not self.slots and self.late:
            self.beyond = blocks
            blocks = scope.add(arith.AddiOp(blocks, scope.value(1)), "blocks").result
        high = scope.value(scope.times(blocks, self.rows, "fragments"))
        wide = scope.value(self.shape[1])
        assert isinstance(self.memory.result.type, tile.GlobalType)
        new = tile.AllocOp([batch, heads, high, wide], self.memory.result.type)
        new.result.name_hint = self.memory.result.name_hint
        Rewriter.replace_op(self.memory, new)
        self.memory = new

    def _read(self) -> None:
        for load in self.loads:
            scope, place = Before(load), list(load.indices)
            high, _ = tile.shape_of(load.result)
            place[2] = self._row(scope, place[2], None)
            type_ = TensorType(f32, [high // ROWS * self.rows, self.shape[1]])
            # Blocks that begin inside of the tensor are whole in memory; those beyond it are not there.
            bounds = [(t, limit) for t, limit in zip(tile.ints_of(load.bounded), load.limits, strict=True) if t == 0]
            limits = {t: self._limit(scope, limit) for t, limit in bounds} if high > ROWS else {}
            found = scope.add(tile.LoadOp(load.source, place, [2, 3], type_, limits), "fragments")
            rounds = None if self.slots else self.columns // COLUMNS
            whole = scope.add(FromFragmentsOp(found.result, self.parts, rounds), load.result.name_hint or "sums")
            Rewriter.replace_op(load, [], [whole.result])

    def _limit(self, scope: Before, limit: SSAValue) -> SSAValue:
        blocks = scope.add(arith.CeilDivSIOp(limit, scope.value(ROWS)), "blocks").result
        return scope.value(scope.times(blocks, self.rows, "limit"))

    def _row(self, scope: Before, row: SSAValue, column: SSAValue | None, most: SSAValue | None = None) -> SSAValue:
        """Where the fragments of the block at a row and a column begin; rows further on are in block `most`."""
        block = scope.add(arith.DivSIOp(row, scope.value(ROWS)), "block").result
        if most is not None:
            block = scope.add(arith.MinSIOp(block, most), "block").result
        number = scope.value(scope.times(block, self.parts, "number"))
        if column is not None and self.parts > 1:
            beside = scope.add(arith.DivSIOp(column, scope.value(self.columns)), "beside").result
            number = scope.add(arith.AddiOp(number, beside), "number").result
        return scope.value(scope.times(number, self.shape[0], "fragment"))

    def _add(self) -> None:
        top = Before(self.adds.launch)
        memory = (
            top.add(DescribeOp(self.memory.result, [1, 1, *self.shape])).result if self.slots else self.memory.result
        )
        argument = self.adds.replace(self.argument, memory)
        Rewriter.erase_op(self.describe)
        most = self.adds.add(self.beyond, "blocks") if self.beyond is not None else None
        for roles in self._roles:
            if most is not None:
                roles.operands = [*roles.captures, most]
                for region in roles.bodies:
                    region.block.insert_arg(most.type, len(region.block.args)).name_hint = "blocks"
            place = list(roles.captures).index(argument)
            inside = [_retype(region.block, place, argument) for region in roles.bodies]
            adds = [o for o in roles.walk() if isinstance(o, AsyncReduceAddOp) and o.descriptor in inside]
            rings = {_ring(roles, add) for add in adds}
            for number in rings if self.slots else ():
                self._pass(roles, number)
            for add in adds:
                scope = Before(add)
                batch, head, row, column = add.coordinates
                limit = _role_of(add).args[-1] if most is not None else None
                coordinates = [batch, head, self._row(scope, row, column, limit)]
                if self.slots:
                    Rewriter.replace_op(
                        add, AsyncReduceAddOp(add.source, add.descriptor, [*coordinates, scope.value(0)])
                    )
                else:
                    _add_at_once(add, coordinates)
            if not self.slots:
                _drop(roles, rings)

    def _pass(self, roles: RolesOp, number: int) -> None:
        """Slots of the ring with this number among the captures hold fragments."""
        ring = roles.captures[number].owner
        assert isinstance(ring, RingOp)
        stages = ring.result.type.get_shape()[0]  # type: ignore[attr-defined]
        ring = Rewriter.replace_value_with_new_type(ring.result, BufferType([stages, *self.shape], f32))
        for region in roles.bodies:
            for slot in [use.operation for use in list(_retype(region.block, number, ring).uses)]:
                assert isinstance(slot, SlotOp)
                one = Rewriter.replace_value_with_new_type(slot.result, SlotOp(slot.ring, slot.index).result.type)
                for write in [use.operation for use in list(one.uses)]:
                    if isinstance(write, WriteOp):
                        write.operands[0] = Before(write).add(ToFragmentsOp(write.value), "fragments").result


def _add_at_once(add: AsyncReduceAddOp, coordinates: list[SSAValue]) -> None:
    """The threads add what they hold themselves: no slot, and nobody to wait for."""
    write = _before(add, lambda op: isinstance(op, WriteOp) and _ring_of(op.target) is _ring_of(add.source))
    fence = _before(add, lambda op: isinstance(op, ProxyFenceOp))
    wait = _before(write, lambda op: isinstance(op, AsyncStoreWaitOp))
    assert isinstance(write, WriteOp) and write.is_before_in_block(fence)
    Before(add).add(AddFragmentsOp(write.value, add.descriptor, coordinates))
    slots = {add.source.owner, write.target.owner}
    for op in (add, write, wait, *(() if _fences_others(fence, write) else (fence,))):
        Rewriter.erase_op(op)
    for slot in slots:
        assert isinstance(slot, SlotOp)
        Rewriter.erase_op(slot)


def _fences_others(fence: Operation, write: WriteOp) -> bool:
    """Whether a fence stands behind other accesses than a write."""
    found = fence.prev_op
    while found is not None and not isinstance(found, ProxyFenceOp):
        if isinstance(found, WriteOp | ReadOp) and found is not write:
            return True
        found = found.prev_op
    return False


def _role_of(op: Operation) -> Block:
    """The block of the role that an op is in."""
    block = op.parent
    while block is not None and not isinstance(block.parent_op(), RolesOp):
        outer = block.parent_op()
        block = outer.parent if outer is not None else None
    assert block is not None
    return block


def _before(op: Operation, wanted: Callable[[Operation], bool]) -> Operation:
    """The last op of a block in front of one that belongs to it: a slot is waited for, written, fenced and copied from."""
    found = op.prev_op
    while found is not None and not wanted(found):
        found = found.prev_op
    assert found is not None
    return found


def _ring_of(slot: SSAValue) -> SSAValue:
    assert isinstance(slot.owner, SlotOp)
    return slot.owner.ring


def _drop(roles: RolesOp, numbers: set[int]) -> None:
    """Rings that nothing uses any more."""
    rings = [roles.captures[number].owner for number in numbers]
    for region in roles.bodies:
        for number in sorted(numbers, reverse=True):
            region.block.erase_arg(region.block.args[number + 1])
    roles.operands = [value for number, value in enumerate(roles.captures) if number not in numbers]
    for ring in rings:
        assert isinstance(ring, RingOp)
        Rewriter.erase_op(ring)


def _loads(reader: Signature, memory: SSAValue) -> list[tile.LoadOp] | None:
    """How a kernel reads a temporary; None unless all its uses are loads of blocks from the first column on."""
    argument = reader.kernel.body.block.args[list(reader.launch.arguments).index(memory)]
    loads: list[tile.LoadOp] = []
    for use in argument.uses:
        load = use.operation
        if not isinstance(load, tile.LoadOp) or tile.ints_of(load.dims) != (2, 3) or len(load.indices) != _RANK:
            return None
        if not _is_multiple(load.indices[2], ROWS) or constant_of(load.indices[3]) != 0:
            return None
        loads.append(load)
    return loads


def _is_multiple(value: SSAValue, of: int) -> bool:
    """Whether an index is a product with a constant multiple of a number."""
    factors = value.owner.operands if isinstance(value.owner, arith.MuliOp) else ()
    known = [constant_of(factor) for factor in factors]
    return any(isinstance(number, int) and number % of == 0 for number in known)


def _retype(block: Block, place: int, capture: SSAValue) -> SSAValue:
    """The argument of a role, behind its number, that stands for a capture, with the type that this has now."""
    return Rewriter.replace_value_with_new_type(block.args[place + 1], capture.type)


def _ring(roles: RolesOp, add: AsyncReduceAddOp) -> int:
    """Which of the captures is the ring that sums leave through."""
    ring = _ring_of(add.source)
    assert isinstance(ring, BlockArgument)
    return ring.index - 1


def _targets(signature: Signature) -> dict[BlockArgument, list[AsyncReduceAddOp]]:
    """The descriptors, as arguments of the kernel, of what consumers add to, and where they do."""
    found: dict[BlockArgument, list[AsyncReduceAddOp]] = {}
    for roles in [op for op in signature.kernel.body.block.ops if isinstance(op, RolesOp)]:
        for add in [op for op in roles.walk() if isinstance(op, AsyncReduceAddOp)]:
            inner = add.descriptor
            assert isinstance(inner, BlockArgument)
            outer = roles.captures[inner.index - 1]
            if isinstance(outer, BlockArgument):
                found.setdefault(outer, []).append(add)
    return found


def _have_own_steps(signature: Signature) -> bool:
    roles = [op for op in signature.kernel.body.block.ops if isinstance(op, RolesOp)]
    return any(has_own_steps(op.bodies[0].block) for op in roles)


def _in_place(add: AsyncReduceAddOp) -> bool:
    """Whether a step adds to its own rows: those of the step before the first one are beyond the tensor."""
    loop, row = add.parent_op(), add.coordinates[2]
    return isinstance(loop, scf.ForOp) and row not in loop.body.block.args[1:]


@dataclass(frozen=True)
class TileFragmentSumsPass(ModulePass):
    """Keeps the sums that consumers add to in memory in the order in which threads hold the results of products.

    Threads then write sixteen bytes each beside each other to the slot that the sums leave through, without conflicts of banks, and
    the slot is one piece of memory. The kernel that reads the sums puts them in order. Temporaries that another
    kernel reads in another form stay as they are.

    ```
    tile.write %dq, %slot : 64x64; tile.async_reduce_add %slot, %sums[%b, %h, %q0, %column]
    ```
    becomes
    ```
    %f = tile.to_fragments %dq; tile.write %f, %slot : 128x32; tile.async_reduce_add %slot, %sums[%b, %h, %fragment, 0]
    ```
    """

    name = "tile-fragment-sums"

    plan: str = "backward"
    """The plan whose kernels are changed."""
    direct: bool = False
    """Whether threads add sums from their registers, without slots, where programs all go through the same blocks. They
    add to the same rows at about the same time then, and pieces of memory would wait for one another."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for signature in kernels_at_async_level(op, self.plan):
            slots = not self.direct or _have_own_steps(signature)
            for argument, adds in _targets(signature).items():
                others = [s for s in launched(op, self.plan) if s.kernel is not signature.kernel]
                found = _Sums.of(signature, argument, others, slots, not all(map(_in_place, adds)))
                if found is not None:
                    found.run()
