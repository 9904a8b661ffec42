"""attn-analyze-mask: which keys a block of queries can see, and which it sees without asking the mask."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Attribute, Block, Region
from xdsl.passes import ModulePass
from xdsl.rewriter import Rewriter

from attn_engine.dialects import attn
from attn_engine.ir.affine import Linear, Position
from attn_engine.ir.visible_ranges import Window
from attn_engine.passes.attn_simplify import simplify
from attn_engine.passes.mask_blocks import BlocksWriter
from attn_engine.passes.mask_condition import KEY, QUERY, MaskReader
from attn_engine.passes.mask_kinds import block_kinds
from attn_engine.passes.simplify_constants import constant_of

SQ, SKV = 4, 5
REGIONS = ("query_mod", "key_mod", "value_mod", "score_mod", "mask", "row", "blocks", "blocks_t", *attn.KIND_REGIONS)


def with_regions(op: attn.AttentionOp, **changed: Region | None) -> attn.AttentionOp:
    """The same attention with some of its regions put in or taken out; the old one keeps no region."""
    old: dict[str, Region | None] = {name: getattr(op, name) for name in REGIONS}
    for region in old.values():
        if region is not None:
            op.detach_region(region)
    kept = [(old | changed)[name] for name in REGIONS]
    regions = [[region] if region is not None else [] for region in kept]
    results: list[list[Attribute]] = [[op.o.type], [r.type for r in op.outputs], [r.type for r in op.saved]]
    return attn.AttentionOp(
        operands=[op.q, op.k, op.v, op.scale, list(op.captures)],
        regions=regions,
        result_types=results,
        attributes=dict(op.attributes),
    )


def key_ranges(mask: Block, over: Position) -> Region:
    """The `blocks` region of a mask for windows of queries, or the `blocks_t` region for windows of keys."""
    assert isinstance(mask.last_op, attn.YieldOp)
    queries = over == QUERY
    low, high = Linear.of(Position("lo")), Linear.of(Position("hi"))
    ends = (low, high - 1)
    window = Window(over, KEY if queries else QUERY, ends, ends)
    ranges = window.ranges(MaskReader(mask).condition(mask.last_op.values[0]))
    writer = BlocksWriter.begin(mask, "q" if queries else "kv", SKV if queries else SQ)
    return Region(writer.finish(ranges))


def analyze_mask(op: attn.AttentionOp) -> None:
    """Adds the regions for blocks to an attention whose mask has not been analysed."""
    if op.mask is None or not op.mask.blocks or op.blocks is not None:
        return
    simplify(op)
    mask = op.mask.block
    assert isinstance(mask.last_op, attn.YieldOp)
    if constant_of(mask.last_op.values[0]) == 1:
        new = with_regions(op, mask=None)
    else:
        ranges = {"blocks": key_ranges(mask, QUERY), "blocks_t": key_ranges(mask, KEY)}
        new = with_regions(op, **ranges, **block_kinds(mask))
        simplify(new)
    Rewriter.replace_op(op, new)


@dataclass(frozen=True)
class AttnAnalyzeMaskPass(ModulePass):
    """Adds to every masked attention the closed-form ranges of keys that a block of queries visits, and the transpose.

    A comparison that is affine in the positions bounds the keys; what the analysis does not
    understand is partial: visited, and masked element by element. A mask that is always true is removed.
    A mask that reads captures at positions, as `doc[q] == doc[kv]` does, gets regions that tell kinds of blocks from
    the smallest and largest values in each.

    ```
    mask {                                      blocks {
    ^bb0(%b, %h, %q, %kv):                      ^bb0(%q_lo, %q_hi, %b, %h, %sq, %skv):
      %c = arith.cmpi sge, %q, %kv : i64   ->     %v = arith.minsi %q_hi, %skv : i64
      attn.yield %c : i1                          %f = arith.minsi %q_lo_plus_1, %v : i64
    }                                             attn.yield %zero, %zero, %f, %v : i64, i64, i64, i64
                                                }

    mask {                                      query_terms { ^bb0(%b, %h, %q, %doc): attn.yield attn.load %doc[%q] }
    ^bb0(%b, %h, %q, %kv, %doc):                key_terms { ^bb0(%b, %h, %kv, %doc): attn.yield attn.load %doc[%kv] }
      %x = attn.load %doc[%q]                   kinds {
      %y = attn.load %doc[%kv]             ->   ^bb0(..., %q_min0, %q_max0, %kv_min0, %kv_max0, %doc):
      %c = arith.cmpi eq, %x, %y : i64            %some = %q_min0 <= %kv_max0 and %kv_min0 <= %q_max0
      attn.yield %c : i1                          %every = %q_min0 == %kv_max0 and %q_max0 == %kv_min0
    }                                             attn.yield %some, %every : i1, i1
                                                }
    ```
    """

    name = "attn-analyze-mask"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for inner in list(op.walk()):
            if isinstance(inner, attn.AttentionOp):
                analyze_mask(inner)
