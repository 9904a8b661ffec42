"""Frozen facts about devices; the only place where device names stand."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.utils.str_enum import StrEnum

from attn_engine.errors import ScheduleError

KIB = 1024


class Vendor(StrEnum):
    NVIDIA = "nvidia"
    AMD = "amd"


@dataclass(frozen=True)
class Matrix:
    """One matrix instruction: its M, N, K for operands of 16 bits, and how many threads issue it."""

    name: str
    m: int
    n: int
    k: int
    threads: int


@dataclass(frozen=True)
class Arch:
    """One kind of device, as its vendor's programming guide states it."""

    name: str
    vendor: Vendor
    warp_size: int
    multiprocessors: int
    """Of the largest product that is sold with this architecture."""
    shared_per_block: int
    """Bytes that one block may have (opt-in); LDS per work-group on AMD."""
    shared_per_multiprocessor: int
    registers_per_multiprocessor: int
    """Of 32 bits."""
    registers_per_thread: int
    """The most that one thread can have; on AMD architectural and accumulation registers together."""
    max_threads_per_block: int
    l2: int
    """Bytes of L2 cache; per die on AMD (L2 is not shared between dies)."""
    matrix: tuple[Matrix, ...]
    """Best first."""
    bfloat16: bool = True
    fp8: str = ""
    """The floats of 8 bits that its matrix instructions multiply, where we use them; elsewhere they go through f16."""
    tf32: bool = False

    @property
    def copies_blocks(self) -> bool:
        """Whether an engine of the device copies whole blocks of tensors, as descriptors say."""
        return _WGMMA in self.matrix

    @property
    def operands_in_registers(self) -> bool:
        """Whether products take all that they read from registers, of which threads have few beside their results."""
        return _WGMMA not in self.matrix and self.registers_per_thread <= 255

    @property
    def max_warps_per_block(self) -> int:
        return self.max_threads_per_block // self.warp_size


_MMA = Matrix("mma.sync.m16n8k16", 16, 8, 16, 32)
_WGMMA = Matrix("wgmma.m64nNk16", 64, 256, 16, 128)
_MFMA_32 = Matrix("v_mfma_f32_32x32x8", 32, 32, 8, 64)
_MFMA_16 = Matrix("v_mfma_f32_16x16x16", 16, 16, 16, 64)
_MFMA_32_WIDE = Matrix("v_mfma_f32_32x32x16", 32, 32, 16, 64)
_MFMA_16_WIDE = Matrix("v_mfma_f32_16x16x32", 16, 16, 32, 64)


def _nvidia(name: str, sms: int, block_kib: int, sm_kib: int, l2_mib: int, matrix: tuple[Matrix, ...]) -> Arch:
    return Arch(
        name=name,
        vendor=Vendor.NVIDIA,
        warp_size=32,
        multiprocessors=sms,
        shared_per_block=block_kib * KIB,
        shared_per_multiprocessor=sm_kib * KIB,
        registers_per_multiprocessor=64 * KIB,
        registers_per_thread=255,
        max_threads_per_block=1024,
        l2=l2_mib * KIB * KIB,
        matrix=matrix,
        tf32=True,
    )


def _amd(
    name: str, units: int, lds_kib: int, l2_mib: int, matrix: tuple[Matrix, ...], tf32: bool = False, fp8: str = ""
) -> Arch:
    return Arch(
        name=name,
        vendor=Vendor.AMD,
        warp_size=64,
        multiprocessors=units,
        shared_per_block=lds_kib * KIB,
        shared_per_multiprocessor=lds_kib * KIB,
        registers_per_multiprocessor=4 * 512 * 64,
        registers_per_thread=512,
        max_threads_per_block=1024,
        l2=l2_mib * KIB * KIB,
        matrix=matrix,
        tf32=tf32,
        fp8=fp8,
    )


ARCHES: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        _nvidia("sm_80", 108, 163, 164, 40, (_MMA,)),
        _nvidia("sm_86", 84, 99, 100, 6, (_MMA,)),
        _nvidia("sm_89", 142, 99, 100, 96, (_MMA,)),
        _nvidia("sm_90", 132, 227, 228, 50, (_WGMMA, _MMA)),
        _amd("gfx90a", 110, 64, 8, (_MFMA_32, _MFMA_16)),
        _amd("gfx942", 304, 64, 4, (_MFMA_32, _MFMA_16), tf32=True, fp8="f8E4M3FNUZ"),
        _amd("gfx950", 256, 160, 4, (_MFMA_32_WIDE, _MFMA_16_WIDE), fp8="f8E4M3FN"),
    )
}


def get_arch(name: str) -> Arch:
    """The facts of an architecture by name; `sm_90a` is `sm_90`, `gfx942:sramecc+:xnack-` is `gfx942`."""
    base = name.split(":")[0].removesuffix("a") if name.startswith("sm_") else name.split(":")[0]
    if base not in ARCHES:
        raise ScheduleError(f"unknown architecture '{name}'; known are {', '.join(ARCHES)}")
    return ARCHES[base]
