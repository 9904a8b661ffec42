"""Where the tensors of one kernel are held, and what a rule needs to write ops over buffers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from xdsl.dialects import arith
from xdsl.dialects.builtin import i1, i32
from xdsl.ir import Attribute, Block, Operation, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_buffer_map import BufferMapOp
from attn_engine.dialects.tile_buffer_memory import BufferAllocOp, BufferFillOp, CopyOp, buffer_type, is_fragment
from attn_engine.dialects.tile_types import BufferType, MemorySpace
from attn_engine.errors import PassError


@dataclass(frozen=True)
class InBuffer:
    """A tensor, or the transpose of one, in a buffer."""

    buffer: SSAValue
    transposed: bool = False


@dataclass(frozen=True)
class Splat:
    """A tensor of one number, held nowhere."""

    number: Attribute


@dataclass(frozen=True)
class Positions:
    """start, start + 1, ...: held nowhere."""

    start: SSAValue


@dataclass(frozen=True)
class Recomputed:
    """An index or a truth value: computed anew wherever it is read, for registers are dearer."""

    op: tile.MapOp
    output: int


Held = InBuffer | Splat | Positions | Recomputed
Op = TypeVar("Op", bound=Operation)


@dataclass
class Memory:
    """The buffers of a kernel under conversion. New ops go before `at`."""

    kernel: tile.KernelOp
    held: dict[SSAValue, Held] = field(default_factory=dict[SSAValue, Held])
    shared: dict[SSAValue, SSAValue] = field(default_factory=dict[SSAValue, SSAValue])
    """Of fragments that products read from shared memory: the copy there, by fragment."""
    copied: set[SSAValue] = field(default_factory=set[SSAValue])
    """Values whose copy in shared memory was made with them."""
    preferred: dict[SSAValue, SSAValue] = field(default_factory=dict[SSAValue, SSAValue])
    """Buffers of loop carries that a value of the loop's body is best written to."""
    turned: dict[SSAValue, tuple[SSAValue, Block]] = field(default_factory=dict[SSAValue, tuple[SSAValue, Block]])
    """Of tiles in shared memory that are read as their transpose: a fragment with it, and the block that fills it."""
    allocs: list[Operation] = field(default_factory=list[Operation])
    taken: list[SSAValue] = field(default_factory=list[SSAValue])
    free: list[SSAValue] = field(default_factory=list[SSAValue])
    """Buffers in shared memory: those in use, and those of loops that are over."""
    at: Operation | None = None
    dead: list[Operation] = field(default_factory=list[Operation])
    """Ops that are converted; they go at the end, for what uses them is converted later."""

    def insert(self, op: Op) -> Op:
        assert self.at is not None
        Rewriter.insert_op(op, InsertPoint.before(self.at))
        return op

    def alloc(self, type_: Attribute, space: MemorySpace, hint: str | None) -> SSAValue:
        """A buffer that can hold a tensor of that type: a new one, or shared memory of a loop that is over."""
        for buffer in self.free if space is MemorySpace.SHARED else ():
            if buffer.type == BufferType(tile.shape_of(type_), tile.element_of(type_), space):
                self.free.remove(buffer)
                self.taken.append(buffer)
                return buffer
        op = BufferAllocOp(BufferType(tile.shape_of(type_), stored(tile.element_of(type_)), space))
        op.result.name_hint = hint
        self.allocs.append(op)
        if space is MemorySpace.SHARED:
            self.taken.append(op.result)
        return op.result

    def target(self, value: SSAValue) -> SSAValue:
        """The fragment that a result is written to."""
        buffer = self.preferred.get(value)
        if buffer is None:
            buffer = self.alloc(value.type, MemorySpace.REGISTER, value.name_hint)
        self.held[value] = InBuffer(buffer)
        return buffer

    def buffer(self, value: SSAValue) -> SSAValue:
        """A buffer with the value of a tensor; one that is held nowhere is written out."""
        match self.held[value]:
            case InBuffer(buffer, transposed=False):
                return buffer
            case Splat() as splat:
                buffer = self.alloc(value.type, MemorySpace.REGISTER, value.name_hint)
                self.fill(buffer, splat)
                return buffer
            case InBuffer(shared):
                return self._turned(value, shared)
            case _:
                raise PassError("tile-assign-memory", f"{value.type} %{value.name_hint} is in no buffer")

    def fill(self, buffer: SSAValue, splat: Splat) -> None:
        number = self.insert(arith.ConstantOp(splat.number))  # type: ignore[arg-type]
        self.insert(BufferFillOp(buffer, number.result))

    def move(self, value: SSAValue, buffer: SSAValue) -> None:
        """Writes a tensor to a buffer, unless it is there."""
        held = self.held[value]
        if isinstance(held, Splat):
            self.fill(buffer, held)
        elif (source := self.buffer(value)) is not buffer:
            self.insert(CopyOp(source, buffer))

    def share(self, value: SSAValue) -> None:
        """Copies a fragment that a product reads as right operand or as a transpose to shared memory, once."""
        buffer = self.buffer(value)
        if is_fragment(buffer) and wants_shared(value):
            if buffer not in self.shared:
                self.shared[buffer] = self._alloc_shared(value)
            self.insert(CopyOp(buffer, self.shared[buffer]))
            self.copied.add(value)

    def to_shared(self, value: SSAValue, buffer: SSAValue) -> SSAValue:
        """The same in shared memory: its own buffer, the copy made with it, or one made now (of what a loop carries, say)."""
        if not is_fragment(buffer):
            return buffer
        if value in self.copied:
            return self.shared[buffer]
        shared = self._alloc_shared(value)
        self.insert(CopyOp(buffer, shared))
        return shared

    def _alloc_shared(self, value: SSAValue) -> SSAValue:
        return self.alloc(value.type, MemorySpace.SHARED, f"{value.name_hint or 'v'}_shared")

    def _turned(self, value: SSAValue, shared: SSAValue) -> SSAValue:
        """A fragment with the transpose of a tile in shared memory; one that another branch or loop fills is no use here."""
        assert self.at is not None
        target, block = self.turned.get(value, (None, None))
        if target is not None and block is not None and block.find_ancestor_op_in_block(self.at) is not None:
            return target
        target = self.alloc(value.type, MemorySpace.REGISTER, value.name_hint)
        body = Block(arg_types=[buffer_type(shared).element_type])
        body.add_op(tile.MapYieldOp(body.args[0]))
        self.insert(BufferMapOp([shared], [(1, 0)], [target], body))
        assert self.at.parent is not None
        self.turned[value] = target, self.at.parent
        return target

    def finish(self) -> None:
        """Puts the buffers at the top of the kernel."""
        Rewriter.insert_op(self.allocs, InsertPoint.at_start(self.kernel.body.block))


def stored(element: Attribute) -> Attribute:
    """The element type of a buffer for a tensor: truth values are stored as integers."""
    return i32 if element == i1 else element


def wants_shared(value: SSAValue) -> bool:
    """Whether a product reads a value as its right operand, or as a transpose."""
    for use in value.uses:
        if isinstance(use.operation, tile.TransposeOp):
            return True
        if isinstance(use.operation, tile.DotOp) and use.operation.b is value:
            return True
    return False


def feeds_product(value: SSAValue) -> bool:
    """Whether a product reads a value, or its transpose, as an operand."""
    for use in value.uses:
        op = use.operation
        if isinstance(op, tile.TransposeOp) and feeds_product(op.result):
            return True
        if isinstance(op, tile.DotOp) and value in (op.a, op.b):
            return True
    return False


def is_local_and_used_once(value: SSAValue, block: Block | None) -> bool:
    """Whether a value that a block makes or takes is used once, so that its buffer may be taken over."""
    owner = value.owner if isinstance(value.owner, Block) else value.owner.parent
    return owner is block and value.has_one_use()
