"""How threads share an overlapped kernel, in TileLang's terms: who runs which statement, a stage earlier or later.

A statement is named by an id; what TileLang makes of the schedule are barriers, branches and rings of tiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from xdsl.dialects import arith, scf
from xdsl.dialects.builtin import DenseArrayBase
from xdsl.ir import Block, Operation, SSAValue
from xdsl.utils.hints import isa

from attn_engine.backends.tilelang.copies import BULK, REGISTERS
from attn_engine.backends.tilelang.legalize import tensor_of
from attn_engine.backends.tilelang.printer import KernelPrinter, integer_attribute
from attn_engine.dialects import tile
from attn_engine.dialects.tile_buffer_compute import GemmOp
from attn_engine.dialects.tile_buffer_memory import BufferAllocOp, CopyInOp, CopyOutOp
from attn_engine.dialects.tile_buffer_pending import LATE, WaitProductsOp

PRODUCT = "product"
"""The function of pending products: TileLang's asynchronous one, or its usual one where there is no schedule."""
PLACE, START = "place", "start"
"""The statements that tell a program its place in the grid, and an iteration where its block starts."""
_WARP, _COPYING_WARPS = 32, 4
_SILENT = (arith.ConstantOp, BufferAllocOp, tile.ProgramIdOp, tile.DimOp, tile.EndOp, scf.YieldOp)


def is_scalar(op: Operation) -> bool:
    """Whether an op computes a number, at the level of a kernel or a loop; nothing is printed for a constant."""
    return isinstance(op, tile.GatherOp) or (op.name.startswith("arith.") and not isinstance(op, arith.ConstantOp))


def named(printer: KernelPrinter, name: str | None) -> AbstractContextManager[None]:
    """Around lines that are the statement of that name, if any."""
    return printer.writer.block(f'with T.ws_op("{name}"):') if name else nullcontext()


def statements(printer: KernelPrinter, ops: Iterable[Operation]) -> Iterator[tuple[str | None, list[Operation]]]:
    """Ops in order, those that compute numbers in a row together, with the id of their statement."""
    row: list[Operation] = []
    name: str | None = None
    for op in ops:
        own = printer.ids.get(op) if is_scalar(op) else None
        if row and own != name and not isinstance(op, _SILENT):
            yield name, row
            row, name = [], None
        row.append(op)
        name = own or name
    yield name, row


def name_statements(kernel: tile.KernelOp) -> dict[Operation, str]:
    """An id for each statement of an overlapped kernel; numbers that are computed in a row are one statement."""
    ids: dict[Operation, str] = {}
    for block in _blocks(kernel):
        shared: str | None = None
        for op in block.ops:
            if isinstance(op, _SILENT):
                continue
            if not is_scalar(op) or shared is None:
                shared = f"{op.name.rsplit('.', 1)[-1] if not is_scalar(op) else 'numbers'}_{len(ids)}"
            ids[op] = shared
            ids.update(dict.fromkeys(_guarded(op), shared))
            shared = shared if is_scalar(op) else None
    return ids


def _guarded(op: Operation) -> list[Operation]:
    """What stands in a branch, which is one statement."""
    return [o for o in op.true_region.block.ops if not isinstance(o, _SILENT)] if isinstance(op, scf.IfOp) else []


def _blocks(kernel: tile.KernelOp) -> list[Block]:
    return [kernel.body.block, loop_of(kernel).body.block]


def loop_of(kernel: tile.KernelOp) -> scf.ForOp:
    return next(op for op in kernel.body.block.ops if isinstance(op, scf.ForOp))


def registers_of(kernel: tile.KernelOp) -> tuple[int, ...]:
    """Of a thread that copies, and of one that computes."""
    share = kernel.attributes[REGISTERS]
    assert isa(share, DenseArrayBase)
    return tile.ints_of(share)


# --- who runs what -----------------------------------------------------------------------------


def _sync(what: str, ring: str, stage: int = 0) -> str:
    return f'T.WSSync.{what}("{ring}", stage={stage})'


class _Roles:
    """The statements of the threads that copy and of those that compute, in a kernel and in its loop."""

    def __init__(self, printer: KernelPrinter):
        self.printer = printer
        self.kernel = printer.kernel
        self.loop = loop_of(self.kernel)
        self.copies = [op for op in self.kernel.walk() if isinstance(op, CopyInOp) and BULK in op.attributes]
        self.ring = {op.target: printer.text(op.target) for op in self.copies}

    def _id(self, op: Operation) -> str:
        return f'"{self.printer.ids[op]}"'

    def _in(self, block: Block) -> list[Operation]:
        """The statements of a block, the first op of each."""
        seen: dict[str, Operation] = {}
        for op in block.ops:
            if op in self.printer.ids:
                seen.setdefault(self.printer.ids[op], op)
        return list(seen.values())

    def copying(self, block: Block) -> Iterator[str]:
        yield from self._place(block)
        for op in self._in(block):
            if op in self.copies and isinstance(op, CopyInOp):
                ring = self.ring[op.target]
                yield from (_sync("producer_acquire", ring), self._id(op), _sync("producer_commit", ring))
            elif op is self.loop or (is_scalar(op) and not self._is_after(op)):
                yield self._id(op)

    def _is_after(self, op: Operation) -> bool:
        return op.parent is self.kernel.body.block and not op.is_before_in_block(self.loop)

    def computing(self, block: Block) -> Iterator[str]:
        """Late products come behind the first; what a product reads is given back when it is done."""
        yield from self._place(block)
        pending: list[GemmOp] = []
        for op in _late_first([o for o in self._in(block) if o not in self.copies]):
            if op is self.loop:
                yield from (_sync("consumer_wait", ring) for ring in self._rings_of(self.copies, block))
            if isinstance(op, GemmOp):
                pending.append(op)
                yield from (_sync("consumer_wait", ring, _stage(op)) for ring in self._rings_read(op, block))
            yield self._id(op)
            if isinstance(op, WaitProductsOp):
                yield from [self._first_id(op)] if op.first is not None else []
                done, pending = pending[: -op.count.value.data or None], pending[-op.count.value.data or len(pending) :]
                yield from (_sync("consumer_release", r, _stage(p)) for p in done for r in self._rings_read(p, block))
                if block is self.kernel.body.block:
                    yield from (_sync("consumer_release", ring) for ring in self._rings_of(self.copies, block))

    def _place(self, block: Block) -> list[str]:
        return [f'"{PLACE}"' if block is self.kernel.body.block else f'"{START}"']

    def _first_id(self, op: Operation) -> str:
        return f'"{self.printer.ids[op]}_first"'

    def _rings_of(self, copies: Iterable[CopyInOp], block: Block) -> list[str]:
        return [self.ring[op.target] for op in copies if op.parent is block]

    def _rings_read(self, product: GemmOp, block: Block) -> list[str]:
        return self._rings_of([op for op in self.copies if op.target in (product.a, product.b)], block)


def _stage(product: GemmOp) -> int:
    return 1 if LATE in product.attributes else 0


def _late_first(ops: Sequence[Operation]) -> list[Operation]:
    late = [op for op in ops if LATE in op.attributes]
    order: list[Operation] = []
    for op in ops:
        if LATE in op.attributes:
            continue
        order.append(op)
        if isinstance(op, GemmOp):
            order += late
            late = []
    return order


# --- text --------------------------------------------------------------------------------------


def print_facts(printer: KernelPrinter) -> None:
    """Whether the kernel runs by its schedule: on a device that has one, with tensors that can be copied in bulk."""
    bulk = [op for op in printer.kernel.walk() if isinstance(op, CopyInOp | CopyOutOp) and BULK in op.attributes]
    tensors: list[SSAValue] = list(dict.fromkeys(tensor_of(op) for op in bulk))
    printer.writer.line(f"{printer.ahead} = {' and '.join(['HOPPER', *(printer.unit[t] for t in tensors)])}")
    printer.writer.line(f"{PRODUCT} = T.wgmma_gemm if {printer.ahead} else T.gemm")


def print_schedule(printer: KernelPrinter) -> None:
    kernel, roles = printer.kernel, _Roles(printer)
    last = _COPYING_WARPS + integer_attribute(kernel, "threads", 128) // _WARP
    registers, stages = registers_of(kernel), integer_attribute(roles.loop, "stages", 1)
    line = printer.writer.line
    with (
        printer.writer.block(f"if {printer.ahead}:"),
        printer.writer.block("T.annotate_ws_schedule(T.WSSchedule(", "))"),
    ):
        line(f"num_warps={last},")
        with printer.writer.block("roles=[", "],"):
            for name, start, end, count in zip(
                ("copy", "compute"), (0, _COPYING_WARPS), (_COPYING_WARPS, last), registers, strict=True
            ):
                line(f'T.WSRole("{name}", warps_lo={start}, warps_hi={end}, max_nreg={count}),')
        with printer.writer.block("pipelines=[", "],"):
            for op in roles.copies:
                depth, ring = stages if op.parent is roles.loop.body.block else 1, roles.ring[op.target]
                line(f'T.WSPipeline("{ring}", [{ring}], depth={depth}),')
        with printer.writer.block("scopes=[", "],"):
            _print_scope(printer, roles, f'"{printer.ids[roles.loop]}"', roles.loop.body.block)
            _print_scope(printer, roles, "T.WSScope.ROOT", kernel.body.block)


def _print_scope(printer: KernelPrinter, roles: _Roles, scope: str, block: Block) -> None:
    with printer.writer.block(f"T.WSScope({scope}, {{", "}),"):
        for name, entries in (("copy", roles.copying(block)), ("compute", roles.computing(block))):
            with printer.writer.block(f'"{name}": [', "],"):
                for entry in entries:
                    printer.writer.line(f"{entry},")


def print_wait(printer: KernelPrinter, op: WaitProductsOp) -> None:
    if op not in printer.ids:
        return
    with printer.writer.block(f"if {printer.ahead}:"):
        with printer.writer.block(f'with T.ws_op("{printer.ids[op]}"):'):
            printer.writer.line(f"T.wait_wgmma({op.count.value.data})")
        if op.first is not None:
            with (
                printer.writer.block(f"if {printer.trip} == 0:"),
                printer.writer.block(f'with T.ws_op("{printer.ids[op]}_first"):'),
            ):
                printer.writer.line(f"T.wait_wgmma({op.first.value.data})")
