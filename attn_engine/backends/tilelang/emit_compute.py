"""Rules for products, reductions and running sums: each is one statement."""

from __future__ import annotations

from collections.abc import Callable

from xdsl.dialects.builtin import f32
from xdsl.ir import Operation

from attn_engine.backends.tilelang import types
from attn_engine.backends.tilelang.emit_overlap import PRODUCT
from attn_engine.backends.tilelang.printer import KernelPrinter, quoted_dtype
from attn_engine.dialects import tile
from attn_engine.dialects import tile_buffer_compute as compute
from attn_engine.dialects import tile_buffer_memory as memory
from attn_engine.dialects.tile_buffer_pending import PENDING
from attn_engine.errors import UnsupportedOpError

_POLICY = {
    compute.Split.ROWS: "T.GemmWarpPolicy.FullRow",
    compute.Split.COLUMNS: "T.GemmWarpPolicy.FullCol",
    compute.Split.BOTH: "T.GemmWarpPolicy.Square",
}


def _gemm(printer: KernelPrinter, op: compute.GemmOp) -> None:
    if op.precision.data != tile.Precision.TF32 and memory.buffer_type(op.a).element_type == f32:
        raise UnsupportedOpError("tile.gemm of f32 operands without rounding them to tf32", types.BACKEND_NAME)
    arguments = printer.texts([op.a, op.b, op.acc])
    arguments += ["transpose_A=True"] if op.transpose_a is not None else []
    arguments += ["transpose_B=True"] if op.transpose_b is not None else []
    arguments += [f"policy={_POLICY[op.split.data]}"] if op.split is not None else []
    arguments += ["clear_accum=True"] if op.clear is not None else []
    product = PRODUCT if PENDING in op.attributes else "T.gemm"
    printer.writer.line(f"{product}({', '.join([*arguments, *printer.mark(op)])})")


def _reduce(printer: KernelPrinter, op: compute.BufferReduceOp) -> None:
    source, target = printer.texts([op.source, op.target])
    mark = "".join(f", {text}" for text in printer.mark(op))
    printer.writer.line(f"T.reduce_{op.kind.data}({source}, {target}, dim={op.axis.value.data}, clear=True{mark})")


def _total(printer: KernelPrinter, op: compute.BufferTotalOp) -> None:
    """A fragment of one element, which every thread holds."""
    name = printer.names.fresh(f"{op.result.name_hint or 'v'}_total")
    printer.writer.line(f"{name} = T.alloc_fragment((1,), {quoted_dtype(op.result.type)})")
    printer.writer.line(f"T.reduce_{op.kind.data}({printer.text(op.source)}, {name}, dim=0, clear=True)")
    printer.names.bind(op.result, f"{name}[0]")


def _scan(printer: KernelPrinter, op: compute.BufferScanOp) -> None:
    if op.kind.data != tile.Reduction.SUM:
        raise UnsupportedOpError(f"tile.buffer_scan {op.kind.data}", types.BACKEND_NAME)
    source, target = printer.texts([op.source, op.target])
    printer.writer.line(f"T.cumsum({source}, {target}, dim={op.axis.value.data}, reverse={op.reverse is not None})")


COMPUTE_RULES: dict[type[Operation], Callable[..., None]] = {
    compute.GemmOp: _gemm,
    compute.BufferReduceOp: _reduce,
    compute.BufferTotalOp: _total,
    compute.BufferScanOp: _scan,
}
