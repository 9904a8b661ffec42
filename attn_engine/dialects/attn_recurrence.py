"""`attn.recurrence`: linear attention and state space models, a state per head that decays and is written to."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import DYNAMIC_INDEX, TensorType, f32, i64
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import (
    AttrSizedOperandSegments,
    AttrSizedRegionSegments,
    AttrSizedResultSegments,
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    opt_region_def,
    opt_result_def,
    result_def,
    traits_def,
    var_operand_def,
)
from xdsl.traits import IsolatedFromAbove, Pure
from xdsl.utils.exceptions import VerifyException

from attn_engine.dialects.attn_scalar import check_block, check_yield

MODS = ("q_mod", "k_mod", "v_mod", "decay_mod")


@irdl_op_definition
class RecurrenceOp(IRDLOperation):
    """A state S [K, V] per batch and head, read by queries and written by keys and values, token by token.

    With g the log decay (0 without one), one number per token or one per key channel (a row of S):

    ```
    S_t = exp(g_t) S_{t-1} + w_t k_t v_t^T                                    without beta; w_t is 1 without weight
    S_t = (I - beta_t k_t k_t^T) (exp(g_t) S_{t-1}) + beta_t k_t v_t^T        the delta rule
    o_t = scale * q_t S_t
    ```

    Shapes: q, k [B, Hk, T, K], v and o [B, H, T, V], decay [B, H, T] or [B, H, T, K], beta [B, H, T], the
    weight [B, H, T], initial state (0 without one) and the final one [B, H, K, V]. Head h of v reads head
    h // (H // Hk) of q and k. A log decay is at most 0; -inf forgets everything before its token. No tokens leave
    the state as it is.

    With `bounds` [N + 1] (i32, ascending from 0) there is one batch in which N sequences follow each other, sequence n
    from bounds[n] to bounds[n + 1]; states are [N, H, K, V] then, and tokens past the last bound give 0.

    `q_mod`, `k_mod`, `v_mod`, `decay_mod` make the element that is used of the element that is given:
    (element f32, b, h, position, channel, captures...) -> f32. `h` is the operand's own head, and the
    channel of a decay per token is 0.

    ```
    %o, %s = attn.recurrence %q, %k, %v scale %scale decay %g initial %s0
      : tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16> decay tensor<?x?x?xf32>
        initial tensor<?x?x64x64xf32> -> tensor<?x?x?x64xbf16> final tensor<?x?x64x64xf32>
    ```
    """

    name = "attn.recurrence"
    q = operand_def(TensorType)
    k = operand_def(TensorType)
    v = operand_def(TensorType)
    scale = operand_def(f32)
    decay = opt_operand_def(TensorType)
    beta = opt_operand_def(TensorType)
    weight = opt_operand_def(TensorType)
    initial = opt_operand_def(TensorType)
    bounds = opt_operand_def(TensorType)
    captures = var_operand_def(TensorType)
    q_mod = opt_region_def("single_block")
    k_mod = opt_region_def("single_block")
    v_mod = opt_region_def("single_block")
    decay_mod = opt_region_def("single_block")
    o = result_def(TensorType)
    final = opt_result_def(TensorType)
    irdl_options = (
        AttrSizedOperandSegments(as_property=True),
        AttrSizedRegionSegments(as_property=True),
        AttrSizedResultSegments(as_property=True),
    )
    traits = traits_def(IsolatedFromAbove(), Pure())
    assembly_format = (
        "$q `,` $k `,` $v `scale` $scale (`decay` $decay^)? (`beta` $beta^)? (`weight` $weight^)? (`initial` $initial^)?"
        " (`bounds` $bounds^)? (`captures` $captures^)? attr-dict-with-keyword `:` type($q) `,` type($k) `,` type($v)"
        " (`decay` type($decay)^)? (`beta` type($beta)^)? (`weight` type($weight)^)? (`initial` type($initial)^)?"
        " (`bounds` type($bounds)^)?"
        " (`captures` type($captures)^)? `->` type($o) (`final` type($final)^)?"
        " (`q_mod` $q_mod^)? (`k_mod` $k_mod^)? (`v_mod` $v_mod^)? (`decay_mod` $decay_mod^)?"
    )

    def verify_(self) -> None:
        self._verify_shapes()
        if self.decay_mod is not None and self.decay is None:
            raise VerifyException("decay_mod has no decay to change")
        if self.beta is not None and self.weight is not None:
            raise VerifyException("beta says how strongly a token writes: there is no weight beside it")
        leading: list[Attribute] = [f32, i64, i64, i64, i64]
        for name in MODS:
            region = getattr(self, name)
            if region is not None:
                check_block(name, region.block, leading, list(self.captures))
                check_yield(name, region.block, [f32])

    def _verify_shapes(self) -> None:
        """Sizes that are known statically agree; each letter stands for one size."""
        sizes: dict[str, int] = {}
        state = "bhkv" if self.bounds is None else "nhkv"
        match_sizes("q", self.q, ("bgtk",), sizes)
        match_sizes("k", self.k, ("bgtk",), sizes)
        match_sizes("v", self.v, ("bhtv",), sizes)
        match_sizes("decay", self.decay, ("bht", "bhtk"), sizes)
        match_sizes("beta", self.beta, ("bht",), sizes)
        match_sizes("weight", self.weight, ("bht",), sizes)
        match_sizes("bounds", self.bounds, ("s",), sizes)
        match_sizes("initial", self.initial, (state,), sizes)
        match_sizes("o", self.o, ("bhtv",), sizes)
        match_sizes("final", self.final, (state,), sizes)
        heads, shared = sizes.get("h"), sizes.get("g")
        if heads is not None and shared and heads % shared:
            raise VerifyException(f"v has {heads} heads, which is no multiple of the {shared} heads of q and k")


_NAMES = {
    "b": "batch",
    "n": "sequences",
    "s": "bounds",
    "g": "heads of q and k",
    "h": "heads",
    "t": "tokens",
    "k": "key channels",
    "v": "value channels",
}


def match_sizes(name: str, value: SSAValue | None, shapes: Sequence[str], sizes: dict[str, int]) -> None:
    """Notes the static sizes of an operand or result; raises where they contradict the ones before."""
    if value is None:
        return
    assert isinstance(value.type, TensorType)
    found = value.type.get_shape()
    letters = next((s for s in shapes if len(s) == len(found)), None)
    if letters is None:
        ranks = " or ".join(str(len(s)) for s in shapes)
        raise VerifyException(f"{name} must be a tensor of rank {ranks}, got {value.type}")
    for letter, size in zip(letters, found, strict=True):
        if letter != "?" and size != DYNAMIC_INDEX and sizes.setdefault(letter, size) != size:
            raise VerifyException(f"{name} has {size} {_NAMES[letter]}, expected {sizes[letter]}")
