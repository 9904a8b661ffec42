"""The ``attn`` dialect: what an attention *means*, over whole tensors.

Nothing here knows blocks, memory or targets. A user's functions are regions of *scalar*
code (``arith`` and ``math`` on ``f32``, ``i64`` and ``i1``) over one score, one row or one
element; `attn_engine.ir.axes` tells on which axes a scalar depends.

Logical dimension order is always batch, head, position, channel; memory layout is strides
and enters at run time only.
"""

from __future__ import annotations

from xdsl.dialects.builtin import ArrayAttr, FloatAttr, IntegerAttr, TensorType, f32, i64
from xdsl.ir import Dialect, Region, SSAValue
from xdsl.irdl import (
    AttrSizedOperandSegments,
    AttrSizedRegionSegments,
    AttrSizedResultSegments,
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    opt_region_def,
    opt_result_def,
    prop_def,
    region_def,
    result_def,
    traits_def,
    var_operand_def,
    var_region_def,
    var_result_def,
)
from xdsl.traits import IsolatedFromAbove, Pure
from xdsl.utils.exceptions import VerifyException

from attn_engine.dialects.attn_recurrence import RecurrenceOp as RecurrenceOp
from attn_engine.dialects.attn_regions import KIND_REGIONS as KIND_REGIONS
from attn_engine.dialects.attn_regions import AttentionRegions as AttentionRegions
from attn_engine.dialects.attn_scalar import AccumulateGradOp as AccumulateGradOp
from attn_engine.dialects.attn_scalar import ChannelAtOp as ChannelAtOp
from attn_engine.dialects.attn_scalar import CombineYieldOp as CombineYieldOp
from attn_engine.dialects.attn_scalar import EpilogueYieldOp as EpilogueYieldOp
from attn_engine.dialects.attn_scalar import LoadOp as LoadOp
from attn_engine.dialects.attn_scalar import ReduceKind as ReduceKind
from attn_engine.dialects.attn_scalar import ReduceKindAttr as ReduceKindAttr
from attn_engine.dialects.attn_scalar import RowReduceOp as RowReduceOp
from attn_engine.dialects.attn_scalar import StepYieldOp as StepYieldOp
from attn_engine.dialects.attn_scalar import TieRule as TieRule
from attn_engine.dialects.attn_scalar import TieRuleAttr as TieRuleAttr
from attn_engine.dialects.attn_scalar import YieldOp as YieldOp
from attn_engine.dialects.attn_scalar import check_block as check_block
from attn_engine.dialects.attn_scalar import check_yield as check_yield
from attn_engine.dialects.attn_sweep import ChannelGradientsOp as ChannelGradientsOp
from attn_engine.dialects.attn_sweep import DeltaBackwardOp as DeltaBackwardOp
from attn_engine.dialects.attn_sweep import SumHeadsOp as SumHeadsOp
from attn_engine.dialects.attn_sweep import SweepOp as SweepOp
from attn_engine.dialects.attn_sweep import TokenGradientsOp as TokenGradientsOp

INDEX_NAMES = ("b", "h", "q", "kv")


def _check_qkv(q: SSAValue, k: SSAValue, v: SSAValue) -> None:
    for name, value in (("q", q), ("k", k), ("v", v)):
        if not isinstance(value.type, TensorType) or value.type.get_num_dims() != 4:
            raise VerifyException(
                f"{name} must be a tensor of rank 4 (batch, head, position, channel), got {value.type}"
            )
    dq, dk = q.type.get_shape()[3], k.type.get_shape()[3]  # type: ignore[union-attr]
    if dq != dk:
        raise VerifyException(f"head dim of q is {dq} but that of k is {dk}")


@irdl_op_definition
class AttentionOp(IRDLOperation, AttentionRegions):
    """One attention, as its user defined it.

    ```
    x = scale * sum_d query_mod(q)[d] * key_mod(k)[d]
    s = score_mod(x); a key with mask = false is not in the row
    p, outputs... = row(s)
    o = sum_kv p * value_mod(v)
    ```

    Query head h reads key/value head h // (Hq // Hkv). `row` takes (s f32, b, h, q, kv,
    captures...) and yields the weight p, then row values for the caller (an lse, for one), then row
    values that backward wants saved: each is a further result of shape [B, H, Sq], f32. A dead row
    (see `attn.row_reduce`) has o = 0 and -inf in every row value.

    `blocks`, where present (from `attn-analyze-mask`), takes (q_lo, q_hi, b, h, sq, skv) and
    yields 4 i64 per key range, sorted and disjoint: (visible lo, full lo, full hi, visible hi).
    For all queries in [q_lo, q_hi): keys outside all [visible lo, visible hi) are masked, and keys
    inside [full lo, full hi) are visible. `blocks_t` is the same with the roles of queries
    and keys exchanged: (kv_lo, kv_hi, b, h, sq, skv) -> ranges of queries.

    Where the mask reads captures at positions, three more regions say what a block of queries is to a block of
    keys. `query_terms` (b, h, q) and `key_terms` (b, h, kv) yield i64 terms of one position each. `kinds` takes
    (q_lo, q_hi, kv_lo, kv_hi, b, h), then the smallest and the largest value of each query term over
    [q_lo, q_hi), then those of each key term over [kv_lo, kv_hi), and yields two i1: whether some query may see
    some key (false: all are masked) and whether every query sees every key.
    """

    name = "attn.attention"
    q = operand_def(TensorType)
    k = operand_def(TensorType)
    v = operand_def(TensorType)
    scale = operand_def(f32)
    captures = var_operand_def(TensorType)
    query_mod = opt_region_def("single_block")
    key_mod = opt_region_def("single_block")
    value_mod = opt_region_def("single_block")
    score_mod = opt_region_def("single_block")
    mask = opt_region_def("single_block")
    row = region_def("single_block")
    blocks = opt_region_def("single_block")
    blocks_t = opt_region_def("single_block")
    query_terms = opt_region_def("single_block")
    key_terms = opt_region_def("single_block")
    kinds = opt_region_def("single_block")
    o = result_def(TensorType)
    outputs = var_result_def(TensorType)
    saved = var_result_def(TensorType)
    irdl_options = (AttrSizedRegionSegments(as_property=True), AttrSizedResultSegments(as_property=True))
    traits = traits_def(IsolatedFromAbove(), Pure())
    assembly_format = (
        "$q `,` $k `,` $v `scale` $scale (`captures` $captures^)? attr-dict-with-keyword"
        " `:` type($q) `,` type($k) `,` type($v) (`captures` type($captures)^)? `->` type($o)"
        " (`outputs` type($outputs)^)? (`saved` type($saved)^)?"
        " (`query_mod` $query_mod^)? (`key_mod` $key_mod^)? (`value_mod` $value_mod^)?"
        " (`score_mod` $score_mod^)? (`mask` $mask^)? `row` $row"
        " (`blocks` $blocks^)? (`blocks_t` $blocks_t^)?"
        " (`query_terms` $query_terms^)? (`key_terms` $key_terms^)? (`kinds` $kinds^)?"
    )

    def verify_(self) -> None:
        _check_qkv(self.q, self.k, self.v)
        self.verify_mods()
        check_block("row", self.row.block, [f32, i64, i64, i64, i64], list(self.captures))
        check_yield("row", self.row.block, [f32] * (1 + len(self.outputs) + len(self.saved)))


@irdl_op_definition
class OnlineOp(IRDLOperation, AttentionRegions):
    """An attention whose row function has become loops over blocks of keys (from `attn-derive-online`).

    One region of `steps` per loop over the keys. Step i starts its states at `init[i]` and is
    applied to one block of keys at a time: any blocks, in any order, that cover every visible
    key once. Its arguments: (s f32, b, h, q, kv, states of this step..., final states of
    all earlier steps..., captures...); it ends in `attn.step_yield`. In it `attn.row_reduce`
    reduces over the visible keys of the block. The last step yields a weight w (taken as 0 where
    masked, whatever the code gives there) and
    `acc = acc * rescale + sum_block w * value_mod(v)`; earlier steps yield states only.

    `epilogue`: (b, h, q, final states of all steps..., captures...) ends in
    `attn.epilogue_yield`: o = acc * scale, then the row outputs, then the saved row vectors;
    both are further results [B, H, Sq] f32. It handles dead rows itself (scale 0, lse -inf).

    `combine`, where present, has one region per step: parts of the keys may then be folded apart, each from
    `init[i]`, and two results made one. Its arguments: (b, h, q, states of one part..., states of the other...,
    final states of all earlier steps..., captures...); it ends in `attn.combine_yield` of the states of both,
    in the last step also of two factors: `acc = acc_a * rescale_a + acc_b * rescale_b`.
    """

    name = "attn.online"
    q = operand_def(TensorType)
    k = operand_def(TensorType)
    v = operand_def(TensorType)
    scale = operand_def(f32)
    captures = var_operand_def(TensorType)
    init = prop_def(ArrayAttr[ArrayAttr[FloatAttr]])
    query_mod = opt_region_def("single_block")
    key_mod = opt_region_def("single_block")
    value_mod = opt_region_def("single_block")
    score_mod = opt_region_def("single_block")
    mask = opt_region_def("single_block")
    epilogue = region_def("single_block")
    blocks = opt_region_def("single_block")
    blocks_t = opt_region_def("single_block")
    query_terms = opt_region_def("single_block")
    key_terms = opt_region_def("single_block")
    kinds = opt_region_def("single_block")
    steps = var_region_def("single_block")
    combine = var_region_def("single_block")
    o = result_def(TensorType)
    outputs = var_result_def(TensorType)
    saved = var_result_def(TensorType)
    irdl_options = (AttrSizedRegionSegments(as_property=True), AttrSizedResultSegments(as_property=True))
    traits = traits_def(IsolatedFromAbove(), Pure())
    assembly_format = (
        "$q `,` $k `,` $v `scale` $scale (`captures` $captures^)? `init` $init attr-dict-with-keyword"
        " `:` type($q) `,` type($k) `,` type($v) (`captures` type($captures)^)? `->` type($o)"
        " (`outputs` type($outputs)^)? (`saved` type($saved)^)?"
        " (`query_mod` $query_mod^)? (`key_mod` $key_mod^)? (`value_mod` $value_mod^)?"
        " (`score_mod` $score_mod^)? (`mask` $mask^)? `steps` $steps `epilogue` $epilogue"
        " (`combine` $combine^)? (`blocks` $blocks^)? (`blocks_t` $blocks_t^)?"
        " (`query_terms` $query_terms^)? (`key_terms` $key_terms^)? (`kinds` $kinds^)?"
    )

    def verify_(self) -> None:
        _check_qkv(self.q, self.k, self.v)
        self.verify_mods()
        captures = list(self.captures)
        if len(self.init) != len(self.steps):
            raise VerifyException(f"init has {len(self.init)} lists for {len(self.steps)} steps")
        earlier = 0
        for i, (init, step) in enumerate(zip(self.init, self.steps, strict=True)):
            states = len(init)
            check_block(f"step {i}", step.block, [f32, *[i64] * 4, *[f32] * (states + earlier)], captures)
            last, final = step.block.last_op, i == len(self.steps) - 1
            if not isinstance(last, StepYieldOp) or len(last.states) != states:
                raise VerifyException(f"step {i}: must end in attn.step_yield of {states} states")
            if (last.weight is not None) != final:
                raise VerifyException(f"step {i}: the last step, and no other, yields a weight")
            earlier += states
        self._verify_combine(captures)
        check_block("epilogue", self.epilogue.block, [*[i64] * 3, *[f32] * earlier], captures)
        last = self.epilogue.block.last_op
        if not isinstance(last, EpilogueYieldOp):
            raise VerifyException("epilogue: region must end in attn.epilogue_yield")
        if (len(last.outputs), len(last.saved)) != (len(self.outputs), len(self.saved)):
            raise VerifyException("epilogue: outputs and saved must match the results of the op")

    def _verify_combine(self, captures: list[SSAValue]) -> None:
        if self.combine and len(self.combine) != len(self.steps):
            raise VerifyException(f"combine has {len(self.combine)} regions for {len(self.steps)} steps")
        earlier = 0
        for i, (init, region) in enumerate(zip(self.init, self.combine, strict=False)):
            states, final = len(init), i == len(self.steps) - 1
            check_block(f"combine {i}", region.block, [*[i64] * 3, *[f32] * (2 * states + earlier)], captures)
            last = region.block.last_op
            if not isinstance(last, CombineYieldOp) or len(last.states) != states:
                raise VerifyException(f"combine {i}: must end in attn.combine_yield of {states} states")
            if len(last.rescale) != (2 if final else 0):
                raise VerifyException(f"combine {i}: the last step, and no other, yields two factors")
            earlier += states


@irdl_op_definition
class BackwardOp(IRDLOperation, AttentionRegions):
    """The gradients of an attention, recomputed block by block (from `attn-derive-backward`).

    With x the scaled product of a query and a key (before score_mod), dp = d_o . value_mod(v) and
    delta = rowsum(d_o * o):

    - `row_steps`: zero or more extra loops over the keys, each (x, dp, b, h, q, kv, delta, saved...,
      d_outputs..., states of this step..., final states of earlier steps..., captures...) ending
      in `attn.step_yield` of states only, which start at `init[i]`;
    - `rows`: (b, h, q, delta, saved..., d_outputs..., final states of all row steps...,
      captures...) yields the row vectors that the element code reads. Row vectors of a dead
      row make p and dx vanish;
    - `element`: (x, dp, b, h, q, kv, row vectors..., captures...) yields (p, dx), both taken as 0
      where masked: dv += p^T d_o, dq += scale * dx k, dk += scale * dx^T q;
    - `query_vjp`, `key_vjp`, `value_vjp`: (gradient of the modified element, element, b, h, position, channel,
      captures...) -> gradient of the element; applied before the sum over a head group.

    `attn.accumulate_grad` in `rows`, `element` and the three `..._vjp` feeds `d_captures`, of which there is one per
    entry of `grad_captures` (positions in captures), f32, of the capture's shape.
    """

    name = "attn.backward"
    q = operand_def(TensorType)
    k = operand_def(TensorType)
    v = operand_def(TensorType)
    scale = operand_def(f32)
    o = operand_def(TensorType)
    d_o = operand_def(TensorType)
    saved = var_operand_def(TensorType)
    d_outputs = var_operand_def(TensorType)
    captures = var_operand_def(TensorType)
    init = prop_def(ArrayAttr[ArrayAttr[FloatAttr]])
    grad_captures = prop_def(ArrayAttr[IntegerAttr])
    query_mod = opt_region_def("single_block")
    key_mod = opt_region_def("single_block")
    value_mod = opt_region_def("single_block")
    score_mod = opt_region_def("single_block")
    mask = opt_region_def("single_block")
    query_vjp = opt_region_def("single_block")
    key_vjp = opt_region_def("single_block")
    value_vjp = opt_region_def("single_block")
    rows = region_def("single_block")
    element = region_def("single_block")
    blocks = opt_region_def("single_block")
    blocks_t = opt_region_def("single_block")
    query_terms = opt_region_def("single_block")
    key_terms = opt_region_def("single_block")
    kinds = opt_region_def("single_block")
    row_steps = var_region_def("single_block")
    dq = opt_result_def(TensorType)
    dk = opt_result_def(TensorType)
    dv = opt_result_def(TensorType)
    d_captures = var_result_def(TensorType)
    irdl_options = (
        AttrSizedOperandSegments(as_property=True),
        AttrSizedRegionSegments(as_property=True),
        AttrSizedResultSegments(as_property=True),
    )
    traits = traits_def(IsolatedFromAbove())
    assembly_format = (
        "$q `,` $k `,` $v `scale` $scale `o` $o `,` $d_o (`saved` $saved^)? (`d_outputs` $d_outputs^)?"
        " (`captures` $captures^)? `init` $init `grad_captures` $grad_captures attr-dict-with-keyword"
        " `:` type($q) `,` type($k) `,` type($v) `,` type($o) `,` type($d_o) (`saved` type($saved)^)?"
        " (`d_outputs` type($d_outputs)^)? (`captures` type($captures)^)? `->`"
        " (`dq` type($dq)^)? (`dk` type($dk)^)? (`dv` type($dv)^)? (`d_captures` type($d_captures)^)?"
        " (`query_mod` $query_mod^)? (`key_mod` $key_mod^)? (`value_mod` $value_mod^)?"
        " (`score_mod` $score_mod^)? (`mask` $mask^)?"
        " (`query_vjp` $query_vjp^)? (`key_vjp` $key_vjp^)? (`value_vjp` $value_vjp^)?"
        " (`row_steps` $row_steps^)? `rows` $rows `element` $element (`blocks` $blocks^)? (`blocks_t` $blocks_t^)?"
        " (`query_terms` $query_terms^)? (`key_terms` $key_terms^)? (`kinds` $kinds^)?"
    )

    def verify_(self) -> None:
        _check_qkv(self.q, self.k, self.v)
        self.verify_mods()
        captures = list(self.captures)
        inputs = 1 + len(self.saved) + len(self.d_outputs)
        if len(self.init) != len(self.row_steps):
            raise VerifyException(f"init has {len(self.init)} lists for {len(self.row_steps)} row steps")
        if len(self.grad_captures) != len(self.d_captures):
            raise VerifyException("grad_captures must have one entry per result of d_captures")
        earlier = 0
        for i, (init, step) in enumerate(zip(self.init, self.row_steps, strict=True)):
            states = len(init)
            leading = [f32, f32, *[i64] * 4, *[f32] * (inputs + states + earlier)]
            check_block(f"row step {i}", step.block, leading, captures)
            last = step.block.last_op
            if not isinstance(last, StepYieldOp) or len(last.states) != states or last.weight is not None:
                raise VerifyException(f"row step {i}: must end in attn.step_yield of {states} states and nothing else")
            earlier += states
        check_block("rows", self.rows.block, [*[i64] * 3, *[f32] * (inputs + earlier)], captures)
        last = self.rows.block.last_op
        if not isinstance(last, YieldOp):
            raise VerifyException("rows: region must end in attn.yield")
        vectors = len(last.values)
        check_block("element", self.element.block, [f32, f32, *[i64] * 4, *[f32] * vectors], captures)
        check_yield("element", self.element.block, [f32, f32])
        for name in ("query_vjp", "key_vjp", "value_vjp"):
            region: Region | None = getattr(self, name)
            if region is not None:
                check_block(name, region.block, [f32, f32, *[i64] * 4], captures)
                check_yield(name, region.block, [f32])


Attn = Dialect(
    "attn",
    [
        AccumulateGradOp,
        AttentionOp,
        BackwardOp,
        ChannelAtOp,
        ChannelGradientsOp,
        CombineYieldOp,
        DeltaBackwardOp,
        EpilogueYieldOp,
        LoadOp,
        OnlineOp,
        RecurrenceOp,
        RowReduceOp,
        StepYieldOp,
        SumHeadsOp,
        SweepOp,
        TokenGradientsOp,
        YieldOp,
    ],
    [ReduceKindAttr, TieRuleAttr],
)
