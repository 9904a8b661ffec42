"""Operands that are modified by kernels of their own: mods that read their row, and those whose captures get gradients.

What a mod makes of queries, keys or values is written to a temporary, once, in front of the kernels that multiply;
in a backward these leave the gradients of modified elements in temporaries too, and kernels behind them carry those
through the mods. Other mods are applied where an operand is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from xdsl.dialects import arith
from xdsl.dialects.builtin import FixedBitwidthType, TensorType, f32
from xdsl.ir import Attribute, Block, BlockArgument, Operation, Region, SSAValue

from attn_engine.dialects import attn, tile
from attn_engine.passes.lowering.frame import Frame, Operands, cast, combine, present, spread
from attn_engine.passes.lowering.gradients import flush, target_of
from attn_engine.passes.lowering.kernel import Blocks, Head, Kernel, Plan, close, loop
from attn_engine.passes.lowering.program import Bound, Program
from attn_engine.passes.lowering.scope import Scope

MODS = {"q": "query", "k": "key", "v": "value"}
INDICES = 4
ELEMENTS = 2048
"""Of a block of rows with all of their channels: a mod is long scalar code, and its values should stay in registers."""
FEWEST_ROWS = 16
DESCRIBED_BYTES = 16
BLOCKS_PER_SUM = 16
"""Blocks of rows that a program goes through before it adds to gradients that all rows share: adding is slow."""


def reads_row(region: Region | None) -> bool:
    """Whether the mod of an operand needs more of it than one element."""
    block = present(region)
    return block is not None and any(isinstance(o, attn.RowReduceOp | attn.ChannelAtOp) for o in block.ops)


def accumulates(region: Region | None) -> bool:
    block = present(region)
    return block is not None and any(isinstance(o, attn.AccumulateGradOp) for o in block.ops)


@dataclass
class Mods:
    """The kernels of one plan that modify operands, and those that carry gradients back."""

    name: str
    plan: Plan
    operands: Operands
    most_rows: int
    """Of a block: where blocks are known to divide the lengths, this many rows divide them too."""
    kernels: list[tile.KernelOp] = field(default_factory=list[tile.KernelOp])

    def _region(self, name: str, kind: str) -> Region | None:
        return getattr(self.operands.op, f"{MODS[name]}_{kind}", None)

    def _prepared(self) -> list[str]:
        return [n for n in MODS if reads_row(self._region(n, "mod")) or accumulates(self._region(n, "vjp"))]

    def before(self) -> None:
        """Launches the kernels that modify operands; what multiplies them reads their results."""
        operands = self.operands
        for name in self._prepared():
            region, vjp = self._region(name, "mod"), self._region(name, "vjp")
            assert region is not None
            target = self._temporary(name, operands.element, f"{name}_modified")
            self._modify(name, region.block, target)
            operands.sources[name] = target
            operands.descriptors &= self._describable(name)
            operands.apart |= {region}
            if vjp is not None and vjp.blocks:
                operands.targets[f"d{name}"] = self._temporary(name, f32, f"d{name}_modified")
                operands.apart |= {vjp}

    def after(self) -> None:
        """Launches the kernels that carry gradients through the mods."""
        for name in MODS:
            if f"d{name}" in self.operands.targets:
                region = self._region(name, "vjp")
                assert region is not None
                self._carry(name, region.block)

    # --- kernels

    def _heads(self, name: str) -> SSAValue:
        return self.operands.heads if name == "q" else self.operands.kv_heads

    def _length(self, name: str) -> SSAValue:
        return self.operands.sq if name == "q" else self.operands.skv

    def _head(self, name: str) -> Head:
        return self.operands.vo if name == "v" else self.operands.qk

    def _describable(self, name: str) -> bool:
        """Whether rows of a modified operand begin where descriptors can."""
        element = self.operands.element
        assert isinstance(element, FixedBitwidthType)
        return self._head(name).size * element.size % DESCRIBED_BYTES == 0

    def _rows(self, name: str) -> int:
        return min(self.most_rows, max(FEWEST_ROWS, ELEMENTS // self._head(name).tile))

    def _temporary(self, name: str, element: Attribute, hint: str) -> SSAValue:
        scope, head = self.plan.scope, self._head(name)
        sizes = [self.operands.batch, self._heads(name), self._length(name), scope.value(head.size)]
        return scope.add(tile.AllocOp(sizes, tile.GlobalType(4, element)), hint).result

    def _begin(self, name: str, hint: str, times: int = 1) -> _RowKernel:
        """A kernel whose programs own `times` blocks of rows each, at the first of them."""
        rows = self._rows(name)
        kernel = Kernel(f"{self.name}_{hint}", self.plan, Blocks(rows, self._head(name).tile, 4, 1))
        i, h, b = (kernel.program_id(n, hint) for n, hint in enumerate(("i", "h", "b")))
        frame = Frame(self.operands, kernel, 0, b, h, h)
        row0 = kernel.scope.value(kernel.scope.times(i, rows * times, "row0"))
        return _RowKernel(frame, kernel.scope, row0, kernel.take(self._length(name)), self._head(name))

    def _launch(self, name: str, kernel: Kernel, times: int = 1) -> None:
        blocks = self.operands.blocks(self._length(name), self._rows(name) * times, f"{name}_blocks")
        self.kernels.append(kernel.launch([blocks, self._heads(name), self.operands.batch]))

    def _modify(self, name: str, block: Block, target: SSAValue) -> None:
        own = self._begin(name, f"{name}_mod")
        program = own.program([name])
        own.store(program, own.inline(program, block), target)
        self._launch(name, own.frame.kernel)

    def _carry(self, name: str, block: Block) -> None:
        """Sums of the gradients of what all rows read alike are kept until a program has seen all of its rows."""
        kept = shared_by_rows(block)
        times = BLOCKS_PER_SUM if kept else 1
        own = self._begin(name, f"d{name}_mod", times)
        kernel, scope = own.frame.kernel, own.scope
        if not kept:
            self._carry_rows(own, name, block, [])
        else:
            sums = [scope.splat([own.head.tile], 0.0, "d") for _ in kept]
            end = scope.smaller(scope.plus(own.row0, self._rows(name) * times), own.limit, "end")
            op, inner, row0, inside = loop(scope, own.row0, end, self._rows(name), sums, "row0")
            found = self._carry_rows(replace(own, scope=inner, row0=row0), name, block, kept)
            close(
                inner,
                [
                    combine(inner, arith.AddfOp, Bound(x, (0,)), y, tile.shape_of(x), "d")
                    for x, y in zip(inside, found, strict=True)
                ],
            )
            own.flush(block, dict(zip(kept, op.results, strict=True)))
        self._launch(name, kernel, times)

    def _carry_rows(self, own: _RowKernel, name: str, block: Block, kept: Sequence[int]) -> list[Bound]:
        """One block of rows; the sums over its rows of the contributions that are kept."""
        own = replace(own, elements=[], sources=[])
        program = own.program([f"d{name}", name])
        result = own.inline(program, block)
        if f"d{name}" in self.plan.args:
            own.store(program, result, self.plan.args[f"d{name}"])
        frame, scope = own.frame, own.scope
        sums: list[Bound] = []
        for n, contribution in enumerate(program.contributions):
            (value,) = frame.run(program, scope, [contribution.value])
            if n in kept:
                whole = spread(scope, value, frame.shape)
                sums.append(Bound(scope.add(tile.ReduceOp(tile.Reduction.SUM, whole, 0), "d").result, (0,)))
            else:
                flush(frame, scope, target_of(frame, scope, program, contribution), value, frame.shape)
        return sums


def shared_by_rows(block: Block) -> list[int]:
    """The contributions, by their numbers, whose place depends neither on an element nor on the position of the row."""
    elements = [a for a in block.args if a.type == f32]
    moving: set[SSAValue] = {*elements, block.args[len(elements) + 2]}
    adds: list[attn.AccumulateGradOp] = []
    for op in block.ops:
        if moving.intersection(op.operands):
            moving.update(op.results)
        if isinstance(op, attn.AccumulateGradOp):
            adds.append(op)
    return [n for n, add in enumerate(adds) if not moving.intersection(add.indices)]


@dataclass
class _RowKernel:
    """A block of rows of one operand with all of its channels."""

    frame: Frame
    scope: Scope
    row0: SSAValue
    limit: SSAValue
    head: Head
    index: list[SSAValue] = field(default_factory=list[SSAValue])
    elements: list[SSAValue] = field(default_factory=list[SSAValue])
    sources: list[SSAValue] = field(default_factory=list[SSAValue])

    def program(self, names: Sequence[str]) -> Program:
        """A program with an element of each of these, loaded from the operand or from a gradient."""
        frame, scope = self.frame, self.scope
        program = frame.program(covered=False)
        for name in names:
            source = self._memory(name)
            limits = frame.limits(self.limit)
            if self.head.padded:
                limits[1] = scope.value(self.head.size)
            type_ = TensorType(tile.element_of(source), frame.shape)
            place = [frame.b, frame.h, self.row0, scope.value(0)]
            loaded = scope.add(tile.LoadOp(source, place, [2, 3], type_, limits), f"{name}_tile").result
            self.elements.append(cast(program, program.argument(Bound(loaded, (0, 1)), name), f32))
            self.sources.append(source)
        self.index = frame.channel_index(program, scope, frame.h, self.row0, frame.shape[0], self.head)
        frame.inside(program, self.index, self.limit, self.head)
        return program

    def _memory(self, name: str) -> SSAValue:
        memory = self.frame.operands.targets.get(name, self.frame.operands.plan.args.get(name))
        assert memory is not None
        return self.frame.kernel.take(memory)

    def inline(self, program: Program, block: Block) -> SSAValue:
        """What a region yields; other channels are read from memory."""
        expanded = expand_channels(block)
        program.rows = dict(zip(expanded.args, self.sources, strict=False))
        program.row_index = self.index[:3]
        return program.inline(expanded, [*self.elements, *self.index]).operands[0]

    def flush(self, block: Block, sums: Mapping[int, SSAValue]) -> None:
        """Adds sums per channel to the gradients that contributions name, at places that no row decides."""
        frame, scope = self.frame, self.scope
        program = frame.program(covered=False)
        nothing = program.argument(Bound(frame.take("scale")), "unused")
        index = frame.channel_index(program, scope, frame.h, self.row0, frame.shape[0], self.head)
        elements = [nothing for a in block.args if a.type == f32]
        sources = [frame.take("q") for _ in elements]
        # Any head stands for the position, on which no place depends.
        own = replace(self, elements=elements, sources=sources, index=[index[0], index[1], index[1], index[3]])
        own.inline(program, block)
        for n, value in sums.items():
            target = target_of(frame, scope, program, program.contributions[n])
            flush(frame, scope, target, Bound(value, (1,)), frame.shape)

    def store(self, program: Program, value: SSAValue, target: SSAValue) -> None:
        frame, scope = self.frame, self.scope
        memory = frame.kernel.take(target)
        (found,) = frame.run(program, scope, [cast(program, value, tile.element_of(memory))])
        limits = frame.limits(self.limit) | ({1: scope.value(self.head.size)} if self.head.padded else {})
        place = [frame.b, frame.h, self.row0, scope.value(0)]
        scope.add(tile.StoreOp(spread(scope, found, frame.shape), memory, place, [2, 3], limits))


# --- other channels ------------------------------------------------------------------------------


def expand_channels(block: Block) -> Block:
    """A region of an operand in which `attn.channel_at` reads elements only, never what was made of them.

    A value at another channel is the code of that value once more, with the other channel in the place of its own.
    """
    return _Expansion(block).run()


class _Expansion:
    def __init__(self, block: Block):
        self.old = block
        self.new = Block(arg_types=[a.type for a in block.args])
        self.known: dict[SSAValue, SSAValue] = dict(zip(block.args, self.new.args, strict=True))
        for old, new in self.known.items():
            new.name_hint = old.name_hint
        elements = [a for a in block.args if a.type == f32]
        self.channel = block.args[len(elements) + INDICES - 1]
        self.moving: set[SSAValue] = {*elements, self.channel}
        self.elsewhere: dict[tuple[SSAValue, SSAValue], SSAValue] = {}

    def run(self) -> Block:
        for op in self.old.ops:
            if isinstance(op, attn.ChannelAtOp):
                self.known[op.result] = self._at(op.value, self.known[op.index])
            else:
                self._copy(op, self.known)
            if not isinstance(op, attn.RowReduceOp) and self.moving.intersection(op.operands):
                self.moving.update(op.results)
        return self.new

    def _copy(self, op: Operation, known: dict[SSAValue, SSAValue]) -> Operation:
        clone = op.clone(value_mapper=dict(known))
        self.new.add_op(clone)
        for old, new in zip(op.results, clone.results, strict=True):
            new.name_hint = old.name_hint
            known[old] = new
        return clone

    def _at(self, value: SSAValue, channel: SSAValue) -> SSAValue:
        """The value of the old block at a channel of the new one."""
        if value not in self.moving:
            return self.known[value]
        if value is self.channel:
            return channel
        key = (value, channel)
        if key not in self.elsewhere:
            self.elsewhere[key] = self._made(value, channel)
        return self.elsewhere[key]

    def _made(self, value: SSAValue, channel: SSAValue) -> SSAValue:
        owner = value.owner
        if isinstance(value, BlockArgument) or not isinstance(owner, Operation):
            op = attn.ChannelAtOp(self.known[value], channel)
            self.new.add_op(op)
            return op.result
        if isinstance(owner, attn.ChannelAtOp):
            return self._at(owner.value, self._at(owner.index, channel))
        moved = {operand: self._at(operand, channel) for operand in owner.operands}
        return self._copy(owner, moved).results[0]
