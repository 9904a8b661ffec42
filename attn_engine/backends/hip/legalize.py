"""hip-transpose: every tile of a kernel as its transpose, so that chained products stay in registers."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from xdsl.context import Context
from xdsl.dialects import arith, scf
from xdsl.dialects.builtin import DenseIntOrFPElementsAttr, FixedBitwidthType, IntegerAttr, ModuleOp, TensorType, i64
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter
from xdsl.utils.hints import isa

from attn_engine.backends.hip import types
from attn_engine.backends.hip.layouts import PADDING_BYTES
from attn_engine.backends.hip.lds import SMALLEST_LDS
from attn_engine.dialects import tile
from attn_engine.errors import UnsupportedOpError


def _flipped_type(type_: Attribute) -> Attribute:
    shape = tile.shape_of(type_)
    return TensorType(tile.element_of(type_), shape[::-1]) if len(shape) == 2 else type_


def _flipped_axes(axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(1 - axis for axis in axes))


def _rank(op: Operation) -> int:
    """Of the tile that an op with axes is about."""
    value = op.results[0] if isinstance(op, tile.LoadOp | tile.MapOp) else op.operands[0]
    return len(tile.shape_of(value))


def _properties(op: Operation) -> dict[str, Attribute]:
    """The op's properties, with axes of tiles of rank 2 exchanged."""
    new = dict(op.properties)
    if isinstance(op, arith.ConstantOp) and isa(op.value, DenseIntOrFPElementsAttr):
        if tile.splat_of(op.value) is None:
            raise UnsupportedOpError("arith.constant of different elements", types.BACKEND_NAME)
        if isinstance(type_ := _flipped_type(op.result.type), TensorType):
            new["value"] = DenseIntOrFPElementsAttr(type_, op.value.data)  # type: ignore[arg-type]
    if not isinstance(op, _WITH_AXES) or _rank(op) != 2:
        return new
    if isinstance(op, _ACCESSES):
        bounded = tile.ints_of(op.bounded)
        new["dims"] = tile.ints(tile.ints_of(op.dims)[::-1])
        new["bounded"] = tile.ints(sorted(1 - axis for axis in bounded))
    elif isinstance(op, tile.MapOp | tile.ScatterAddOp):
        new["axes"] = tile.axes_attr([_flipped_axes(axes) for axes in tile.axes_of(op.axes)])
    else:
        new["axis"] = IntegerAttr(1 - op.axis.value.data, i64)
    return new


_ACCESSES = (tile.LoadOp, tile.StoreOp, tile.AtomicAddOp)
_WITH_AXES = (
    tile.LoadOp,
    tile.StoreOp,
    tile.AtomicAddOp,
    tile.MapOp,
    tile.ScatterAddOp,
    tile.ReduceOp,
    tile.ScanOp,
    tile.SliceOp,
    tile.ConcatOp,
)


def _transposed(op: Operation, values: dict[SSAValue, SSAValue]) -> Operation:
    operands = [values.get(o, o) for o in op.operands]
    if isinstance(op, tile.DotOp):
        operands[0], operands[1] = operands[1], operands[0]
    if isinstance(op, _ACCESSES) and _rank(op) == 2 and len(op.limits) == 2:
        operands[-2:] = operands[:-3:-1]
    regions = [Region([_transposed_block(b, values) for b in r.blocks]) for r in op.regions]
    make: Any = type(op)
    new: Operation = make.create(
        operands=operands,
        result_types=[_flipped_type(r.type) for r in op.results],
        properties=_properties(op),
        attributes=dict(op.attributes),
        regions=regions,
    )
    for old, result in zip(op.results, new.results, strict=True):
        result.name_hint = old.name_hint
        values[old] = result
    return new


def _transposed_block(block: Block, values: dict[SSAValue, SSAValue]) -> Block:
    new = Block(arg_types=[_flipped_type(a.type) for a in block.args])
    for old, argument in zip(block.args, new.args, strict=True):
        argument.name_hint = old.name_hint
        values[old] = argument
    for op in block.ops:
        new.add_op(_transposed(op, values))
    return new


def _fold_transposes(kernel: tile.KernelOp) -> None:
    """The transpose of a tile that is loaded is a load of its own, with the axes exchanged: each product then finds its
    operand as it reads it. Where LDS cannot hold tiles both ways, a tile that is also read as it is stays alone."""
    turned = [t for t in kernel.walk() if isinstance(t, tile.TransposeOp) and isinstance(t.value.owner, tile.LoadOp)]
    loops = [op.body.block for op in kernel.walk() if isinstance(op, scf.ForOp)]
    fits = all(sum(_bytes(op) for op in loop.ops if _lies_in_lds(op)) <= SMALLEST_LDS for loop in loops)
    for op in turned:
        load = op.value.owner
        assert isinstance(load, tile.LoadOp)
        if fits or load.result.has_one_use():
            _fold_transpose(op, load)


def _lies_in_lds(op: Operation) -> bool:
    """Loads of a loop and their transposes; what is loaded before it stays in registers."""
    return isinstance(op, tile.LoadOp | tile.TransposeOp) and len(tile.shape_of(op.results[0])) == 2


def _bytes(op: Operation) -> int:
    """Of a tile in LDS, its rows padded, whichever way it lies."""
    shape, type_ = tile.shape_of(op.results[0]), tile.element_of(op.results[0])
    assert isinstance(type_, FixedBitwidthType)
    return prod(shape) * type_.bitwidth // 8 + max(shape) * PADDING_BYTES


def _fold_transpose(op: tile.TransposeOp, load: tile.LoadOp) -> None:
    limits = {1 - axis: limit for axis, limit in zip(tile.ints_of(load.bounded), load.limits, strict=True)}
    dims = tile.ints_of(load.dims)[::-1]
    turned = tile.LoadOp(load.source, list(load.indices), dims, op.result.type, limits)
    turned.result.name_hint = load.result.name_hint
    Rewriter.insert_op(turned, InsertPoint.after(load))
    op.result.replace_all_uses_with(turned.result)
    Rewriter.erase_op(op)
    if not load.result.first_use:
        Rewriter.erase_op(load)


@dataclass(frozen=True)
class HipTransposePass(ModulePass):
    """Exchanges the axes of every tile of rank 2 in kernels: what is loaded, computed and stored is the same.

    A lane holds a column of an accumulator. With the queries (or keys) of a program along the columns, row reductions
    stay within a lane or two, and weights are held as the next product wants its right operand.

    ```
    %x = tile.dot %q, %kt, %zero ieee : tensor<128x64xf16>, tensor<64x32xf16> -> tensor<128x32xf32>
    %m = tile.reduce max %x, 1 : tensor<128x32xf32> -> tensor<128xf32>
    ```
    becomes
    ```
    %x = tile.dot %kt, %q, %zero ieee : tensor<32x64xf16>, tensor<64x128xf16> -> tensor<32x128xf32>
    %m = tile.reduce max %x, 0 : tensor<32x128xf32> -> tensor<128xf32>
    ```
    """

    name = "hip-transpose"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for kernel in [k for k in op.ops if isinstance(k, tile.KernelOp)]:
            body = _transposed_block(kernel.body.block, {})
            new = tile.KernelOp(kernel.sym_name.data, body, dict(kernel.attributes))
            Rewriter.replace_op(kernel, new)
            _fold_transposes(new)
