"""triton-pass-sizes: sizes of tensors reach a Triton kernel, where tensors are bare pointers, as arguments."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, i32
from xdsl.ir import BlockArgument, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import tile
from attn_engine.errors import PassError

Size = tuple[int, int]
"""Position of the tensor among the kernel's arguments, and axis."""


def _lift_sizes(kernel: tile.KernelOp) -> list[Size]:
    """Replaces `tile.dim` in a kernel by new arguments at its end; returns which sizes they are."""
    block, found = kernel.body.block, dict[Size, SSAValue]()
    for op in list(kernel.walk()):
        if not isinstance(op, tile.DimOp):
            continue
        if not isinstance(op.source, BlockArgument) or op.source.block is not block:
            raise PassError(
                "triton-pass-sizes", f"tile.dim of {op.source} in kernel @{kernel.sym_name.data}: not its argument"
            )
        size = (op.source.index, op.axis.value.data)
        if size not in found:
            found[size] = block.insert_arg(i32, len(block.args))
            found[size].name_hint = f"{op.source.name_hint or 'tensor'}_size_{size[1]}"
        op.result.replace_all_uses_with(found[size])
        Rewriter.erase_op(op)
    return list(found)


def _pass_sizes(launch: tile.LaunchOp, sizes: list[Size]) -> None:
    dims = [tile.DimOp(launch.arguments[position], axis) for position, axis in sizes]
    Rewriter.insert_op(dims, InsertPoint.before(launch))
    name, attributes = launch.kernel.root_reference.data, dict(launch.attributes)
    new = tile.LaunchOp(name, list(launch.grid), [*launch.arguments, *dims])
    new.attributes |= attributes
    Rewriter.replace_op(launch, new)


@dataclass(frozen=True)
class TritonPassSizesPass(ModulePass):
    """Turns `tile.dim` inside kernels into arguments that every launch passes.

    ```
    tile.kernel @k(%x: !tile.global<1 x f32>) {
      %n = tile.dim %x, 0 : !tile.global<1 x f32>
    ```
    becomes
    ```
    tile.kernel @k(%x: !tile.global<1 x f32>, %n: i32) {
    ```
    """

    name = "triton-pass-sizes"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        kernels = [k for k in op.ops if isinstance(k, tile.KernelOp)]
        sizes = {kernel.sym_name.data: _lift_sizes(kernel) for kernel in kernels}
        for launch in list(op.walk()):
            if isinstance(launch, tile.LaunchOp) and sizes.get(launch.kernel.root_reference.data):
                _pass_sizes(launch, sizes[launch.kernel.root_reference.data])
