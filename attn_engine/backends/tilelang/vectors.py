"""tilelang-share-vectors: vectors that lie along both axes of tiles go through shared memory for one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from networkx.utils import UnionFind
from xdsl.context import Context
from xdsl.dialects import scf
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.backends.tilelang.printer import integer_attribute
from attn_engine.backends.tilelang.tiles import Tiles, is_tile
from attn_engine.dialects import tile
from attn_engine.dialects.tile_buffer_check import writes
from attn_engine.dialects.tile_buffer_compute import BufferReduceOp, BufferScanOp
from attn_engine.dialects.tile_buffer_map import BufferMapOp, BufferScatterAddOp
from attn_engine.dialects.tile_buffer_memory import (
    BufferAllocOp,
    CopyInOp,
    CopyOp,
    buffer_type,
    is_fragment,
    shared_like,
)
from attn_engine.dialects.tile_types import BufferType

_PER_LOOP = 8
"""How much more often than what stands around it a loop's body is taken to run."""

Elementwise = BufferMapOp | BufferScatterAddOp
Along = tuple[int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class _Use:
    """A vector along an axis of a tile: read by a map (`place` is that of its operand), or made by a reduction."""

    op: Elementwise | BufferReduceOp
    vector: SSAValue
    axis: int
    sizes: tuple[int, ...]
    """The tile's sizes, where they matter: products fix how tiles of all sizes lie; any other lies its own way."""
    shared: tuple[int, ...] = ()
    """The sizes of a tile whose columns are shared by the warps of a product: along them, it lies its own way."""
    place: int = -1

    @property
    def along(self) -> Along:
        return self.axis, self.sizes, self.shared

    def weight(self) -> int:
        """How often it happens, roughly."""
        depth, parent = 0, self.op.parent_op()
        while parent is not None:
            depth, parent = depth + isinstance(parent, scf.ForOp), parent.parent_op()
        return _PER_LOOP**depth


def is_vector(value: SSAValue) -> bool:
    return isinstance(value.type, BufferType) and is_fragment(value) and len(buffer_type(value).get_shape()) == 1


def _uses(kernel: tile.KernelOp) -> Iterator[_Use]:
    tiles = Tiles.of(kernel)
    for op in kernel.walk():
        if isinstance(op, Elementwise) and len(op.shape) > 1:
            held = list(filter(is_tile, op.operands))
            sizes = tiles.sizes(op.shape, held)
            for place, (value, axes) in enumerate(zip(op.inputs, tile.axes_of(op.axes), strict=True)):
                if is_vector(value):
                    yield _Use(op, value, axes[0], sizes, _shared(tiles, op.shape, held, axes[0]), place)
        elif isinstance(op, BufferReduceOp):
            shape, held, axis = (
                buffer_type(op.source).get_shape(),
                list(filter(is_tile, [op.source])),
                1 - op.axis.value.data,
            )
            yield _Use(op, op.target, axis, tiles.sizes(shape, held), _shared(tiles, shape, held, axis))


def _shared(tiles: Tiles, shape: tuple[int, ...], held: list[SSAValue], axis: int) -> tuple[int, ...]:
    return shape if axis == 1 and any(map(tiles.has_shared_columns, held)) else ()


def vectors_alike(kernel: tile.KernelOp) -> UnionFind[SSAValue]:
    """Vectors that threads hold in the same way, for one is computed from the other element by element."""
    found: UnionFind[SSAValue] = UnionFind()
    for op in kernel.walk():
        match op:
            case BufferMapOp() if len(op.shape) == 1:
                found.union(*filter(is_vector, (*op.inputs, *op.outputs)))
            case CopyOp() | BufferScanOp() if is_vector(op.source) and is_vector(op.target):
                found.union(op.source, op.target)
            case _:
                pass
    return found


def _crossing(kernel: tile.KernelOp) -> dict[SSAValue, list[_Use]]:
    """By one vector of them: the uses of vectors that are held alike and lie along both axes."""
    alike, classes = vectors_alike(kernel), dict[SSAValue, list[_Use]]()
    for use in _uses(kernel):
        classes.setdefault(alike[use.vector], []).append(use)
    return {vector: uses for vector, uses in classes.items() if len({use.along for use in uses}) > 1}


# --- loaded vectors ----------------------------------------------------------------------------


def _is_only_loaded(vector: SSAValue) -> bool:
    """Whether copies from memory alone write a vector, and maps alone read it."""
    users = [use.operation for use in vector.uses]
    loads = [op for op in users if isinstance(op, CopyInOp)]
    return bool(loads) and all(isinstance(op, CopyInOp | Elementwise) for op in users)


def _move_loaded(kernel: tile.KernelOp) -> None:
    """Loaded vectors of crossing classes lie in shared memory, where each thread reads what it needs."""
    alike, crossing = vectors_alike(kernel), _crossing(kernel)
    for alloc in [op for op in kernel.body.walk() if isinstance(op, BufferAllocOp)]:
        vector = alloc.result
        if is_vector(vector) and alike[vector] in crossing and _is_only_loaded(vector):
            Rewriter.replace_op(alloc, shared_like(vector, vector.name_hint))


def _twin(kernel: tile.KernelOp, vector: SSAValue) -> SSAValue:
    return _insert(kernel, shared_like(vector, f"{vector.name_hint or 'v'}_shared"))


# --- computed vectors --------------------------------------------------------------------------


def _to_shared(use: _Use, kernel: tile.KernelOp, twins: dict[SSAValue, SSAValue]) -> None:
    """A map reads a vector from its twin in shared memory."""
    twin = twins.get(use.vector) or _twin(kernel, use.vector)
    twins[use.vector] = twin
    if not _is_current(use.op, use.vector, twin):
        Rewriter.insert_op(CopyOp(use.vector, twin), InsertPoint.before(use.op))
    use.op.operands[use.place] = twin


def _kept_axis(uses: list[_Use]) -> Along:
    """The axis, and the tile, along which the most uses lie; rows if both have as many."""
    weights = Counter[Along]()
    for use in uses:
        weights[use.along] += use.weight()
    return max(sorted(weights), key=weights.__getitem__)


def _turn(kernel: tile.KernelOp, uses: list[_Use]) -> None:
    """Sends the uses along the other axis through shared memory."""
    kept = _kept_axis(uses)
    twins: dict[SSAValue, SSAValue] = {}
    for use in [u for u in uses if u.along != kept]:
        if isinstance(use.op, BufferReduceOp):
            _turn_result(kernel, use.op)
        else:
            _to_shared(use, kernel, twins)


def _insert(kernel: tile.KernelOp, alloc: BufferAllocOp) -> SSAValue:
    Rewriter.insert_op(alloc, InsertPoint.at_start(kernel.body.block))
    return alloc.result


def _turn_result(kernel: tile.KernelOp, op: BufferReduceOp) -> None:
    """What a reduction gives goes to a fragment of its own, and from there to its target."""
    target = op.target
    own = BufferAllocOp(buffer_type(target))
    own.result.name_hint = target.name_hint
    _insert(kernel, own)
    twin = _twin(kernel, target)
    op.operands[1] = own.result
    Rewriter.insert_op([CopyOp(own.result, twin), CopyOp(twin, target)], InsertPoint.after(op))


def _is_current(op: Operation, vector: SSAValue, twin: SSAValue) -> bool:
    """Whether an earlier op of the same block copied a vector to its twin, and nothing wrote it since."""
    assert isinstance(op.parent, Block)
    before = op.prev_op
    while before is not None:
        if isinstance(before, CopyOp) and (before.source, before.target) == (vector, twin):
            return True
        if any(vector in writes(inner) for inner in before.walk()):
            return False
        before = before.prev_op
    return False


# --- tiles held more than once -----------------------------------------------------------------


def _share_repeated(kernel: tile.KernelOp) -> None:
    """Vectors shorter than the threads, along tiles that no product fixes and that go to shared memory themselves.

    Threads hold such a vector more than once, and with it the tile; of the threads that hold the same, only some write it.
    """
    tiles, threads = Tiles.of(kernel), integer_attribute(kernel, "threads", 128)
    written = {tiles.alike[op.source] for op in kernel.walk() if isinstance(op, CopyOp) and _leaves(op)}
    twins: dict[SSAValue, SSAValue] = {}
    for use in list(_uses(kernel)):
        short = buffer_type(use.vector).get_shape()[0] < threads
        outputs = use.op.outputs if short and use.sizes and isinstance(use.op, BufferMapOp) else ()
        if any(is_tile(o) and tiles.alike[o] in written for o in outputs):
            _to_shared(use, kernel, twins)


def _leaves(op: CopyOp) -> bool:
    """Whether it takes a tile from registers to shared memory."""
    return is_tile(op.source) and not is_fragment(op.target)


@dataclass(frozen=True)
class TilelangShareVectorsPass(ModulePass):
    """Lets no vector lie along the rows of one tile and the columns of another: TileLang finds no layout for such.

    ```
    tile.copy_in %g ... into %a : !tile.global<1 x f32>, !tile.buffer<64xf32, register>
    tile.buffer_map (%s, %a, %a) axes [[0, 1], [0], [1]] into (%s) ...
    tile.buffer_reduce max %s, 0 into %m
    tile.buffer_map (%s, %m) axes [[0, 1], [0]] into (%s) ...
    ```
    becomes
    ```
    tile.copy_in %g ... into %a : !tile.global<1 x f32>, !tile.buffer<64xf32, shared>
    tile.buffer_map (%s, %a, %a) axes [[0, 1], [0], [1]] into (%s) ...
    tile.buffer_reduce max %s, 0 into %m
    tile.copy %m, %m_shared
    tile.buffer_map (%s, %m_shared) axes [[0, 1], [0]] into (%s) ...
    ```
    Threads hold vectors alike that are computed from each other element by element: if any of these lie along both
    axes, those that are only loaded are loaded to shared memory, and for the rest the axis stays that most uses have.
    Products fix how threads hold their accumulators and what is computed with these element by element; among tiles
    without such a tie, those of other sizes are other tiles, and their rows are not those of products; so are, along
    columns, those of products whose columns are shared by warps. Where such a tile
    goes to shared memory, so do vectors along it that are shorter than the threads: or it would be held more than once.
    """

    name = "tilelang-share-vectors"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for kernel in [k for k in op.ops if isinstance(k, tile.KernelOp)]:
            _move_loaded(kernel)
            for uses in _crossing(kernel).values():
                _turn(kernel, uses)
            _share_repeated(kernel)
