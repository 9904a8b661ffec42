"""Names of our dialects and passes, each with a lazy getter: the one table that tools and drivers read."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from xdsl.context import Context
from xdsl.dialects import arith, builtin, func, math, scf
from xdsl.ir import Dialect
from xdsl.passes import ModulePass
from xdsl.universe import Universe

import attn_engine.dialects.hex_floats  # noqa: F401  # pyright: ignore[reportUnusedImport]  (how dense constants are read)


def _lazy(module: str, name: str) -> Callable[[], Any]:
    return lambda: getattr(import_module(f"attn_engine.{module}"), name)


DIALECTS: dict[str, Callable[[], Dialect]] = {
    "attn": _lazy("dialects.attn", "Attn"),
    "tile": _lazy("dialects.tile_all", "Tile"),
}

PASSES: dict[str, Callable[[], type[ModulePass]]] = {
    "attn-derive-online": _lazy("passes.attn_derive_online", "AttnDeriveOnlinePass"),
    "attn-analyze-mask": _lazy("passes.attn_analyze_mask", "AttnAnalyzeMaskPass"),
    "attn-derive-backward": _lazy("passes.attn_derive_backward", "AttnDeriveBackwardPass"),
    "attn-exp-to-exp2": _lazy("passes.attn_exp_to_exp2", "AttnExpToExp2Pass"),
    "attn-narrow-integers": _lazy("passes.attn_narrow_integers", "AttnNarrowIntegersPass"),
    "attn-simplify": _lazy("passes.attn_simplify", "AttnSimplifyPass"),
    "convert-attn-to-tile": _lazy("passes.convert_attn_to_tile", "ConvertAttnToTilePass"),
    "tile-assign-memory": _lazy("passes.tile_assign_memory", "TileAssignMemoryPass"),
    "tile-fix-sums": _lazy("passes.tile_fix_sums", "TileFixSumsPass"),
    "tile-hoist": _lazy("passes.tile_hoist", "TileHoistPass"),
    "tile-verify-lowered": _lazy("passes.tile_verify_lowered", "TileVerifyLoweredPass"),
    "tile-expand-math": _lazy("passes.tile_expand_math", "TileExpandMathPass"),
    "tilelang-bounds": _lazy("backends.tilelang.legalize", "TilelangBoundsPass"),
    "tilelang-copies": _lazy("backends.tilelang.copies", "TilelangCopiesPass"),
    "tilelang-keep-numbers": _lazy("backends.tilelang.numbers", "TilelangKeepNumbersPass"),
    "tilelang-overlap": _lazy("backends.tilelang.overlap", "TilelangOverlapPass"),
    "tilelang-widen-blocks": _lazy("backends.tilelang.widen", "TilelangWidenBlocksPass"),
    "tilelang-flatten-loops": _lazy("backends.tilelang.loops", "TilelangFlattenLoopsPass"),
    "tilelang-share-rows": _lazy("backends.tilelang.rows", "TilelangShareRowsPass"),
    "tilelang-share-vectors": _lazy("backends.tilelang.vectors", "TilelangShareVectorsPass"),
    "tilelang-share-operands": _lazy("backends.tilelang.operands", "TilelangShareOperandsPass"),
    "gluon-hold-diagonals": _lazy("backends.triton.gluon_hold", "GluonHoldDiagonalsPass"),
    "triton-pass-sizes": _lazy("backends.triton.legalize", "TritonPassSizesPass"),
    "hip-transpose": _lazy("backends.hip.legalize", "HipTransposePass"),
    "hip-choose-layouts": _lazy("backends.hip.layouts", "HipChooseLayoutsPass"),
    "hip-share-lds": _lazy("backends.hip.lds", "HipShareLdsPass"),
    "hip-place-barriers": _lazy("backends.hip.barriers", "HipPlaceBarriersPass"),
    "hip-prefetch": _lazy("backends.hip.prefetch", "HipPrefetchPass"),
    "cpu-legalize": _lazy("backends.cpu.legalize", "CpuLegalizePass"),
    "attn-derive-recurrence-backward": _lazy("passes.recurrence_backward", "AttnDeriveRecurrenceBackwardPass"),
    "convert-recurrence-to-tile": _lazy("passes.convert_recurrence_to_tile", "ConvertRecurrenceToTilePass"),
    "attn-schedule-recurrence": _lazy("passes.attn_schedule_recurrence", "AttnScheduleRecurrencePass"),
    "attn-pack-heads": _lazy("passes.attn_pack_heads", "AttnPackHeadsPass"),
    "attn-hoist-rows": _lazy("passes.attn_hoist_rows", "AttnHoistRowsPass"),
    "tile-join-loops": _lazy("passes.tile_join_loops", "TileJoinLoopsPass"),
    "tile-peel-block": _lazy("passes.tile_peel_block", "TilePeelBlockPass"),
    "tile-schedule-grid": _lazy("passes.tile_schedule_grid", "TileScheduleGridPass"),
    "tile-order-programs": _lazy("passes.tile_order_programs", "TileOrderProgramsPass"),
    "tile-persist-roles": _lazy("passes.tile_persist_roles", "TilePersistRolesPass"),
    "tile-order-sums": _lazy("passes.tile_order_sums", "TileOrderSumsPass"),
    "tile-fragment-sums": _lazy("passes.tile_fragment_sums", "TileFragmentSumsPass"),
    "tile-pipeline": _lazy("passes.tile_pipeline", "TilePipelinePass"),
    "tile-sink-waits": _lazy("passes.tile_sink_waits", "TileSinkWaitsPass"),
    "tile-narrow-results": _lazy("passes.tile_narrow_results", "TileNarrowResultsPass"),
    "tile-sum-distances": _lazy("passes.tile_sum_distances", "TileSumDistancesPass"),
    "tile-specialize-warps": _lazy("passes.tile_specialize_warps", "TileSpecializeWarpsPass"),
    "tile-load-tables": _lazy("passes.tile_load_tables", "TileLoadTablesPass"),
    "tile-relax-functions": _lazy("passes.tile_relax_functions", "TileRelaxFunctionsPass"),
    "tile-relax-tanh": _lazy("passes.tile_relax_tanh", "TileRelaxTanhPass"),
    "tile-relax-divide": _lazy("passes.tile_relax_divide", "TileRelaxDividePass"),
    "tile-order-async": _lazy("passes.tile_order_async", "TileOrderAsyncPass"),
    "tile-advance-waits": _lazy("passes.tile_advance_waits", "TileAdvanceWaitsPass"),
    "tile-reduce-in-trees": _lazy("passes.tile_reduce_in_trees", "TileReduceInTreesPass"),
    "tile-split-sums": _lazy("passes.tile_split_sums", "TileSplitSumsPass"),
    "tile-split-channels": _lazy("passes.tile_split_channels", "TileSplitChannelsPass"),
    "tile-stage-maps": _lazy("passes.tile_stage_maps", "TileStageMapsPass"),
    "tile-pipeline-steps": _lazy("passes.tile_pipeline_steps", "TilePipelineStepsPass"),
    "tile-split-distances": _lazy("passes.tile_split_distances", "TileSplitDistancesPass"),
    "tile-split-roles": _lazy("passes.tile_split_roles", "TileSplitRolesPass"),
    "tile-overlap-products": _lazy("passes.tile_overlap_products", "TileOverlapProductsPass"),
    "tile-start-products": _lazy("passes.tile_start_products", "TileStartProductsPass"),
    "tile-hoist-factors": _lazy("passes.tile_hoist_factors", "TileHoistFactorsPass"),
    "tile-fold-scales": _lazy("passes.tile_fold_scales", "TileFoldScalesPass"),
    "tile-defer-product": _lazy("passes.tile_defer_product", "TileDeferProductPass"),
    "tile-defer-weights": _lazy("passes.tile_defer_weights", "TileDeferWeightsPass"),
    "tile-defer-sums": _lazy("passes.tile_defer_sums", "TileDeferSumsPass"),
    "tile-rotate-steps": _lazy("passes.tile_rotate_steps", "TileRotateStepsPass"),
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
