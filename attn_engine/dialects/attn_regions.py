"""What `attn.attention` and its two lowered forms share: regions for the user's functions, and for blocks of the mask."""

from __future__ import annotations

from xdsl.dialects.builtin import f32, i1, i64
from xdsl.ir import Region, SSAValue
from xdsl.utils.exceptions import VerifyException

from attn_engine.dialects.attn_scalar import YieldOp, check_block, check_yield

KIND_REGIONS = ("query_terms", "key_terms", "kinds")


class AttentionRegions:
    """What `attn.attention` and its two lowered forms share: the user's elementwise functions.

    Region arguments (captures of the op are appended to each, in order):

    - `query_mod`, `key_mod`, `value_mod`: (element f32, b, h, position, channel) -> f32
    - `score_mod`: (score f32, b, h, q, kv) -> f32
    - `mask`: (b, h, q, kv) -> i1

    `h` is the operand's own head: the key/value head in `key_mod` and `value_mod`, else the query head. The three
    mods may read their row: `attn.row_reduce` is over its channels, `attn.channel_at` is a value at another one.
    """

    def verify_mods(self) -> None:
        captures: list[SSAValue] = list(self.captures)  # type: ignore[attr-defined]
        index = [i64] * 4
        for name in ("query_mod", "key_mod", "value_mod", "score_mod"):
            region: Region | None = getattr(self, name)
            if region is not None and region.blocks:
                check_block(name, region.block, [f32, *index], captures)
                check_yield(name, region.block, [f32])
        mask: Region | None = getattr(self, "mask")  # noqa: B009
        if mask is not None and mask.blocks:
            check_block("mask", mask.block, index, captures)
            check_yield("mask", mask.block, [i1])
        for name in ("blocks", "blocks_t"):
            region: Region | None = getattr(self, name)
            if region is not None and region.blocks:
                check_block(name, region.block, [i64] * 6, captures)
                last = region.block.last_op
                if not isinstance(last, YieldOp) or len(last.values) % 4 or any(v.type != i64 for v in last.values):
                    raise VerifyException(
                        f"{name}: must yield four i64 per range: visible lo, full lo, full hi, visible hi"
                    )
        self._verify_kinds(captures)

    def _verify_kinds(self, captures: list[SSAValue]) -> None:
        """The regions that tell kinds of blocks by what is read at run time: all three or none."""
        regions: list[Region | None] = [getattr(self, name) for name in KIND_REGIONS]
        blocks = [region.block for region in regions if region is not None and region.blocks]
        if not blocks:
            return
        if len(blocks) != len(KIND_REGIONS):
            raise VerifyException(f"{', '.join(KIND_REGIONS)} come together or not at all")
        terms = 0
        for name, block in zip(KIND_REGIONS, blocks[:2], strict=False):
            check_block(name, block, [i64] * 3, captures)
            last = block.last_op
            if not isinstance(last, YieldOp) or any(v.type != i64 for v in last.values):
                raise VerifyException(f"{name}: must yield i64 terms")
            terms += len(last.values)
        check_block("kinds", blocks[2], [i64] * (6 + 2 * terms), captures)
        check_yield("kinds", blocks[2], [i1, i1])
