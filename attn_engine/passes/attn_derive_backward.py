"""attn-derive-backward: the gradients of an attention, by reverse mode on its scalar regions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, func
from xdsl.dialects.builtin import ArrayAttr, FloatAttr, IntegerAttr, ModuleOp, TensorType, f32, i64
from xdsl.ir import Block, Region, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import attn
from attn_engine.ir.autodiff.graph import Slicer
from attn_engine.passes.attn_simplify import simplify
from attn_engine.passes.backward_joint import OPERANDS, JointCode, Wanted, derive
from attn_engine.passes.backward_operands import led_through, vjp
from attn_engine.passes.backward_regions import BackwardCode

# --- the forward pass ----------------------------------------------------------------------------


def _save(op: attn.AttentionOp, joint: JointCode, code: BackwardCode) -> attn.AttentionOp:
    """The attention with row values for backward; their code is cut out of the joint graph."""
    row = op.row.block
    slicer = Slicer(row, dict(joint.origin))
    if code.marker is not None:
        zero = arith.ConstantOp(FloatAttr(0.0, f32))
        slicer.append(zero)
        slicer.known[code.marker] = zero.result
    saved = slicer.values(code.saved)
    assert row.last_op is not None
    row.last_op.operands = [*row.last_op.operands, *saved]
    return _with_results(op, len(saved))


def _with_results(op: attn.AttentionOp, count: int) -> attn.AttentionOp:
    row_type = TensorType(f32, op.q.type.get_shape()[:3])  # type: ignore[union-attr]
    outputs = [r.type for r in op.outputs]
    names = attn.AttentionOp.get_irdl_definition().regions
    regions = [_moved(getattr(op, name)) for name, _ in names]
    new = attn.AttentionOp(
        operands=[op.q, op.k, op.v, op.scale, list(op.captures)],
        result_types=[op.o.type, outputs, [row_type] * count],
        regions=regions,
    )
    for i, saved in enumerate(new.saved):
        saved.name_hint = f"saved{i}"
    Rewriter.insert_op(new, InsertPoint.before(op))
    for old, fresh in zip(op.results, new.results[: len(op.results)], strict=True):
        fresh.name_hint = old.name_hint
        old.replace_all_uses_with(fresh)
    Rewriter.erase_op(op)
    return new


def _moved(region: Region | None) -> list[Region] | Region:
    if region is None:
        return []
    new = Region()
    region.move_blocks(new)
    return new


# --- the backward pass -----------------------------------------------------------------------------------


def _backward_function(op: attn.AttentionOp, code: BackwardCode, wanted: Wanted) -> func.FuncOp:
    """func.func @backward(q, k, v, scale, o, d_o, saved..., d_outputs..., captures...) around attn.backward."""
    rows = [r.type for r in op.outputs]
    saved = [r.type for r in op.saved]
    types = [op.q.type, op.k.type, op.v.type, f32, op.o.type, op.o.type, *saved, *rows, *(c.type for c in op.captures)]
    block = Block(arg_types=types)
    names = ["q", "k", "v", "scale", "o", "d_o", *(f"saved{i}" for i in range(len(saved)))]
    names += [*(f"d_out{i}" for i in range(len(rows))), *(c.name_hint for c in op.captures)]
    for argument, name in zip(block.args, names, strict=True):
        argument.name_hint = name
    backward = _backward_op(op, code, wanted, list(block.args))
    results = [f"d{name}" for name in OPERANDS if name in wanted.operands]
    results += [f"d_{op.captures[i].name_hint or f'capture{i}'}" for i in wanted.captures]
    for result, name in zip(backward.results, results, strict=True):
        result.name_hint = name
    block.add_ops([backward, func.ReturnOp(*backward.results)])
    return func.FuncOp("backward", (types, [r.type for r in backward.results]), Region(block))


def _backward_op(op: attn.AttentionOp, code: BackwardCode, wanted: Wanted, args: Sequence[SSAValue]) -> attn.BackwardOp:
    saved, outputs = 6 + len(op.saved), 6 + len(op.saved) + len(op.outputs)
    cloned = {name: _cloned(getattr(op, name)) for name in ("query_mod", "key_mod", "value_mod", "score_mod", "mask")}
    # score_mod is part of `element` and of the row steps.
    cloned["score_mod"] = []
    vjps = [vjp(op, operand, wanted) for operand in OPERANDS]
    results = [[getattr(op, name).type] if name in wanted.operands else [] for name in OPERANDS]
    d_captures = [TensorType(f32, op.captures[i].type.get_shape()) for i in wanted.captures]  # type: ignore[union-attr]
    return attn.BackwardOp(
        operands=[*args[:6], args[6:saved], args[saved:outputs], args[outputs:]],
        result_types=[*results, d_captures],
        properties={
            "init": code.init(),
            "grad_captures": ArrayAttr(IntegerAttr(i, i64) for i in wanted.captures),
        },
        regions=[
            *cloned.values(),
            *vjps,
            code.rows(),
            code.element(),
            *(_cloned(r) for r in (op.blocks, op.blocks_t, op.query_terms, op.key_terms, op.kinds)),
            code.row_steps(),
        ],
    )


def _cloned(region: Region | None) -> list[Region]:
    return [] if region is None else [region.clone()]


def derive_backward(function: func.FuncOp, op: attn.AttentionOp, wrt: Sequence[str | int]) -> func.FuncOp:
    """Adds saved row values to an attention and to the results of its function; gives the backward function."""
    wanted = Wanted.of(wrt, op)
    joint = JointCode.of(op)
    code = derive(joint, wanted, led_through(op, wanted))
    op = _save(op, joint, code)
    simplify(op)
    last = function.body.block.last_op
    assert isinstance(last, func.ReturnOp)
    last.operands = [*last.operands, *op.saved]
    function.update_function_type()
    return _backward_function(op, code, wanted)


@dataclass(frozen=True)
class AttnDeriveBackwardPass(ModulePass):
    """Derives the gradients of every function that holds an `attn.attention`, from its regions alone.

    The row function yields further row values, `saved`, chosen as a minimum cut of what backward reads; a function
    @backward(q, k, v, scale, o, d_o, saved..., d_outputs..., captures...) follows. Softmax:

    ```
    row {                                        row { ... attn.yield %p, %lse : f32, f32 }
      %m = attn.row_reduce max %s                rows { ... attn.yield %lse, %delta : f32, f32 }
      %e = math.exp (%s - %m)               ->   element {
      %l = attn.row_reduce sum %e                  %p = math.exp (%s - %lse)
      attn.yield %e / %l                           attn.yield %p, %p * (%dp - %delta)
    }                                            }
    ```
    """

    name = "attn-derive-backward"

    wrt: tuple[str | int, ...] = OPERANDS
    """What gradients are needed: `q`, `k`, `v` and positions of captures."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for attention in [a for a in op.walk() if isinstance(a, attn.AttentionOp)]:
            function = attention.parent_op()
            if not isinstance(function, func.FuncOp):
                raise ValueError("attn.attention must stand directly in a func.func")
            backward = derive_backward(function, attention, self.wrt)
            Rewriter.insert_op(backward, InsertPoint.after(function))
