"""Kernels whose loops have any number of products a step, and why some are not taken to the async level.

A program loads the blocks that it owns, then loops (of loops) over steps. A step loads blocks, multiplies what
the program owns, or elementwise results, with them, and accumulates. What lies between is up to `tile.map`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from xdsl.dialects import arith, scf
from xdsl.dialects.builtin import ModuleOp, bf16, f16, f32
from xdsl.ir import Block, BlockArgument, Operation, SSAValue

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async import RolesOp
from attn_engine.dialects.tile_async_copy import AsyncLoadOp
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.ir.async_schedule import WARPGROUP_ROWS, WARPGROUP_THREADS
from attn_engine.passes.hopper.edit import Signature
from attn_engine.passes.hopper.form import find_plan

_MATRIX_RANK = 2
Write = tile.StoreOp | tile.AtomicAddOp


@dataclass(frozen=True)
class Shared:
    """A product of a turned result of the step with a block that the program owns, added to memory."""

    dot: tile.DotOp
    result: SSAValue
    """Of the step, before it is turned: rows are those that consumers share."""
    block: tile.LoadOp
    add: tile.AtomicAddOp
    leaving: tuple[Write, ...] = ()
    """How the result itself leaves, turned, in every step."""

    @classmethod
    def of(cls, dot: tile.DotOp) -> Shared | None:
        """None for a product of another form."""
        turned, block, uses = dot.a.owner, dot.b.owner, list(dot.result.uses)
        if not isinstance(turned, tile.TransposeOp) or not isinstance(turned.value.owner, tile.MapOp):
            return None
        if not isinstance(block, tile.LoadOp) or block.parent is dot.parent or len(uses) != 1:
            return None
        add = uses[0].operation
        if not isinstance(add, tile.AtomicAddOp) or tile.ints_of(add.dims) != (2, 3):
            return None
        return cls(dot, turned.value, block, add)

    def with_leaving(self, writes: Sequence[Write]) -> Shared:
        """With those of some writes that are of its result."""
        return replace(self, leaving=tuple(write for write in writes if turned_of(write.value) is self.result))


@dataclass(frozen=True)
class Step:
    """The body of a loop that holds products, and its loads: blocks for products, and vectors that come with them.

    Products over the rows that consumers share are apart from those in which each has its own.
    """

    body: Block
    dots: tuple[tile.DotOp, ...]
    blocks: tuple[tile.LoadOp, ...]
    vectors: tuple[tile.LoadOp, ...]
    shared: tuple[Shared, ...] = ()
    tables: tuple[tile.LoadOp, ...] = ()
    """Blocks with an element per score, which arithmetic reads, turned or not."""

    writes: tuple[Write, ...] = ()
    """Blocks of other results that leave in every step."""

    @property
    def beside(self) -> tuple[tile.LoadOp, ...]:
        """What comes with the first block."""
        return (*self.vectors, *self.tables)

    def first_use(self, load: tile.LoadOp) -> tile.DotOp:
        """The first product that a block takes part in."""
        return next(dot for dot in self.dots if block_of(dot.b) is load)


def is_step(op: Operation) -> bool:
    return isinstance(op, scf.ForOp) and any(isinstance(o, tile.DotOp) for o in op.body.block.ops)


def step_bodies(block: Block) -> Iterator[Block]:
    """The bodies of the loops that hold products themselves."""
    for op in block.walk():
        if isinstance(op, scf.ForOp) and is_step(op):
            yield op.body.block


def turned_of(value: SSAValue) -> SSAValue | None:
    """What a value is turned from, if it is."""
    return value.owner.value if isinstance(value.owner, tile.TransposeOp) else None


def block_of(value: SSAValue) -> tile.LoadOp | None:
    """The load behind the second operand of a product, turned or not."""
    owner = value.owner
    owner = owner.value.owner if isinstance(owner, tile.TransposeOp) else owner
    return owner if isinstance(owner, tile.LoadOp) else None


def signatures(module: ModuleOp, plan_name: str) -> list[Signature]:
    """The kernels of a plan that have steps, with their launches."""
    return [s for s in launched(module, plan_name) if any(True for _ in step_bodies(s.kernel.body.block))]


def kernels_at_async_level(module: ModuleOp, plan_name: str) -> list[Signature]:
    """The kernels of a plan that copy asynchronously."""
    found = launched(module, plan_name)
    return [s for s in found if any(isinstance(op, AsyncLoadOp) for op in s.kernel.walk())]


def roles_of(module: ModuleOp, plan_name: str) -> Iterator[RolesOp]:
    """The roles into which those kernels are cut; the first are those of consumers."""
    for signature in kernels_at_async_level(module, plan_name):
        yield from [op for op in signature.kernel.body.block.ops if isinstance(op, RolesOp)]


def step_maps(module: ModuleOp, plan_name: str) -> Iterator[tile.MapOp]:
    """The maps of the steps of a plan's kernels, each of which may be changed as it comes."""
    for signature in launched(module, plan_name):
        for body in step_bodies(signature.kernel.body.block):
            yield from [op for op in body.ops if isinstance(op, tile.MapOp)]


def launched(module: ModuleOp, plan_name: str) -> list[Signature]:
    """What a plan launches."""
    plan = find_plan(module, plan_name)
    kernels = {op.sym_name.data: op for op in module.ops if isinstance(op, tile.KernelOp)}
    launches = [op for op in plan.body.block.ops if isinstance(op, tile.LaunchOp)]
    return [Signature(kernels[op.kernel.root_reference.data], op) for op in launches]


def step_of(body: Block, signature: Signature) -> Step:
    """A step and its loads; raises `AsyncUnsupportedError` if its products take their operands from elsewhere."""
    found = {op: Shared.of(op) for op in body.ops if isinstance(op, tile.DotOp)}
    dots = tuple(dot for dot, shared in found.items() if shared is None)
    shared = tuple(s for s in found.values() if s is not None)
    blocks: dict[tile.LoadOp, None] = {}
    for dot in dots:
        load = block_of(dot.b)
        if load is None or load.parent is not body:
            raise AsyncUnsupportedError(f"product '{dot.result.name_hint}' does not read a block as it was loaded")
        blocks.setdefault(load)
        _check_left(dot, body)
    for load in (*blocks, *(s.block for s in shared)):
        check_block(load)
    vectors = tuple(op for op in body.ops if isinstance(op, tile.LoadOp) and _is_vector(op, signature))
    loads = tuple(op for op in body.ops if isinstance(op, tile.LoadOp) and op in blocks)
    tables, writes = tuple(_tables(body, dots, loads)), tuple(_writes(body, [s.add for s in shared]))
    shared = tuple(one.with_leaving(writes) for one in shared)
    known = [write for one in shared for write in one.leaving]
    return Step(body, dots, loads, vectors, shared, tables, tuple(w for w in writes if w not in known))


def _writes(body: Block, known: Sequence[Operation]) -> Iterator[Write]:
    """Raises `AsyncUnsupportedError` for what does not leave as a block along the last two axes of its memory."""
    for op in body.ops:
        if isinstance(op, tile.ScatterAddOp):
            raise AsyncUnsupportedError("it adds to a capture's gradient score by score")
        if isinstance(op, tile.StoreOp | tile.AtomicAddOp) and op not in known:
            rank = len(op.indices)
            if len(tile.shape_of(op.value)) != _MATRIX_RANK or tile.ints_of(op.dims) != (rank - 2, rank - 1):
                raise AsyncUnsupportedError("it writes something else than blocks in every step")
            yield op


def _tables(body: Block, dots: Sequence[tile.DotOp], blocks: Sequence[tile.LoadOp]) -> Iterator[tile.LoadOp]:
    scores = tile.shape_of(dots[0].result) if dots else ()
    for op in body.ops:
        if not isinstance(op, tile.LoadOp) or op in blocks or len(tile.shape_of(op.result)) != _MATRIX_RANK:
            continue
        rank = len(op.indices)
        if tile.ints_of(op.dims) != (rank - 2, rank - 1) or sorted(tile.shape_of(op.result)) != sorted(scores):
            raise AsyncUnsupportedError(f"it loads '{op.result.name_hint}' in other blocks than those of the scores")
        yield op


def check_block(load: tile.LoadOp) -> None:
    if tile.element_of(load.result) not in (f16, bf16):
        raise AsyncUnsupportedError(f"its operands are {tile.element_of(load.result)}, not f16 or bf16")
    if tile.ints_of(load.dims) != (2, 3):
        raise AsyncUnsupportedError("it loads operands transposed")
    for use in load.result.uses:
        if not isinstance(use.operation, tile.TransposeOp | tile.DotOp):
            raise AsyncUnsupportedError(f"it computes with '{load.result.name_hint}' beside multiplying it")


def _check_left(dot: tile.DotOp, body: Block) -> None:
    """The first operand: a block that the program owns, or a result of the step."""
    owner = dot.a.owner
    if isinstance(owner, tile.LoadOp) and owner.parent is not body:
        check_block(owner)
    elif not isinstance(owner, tile.MapOp):
        raise AsyncUnsupportedError(f"product '{dot.result.name_hint}' does not read a block as it was loaded")


def _is_vector(load: tile.LoadOp, signature: Signature) -> bool:
    """One number per position, from a temporary of the plan, whose rows the plan can align."""
    source = load.source
    if not isinstance(source, BlockArgument) or not isinstance(signature.passed(source).owner, tile.AllocOp):
        return False
    return tile.element_of(load.result) == f32 and tile.ints_of(load.dims) == (2,)


_TAKEN = (
    *(tile.LoadOp, tile.StoreOp, tile.MapOp, tile.ReduceOp, tile.DotOp, tile.TransposeOp, tile.RangeOp),
    *(tile.GatherOp, tile.DimOp, tile.ProgramIdOp, tile.EndOp, tile.MapYieldOp, scf.ForOp, scf.YieldOp),
    *(tile.AtomicAddOp, tile.ScatterAddOp, tile.AddDiagonalsOp, tile.LoadDiagonalsOp),
)


def check_kernel(signature: Signature) -> None:
    """Raises `AsyncUnsupportedError` if a kernel holds what the passes do not take."""
    kernel = signature.kernel
    for op in kernel.walk():
        known = isinstance(op, _TAKEN) or op.name.startswith(("arith.", "math."))
        if op is not kernel and not known:
            raise AsyncUnsupportedError(f"its kernel @{kernel.sym_name.data} holds '{op.name}'")
    bodies = list(step_bodies(kernel.body.block))
    for op in kernel.walk() if bodies else ():
        if isinstance(op, tile.ReduceOp) and not (op.parent in bodies and op.axis.value.data) and not adds_up(op):
            raise AsyncUnsupportedError("it reduces over the rows that consumers share")
    for body in bodies:
        step_of(body, signature)


SHARED_STAGES = 2
"""Results that consumers share: one consumer may be a step ahead of another."""


def check_size(signature: Signature, consumers: int, registers: int) -> None:
    """Raises `AsyncUnsupportedError` unless a consumer has the rows of one warpgroup, and room for a step's results.

    A product over shared rows takes the place of one whose result is used up.
    """
    for body in step_bodies(signature.kernel.body.block):
        step = step_of(body, signature)
        dots = step.dots
        own = {tile.shape_of(shared.dot.result)[0] for shared in step.shared}
        if not own <= {WARPGROUP_ROWS, WARPGROUP_ROWS * consumers}:
            raise AsyncUnsupportedError(
                f"a sum over its rows has neither {WARPGROUP_ROWS} rows itself nor as many a consumer"
            )
        rows = {tile.shape_of(dot.result)[0] for dot in dots}
        if rows != {WARPGROUP_ROWS * consumers}:
            raise AsyncUnsupportedError(f"its blocks have {max(rows)} rows instead of {WARPGROUP_ROWS * consumers}")
        columns = sum(tile.shape_of(dot.result)[1] for dot in dots)
        need = columns * WARPGROUP_ROWS // WARPGROUP_THREADS
        if need > registers:
            raise AsyncUnsupportedError(f"the results of its products need {need} of {registers} registers")


def adds_up(op: tile.ReduceOp) -> bool:
    """Whether sums over parts, each added to memory, are the sum over all: nothing but a guard comes in between."""
    if op.kind.data is not tile.Reduction.SUM:
        return False
    users = [use.operation for use in op.result.uses]
    guards = [u for u in users if isinstance(u, arith.SelectOp)]
    users = [u for u in users if u not in guards] + [use.operation for g in guards for use in g.result.uses]
    return all(isinstance(u, tile.AtomicAddOp | tile.ScatterAddOp) for u in users)
