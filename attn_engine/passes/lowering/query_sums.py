"""dq as sums that the dk/dv kernel adds to in memory, block by block, and the kernel that makes the result of them."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects.builtin import TensorType, f32
from xdsl.ir import SSAValue

from attn_engine.dialects import attn, tile
from attn_engine.passes.lowering.forward import store_rows
from attn_engine.passes.lowering.frame import Frame, Operands
from attn_engine.passes.lowering.kernel import Blocks, Kernel
from attn_engine.passes.lowering.query_gradients import operand_gradient
from attn_engine.passes.lowering.scope import Scope


@dataclass
class QuerySums:
    """The f32 temporary [B, H, Sq, channels] of one backward. Programs add to it in no particular order."""

    op: attn.BackwardOp
    operands: Operands
    alike: bool = False
    """Whether every program takes the same steps."""

    def __post_init__(self) -> None:
        operands, scope = self.operands, self.operands.plan.scope
        sizes = [operands.batch, operands.heads, operands.sq, scope.value(operands.qk.size)]
        self.sums = scope.add(tile.AllocOp(sizes, tile.GlobalType(4, f32)), "dq_sums").result
        scope.add(tile.FillOp(self.sums, scope.real(0.0)))

    def add(self, frame: Frame, scope: Scope, ds: SSAValue, k: SSAValue, q0: SSAValue, limit: SSAValue | None) -> None:
        """Adds what a block of keys contributes to a block of queries; `ds` has keys along its rows."""
        head, zeros = self.operands.qk, [tile.shape_of(ds)[1], self.operands.qk.tile]
        turned = scope.add(tile.TransposeOp(ds), "ds").result
        part = frame.dot(scope, turned, k, scope.splat(zeros, 0.0, "zero"), "dq")
        limits = frame.limits(limit) | ({1: scope.value(head.size)} if head.padded else {})
        place = [frame.b, frame.h, q0, scope.value(0)]
        scope.add(tile.AtomicAddOp(part, frame.kernel.take(self.sums), place, [2, 3], limits))

    def finish(self, name: str, blocks: Blocks) -> tile.KernelOp:
        """The kernel that scales and rounds the sums, behind all programs that add to them."""
        kernel, operands = Kernel(name, self.operands.plan, blocks), self.operands
        count = operands.blocks(operands.sq, blocks.m, "dq_blocks")
        i, h, b = (kernel.program_id(n, hint) for n, hint in enumerate(("i", "h", "b")))
        scope, head = kernel.scope, operands.qk
        frame = Frame(operands, kernel, 0, b, h, h)
        q0 = scope.value(scope.times(i, blocks.m, "q0"))
        limits = frame.limits(frame.sq) | ({1: scope.value(head.size)} if head.padded else {})
        type_, place = TensorType(f32, [blocks.m, head.tile]), [b, h, q0, scope.value(0)]
        sums = scope.add(tile.LoadOp(kernel.take(self.sums), place, [2, 3], type_, limits), "dq").result
        vjp = self.op.query_vjp
        q = frame.rows(scope, "q", h, q0, blocks.m, head, frame.sq) if vjp is not None and vjp.blocks else sums
        dq = operand_gradient(frame, scope, sums, q, vjp, h, q0, head, frame.take("scale"))
        store_rows(frame, scope, dq, "dq", h, q0, head.size, head.padded, frame.sq)
        return kernel.launch([count, operands.heads, operands.batch])
