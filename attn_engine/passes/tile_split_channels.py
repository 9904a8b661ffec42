"""`tile-split-channels`: heads whose size is no power of two, in parts that are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, builtin, scf
from xdsl.dialects.builtin import DenseIntOrFPElementsAttr, FloatAttr, IntegerAttr, TensorType
from xdsl.ir import Attribute, Block, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async import RolesOp
from attn_engine.dialects.tile_async_copy import AsyncLoadOp, AsyncStoreOp
from attn_engine.dialects.tile_async_memory import DescribeOp, ReadOp, WriteOp
from attn_engine.dialects.tile_async_product import AsyncDotOp, DotOperandOp, WaitOp
from attn_engine.dialects.tile_async_view import PartOp, RingOp, SlotOp, TransposedSlotOp
from attn_engine.dialects.tile_types import BufferType, DescriptorType, MmaLayoutAttr
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.passes.hopper.edit import Before, Signature
from attn_engine.passes.hopper.form import signature_of

_LARGEST_N = 256
_MATRIX_RANK = 2


def parts_of(size: int) -> list[int]:
    """The powers of two that a size is the sum of, the largest first."""
    return [1 << bit for bit in range(size.bit_length() - 1, -1, -1) if size >> bit & 1]


def _shape(type_: Attribute) -> tuple[int, ...]:
    if isinstance(type_, TensorType | BufferType | DescriptorType):
        return tuple(type_.get_shape())
    return ()


def _is_wide(value: SSAValue) -> bool:
    """Whether the columns of a tile, a buffer or a descriptor are channels in several parts."""
    shape = _shape(value.type)
    return len(shape) >= _MATRIX_RANK and len(parts_of(shape[-1])) > 1


def _narrow(type_: Attribute, size: int) -> Attribute:
    """The type of a part."""
    shape = [*_shape(type_)[:-1], size]
    if isinstance(type_, BufferType):
        return BufferType(shape, type_.element_type, type_.space)
    if isinstance(type_, DescriptorType):
        return DescriptorType(shape, type_.element_type)
    return tile.tile_type(shape, tile.element_of(type_))


class _Split:
    """One kernel under conversion."""

    def __init__(self, signature: Signature):
        self.signature = signature
        self.parts: dict[SSAValue, list[SSAValue]] = {}
        self.old: list[Operation] = []
        """Ops that others have replaced."""
        self.blocks: list[Block] = []
        """Those whose wide arguments have been replaced."""
        self.started: list[int] = []
        """Of the products of the block at hand, in order: how many each became."""

    def run(self) -> None:
        body = self.signature.kernel.body.block
        for argument in [a for a in body.args if _is_wide(a)]:
            self.parts[argument] = self._describe(argument)
        self._ops(body)
        for op in reversed(self.old):
            Rewriter.erase_op(op, safe_erase=False)
        for block in self.blocks:
            for argument in [a for a in block.args if _is_wide(a)]:
                block.erase_arg(argument, safe_erase=False)
        self.signature.drop_unused()
        for op in [o for o in self.signature.launch.parent.ops if isinstance(o, DescribeOp)]:  # type: ignore[union-attr]
            if not op.result.uses:
                Rewriter.erase_op(op)

    def _describe(self, argument: SSAValue) -> list[SSAValue]:
        """A descriptor for each part; coordinates say which channels it copies."""
        described = self.signature.passed(argument).owner
        assert isinstance(described, DescribeOp)
        found: list[SSAValue] = []
        for size in parts_of(_shape(argument.type)[-1]):
            block = [*_shape(argument.type)[:-1], size]
            new = Before(self.signature.launch).add(DescribeOp(described.source, block), "copies")
            found.append(self.signature.add(new.result, argument.name_hint or "copies"))
        return found

    def _ops(self, block: Block) -> None:
        outer, self.started = self.started, []
        for op in list(block.ops):
            self._op(op)
        self.started = outer

    def _op(self, op: Operation) -> None:
        rule = _RULES.get(type(op))
        if rule is not None:
            rule(self, op)
        elif isinstance(op, scf.ForOp | RolesOp):
            self._control(op)
        elif isinstance(op, scf.YieldOp):
            op.operands = self.flat(op.operands)
        elif any(_is_wide(v) for v in (*op.operands, *op.results)):
            raise AsyncUnsupportedError(f"'{op.name}' takes heads whole, and their size is no power of two")
        else:
            for region in op.regions:
                for block in region.blocks:
                    self._ops(block)

    # --- values

    def of(self, value: SSAValue) -> list[SSAValue]:
        """A value's parts, or itself."""
        return self.parts.get(value, [value])

    def flat(self, values: Sequence[SSAValue]) -> list[SSAValue]:
        return [part for value in values for part in self.of(value)]

    def put(self, op: Operation, new: Sequence[Operation]) -> None:
        """Ops in place of another, each with a part of every result."""
        for one in new:
            Rewriter.insert_op(one, InsertPoint.before(op))
        for number, result in enumerate(op.results):
            self.stand_for(result, [one.results[number] for one in new])
        self.old.append(op)

    def stand_for(self, old: SSAValue, new: list[SSAValue]) -> None:
        for value in new:
            value.name_hint = old.name_hint
        if len(new) == 1:
            old.replace_all_uses_with(new[0])
        else:
            self.parts[old] = new

    # --- control

    def _control(self, op: scf.ForOp | RolesOp) -> None:
        """Parts of what a loop carries, or what roles take, stand in its place."""
        for region in op.regions:
            block = region.block
            for argument in [a for a in block.args if _is_wide(a)]:
                sizes = parts_of(_shape(argument.type)[-1])
                types = [_narrow(argument.type, size) for size in sizes]
                self.stand_for(argument, [block.insert_arg(t, argument.index + 1 + n) for n, t in enumerate(types)])
            self._ops(block)
            self.blocks.append(block)
        if isinstance(op, RolesOp):
            op.operands = self.flat(op.captures)
            return
        new = scf.ForOp(op.lb, op.ub, op.step, self.flat(op.iter_args), op.detach_region(op.body))
        Rewriter.insert_op(new, InsertPoint.before(op))
        results = iter(new.results)
        for old in op.results:
            self.stand_for(
                old, [next(results) for _ in range(len(parts_of(_shape(old.type)[-1])) if _is_wide(old) else 1)]
            )
        self.old.append(op)


# --- rules -------------------------------------------------------------------------------------


def _constant(split: _Split, op: arith.ConstantOp) -> None:
    if not _is_wide(op.result) or not isinstance(op.value, DenseIntOrFPElementsAttr):
        return
    number = tile.splat_of(op.value)
    assert isinstance(number, FloatAttr)
    new: list[Operation] = []
    for size in parts_of(_shape(op.result.type)[-1]):
        type_ = _narrow(op.result.type, size)
        new.append(arith.ConstantOp(DenseIntOrFPElementsAttr.from_list(type_, [number.value.data]), type_))  # type: ignore[arg-type]
    split.put(op, new)


def _ring(split: _Split, op: RingOp) -> None:
    if _is_wide(op.result):
        types = [_narrow(op.result.type, size) for size in parts_of(_shape(op.result.type)[-1])]
        split.put(op, [RingOp(t) for t in types if isinstance(t, BufferType)])


def _slot(split: _Split, op: SlotOp) -> None:
    if op.ring in split.parts:
        split.put(op, [SlotOp(ring, op.index) for ring in split.of(op.ring)])


def _part(split: _Split, op: PartOp) -> None:
    """Of channels, the part that it stands for."""
    if op.source not in split.parts:
        return
    first, size, owner = 0, _shape(op.result.type)[-1], op.index.owner
    number = owner.value if isinstance(owner, arith.ConstantOp) else None
    for part in split.of(op.source):
        starts = isinstance(number, IntegerAttr) and first == number.value.data * size
        if op.axis.value.data == 1 and starts and part.type == op.result.type:
            split.stand_for(op.result, [part])
            split.old.append(op)
            return
        first += _shape(part.type)[-1]
    raise AsyncUnsupportedError("it takes other parts of heads than those that are powers of two")


def _transposed(split: _Split, op: TransposedSlotOp) -> None:
    if op.source in split.parts:
        split.put(op, [TransposedSlotOp(slot) for slot in split.of(op.source)])


def _read(split: _Split, op: ReadOp) -> None:
    if op.source in split.parts:
        split.put(op, [ReadOp(slot) for slot in split.of(op.source)])


def _operand(split: _Split, op: DotOperandOp) -> None:
    if op.value in split.parts:
        split.put(op, [DotOperandOp(value, op.layout) for value in split.of(op.value)])


def _write(split: _Split, op: WriteOp) -> None:
    if op.target in split.parts:
        pairs = zip(split.of(op.value), split.of(op.target), strict=True)
        split.put(op, [WriteOp(value, slot) for value, slot in pairs])


def _coordinates(op: AsyncLoadOp | AsyncStoreOp, slots: Sequence[SSAValue]) -> list[list[SSAValue]]:
    """Where the parts of a block start."""
    scope, first, found = Before(op), 0, list[list[SSAValue]]()
    for slot in slots:
        *outer, channel = op.coordinates
        found.append([*outer, scope.value(scope.plus(channel, first, "channel")) if first else channel])
        first += _shape(slot.type)[-1]
    return found


def _load(split: _Split, op: AsyncLoadOp) -> None:
    """All parts land on the same barrier, which expects their bytes together."""
    if op.target in split.parts:
        slots = split.of(op.target)
        found = zip(split.of(op.descriptor), _coordinates(op, slots), slots, strict=True)
        split.put(op, [AsyncLoadOp(d, where, slot, op.barriers, op.index) for d, where, slot in found])


def _store(split: _Split, op: AsyncStoreOp) -> None:
    if op.source in split.parts:
        slots = split.of(op.source)
        found = zip(slots, split.of(op.descriptor), _coordinates(op, slots), strict=True)
        split.put(op, [AsyncStoreOp(slot, d, where) for slot, d, where in found])


def _map(split: _Split, op: tile.MapOp) -> None:
    """The same map for each part; tiles that are not wide are the same for all."""
    wide = [_is_wide(output) for output in op.outputs]
    if not any(wide) and not any(value in split.parts for value in op.inputs):
        return
    if not all(wide):
        raise AsyncUnsupportedError("a map takes heads whole, and their size is no power of two")
    new: list[Operation] = []
    for n, size in enumerate(parts_of(_shape(op.outputs[0].type)[-1])):
        inputs = [split.of(value)[n] if value in split.parts else value for value in op.inputs]
        types = [_narrow(output.type, size) for output in op.outputs]
        new.append(tile.MapOp(inputs, tile.axes_of(op.axes), types, op.body.clone()))
    split.put(op, new)


def _product(split: _Split, op: AsyncDotOp) -> None:
    """Over the channels of both operands one product after the other; for channels of the result one beside the other."""
    if op.b in split.parts and op.a in split.parts:
        acc, new = op.acc, list[AsyncDotOp]()
        for a, b in zip(split.of(op.a), split.of(op.b), strict=True):
            dot = AsyncDotOp(a, b, acc, op.layout)
            Rewriter.insert_op(dot, InsertPoint.before(op))
            acc, new = dot.result, [*new, dot]
        split.stand_for(op.result, [new[-1].result])
        split.old.append(op)
        split.started.append(len(new))
    elif op.b in split.parts:
        accs = split.of(op.acc) if op.acc is not None else [None] * len(split.of(op.b))
        beside: list[Operation] = []
        for b, acc in zip(split.of(op.b), accs, strict=True):
            layout = MmaLayoutAttr(op.layout.rows.data, op.layout.columns.data, min(_shape(b.type)[-1], _LARGEST_N))
            beside.append(AsyncDotOp(op.a, b, acc, layout))
        split.put(op, beside)
        split.started.append(len(beside))
    else:
        split.started.append(1)


def _wait(split: _Split, op: WaitOp) -> None:
    """For all parts; as many may be in flight as the products that might have been have become."""
    count = op.count.value.data
    pending = split.flat(op.pending)
    latest = sum(split.started[-count:]) if count else 0
    op.properties["count"] = builtin.IntegerAttr(latest, builtin.i64)
    if len(pending) == len(op.pending):
        return
    new = WaitOp(latest, pending)
    Rewriter.insert_op(new, InsertPoint.before(op))
    values = iter(new.values)
    for was, old in zip(op.pending, op.values, strict=True):
        split.stand_for(old, [next(values) for _ in split.of(was)])
    split.old.append(op)


_RULES: dict[type[Operation], Callable[..., None]] = {
    arith.ConstantOp: _constant,
    RingOp: _ring,
    SlotOp: _slot,
    PartOp: _part,
    TransposedSlotOp: _transposed,
    DotOperandOp: _operand,
    ReadOp: _read,
    WriteOp: _write,
    AsyncLoadOp: _load,
    AsyncStoreOp: _store,
    tile.MapOp: _map,
    AsyncDotOp: _product,
    WaitOp: _wait,
}


@dataclass(frozen=True)
class TileSplitChannelsPass(ModulePass):
    """Divides heads whose size is no power of two, which instructions and layouts want, into parts whose size is one.

    192 channels become 128 and 64: two slots on one barrier for each block of keys, two products that accumulate
    the same scores. Channels of values become two accumulators, two products with the same weights, two stores.

    ```
    %s = tile.async_dot %q, %kt layout <4x1, 128>  // over 192 channels
    ```
    becomes
    ```
    %s0 = tile.async_dot %q0, %kt0 layout <4x1, 128>
    %s = tile.async_dot %q1, %kt1, %s0 layout <4x1, 128>
    ```
    """

    name = "tile-split-channels"

    plan: str = "forward"
    """The plan whose kernel is changed."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        signature = signature_of(op, self.plan)
        if any(_is_wide(argument) for argument in signature.kernel.body.block.args):
            _Split(signature).run()
