"""`tile-fragment-sums`: sums in memory that only the plan's kernels see lie there as threads hold them."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, builtin
from xdsl.dialects.builtin import TensorType, f32
from xdsl.ir import Block, BlockArgument, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async import RolesOp
from attn_engine.dialects.tile_async_copy import AsyncReduceAddOp
from attn_engine.dialects.tile_async_fragments import COLUMNS, ROWS, THREADS, FromFragmentsOp, ToFragmentsOp
from attn_engine.dialects.tile_async_memory import DescribeOp, WriteOp
from attn_engine.dialects.tile_async_view import RingOp, SlotOp
from attn_engine.dialects.tile_types import BufferType, DescriptorType
from attn_engine.passes.hopper.edit import Before, Signature
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

    @property
    def rows(self) -> int:
        """That hold 64 rows of sums."""
        return self.parts * THREADS

    @classmethod
    def of(cls, adds: Signature, argument: BlockArgument, others: list[Signature]) -> _Sums | None:
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
        return cls(memory, describe, adds, argument, loads, columns, wide // columns) if high % ROWS == 0 else None

    # --- rewriting

    def run(self) -> None:
        self._allocate()
        self._read()
        self._add()

    def _allocate(self) -> None:
        """Whole blocks of 64 rows; sizes that are no multiple of it have room for more."""
        scope, (batch, heads, rows, _) = Before(self.memory), self.memory.sizes
        blocks = scope.add(arith.CeilDivSIOp(rows, scope.value(ROWS)), "blocks").result
        high = scope.value(scope.times(blocks, self.rows, "fragments"))
        wide = scope.value(self.columns * ROWS // THREADS)
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
            type_ = TensorType(f32, [high // ROWS * self.rows, self.columns * ROWS // THREADS])
            # Blocks that begin inside of the tensor are whole in memory; those beyond it are not there.
            bounds = [(t, limit) for t, limit in zip(tile.ints_of(load.bounded), load.limits, strict=True) if t == 0]
            limits = {t: self._limit(scope, limit) for t, limit in bounds} if high > ROWS else {}
            found = scope.add(tile.LoadOp(load.source, place, [2, 3], type_, limits), "fragments")
            whole = scope.add(FromFragmentsOp(found.result, self.parts), load.result.name_hint or "sums")
            Rewriter.replace_op(load, [], [whole.result])

    def _limit(self, scope: Before, limit: SSAValue) -> SSAValue:
        blocks = scope.add(arith.CeilDivSIOp(limit, scope.value(ROWS)), "blocks").result
        return scope.value(scope.times(blocks, self.rows, "limit"))

    def _row(self, scope: Before, row: SSAValue, column: SSAValue | None) -> SSAValue:
        """Where the fragments of the block at a row and a column begin."""
        block = scope.add(arith.DivSIOp(row, scope.value(ROWS)), "block").result
        number = scope.value(scope.times(block, self.parts, "number"))
        if column is not None and self.parts > 1:
            beside = scope.add(arith.DivSIOp(column, scope.value(self.columns)), "beside").result
            number = scope.add(arith.AddiOp(number, beside), "number").result
        return scope.value(scope.times(number, THREADS, "fragment"))

    def _add(self) -> None:
        wide = self.columns * ROWS // THREADS
        argument = self.adds.replace(
            self.argument, Before(self.adds.launch).add(DescribeOp(self.memory.result, [1, 1, THREADS, wide])).result
        )
        Rewriter.erase_op(self.describe)
        for roles in [op for op in self.adds.kernel.body.block.ops if isinstance(op, RolesOp)]:
            place = list(roles.captures).index(argument)
            inside = [_retype(region.block, place, argument) for region in roles.bodies]
            adds = [o for o in roles.walk() if isinstance(o, AsyncReduceAddOp) and o.descriptor in inside]
            for number in {_ring(roles, add) for add in adds}:
                self._pass(roles, number)
            for add in adds:
                scope = Before(add)
                batch, head, row, column = add.coordinates
                coordinates = [batch, head, self._row(scope, row, column), scope.value(0)]
                Rewriter.replace_op(add, AsyncReduceAddOp(add.source, add.descriptor, coordinates))

    def _pass(self, roles: RolesOp, number: int) -> None:
        """Slots of the ring with this number among the captures hold fragments."""
        ring = roles.captures[number].owner
        assert isinstance(ring, RingOp)
        stages = ring.result.type.get_shape()[0]
        wide = self.columns * ROWS // THREADS
        ring = Rewriter.replace_value_with_new_type(ring.result, BufferType([stages, THREADS, wide], f32))
        for region in roles.bodies:
            for slot in [use.operation for use in list(_retype(region.block, number, ring).uses)]:
                assert isinstance(slot, SlotOp)
                one = Rewriter.replace_value_with_new_type(slot.result, SlotOp(slot.ring, slot.index).result.type)
                for write in [use.operation for use in list(one.uses)]:
                    if isinstance(write, WriteOp):
                        write.operands[0] = Before(write).add(ToFragmentsOp(write.value), "fragments").result


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
    slot = add.source.owner
    assert isinstance(slot, SlotOp) and isinstance(slot.ring, BlockArgument)
    return slot.ring.index - 1


def _targets(signature: Signature) -> list[BlockArgument]:
    """The descriptors, as arguments of the kernel, of what consumers add to."""
    found: dict[BlockArgument, None] = {}
    for roles in [op for op in signature.kernel.body.block.ops if isinstance(op, RolesOp)]:
        for add in [op for op in roles.walk() if isinstance(op, AsyncReduceAddOp)]:
            inner = add.descriptor
            assert isinstance(inner, BlockArgument)
            outer = roles.captures[inner.index - 1]
            if isinstance(outer, BlockArgument):
                found[outer] = None
    return list(found)


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

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for signature in kernels_at_async_level(op, self.plan):
            for argument in _targets(signature):
                others = [s for s in launched(op, self.plan) if s.kernel is not signature.kernel]
                found = _Sums.of(signature, argument, others)
                if found is not None:
                    found.run()
