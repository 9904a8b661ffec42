"""hip-choose-layouts: who holds which element of each fragment, and how tiles lie in LDS."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import FixedBitwidthType, IntegerAttr, ModuleOp
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter
from xdsl.utils.hints import isa

from attn_engine.dialects import tile
from attn_engine.dialects import tile_buffer_compute as compute
from attn_engine.dialects import tile_buffer_memory as memory
from attn_engine.dialects.tile_buffer_check import reads, writes
from attn_engine.dialects.tile_buffer_layout import WAVE, MfmaAttr, PaddedAttr, Part, SliceLayoutAttr
from attn_engine.dialects.tile_types import BufferType, MemorySpace
from attn_engine.errors import ScheduleError

SIZES = (32, 16)
"""Rows and columns of a matrix instruction, best first."""
_DEPTHS = {(32, 1): (16,), (16, 1): (32,), (32, 2): (16, 8), (16, 2): (32, 16), (32, 4): (8,), (16, 4): (16,)}
"""By size and bytes of an element: how deep a product of matrices is, deepest first. Where the device's instruction is
less deep, it is several of them; a lane holds at least the 4 neighbours along the depth that an accumulator holds."""
PADDING_BYTES = 16


def _bytes(type_: Attribute) -> int:
    assert isinstance(type_, FixedBitwidthType)
    return max(1, type_.bitwidth // 8)


def _buffers(kernel: tile.KernelOp) -> list[memory.BufferAllocOp]:
    return [op for op in kernel.body.block.ops if isinstance(op, memory.BufferAllocOp)]


def _touching(kernel: tile.KernelOp, buffer: SSAValue) -> tuple[list[Operation], list[Operation]]:
    """The ops that write a buffer, and those that read it."""
    users = [use.operation for use in buffer.uses]
    return [op for op in users if buffer in writes(op)], [op for op in users if buffer in reads(op)]


# --- where operands are ------------------------------------------------------------------------


def _is_right(op: Operation, buffer: SSAValue) -> bool:
    """Whether an op reads a buffer as the right operand of a product, as it stands, and not otherwise."""
    return isinstance(op, compute.GemmOp) and op.b is buffer and op.a is not buffer and op.transpose_b is None


def _copied_from(gemm: compute.GemmOp) -> SSAValue | None:
    """The fragment that the right operand was copied from, if it still holds the same."""
    op, written = gemm.prev_op, set[SSAValue]()
    while op is not None:
        if isinstance(op, memory.CopyOp) and op.target is gemm.b:
            return op.source if op.source not in written and memory.is_fragment(op.source) else None
        if op.regions and any(gemm.b in writes(inner) for inner in op.walk()):
            return None
        written |= {value for inner in op.walk() for value in writes(inner)}
        if gemm.b in writes(op):
            return None
        op = op.prev_op
    return None


def _keep_right_operands(kernel: tile.KernelOp) -> None:
    """A right operand that the kernel computes is read from its fragment; one that it loads is loaded into one."""
    for op in list(kernel.walk()):
        if isinstance(op, compute.GemmOp) and _is_right(op, op.b):
            fragment = _copied_from(op)
            if fragment is not None:
                op.operands[1] = fragment
    for alloc in _buffers(kernel):
        written, read = _touching(kernel, alloc.result)
        type_ = memory.buffer_type(alloc.result)
        if type_.memory_space is not MemorySpace.SHARED:
            continue
        if not read:
            for op in (*written, alloc):
                Rewriter.erase_op(op)
        elif all(_is_right(op, alloc.result) for op in read) and all(isinstance(op, memory.CopyInOp) for op in written):
            # Copies from fragments were taken above; what is left is loaded, or changes its layout.
            held = BufferType(type_.get_shape(), type_.element_type, MemorySpace.REGISTER)
            _replace_alloc(alloc, memory.BufferAllocOp(held))


def _replace_alloc(old: memory.BufferAllocOp, new: memory.BufferAllocOp) -> None:
    new.result.name_hint = old.result.name_hint
    Rewriter.replace_op(old, new)


def _share_operands(kernel: tile.KernelOp, keep: bool) -> None:
    """An operand that is a fragment goes through LDS, but for right ones that are kept: no accumulator is held as a left
    one."""
    for op in list(kernel.walk()):
        for position, part in ((0, "a"), (1, "b")):
            if not isinstance(op, compute.GemmOp):
                continue
            value = op.operands[position]
            fine = position == 1 and keep and op.transpose_b is None
            if not memory.is_fragment(value) or fine:
                continue
            alloc = memory.shared_like(value, f"{value.name_hint or 'v'}_{part}")
            Rewriter.insert_op(alloc, InsertPoint.at_start(kernel.body.block))
            Rewriter.insert_op(memory.CopyOp(value, alloc.result), InsertPoint.before(op))
            op.operands[position] = alloc.result


# --- layouts -----------------------------------------------------------------------------------


class _Vectors:
    """Along which axis of a tile each vector lies, kept as the axis that it lacks."""

    def __init__(self, kernel: tile.KernelOp):
        self._kernel = kernel
        self._removed: dict[SSAValue, int] = {}
        for op in kernel.walk():
            if isinstance(op, compute.BufferReduceOp):
                self._removed[op.target] = op.axis.value.data
        self._spread()
        for op in list(kernel.walk()):
            if isinstance(op, compute.BufferMapOp | compute.BufferScatterAddOp) and len(op.shape) == 2:
                self._place_inputs(op)
        self._spread()

    def removed(self, vector: SSAValue) -> int:
        return self._removed.get(vector, 0)

    def _place_inputs(self, op: compute.BufferMapOp | compute.BufferScatterAddOp) -> None:
        for number, (value, named) in enumerate(zip(list(op.inputs), tile.axes_of(op.axes), strict=True)):
            if not _is_fragment(value) or _rank(value) != 1:
                continue
            wanted = 1 - named[0]
            if self._removed.setdefault(value, wanted) != wanted:
                op.operands[number] = self._turned(value, wanted, op)
            else:
                self._spread()

    def _turned(self, vector: SSAValue, removed: int, op: Operation) -> SSAValue:
        """The vector laid along the other axis, by way of LDS."""
        name = vector.name_hint or "v"
        shared, turned = memory.shared_like(vector, f"{name}_shared"), memory.BufferAllocOp(memory.buffer_type(vector))
        turned.result.name_hint = f"{name}_turned"
        Rewriter.insert_op([shared, turned], InsertPoint.at_start(self._kernel.body.block))
        copies = [memory.CopyOp(vector, shared.result), memory.CopyOp(shared.result, turned.result)]
        Rewriter.insert_op(copies, InsertPoint.before(op))
        self._removed[turned.result] = removed
        return turned.result

    def _spread(self) -> None:
        """Vectors that meet only each other in an op lie along the same axis; one that lies along the other is turned."""
        before = -1
        while len(self._removed) > before:
            before = len(self._removed)
            for op in list(self._kernel.walk()):
                held = [v for v in op.operands if _is_fragment(v)]
                if isinstance(op, _MEETING) and all(_rank(v) == 1 for v in held):
                    self._align(op, held)

    def _align(self, op: Operation, held: list[SSAValue]) -> None:
        """Results say along which axis, or else the first vector that is known to lie along one."""
        known = [self._removed[v] for v in [*filter(_is_fragment, writes(op)), *held] if v in self._removed]
        if not known:
            return
        for vector in held:
            if self._removed.setdefault(vector, known[0]) == known[0]:
                continue
            if vector in writes(op):
                raise ScheduleError(f"hip: {op.name} writes vectors along both axes of a tile")
            turned = self._turned(vector, known[0], op)
            for number, operand in enumerate(op.operands):
                if operand is vector:
                    op.operands[number] = turned


def _halves(number: int) -> list[int]:
    """8 -> 8, 4, 2, 1."""
    return [number >> n for n in range(number.bit_length())]


class _Groups:
    """Fragments that meet in one op are held alike: a layout is chosen per group."""

    def __init__(self, kernel: tile.KernelOp, copies: bool):
        self._copies = copies
        self._same: dict[SSAValue, SSAValue] = {}
        self._sums: set[SSAValue] = set()
        self._right: set[SSAValue] = set()
        for op in kernel.walk():
            held = [v for v in op.operands if _is_fragment(v)]
            if held and isinstance(op, _MEETING):
                self._join(held)
                if isinstance(op, compute.GemmOp):
                    self._sums.add(op.acc)
                    self._right |= {op.b} if _is_fragment(op.b) else set()

    def root(self, value: SSAValue) -> SSAValue:
        while value in self._same:
            value = self._same[value]
        return value

    def candidates(self, root: SSAValue, waves: int) -> Iterator[MfmaAttr]:
        """Ways to hold a group, best first: columns shared by the waves, as a right operand must be; then rows too,
        as the result of a product may be; then copies of what is not one; then copies of products, in fewer waves."""
        shapes = [(size, size, _DEPTHS[size, 4][0]) for size in SIZES]
        for count in _halves(waves) if self._copies else [waves]:
            splits = [(count // columns, columns) for columns in _halves(count)]
            yield from (MfmaAttr(shape, Part.ACC, (1, count)) for shape in shapes)
            if not self._has(root, self._right):
                yield from (MfmaAttr(shape, Part.ACC, split) for shape in shapes for split in splits)
                if not self._has(root, self._sums):
                    yield from (MfmaAttr(shape, Part.B, split) for shape in shapes for split in splits)

    def _has(self, root: SSAValue, values: set[SSAValue]) -> bool:
        return any(self.root(value) is root for value in values)

    def _join(self, values: list[SSAValue]) -> None:
        for value in values[1:]:
            first, other = self.root(values[0]), self.root(value)
            if first is not other:
                self._same[other] = first


_MEETING = (
    compute.BufferMapOp,
    compute.BufferReduceOp,
    compute.BufferScanOp,
    compute.BufferScatterAddOp,
    compute.GemmOp,
    memory.CopyOp,
)


def _is_fragment(value: SSAValue) -> bool:
    return isinstance(value.type, BufferType) and memory.is_fragment(value)


def _rank(value: SSAValue) -> int:
    return len(memory.buffer_type(value).get_shape())


def _fits(layout: MfmaAttr, vectors: _Vectors, member: SSAValue) -> bool:
    shape = memory.buffer_type(member).get_shape()
    axes = (0, 1) if len(shape) == 2 else (1 - vectors.removed(member),)
    return all(n % (layout.block[a] * layout.split[a]) == 0 for n, a in zip(shape, axes, strict=True))


def _choose(kernel: tile.KernelOp, groups: _Groups, vectors: _Vectors, root: SSAValue, waves: int) -> MfmaAttr:
    members = [a.result for a in _buffers(kernel) if _is_fragment(a.result) and groups.root(a.result) is root]
    for layout in groups.candidates(root, waves):
        if all(_fits(layout, vectors, member) for member in members):
            return layout
    shapes = sorted({"x".join(map(str, memory.buffer_type(m).get_shape())) for m in members})
    raise ScheduleError(
        f"hip: kernel @{kernel.sym_name.data} has tiles of {', '.join(shapes)}, which matrix instructions of 16 rows"
        f" and columns do not divide among {waves} waves; use larger blocks"
    )


def _layout_of(alloc: memory.BufferAllocOp, held: MfmaAttr, removed: int) -> Attribute:
    """The group's layout for one fragment: an accumulator's with the depth of its products, a vector's without an axis."""
    users = [use.operation for use in alloc.result.uses]
    products = [op for op in users if isinstance(op, compute.GemmOp) and op.acc is alloc.result]
    if products:
        bits = _bytes(memory.buffer_type(products[0].a).element_type)
        depth = next((k for k in _DEPTHS[held.m.data, bits] if all(_depth(op) % k == 0 for op in products)), None)
        if depth is None:
            raise ScheduleError(f"hip: a product is {min(map(_depth, products))} deep; use larger blocks")
        return MfmaAttr((held.m, held.n, depth), Part.ACC, held.waves)
    return held if _rank(alloc.result) == 2 else SliceLayoutAttr(removed, held)


def _depth(op: compute.GemmOp) -> int:
    return memory.buffer_type(op.a).get_shape()[0 if op.transpose_a is not None else 1]


def _lay_out(kernel: tile.KernelOp, copies: bool) -> None:
    threads = kernel.attributes["threads"]
    assert isa(threads, IntegerAttr)
    vectors = _Vectors(kernel)
    groups = _Groups(kernel, copies)
    chosen: dict[SSAValue, MfmaAttr] = {}
    new: list[tuple[memory.BufferAllocOp, Attribute]] = []
    shared: list[memory.BufferAllocOp] = []
    for alloc in _buffers(kernel):
        type_ = memory.buffer_type(alloc.result)
        if type_.memory_space is MemorySpace.SHARED:
            shared.append(alloc)
            continue
        root = groups.root(alloc.result)
        if root not in chosen:
            chosen[root] = _choose(kernel, groups, vectors, root, threads.value.data // WAVE)
        new.append((alloc, _layout_of(alloc, chosen[root], vectors.removed(alloc.result))))
    for alloc, layout in new:
        _replace_alloc(alloc, memory.BufferAllocOp(memory.buffer_type(alloc.result), layout))
    for alloc in shared:
        layout = _in_lds(alloc) if _rank(alloc.result) == 2 else None
        _replace_alloc(alloc, memory.BufferAllocOp(memory.buffer_type(alloc.result), layout))
    for op in kernel.walk():
        if isinstance(op, compute.GemmOp):
            op.properties.pop("split", None)


def _in_lds(alloc: memory.BufferAllocOp) -> PaddedAttr:
    """Rows padded; where products alone read a tile, along its rows, what a lane multiplies at once lies together."""
    bits = _bytes(memory.buffer_type(alloc.result).element_type)
    padding = PADDING_BYTES // bits
    read = [use.operation for use in alloc.result.uses if alloc.result in reads(use.operation)]
    depths = {_depth_along_rows(op, alloc.result) for op in read}
    depth = next(iter(depths)) if len(depths) == 1 else None
    return PaddedAttr(padding, depth if depth is not None and bits <= 2 else 0)


def _depth_along_rows(op: Operation, tile_: SSAValue) -> int | None:
    """How deep the instructions are that read a tile along its rows: two runs of a lane; None for other ops."""
    if not isinstance(op, compute.GemmOp):
        return None
    along = [op.transpose_a is None] * (op.a is tile_) + [op.transpose_b is not None] * (op.b is tile_)
    held = memory.fragment_layout(op.acc)
    assert isinstance(held, MfmaAttr)
    m, _, depth = held.instruction
    return depth if all(along) and m * depth // WAVE == 8 else None


def _choose_layouts(kernel: tile.KernelOp, keep: bool, copies: bool) -> None:
    if keep:
        _keep_right_operands(kernel)
    _share_operands(kernel, keep)
    _lay_out(kernel, copies)


@dataclass(frozen=True)
class HipChooseLayoutsPass(ModulePass):
    """Holds every fragment as an accumulator of matrix instructions is, its columns shared by the waves.

    Right operands are held the same way and stay in registers; left operands lie in LDS, rows padded. Where blocks are
    too small for that, right operands go to LDS as well, and waves may share rows; and where they are still too small,
    some waves compute what others do.

    ```
    %ks = tile.buffer_alloc : !tile.buffer<64x64xf16, shared>
    %s = tile.buffer_alloc : !tile.buffer<64x128xf32, register>
    %m = tile.buffer_alloc : !tile.buffer<128xf32, register>
    ```
    becomes
    ```
    %ks = tile.buffer_alloc layout #tile.padded<8> : !tile.buffer<64x64xf16, shared>
    %s = tile.buffer_alloc layout #tile.mfma<32x32x16, acc, 1x4> : !tile.buffer<64x128xf32, register>
    %m = tile.buffer_alloc layout #tile.sliced<0, #tile.mfma<32x32x16, acc, 1x4>> : !tile.buffer<128xf32, register>
    ```
    """

    name = "hip-choose-layouts"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for kernel in [k for k in op.ops if isinstance(k, tile.KernelOp)]:
            for keep, copies in ((True, False), (False, False), (True, True)):
                tried = kernel.clone()
                try:
                    _choose_layouts(tried, keep, copies)
                except ScheduleError:
                    if copies:
                        raise
                else:
                    Rewriter.replace_op(kernel, tried)
                    break
