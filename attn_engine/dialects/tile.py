"""The ``tile`` dialect, value level: kernels over blocks of tensors, and host plans that launch them.

Values are static ``tensor<MxNxT>`` (pure SSA) and scalars; global memory is `!tile.global`.
Scalar work is plain ``arith``/``math``; *all* elementwise work on tensors is `tile.map`; loops are
``scf.for`` and branches ``scf.if``, both over any of these values. The buffered and async levels
(`tile_buffer`, `tile_async`) add buffers, copies and barriers to the same kernels.
"""

from __future__ import annotations

from xdsl.ir import Dialect

from attn_engine.dialects.tile_base import (
    INDEX as INDEX,
)
from attn_engine.dialects.tile_base import (
    GlobalType as GlobalType,
)
from attn_engine.dialects.tile_base import (
    Precision as Precision,
)
from attn_engine.dialects.tile_base import (
    PrecisionAttr as PrecisionAttr,
)
from attn_engine.dialects.tile_base import (
    Reduction as Reduction,
)
from attn_engine.dialects.tile_base import (
    ReductionAttr as ReductionAttr,
)
from attn_engine.dialects.tile_base import (
    axes_attr as axes_attr,
)
from attn_engine.dialects.tile_base import (
    axes_of as axes_of,
)
from attn_engine.dialects.tile_base import (
    check_axes as check_axes,
)
from attn_engine.dialects.tile_base import (
    element_of as element_of,
)
from attn_engine.dialects.tile_base import (
    ints as ints,
)
from attn_engine.dialects.tile_base import (
    ints_of as ints_of,
)
from attn_engine.dialects.tile_base import (
    shape_of as shape_of,
)
from attn_engine.dialects.tile_base import (
    splat_of as splat_of,
)
from attn_engine.dialects.tile_base import (
    tile_type as tile_type,
)
from attn_engine.dialects.tile_compute import (
    ConcatOp as ConcatOp,
)
from attn_engine.dialects.tile_compute import (
    DotOp as DotOp,
)
from attn_engine.dialects.tile_compute import (
    MapOp as MapOp,
)
from attn_engine.dialects.tile_compute import (
    MapYieldOp as MapYieldOp,
)
from attn_engine.dialects.tile_compute import (
    RangeOp as RangeOp,
)
from attn_engine.dialects.tile_compute import (
    ReduceOp as ReduceOp,
)
from attn_engine.dialects.tile_compute import (
    ScanOp as ScanOp,
)
from attn_engine.dialects.tile_compute import (
    SliceOp as SliceOp,
)
from attn_engine.dialects.tile_compute import (
    TransposeOp as TransposeOp,
)
from attn_engine.dialects.tile_diagonal import (
    AddDiagonalsOp as AddDiagonalsOp,
)
from attn_engine.dialects.tile_diagonal import (
    LoadDiagonalsOp as LoadDiagonalsOp,
)
from attn_engine.dialects.tile_host import (
    AllocOp as AllocOp,
)
from attn_engine.dialects.tile_host import (
    DimOp as DimOp,
)
from attn_engine.dialects.tile_host import (
    EndOp as EndOp,
)
from attn_engine.dialects.tile_host import (
    FillOp as FillOp,
)
from attn_engine.dialects.tile_host import (
    KernelOp as KernelOp,
)
from attn_engine.dialects.tile_host import (
    LaunchOp as LaunchOp,
)
from attn_engine.dialects.tile_host import (
    PlanOp as PlanOp,
)
from attn_engine.dialects.tile_host import (
    ProgramIdOp as ProgramIdOp,
)
from attn_engine.dialects.tile_memory import (
    Access as Access,
)
from attn_engine.dialects.tile_memory import (
    AtomicAddOp as AtomicAddOp,
)
from attn_engine.dialects.tile_memory import (
    AtomicMaxOp as AtomicMaxOp,
)
from attn_engine.dialects.tile_memory import (
    GatherOp as GatherOp,
)
from attn_engine.dialects.tile_memory import (
    LoadOp as LoadOp,
)
from attn_engine.dialects.tile_memory import (
    ScatterAddOp as ScatterAddOp,
)
from attn_engine.dialects.tile_memory import (
    StoreOp as StoreOp,
)
from attn_engine.dialects.tile_memory import (
    WriteAccess as WriteAccess,
)
from attn_engine.dialects.tile_memory import (
    check_access as check_access,
)
from attn_engine.dialects.tile_memory import (
    parse_access as parse_access,
)
from attn_engine.dialects.tile_memory import (
    print_access as print_access,
)

Tile = Dialect(
    "tile",
    [
        AddDiagonalsOp,
        LoadDiagonalsOp,
        AllocOp,
        AtomicAddOp,
        AtomicMaxOp,
        ConcatOp,
        DimOp,
        DotOp,
        EndOp,
        FillOp,
        GatherOp,
        KernelOp,
        LaunchOp,
        LoadOp,
        MapOp,
        MapYieldOp,
        PlanOp,
        ProgramIdOp,
        RangeOp,
        ReduceOp,
        ScanOp,
        ScatterAddOp,
        SliceOp,
        StoreOp,
        TransposeOp,
    ],
    [GlobalType, PrecisionAttr, ReductionAttr],
)
