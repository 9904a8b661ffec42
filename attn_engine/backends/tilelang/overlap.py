"""tilelang-overlap: a loop's second product runs while the next iteration computes its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, scf
from xdsl.dialects.builtin import AnyFloat, ModuleOp, UnitAttr
from xdsl.ir import Block, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.arch import get_arch
from attn_engine.backends.tilelang.copies import BLOCK, BULK, REGISTERS
from attn_engine.backends.tilelang.guard import guard_masks
from attn_engine.backends.tilelang.printer import integer_attribute
from attn_engine.dialects import tile
from attn_engine.dialects import tile_buffer_memory as memory
from attn_engine.dialects.tile_buffer_check import reads, writes
from attn_engine.dialects.tile_buffer_compute import BufferReduceOp, GemmOp
from attn_engine.dialects.tile_buffer_map import BufferMapOp
from attn_engine.dialects.tile_buffer_memory import buffer_type, is_fragment
from attn_engine.dialects.tile_buffer_pending import LATE, PENDING, WaitProductsOp
from attn_engine.dialects.tile_types import BufferType, MemorySpace
from attn_engine.passes.simplify_constants import is_constant

OVERLAP = "overlap"
"""Of a kernel: threads that copy, threads that compute, and products one iteration late."""
ONCE = "once"
"""Of a loop: it runs at least once, for a late product of no iteration would be waited for. Where it has no iteration,
nothing is visible in its first either."""
ARCH = get_arch("sm_90")
GROUP, GROUP_ROWS = 128, 64
"""Threads that issue one product, and rows of it."""
SHARES = {128: (24, 240), 256: (24, 240), 384: (32, 160)}
"""By threads that compute: registers of one of the 128 threads that copy, and of one of them."""

_KNOWN = (
    *(memory.BufferAllocOp, memory.BufferFillOp, memory.CopyInOp, memory.CopyOutOp, memory.CopyOp),
    *(GemmOp, BufferMapOp, BufferReduceOp, tile.ProgramIdOp, tile.DimOp, tile.GatherOp, tile.EndOp),
)


@dataclass(frozen=True)
class Form:
    """A kernel that computes S = A B, then from S its weights P, then acc += P C, in one loop over B and C."""

    kernel: tile.KernelOp
    loop: scf.ForOp
    first: GemmOp
    last: GemmOp

    @property
    def body(self) -> Block:
        return self.loop.body.block


# --- which kernels -----------------------------------------------------------------------------


def _is_known(op: Operation) -> bool:
    return isinstance(op, _KNOWN) or op.name.startswith("arith.")


def form_of(kernel: tile.KernelOp) -> Form | None:
    """The kernel's form, if it is one that this pass knows."""
    top = list(kernel.body.block.ops)
    loops = [op for op in top if isinstance(op, scf.ForOp)]
    if len(loops) != 1 or "stages" not in loops[0].attributes or loops[0].iter_args:
        return None
    body = [op for op in loops[0].body.block.ops if not isinstance(op, scf.YieldOp)]
    if not all(_is_known(op) for op in (*body, *(op for op in top if op is not loops[0]))):
        return None
    products = [op for op in body if isinstance(op, GemmOp)]
    if len(products) != 2 or sum(isinstance(op, GemmOp) for op in kernel.walk()) != 2:
        return None
    form = Form(kernel, loops[0], *products)
    return form if _products_fit(form) and _copies_fit(form) else None


def _products_fit(form: Form) -> bool:
    """Whether each group of threads has 64 rows of both products, the first from shared memory, the last's left not."""
    groups, rest = divmod(integer_attribute(form.kernel, "threads", GROUP), GROUP)
    if rest or groups * GROUP not in SHARES:
        return False
    if is_fragment(form.first.a) or not is_fragment(form.last.a) or form.last.acc is form.first.acc:
        return False
    return all(buffer_type(op.acc).get_shape()[0] == GROUP_ROWS * groups for op in (form.first, form.last))


def _copies_fit(form: Form) -> bool:
    """Whether all shared memory is filled by copies of blocks, each for one product."""
    products = (form.first, form.last)
    for op in form.kernel.walk():
        if any(not is_fragment(v) for v in writes(op)) and not (
            isinstance(op, memory.CopyInOp) and BLOCK in op.attributes
        ):
            return False
        if not isinstance(op, memory.CopyInOp) or is_fragment(op.target):
            continue
        readers = {use.operation for use in op.target.uses} - {op}
        if len(readers) != 1 or not readers <= set(products) or op.parent not in (form.body, form.kernel.body.block):
            return False
    return True


# --- the order within an iteration -------------------------------------------------------------


def _late_part(form: Form) -> list[Operation] | None:
    """What must wait for the late product of the iteration before; None if the rest needs any of it."""
    held = {form.last.a, form.last.acc}
    late: list[Operation] = []
    made: set[SSAValue] = set()
    for op in form.body.ops:
        if op is form.last or isinstance(op, scf.YieldOp):
            continue
        touched = _touched(form, op)
        if touched & held:
            late.append(op)
            made |= set(writes(op))
        elif touched & made or any(set(writes(op)) & set(reads(other)) for other in late):
            return None
    return None if form.first in late else late


def _touched(form: Form, op: Operation) -> set[SSAValue]:
    """The buffers that an op reads or writes, but for weights that can be computed apart from being written."""
    splits = isinstance(op, BufferMapOp) and form.last.a not in op.inputs and not _is_rounding(op)
    return {*reads(op), *writes(op)} - ({form.last.a} if splits else set())


def _is_rounding(op: BufferMapOp) -> bool:
    """Whether a map only rounds one buffer to another."""
    return len(op.outputs) == 1 and isinstance(op.body.block.first_op, arith.TruncFOp) and len(op.body.block.ops) == 2


def _split_weights(form: Form) -> None:
    """Lets the weights first go to a fragment of their own, so that the late product's operand is written last.

    Where it is rounded from a value, the fragment has that value's type.
    """
    weights = form.last.a
    for op in [o for o in form.body.ops if weights in writes(o) and weights not in _touched(form, o)]:
        assert isinstance(op, BufferMapOp)
        _split_map(op, weights)


def _split_map(op: BufferMapOp, weights: SSAValue) -> None:
    number, end = list(op.outputs).index(weights), op.body.block.last_op
    assert isinstance(end, tile.MapYieldOp)
    rounding = end.operands[number].owner
    exact = rounding.operands[0] if isinstance(rounding, arith.TruncFOp) else end.operands[number]
    others = [n for n in range(len(op.outputs)) if n != number]
    twin = next((n for n in others if end.operands[n] is exact), None)
    outputs, values = [op.outputs[n] for n in others], [end.operands[n] for n in others]
    source = op.outputs[twin] if twin is not None else _alloc_like(weights, exact)
    if twin is None:
        outputs, values = [*outputs, source], [*values, exact]
    Rewriter.replace_op(end, tile.MapYieldOp(*values))
    if isinstance(rounding, Operation) and not any(result.uses for result in rounding.results):
        Rewriter.erase_op(rounding)
    body = op.detach_region(op.body)
    new = BufferMapOp(list(op.inputs), tile.axes_of(op.axes), outputs, body)
    Rewriter.replace_op(op, [new, _rounding(source, weights)], [])


def _alloc_like(buffer: SSAValue, value: SSAValue) -> SSAValue:
    alloc = buffer.owner
    assert isinstance(alloc, memory.BufferAllocOp)
    new = memory.BufferAllocOp(BufferType(buffer_type(buffer).get_shape(), value.type, MemorySpace.REGISTER))
    new.result.name_hint = value.name_hint
    Rewriter.insert_op(new, InsertPoint.before(alloc))
    return new.result


def _rounding(source: SSAValue, target: SSAValue) -> Operation:
    """A buffer to one of a narrower type."""
    wide, narrow = buffer_type(source).element_type, buffer_type(target).element_type
    if wide == narrow:
        return memory.CopyOp(source, target)
    block = Block(arg_types=[wide])
    assert isinstance(narrow, AnyFloat)
    rounded = arith.TruncFOp(block.args[0], narrow)
    block.add_ops([rounded, tile.MapYieldOp(rounded.result)])
    axes = range(len(buffer_type(target).get_shape()))
    return BufferMapOp([source], [tuple(axes)], [target], block)


def _clear(form: Form) -> None:
    """Lets the first product start anew instead of from zeros that are written right before it."""
    before = form.first.prev_op
    while before is not None and form.first.acc not in (*reads(before), *writes(before)):
        before = before.prev_op
    if isinstance(before, memory.BufferFillOp) and is_constant(before.value, 0):
        form.first.properties["clear"] = UnitAttr()
        Rewriter.erase_op(before)


def _order(form: Form, late: Sequence[Operation]) -> None:
    form.first.attributes[PENDING] = form.last.attributes[PENDING] = form.last.attributes[LATE] = UnitAttr()
    Rewriter.insert_op(WaitProductsOp(1, first=0), InsertPoint.after(form.first))
    wait = WaitProductsOp(0)
    for op in (wait, *late):
        if op.parent is not None:
            op.detach()
        Rewriter.insert_op(op, InsertPoint.before(form.last))
    copies = [op for op in form.body.ops if isinstance(op, memory.CopyInOp) and op.target is form.last.b]
    for op in copies:
        op.detach()
        Rewriter.insert_op(op, InsertPoint.before(form.last))
    Rewriter.insert_op(WaitProductsOp(0), InsertPoint.after(form.loop))


# --- copies ------------------------------------------------------------------------------------


def _shared_bytes(form: Form) -> int:
    """What the tiles need, those of the loop once per stage."""
    stages = integer_attribute(form.loop, "stages", 1)
    copies = [op for op in form.kernel.walk() if isinstance(op, memory.CopyInOp) and not is_fragment(op.target)]
    return sum(buffer_type(op.target).byte_size * (stages if op.parent is form.body else 1) for op in copies)


def _store_through_shared(form: Form) -> None:
    """Blocks of results go through shared memory, where there is room, so that they are written by the device's engine."""
    free = ARCH.shared_per_block - _shared_bytes(form) - 1024
    for op in [o for o in form.kernel.body.block.ops if isinstance(o, memory.CopyOutOp)]:
        type_ = buffer_type(op.value)
        if BLOCK not in op.attributes or len(type_.get_shape()) != 2 or type_.byte_size > free:
            continue
        free -= type_.byte_size
        alloc = memory.shared_like(op.value, op.target.name_hint)
        Rewriter.insert_op(alloc, InsertPoint.at_start(form.kernel.body.block))
        Rewriter.insert_op(memory.CopyOp(op.value, alloc.result), InsertPoint.before(op))
        op.operands[0] = alloc.result
        op.attributes[BULK] = UnitAttr()


def _overlap(form: Form) -> None:
    if _late_part(form) is None:
        return
    _split_weights(form)
    late = _late_part(form)
    assert late
    _clear(form)
    _order(form, late)
    form.loop.attributes[ONCE] = UnitAttr()
    for op in form.kernel.walk():
        if isinstance(op, memory.CopyInOp) and not is_fragment(op.target):
            op.attributes[BULK] = UnitAttr()
    _store_through_shared(form)
    guard_masks(form.body)
    threads = integer_attribute(form.kernel, "threads", GROUP)
    form.kernel.attributes[REGISTERS] = tile.ints(SHARES[threads])
    form.kernel.attributes[OVERLAP] = UnitAttr()


@dataclass(frozen=True)
class TilelangOverlapPass(ModulePass):
    """Lets the last product of a loop run one iteration late, beside the computing of the next weights.

    ```
    scf.for %n0 = ... {
      tile.copy_in %k ... into %ks {block, bulk}
      tile.buffer_fill %s, %zero
      tile.gemm %qs, %ks, %s transpose_b
      tile.buffer_map (%s) ... into (%p, %alpha) ...
      tile.buffer_map (%acc, %alpha) ... into (%acc) ...
      tile.copy_in %v ... into %vs {block, bulk}
      tile.gemm %p, %vs, %acc
    } {stages = 2}
    ```
    becomes
    ```
    scf.for %n0 = ... {
      tile.copy_in %k ... into %ks {block, bulk}
      tile.gemm %qs, %ks, %s transpose_b clear {pending}
      tile.wait_products 1 first 0
      tile.buffer_map (%s) ... into (%exact, %alpha) ...
      tile.wait_products 0
      tile.buffer_map (%acc, %alpha) ... into (%acc) ...
      tile.buffer_map (%exact) ... into (%p) ...
      tile.copy_in %v ... into %vs {block, bulk}
      tile.gemm %p, %vs, %acc {pending, late}
    } {stages = 2, once}
    tile.wait_products 0
    ```
    in kernels of this form whose tiles are all copied as blocks. They get `overlap`, and their copies are `bulk`. Masks
    move to a branch that whole blocks skip.
    """

    name = "tilelang-overlap"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for kernel in [k for k in op.ops if isinstance(k, tile.KernelOp)]:
            form = form_of(kernel)
            if form is not None:
                _overlap(form)
