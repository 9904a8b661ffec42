"""Default schedules per device: preferences in order, of which the first that fits is taken. Data only."""

from __future__ import annotations

from dataclasses import replace

from attn_engine.arch import Arch, Vendor
from attn_engine.errors import ScheduleError
from attn_engine.ir.schedule import BYTES, Heads, KernelSchedule, Kind, Schedule, padded

Preferences = dict[Kind, tuple[KernelSchedule, ...]]

_SMALL = tuple(KernelSchedule(m, n, 4, 1) for m, n in ((64, 32), (32, 64), (32, 32), (32, 16), (16, 32), (16, 16)))
"""When nothing better fits: large heads, f32, little shared memory."""


def _kernels(*blocks: tuple[int, int, int, int]) -> tuple[KernelSchedule, ...]:
    return tuple(KernelSchedule(*b) for b in blocks)


def _preferences(forward: tuple[KernelSchedule, ...], dq: tuple[KernelSchedule, ...], dkdv: tuple[KernelSchedule, ...]):
    rows = _kernels((64, 64, 4, 1), (32, 32, 4, 1))
    return {Kind.FORWARD: forward, Kind.ROWS: rows, Kind.DQ: dq, Kind.DKDV: dkdv}


# By the larger head dim, up to and including the key. For sm_90, 16 bits: measured in bf16, operands through
# descriptors, causal and full, among 6 to 9 candidates a kernel at 4096 and 16384 positions; 256 was only compiled.
_SM_90: dict[int, Preferences] = {
    64: _preferences(
        _kernels((64, 128, 4, 3), (128, 64, 8, 3)),
        _kernels((64, 64, 4, 3), (64, 64, 4, 2)),
        _kernels((64, 64, 4, 3), (64, 64, 4, 2)),
    ),
    128: _preferences(
        _kernels((64, 64, 4, 3)),
        _kernels((128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 2)),
        _kernels((64, 64, 4, 2), (32, 64, 4, 2)),
    ),
    256: _preferences(_kernels((128, 32, 8, 2)), _kernels((64, 32, 8, 2)), _kernels((32, 64, 8, 1))),
}
_SM_80: dict[int, Preferences] = {
    64: _preferences(_kernels((128, 64, 8, 2)), _kernels((64, 32, 4, 3)), _kernels((32, 64, 4, 3))),
    128: _preferences(_kernels((64, 64, 4, 2)), _kernels((64, 32, 4, 2)), _kernels((32, 64, 4, 2))),
    256: _preferences(_kernels((64, 32, 4, 2)), _kernels((32, 32, 4, 2)), _kernels((32, 32, 4, 2))),
}
_CDNA: dict[int, Preferences] = {
    64: _preferences(_kernels((128, 64, 4, 2)), _kernels((128, 32, 4, 2)), _kernels((32, 128, 4, 2))),
    128: _preferences(_kernels((128, 64, 4, 2), (128, 32, 4, 2)), _kernels((128, 32, 4, 2)), _kernels((16, 64, 4, 2))),
    256: _preferences(_kernels((64, 32, 4, 2)), _kernels((64, 16, 4, 2)), _kernels((16, 64, 4, 2))),
}
# By static cost of its kernels, causal in bf16, among 6 to 8 candidates a kernel: on gfx942 and gfx90a alike those that
# need fewest clocks, or as few as another (bench/hip_static.py); nothing was run on such a device.
_HIP: dict[int, Preferences] = {
    64: _preferences(
        _kernels((256, 64, 8, 2), (128, 64, 4, 2)),
        _kernels((256, 64, 8, 2), (128, 32, 4, 2)),
        _kernels((16, 256, 8, 2), (32, 64, 4, 2)),
    ),
    128: _preferences(
        _kernels((256, 64, 8, 2), (128, 32, 4, 2)),
        _kernels((256, 32, 8, 2), (128, 16, 4, 2)),
        _kernels((32, 128, 8, 2), (16, 64, 4, 2)),
    ),
    256: _preferences(
        _kernels((128, 32, 8, 2), (64, 32, 4, 2)),
        _kernels((128, 16, 8, 2), (64, 16, 4, 2)),
        _kernels((16, 64, 4, 2)),
    ),
}
_HIP_BY_KEY: dict[int, Preferences] = {
    **_HIP,
    128: _preferences(_kernels((256, 32, 8, 2)), _HIP[128][Kind.DQ], _HIP[128][Kind.DKDV]),
}
"""With a mask that reads captures at keys, 64 keys a block spill."""
_WIDE: dict[int, Preferences] = {
    64: _preferences(_kernels((64, 32, 4, 2)), _kernels((64, 32, 4, 2)), _kernels((32, 64, 4, 2))),
    128: _preferences(_kernels((64, 32, 4, 2)), _kernels((64, 32, 4, 1)), _kernels((32, 32, 4, 1))),
    256: _preferences(_kernels((32, 32, 4, 2)), _kernels((32, 16, 4, 1)), _kernels((16, 32, 4, 1))),
}
"""Elements of 32 bits, on NVIDIA, whose products may be of tf32."""
_EXACT: dict[int, Preferences] = {
    64: _preferences(_WIDE[64][Kind.FORWARD], _kernels((64, 32, 8, 1)), _kernels((32, 32, 8, 1))),
    128: _preferences(_WIDE[128][Kind.FORWARD], _kernels((32, 32, 8, 1)), _kernels((32, 32, 8, 1))),
    256: _WIDE[256],
}
"""Elements of 32 bits, on NVIDIA, exact products: each multiplication is an instruction. Gradients are 1.5 and 2.2 times as
fast as with half the threads, which spilled 4 KB; forwards spill too, and were slower with blocks that do not (H200)."""
_WIDE_CDNA: dict[int, Preferences] = {
    64: _preferences(_kernels((64, 32, 4, 2)), _kernels((64, 32, 4, 2)), _kernels((32, 64, 4, 2))),
    128: _preferences(_kernels((64, 32, 4, 2)), _kernels((64, 32, 4, 2)), _kernels((16, 64, 4, 2))),
    256: _preferences(_kernels((64, 16, 4, 2)), _kernels((64, 16, 4, 2)), _kernels((16, 64, 4, 2))),
}
"""Elements of 32 bits, on AMD: 16 rows or columns of the kept block for each wave."""

_TABLE: dict[str, dict[int, Preferences]] = {
    "sm_80": _SM_80,
    "sm_86": _SM_80,
    "sm_89": _SM_80,
    "sm_90": _SM_90,
    "gfx90a": _CDNA,
    "gfx942": _CDNA,
    "gfx950": _CDNA,
}


_TILELANG: dict[int, Preferences] = {
    **_SM_90,
    128: _preferences(_kernels((128, 128, 8, 2)), _kernels((128, 64, 8, 2)), _kernels((64, 64, 4, 2))),
}
_OF_BACKEND: dict[tuple[str, Vendor | str], dict[int, Preferences]] = {
    ("hip", Vendor.AMD): _HIP,
    ("tilelang", "sm_90"): _TILELANG,
}
"""Backends whose kernels want other blocks than the device's usual ones, on a vendor's devices or on one."""
_BY_KEY: dict[tuple[str, Vendor | str], dict[int, Preferences]] = {**_OF_BACKEND, ("hip", Vendor.AMD): _HIP_BY_KEY}
"""The same where the mask reads captures at keys."""


def default_kernel_schedule(
    arch: Arch, heads: Heads, kind: Kind, backend: str = "", tf32: bool = False
) -> KernelSchedule:
    """The first preference that the device can hold."""
    wide = _WIDE_CDNA if arch.vendor is Vendor.AMD else _WIDE if tf32 and arch.tf32 else _EXACT
    of_backend = _BY_KEY if heads.masked_by_key else _OF_BACKEND
    usual = of_backend.get((backend, arch.vendor), _TABLE[arch.name])
    narrow = of_backend.get((backend, arch.name), usual)
    table = narrow if BYTES[heads.dtype] == 2 else wide
    size = max(padded(heads.qk), padded(heads.v))
    limit = next((limit for limit in table if size <= limit), max(table))
    row = table[limit]
    shallower = (replace(s, num_stages=stages) for s in row[kind] for stages in range(s.num_stages, 0, -1))
    for schedule in (*shallower, *_SMALL):
        try:
            schedule.validate(kind, arch, heads)
        except ScheduleError:
            continue
        return schedule
    raise ScheduleError(f"{kind}: no block size fits heads of {heads.qk} and {heads.v} in {heads.dtype} on {arch.name}")


def default_schedule(arch: Arch, heads: Heads, tf32: bool = False, backend: str = "") -> Schedule:
    """Schedules of all kernels for one attention."""
    schedule = Schedule(
        forward=default_kernel_schedule(arch, heads, Kind.FORWARD, backend, tf32),
        rows=default_kernel_schedule(arch, heads, Kind.ROWS, backend, tf32),
        dq=default_kernel_schedule(arch, heads, Kind.DQ, backend, tf32),
        dkdv=default_kernel_schedule(arch, heads, Kind.DKDV, backend, tf32),
        tf32=tf32 and arch.tf32,
    )
    schedule.validate(arch, heads)
    return schedule
