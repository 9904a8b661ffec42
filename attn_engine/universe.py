"""Names of our dialects and passes, each with a lazy getter: the one table that tools and drivers read."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from xdsl.context import Context
from xdsl.dialects import arith, builtin, func, math, scf
from xdsl.ir import Dialect
from xdsl.passes import ModulePass
from xdsl.universe import Universe

import attn_engine.dialects.hex_floats  # noqa: F401  # pyright: ignore[reportUnusedImport]  (how dense constants are read)


def _lazy(module: str, name: str) -> Callable[[], object]:
    return lambda: getattr(import_module(f"attn_engine.{module}"), name)


DIALECTS: dict[str, Callable[[], Dialect]] = {
    "attn": _lazy("dialects.attn", "Attn"),  # type: ignore[dict-item]
    "tile": _lazy("dialects.tile_all", "Tile"),  # type: ignore[dict-item]
}

PASSES: dict[str, Callable[[], type[ModulePass]]] = {
    "attn-derive-online": _lazy("passes.attn_derive_online", "AttnDeriveOnlinePass"),  # type: ignore[dict-item]
    "attn-analyze-mask": _lazy("passes.attn_analyze_mask", "AttnAnalyzeMaskPass"),  # type: ignore[dict-item]
    "attn-derive-backward": _lazy("passes.attn_derive_backward", "AttnDeriveBackwardPass"),  # type: ignore[dict-item]
    "attn-exp-to-exp2": _lazy("passes.attn_exp_to_exp2", "AttnExpToExp2Pass"),  # type: ignore[dict-item]
    "attn-narrow-integers": _lazy("passes.attn_narrow_integers", "AttnNarrowIntegersPass"),  # type: ignore[dict-item]
    "attn-simplify": _lazy("passes.attn_simplify", "AttnSimplifyPass"),  # type: ignore[dict-item]
    "convert-attn-to-tile": _lazy("passes.convert_attn_to_tile", "ConvertAttnToTilePass"),  # type: ignore[dict-item]
    "tile-assign-memory": _lazy("passes.tile_assign_memory", "TileAssignMemoryPass"),  # type: ignore[dict-item]
    "tile-fix-sums": _lazy("passes.tile_fix_sums", "TileFixSumsPass"),  # type: ignore[dict-item]
    "tile-hoist": _lazy("passes.tile_hoist", "TileHoistPass"),  # type: ignore[dict-item]
    "tile-verify-lowered": _lazy("passes.tile_verify_lowered", "TileVerifyLoweredPass"),  # type: ignore[dict-item]
    "tile-expand-math": _lazy("passes.tile_expand_math", "TileExpandMathPass"),  # type: ignore[dict-item]
    "tilelang-bounds": _lazy("backends.tilelang.legalize", "TilelangBoundsPass"),  # type: ignore[dict-item]
    "tilelang-copies": _lazy("backends.tilelang.copies", "TilelangCopiesPass"),  # type: ignore[dict-item]
    "tilelang-keep-numbers": _lazy("backends.tilelang.numbers", "TilelangKeepNumbersPass"),  # type: ignore[dict-item]
    "tilelang-overlap": _lazy("backends.tilelang.overlap", "TilelangOverlapPass"),  # type: ignore[dict-item]
    "tilelang-widen-blocks": _lazy("backends.tilelang.widen", "TilelangWidenBlocksPass"),  # type: ignore[dict-item]
    "tilelang-flatten-loops": _lazy("backends.tilelang.loops", "TilelangFlattenLoopsPass"),  # type: ignore[dict-item]
    "tilelang-share-rows": _lazy("backends.tilelang.rows", "TilelangShareRowsPass"),  # type: ignore[dict-item]
    "tilelang-share-vectors": _lazy("backends.tilelang.vectors", "TilelangShareVectorsPass"),  # type: ignore[dict-item]
    "tilelang-share-operands": _lazy("backends.tilelang.operands", "TilelangShareOperandsPass"),  # type: ignore[dict-item]
    "gluon-hold-diagonals": _lazy("backends.triton.gluon_hold", "GluonHoldDiagonalsPass"),  # type: ignore[dict-item]
    "triton-pass-sizes": _lazy("backends.triton.legalize", "TritonPassSizesPass"),  # type: ignore[dict-item]
    "hip-transpose": _lazy("backends.hip.legalize", "HipTransposePass"),  # type: ignore[dict-item]
    "hip-choose-layouts": _lazy("backends.hip.layouts", "HipChooseLayoutsPass"),  # type: ignore[dict-item]
    "hip-share-lds": _lazy("backends.hip.lds", "HipShareLdsPass"),  # type: ignore[dict-item]
    "hip-place-barriers": _lazy("backends.hip.barriers", "HipPlaceBarriersPass"),  # type: ignore[dict-item]
    "hip-prefetch": _lazy("backends.hip.prefetch", "HipPrefetchPass"),  # type: ignore[dict-item]
    "cpu-legalize": _lazy("backends.cpu.legalize", "CpuLegalizePass"),  # type: ignore[dict-item]
    "attn-derive-recurrence-backward": _lazy("passes.recurrence_backward", "AttnDeriveRecurrenceBackwardPass"),  # type: ignore[dict-item]
    "convert-recurrence-to-tile": _lazy("passes.convert_recurrence_to_tile", "ConvertRecurrenceToTilePass"),  # type: ignore[dict-item]
    "attn-schedule-recurrence": _lazy("passes.attn_schedule_recurrence", "AttnScheduleRecurrencePass"),  # type: ignore[dict-item]
    "attn-pack-heads": _lazy("passes.attn_pack_heads", "AttnPackHeadsPass"),  # type: ignore[dict-item]
    "attn-hoist-rows": _lazy("passes.attn_hoist_rows", "AttnHoistRowsPass"),  # type: ignore[dict-item]
    "tile-join-loops": _lazy("passes.tile_join_loops", "TileJoinLoopsPass"),  # type: ignore[dict-item]
    "tile-peel-block": _lazy("passes.tile_peel_block", "TilePeelBlockPass"),  # type: ignore[dict-item]
    "tile-schedule-grid": _lazy("passes.tile_schedule_grid", "TileScheduleGridPass"),  # type: ignore[dict-item]
    "tile-order-programs": _lazy("passes.tile_order_programs", "TileOrderProgramsPass"),  # type: ignore[dict-item]
    "tile-order-sums": _lazy("passes.tile_order_sums", "TileOrderSumsPass"),  # type: ignore[dict-item]
    "tile-fragment-sums": _lazy("passes.tile_fragment_sums", "TileFragmentSumsPass"),  # type: ignore[dict-item]
    "tile-pipeline": _lazy("passes.tile_pipeline", "TilePipelinePass"),  # type: ignore[dict-item]
    "tile-sink-waits": _lazy("passes.tile_sink_waits", "TileSinkWaitsPass"),  # type: ignore[dict-item]
    "tile-narrow-results": _lazy("passes.tile_narrow_results", "TileNarrowResultsPass"),  # type: ignore[dict-item]
    "tile-sum-distances": _lazy("passes.tile_sum_distances", "TileSumDistancesPass"),  # type: ignore[dict-item]
    "tile-specialize-warps": _lazy("passes.tile_specialize_warps", "TileSpecializeWarpsPass"),  # type: ignore[dict-item]
    "tile-load-tables": _lazy("passes.tile_load_tables", "TileLoadTablesPass"),  # type: ignore[dict-item]
    "tile-relax-functions": _lazy("passes.tile_relax_functions", "TileRelaxFunctionsPass"),  # type: ignore[dict-item]
    "tile-relax-tanh": _lazy("passes.tile_relax_tanh", "TileRelaxTanhPass"),  # type: ignore[dict-item]
    "tile-relax-divide": _lazy("passes.tile_relax_divide", "TileRelaxDividePass"),  # type: ignore[dict-item]
    "tile-order-async": _lazy("passes.tile_order_async", "TileOrderAsyncPass"),  # type: ignore[dict-item]
    "tile-advance-waits": _lazy("passes.tile_advance_waits", "TileAdvanceWaitsPass"),  # type: ignore[dict-item]
    "tile-reduce-in-trees": _lazy("passes.tile_reduce_in_trees", "TileReduceInTreesPass"),  # type: ignore[dict-item]
    "tile-split-sums": _lazy("passes.tile_split_sums", "TileSplitSumsPass"),  # type: ignore[dict-item]
    "tile-split-channels": _lazy("passes.tile_split_channels", "TileSplitChannelsPass"),  # type: ignore[dict-item]
    "tile-stage-maps": _lazy("passes.tile_stage_maps", "TileStageMapsPass"),  # type: ignore[dict-item]
    "tile-pipeline-steps": _lazy("passes.tile_pipeline_steps", "TilePipelineStepsPass"),  # type: ignore[dict-item]
    "tile-split-distances": _lazy("passes.tile_split_distances", "TileSplitDistancesPass"),  # type: ignore[dict-item]
    "tile-split-roles": _lazy("passes.tile_split_roles", "TileSplitRolesPass"),  # type: ignore[dict-item]
    "tile-overlap-products": _lazy("passes.tile_overlap_products", "TileOverlapProductsPass"),  # type: ignore[dict-item]
    "tile-start-products": _lazy("passes.tile_start_products", "TileStartProductsPass"),  # type: ignore[dict-item]
    "tile-hoist-factors": _lazy("passes.tile_hoist_factors", "TileHoistFactorsPass"),  # type: ignore[dict-item]
    "tile-fold-scales": _lazy("passes.tile_fold_scales", "TileFoldScalesPass"),  # type: ignore[dict-item]
    "tile-defer-product": _lazy("passes.tile_defer_product", "TileDeferProductPass"),  # type: ignore[dict-item]
    "tile-defer-weights": _lazy("passes.tile_defer_weights", "TileDeferWeightsPass"),  # type: ignore[dict-item]
    "tile-defer-sums": _lazy("passes.tile_defer_sums", "TileDeferSumsPass"),  # type: ignore[dict-item]
    "tile-rotate-steps": _lazy("passes.tile_rotate_steps", "TileRotateStepsPass"),  # type: ignore[dict-item]
}

UNIVERSE = Universe(all_dialects=DIALECTS, all_passes=PASSES)


def make_context() -> Context:
    """A context with our dialects and the upstream ones that they stand on."""
    context = Context()
    for dialect in (builtin.Builtin, arith.Arith, func.Func, math.Math, scf.Scf):
        context.load_dialect(dialect)
    for get in DIALECTS.values():
        context.load_dialect(get())
    return context
