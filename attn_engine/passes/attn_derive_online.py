"""attn-derive-online: attentions become loops over blocks of keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ArrayAttr, FloatAttr, ModuleOp, f32
from xdsl.ir import Region
from xdsl.passes import ModulePass
from xdsl.rewriter import Rewriter

from attn_engine.dialects.attn import AttentionOp, OnlineOp
from attn_engine.ir.autodiff.graph import IDENTITY
from attn_engine.passes.online_combine import CombineBuilder
from attn_engine.passes.online_plan import OnlinePlan, OnlineReport, plan_online
from attn_engine.passes.online_regions import StepBuilder, build_epilogue


def explain(op: AttentionOp) -> OnlineReport:
    """What this pass would make of an attention, and why."""
    return plan_online(op.row.block).report()


def _copy(region: Region | None) -> list[Region]:
    return [] if region is None else [region.clone()]


def _initial_states(plan: OnlinePlan) -> ArrayAttr[ArrayAttr[FloatAttr]]:
    levels: Sequence[int] = range(plan.levels)
    return ArrayAttr(
        [ArrayAttr([FloatAttr(IDENTITY[s.kind], f32) for s in plan.states if s.level == at]) for at in levels]
    )


def derive_online(op: AttentionOp) -> OnlineOp:
    """The `attn.online` that means the same as `op`."""
    plan = plan_online(op.row.block)
    steps = [StepBuilder(plan, level, op.row.block).build() for level in range(plan.levels)]
    combine = [CombineBuilder(plan, level, op.row.block).build() for level in range(plan.levels)]
    mods = [_copy(r) for r in (op.query_mod, op.key_mod, op.value_mod, op.score_mod, op.mask)]
    visited = [_copy(r) for r in (op.blocks, op.blocks_t, op.query_terms, op.key_terms, op.kinds)]
    epilogue = build_epilogue(plan, op.row.block, len(op.outputs))
    return OnlineOp.build(
        operands=[op.q, op.k, op.v, op.scale, op.captures],
        properties={"init": _initial_states(plan)},
        regions=[*mods, epilogue, *visited, steps, combine],
        result_types=[op.o.type, [r.type for r in op.outputs], [r.type for r in op.saved]],
    )


@dataclass(frozen=True)
class AttnDeriveOnlinePass(ModulePass):
    """Turns each row function into as few loops over the keys as can be proved.

    ```
    attn.attention ... row {
      %m = attn.row_reduce max %s
      %e = exp(%s - %m)
      %l = attn.row_reduce sum %e
      attn.yield %e / %l
    }
    ```

    becomes

    ```
    attn.online ... init [[-inf, 0]] steps {
    ^bb0(%s, %b, %h, %q, %kv, %m, %l):
      %m1 = max(%m, attn.row_reduce max %s)
      %e = exp(%s - %m1), %alpha = exp(%m - %m1)
      attn.step_yield states(%m1, %l * %alpha + attn.row_reduce sum %e) rescale(%alpha) weight(%e)
    } epilogue {
    ^bb0(%b, %h, %q, %m, %l):
      attn.epilogue_yield scale(1 / %l)
    } combine {
    ^bb0(%b, %h, %q, %m_a, %l_a, %m_b, %l_b):
      %m = max(%m_a, %m_b)
      %alpha_a = exp(%m_a - %m), %alpha_b = exp(%m_b - %m)
      attn.combine_yield states(%m, %l_a * %alpha_a + %l_b * %alpha_b) rescale(%alpha_a, %alpha_b)
    }
    ```

    No row function is known by name: see `attn_engine.ir.separation` for what is proved. A value that
    cannot be proved one-pass waits for the final values of the reductions in it, in one more loop.
    """

    name = "attn-derive-online"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for attention in [o for o in op.walk() if isinstance(o, AttentionOp)]:
            online = derive_online(attention)
            for old, new in zip(attention.results, online.results, strict=True):
                new.name_hint = old.name_hint
            Rewriter.replace_op(attention, online)
