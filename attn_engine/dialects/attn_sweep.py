"""What a recurrence without the delta rule is made of, forward and backward: sweeps over the tokens."""

from __future__ import annotations

from xdsl.dialects.builtin import I64, IntegerAttr, TensorType, UnitAttr, f32
from xdsl.irdl import (
    AttrSizedOperandSegments,
    AttrSizedResultSegments,
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    opt_prop_def,
    opt_result_def,
    result_def,
    traits_def,
    var_operand_def,
)
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

from attn_engine.dialects.attn_recurrence import match_sizes


@irdl_op_definition
class SweepOp(IRDLOperation):
    """The map of a recurrence without the delta rule, or with `reverse` the adjoint of that map.

    With g the log decay and w the weight (0 and 1 without them):

    ```
    S_t = exp(g_t) S_{t-1} + w_t k_t v_t^T,    o_t = scale * q_t S_t                          forward
    D_t = R_{t+1} + scale * k_t v_t^T,         o_t = w_t q_t D_t,        R_t = exp(g_t) D_t   reverse
    ```

    The state starts as `initial` (S_0, or R after the last token; 0 without it) and ends as `final` (the last S, or
    the first R). `rows` are sums over the channels of `dot` * o, one per token, in reverse without w unless `whole`. Shapes and `bounds` are
    those of `attn.recurrence`, but each of q, k, v and dot may have fewer heads than the result: head h of H
    reads head h // (H // own heads). A log decay per channel is one per row of the state, with `columns` one per column.

    `kept` are the states before every `segment`-th token (slot s holds S before token s * segment; slot 0 is not read),
    and `ends` the sums of such states, given as `meets`, times the sweep's own R before the same tokens: over all of
    the state, or with a log decay per channel over its rows. They are of the type of the results.

    ```
    %o, %rows = attn.sweep %q, %k, %v scale %scale decay %g dot %e reverse
      : tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16> decay tensor<?x?x?xf32>
        dot tensor<?x?x?x64xbf16> -> tensor<?x?x?x64xbf16> rows tensor<?x?x?xf32>
    ```
    """

    name = "attn.sweep"
    q = operand_def(TensorType)
    k = operand_def(TensorType)
    v = operand_def(TensorType)
    scale = operand_def(f32)
    decay = opt_operand_def(TensorType)
    weight = opt_operand_def(TensorType)
    initial = opt_operand_def(TensorType)
    bounds = opt_operand_def(TensorType)
    dot = opt_operand_def(TensorType)
    meets = opt_operand_def(TensorType)
    segment = opt_prop_def(IntegerAttr[I64])
    reverse = opt_prop_def(UnitAttr)
    columns = opt_prop_def(UnitAttr)
    whole = opt_prop_def(UnitAttr)
    o = result_def(TensorType)
    final = opt_result_def(TensorType)
    rows = opt_result_def(TensorType)
    kept = opt_result_def(TensorType)
    ends = opt_result_def(TensorType)
    irdl_options = (AttrSizedOperandSegments(as_property=True), AttrSizedResultSegments(as_property=True))
    traits = traits_def(Pure())
    assembly_format = (
        "$q `,` $k `,` $v `scale` $scale (`decay` $decay^)? (`weight` $weight^)? (`initial` $initial^)?"
        " (`bounds` $bounds^)? (`dot` $dot^)? (`meets` $meets^)? (`segment` $segment^)? (`reverse` $reverse^)?"
        " (`columns` $columns^)? (`whole` $whole^)? attr-dict `:` type($q) `,` type($k) `,` type($v)"
        " (`decay` type($decay)^)? (`weight` type($weight)^)? (`initial` type($initial)^)? (`bounds` type($bounds)^)?"
        " (`dot` type($dot)^)? (`meets` type($meets)^)? `->` type($o) (`final` type($final)^)? (`rows` type($rows)^)?"
        " (`kept` type($kept)^)? (`ends` type($ends)^)?"
    )

    def verify_(self) -> None:
        if (self.dot is None) != (self.rows is None):
            raise VerifyException("rows are the sums that dot asks for: give both or neither")
        if (self.meets is None) != (self.ends is None):
            raise VerifyException("ends are the sums that meets asks for: give both or neither")
        if self.segment is None and (self.kept is not None or self.meets is not None):
            raise VerifyException("states are kept, and met, at every segment-th token: give a segment")
        state = "bhkv" if self.bounds is None else "nhkv"
        sizes: dict[str, int] = {}
        wide = "bhtk" if self.columns is None else "bhtv"
        for name, shapes in (
            ("o", ("bhtv",)),
            ("q", ("b?tk",)),
            ("k", ("b?tk",)),
            ("v", ("b?tv",)),
            ("decay", ("bht", wide)),
            ("weight", ("bht",)),
            ("initial", (state,)),
            ("bounds", ("s",)),
            ("dot", ("b?tv",)),
            ("final", (state,)),
            ("rows", ("bht",)),
            ("kept", ("bh?kv",)),
            ("meets", ("bh?kv",)),
            ("ends", ("bh?", "bh?v")),
        ):
            match_sizes(name, getattr(self, name), shapes, sizes)


@irdl_op_definition
class TokenGradientsOp(IRDLOperation):
    """The gradients of what a recurrence has one of per token: the log decay, the weight.

    With p = q . dq, n = k . dk, r = v . dv before the weight, and the states at the end:

    ```
    d_decay_t  = sum_{s >= t} (p_s - n_s) + sum(final * d_final), and 0 where the log decay is -inf
    d_weight_t = r_t
    ```

    Those sums cancel, more so the longer they are. With `ends` [B, H, slots] they go to the end of the segment of t alone,
    and the sum of states times their gradients before the next segment stands for what follows. That sum is known where a
    segment starts, too (0 where a sequence does, if they are all `fresh` and have no initial state): errors are held against it.

    ```
    %dg = attn.token_gradients p %p n %n decay %g : p tensor<?x?x?xf32> n tensor<?x?x?xf32> decay tensor<?x?x?xf32>
      -> decay tensor<?x?x?xf32>
    ```
    """

    name = "attn.token_gradients"
    r = opt_operand_def(TensorType)
    p = opt_operand_def(TensorType)
    n = opt_operand_def(TensorType)
    decay = opt_operand_def(TensorType)
    states = var_operand_def(TensorType)
    bounds = opt_operand_def(TensorType)
    ends = opt_operand_def(TensorType)
    segment = opt_prop_def(IntegerAttr[I64])
    fresh = opt_prop_def(UnitAttr)
    d_decay = opt_result_def(TensorType)
    d_weight = opt_result_def(TensorType)
    irdl_options = (AttrSizedOperandSegments(as_property=True), AttrSizedResultSegments(as_property=True))
    traits = traits_def(Pure())
    assembly_format = (
        "(`r` $r^)? (`p` $p^)? (`n` $n^)? (`decay` $decay^)? (`states` $states^)? (`bounds` $bounds^)? (`ends` $ends^)?"
        " (`segment` $segment^)? (`fresh` $fresh^)? attr-dict"
        " `:` (`r` type($r)^)? (`p` type($p)^)? (`n` type($n)^)? (`decay` type($decay)^)? (`states` type($states)^)?"
        " (`bounds` type($bounds)^)? (`ends` type($ends)^)? `->` (`decay` type($d_decay)^)? (`weight` type($d_weight)^)?"
    )

    def verify_(self) -> None:
        if len(self.states) not in (0, 2):
            raise VerifyException(f"states are the final state and its gradient, got {len(self.states)}")
        if self.d_decay is not None and (self.decay is None or self.p is None or self.n is None):
            raise VerifyException("the gradient of a decay needs the decay, p and n")
        if self.d_weight is not None and self.r is None:
            raise VerifyException("the gradient of a weight is r: give it")
        if (self.ends is None) != (self.segment is None):
            raise VerifyException("ends are those of segments: give both or neither")


@irdl_op_definition
class ChannelGradientsOp(IRDLOperation):
    """The gradient of a log decay per key channel, [B, H, T, K].

    ```
    d_decay_t = sum_{s >= t} (q_s * dq_s - k_s * dk_s) + (final * d_final) summed over the value channels
    ```
    and 0 where the log decay is -inf. dq and dk have all heads and are f32. `ends` [B, H, slots, K] and segments are as in
    `attn.token_gradients`.

    ```
    %dg = attn.channel_gradients %q, %dq, %k, %dk decay %g : tensor<?x?x?x64xbf16>, tensor<?x?x?x64xf32>,
      tensor<?x?x?x64xbf16>, tensor<?x?x?x64xf32> decay tensor<?x?x?x64xf32> -> tensor<?x?x?x64xf32>
    ```
    """

    name = "attn.channel_gradients"
    q = operand_def(TensorType)
    dq = operand_def(TensorType)
    k = operand_def(TensorType)
    dk = operand_def(TensorType)
    decay = operand_def(TensorType)
    states = var_operand_def(TensorType)
    bounds = opt_operand_def(TensorType)
    ends = opt_operand_def(TensorType)
    segment = opt_prop_def(IntegerAttr[I64])
    result = result_def(TensorType)
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(Pure())
    assembly_format = (
        "$q `,` $dq `,` $k `,` $dk `decay` $decay (`states` $states^)? (`bounds` $bounds^)? (`ends` $ends^)?"
        " (`segment` $segment^)? attr-dict `:` type($q) `,`"
        " type($dq) `,` type($k) `,` type($dk) `decay` type($decay) (`states` type($states)^)?"
        " (`bounds` type($bounds)^)? (`ends` type($ends)^)? `->` type($result)"
    )

    def verify_(self) -> None:
        if len(self.states) not in (0, 2):
            raise VerifyException(f"states are the final state and its gradient, got {len(self.states)}")
        if (self.ends is None) != (self.segment is None):
            raise VerifyException("ends are those of segments: give both or neither")
        if self.result.type != self.decay.type:
            raise VerifyException(f"the gradient {self.result.type} has not the type of the decay, {self.decay.type}")


@irdl_op_definition
class SumHeadsOp(IRDLOperation):
    """The sum over each group of heads that share one: [B, H, T, K] to [B, Hk, T, K], group h being h // (H // Hk).

    ```
    %dk = attn.sum_heads %dk_of_heads like %k : tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16> -> tensor<?x?x?x64xbf16>
    ```
    """

    name = "attn.sum_heads"
    value = operand_def(TensorType)
    like = operand_def(TensorType)
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$value `like` $like attr-dict `:` type($value) `,` type($like) `->` type($result)"

    def verify_(self) -> None:
        if self.like.type != self.result.type:
            raise VerifyException(f"the sum {self.result.type} has not the type of what it is like, {self.like.type}")


@irdl_op_definition
class DeltaBackwardOp(IRDLOperation):
    """The gradients of a recurrence with the delta rule.

    With S' = exp(g_t) S_{t-1}, u_t = v_t - S'^T k_t, D_t the gradient of S_t and R_t that of S_{t-1}:

    ```
    D_t = R_{t+1} + scale * q_t do_t^T      dq_t = scale * S_t do_t         dv_t = beta_t D_t^T k_t
    dk_t = beta_t D_t u_t - S' dv_t         dbeta_t = k_t D_t u_t           R_t = exp(g_t) (D_t - k_t dv_t^T)
    ```
    and the gradient of g_t sums S' * (D_t - k_t dv_t^T), over all of the state or over the value channels.

    dq and dk are f32 and have all heads. `d_final` is R after the last token (0 without it).

    ```
    %dq, %dk, %dv, %db = attn.delta_backward %q, %k, %v, %do scale %scale beta %b : tensor<?x?x?x64xbf16>,
      tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16> beta tensor<?x?x?xf32>
      -> tensor<?x?x?x64xf32>, tensor<?x?x?x64xf32>, tensor<?x?x?x64xbf16>, tensor<?x?x?xf32>
    ```
    """

    name = "attn.delta_backward"
    q = operand_def(TensorType)
    k = operand_def(TensorType)
    v = operand_def(TensorType)
    d_o = operand_def(TensorType)
    scale = operand_def(f32)
    beta = operand_def(TensorType)
    decay = opt_operand_def(TensorType)
    initial = opt_operand_def(TensorType)
    bounds = opt_operand_def(TensorType)
    d_final = opt_operand_def(TensorType)
    dq = result_def(TensorType)
    dk = result_def(TensorType)
    dv = result_def(TensorType)
    d_beta = result_def(TensorType)
    d_decay = opt_result_def(TensorType)
    d_initial = opt_result_def(TensorType)
    irdl_options = (AttrSizedOperandSegments(as_property=True), AttrSizedResultSegments(as_property=True))
    traits = traits_def(Pure())
    assembly_format = (
        "$q `,` $k `,` $v `,` $d_o `scale` $scale `beta` $beta (`decay` $decay^)? (`initial` $initial^)?"
        " (`bounds` $bounds^)? (`d_final` $d_final^)? attr-dict `:` type($q) `,` type($k) `,` type($v) `,` type($d_o)"
        " `beta` type($beta) (`decay` type($decay)^)? (`initial` type($initial)^)? (`bounds` type($bounds)^)?"
        " (`d_final` type($d_final)^)? `->` type($dq) `,` type($dk) `,` type($dv) `,` type($d_beta)"
        " (`decay` type($d_decay)^)? (`initial` type($d_initial)^)?"
    )

    def verify_(self) -> None:
        if self.d_decay is not None and (self.decay is None or self.decay.type != self.d_decay.type):
            raise VerifyException("the gradient of a decay needs the decay, and has its type")
        state = "bhkv" if self.bounds is None else "nhkv"
        sizes: dict[str, int] = {}
        for name, shapes in (
            ("v", ("bhtv",)),
            ("d_o", ("bhtv",)),
            ("q", ("bgtk",)),
            ("k", ("bgtk",)),
            ("beta", ("bht",)),
            ("decay", ("bht", "bhtk")),
            ("initial", (state,)),
            ("d_final", (state,)),
            ("dq", ("bhtk",)),
            ("dk", ("bhtk",)),
            ("dv", ("bhtv",)),
            ("d_beta", ("bht",)),
            ("d_initial", (state,)),
        ):
            match_sizes(name, getattr(self, name), shapes, sizes)
