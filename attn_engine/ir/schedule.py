"""Block sizes, warps and pipeline stages of every kernel: plain data, checked against a device before anything is built."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from xdsl.utils.str_enum import StrEnum

from attn_engine.arch import Arch, Vendor
from attn_engine.errors import ScheduleError

SMALLEST_TILE = 16
F32_BYTES = 4
BYTES = {"f16": 2, "bf16": 2, "f32": 4}


class Length(StrEnum):
    """Classes of sequence lengths, for which schedules may differ."""

    SHORT = "short"
    LONG = "long"

    @classmethod
    def of(cls, positions: int) -> Length:
        """Up to 64 positions are short."""
        return cls.SHORT if positions <= 64 else cls.LONG


class Kind(StrEnum):
    """The kernels of one attention: forward, row vectors of the backward, and the two gradient kernels."""

    FORWARD = "forward"
    ROWS = "rows"
    DQ = "dq"
    DKDV = "dkdv"


def padded(head_dim: int) -> int:
    """The tile that holds a head dim: a power of two, at least 16."""
    return max(SMALLEST_TILE, 1 << (head_dim - 1).bit_length())


@dataclass(frozen=True)
class Heads:
    """Sizes of the heads as tiles hold them, and the element type of q, k and v.

    `gathered` are bytes that loads of captures bring per score (a dense bias in f32: 4); the loop stages them too.
    `masked_by_key` says that the mask reads captures at keys: what it reads, and ranges from tables, take registers.
    """

    qk: int
    v: int
    dtype: str
    gathered: int = 0
    masked_by_key: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in BYTES:
            raise ScheduleError(f"dtype '{self.dtype}' has no schedule; choose one of {', '.join(BYTES)}")
        for name, size in (("qk", self.qk), ("v", self.v)):
            if size < 1:
                raise ScheduleError(f"head dim of {name} is {size}; it must be positive")

    @property
    def narrowest(self) -> int:
        """Columns of the narrowest tile that holds heads."""
        return min(padded(self.qk), padded(self.v))

    @property
    def bytes_per_position(self) -> int:
        """Of one row of k and one of v, or of q and of the output's gradient."""
        return (padded(self.qk) + padded(self.v)) * BYTES[self.dtype]


@dataclass(frozen=True)
class KernelSchedule:
    """One kernel: `block_m` queries by `block_n` keys at a time, on `num_warps`, loads `num_stages` deep."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def __iter__(self):
        return iter((self.block_m, self.block_n, self.num_warps, self.num_stages))

    def validate(self, kind: Kind, arch: Arch, heads: Heads) -> None:
        """Raises `ScheduleError` if this cannot be built for the device; what passes may still spill a little."""
        for name in ("block_m", "block_n"):
            _check_power_of_two(kind, name, getattr(self, name), SMALLEST_TILE)
        _check_power_of_two(kind, "num_warps", self.num_warps, 1)
        if self.num_warps > arch.max_warps_per_block:
            raise ScheduleError(
                f"{kind}: num_warps is {self.num_warps}, but {arch.name} has at most {arch.max_warps_per_block} warps in a block"
            )
        if self.num_stages < 1:
            raise ScheduleError(f"{kind}: num_stages is {self.num_stages}; it must be at least 1")
        self._check_shared(kind, arch, heads)
        self._check_registers(kind, arch, heads)

    def shared_bytes(self, kind: Kind, arch: Arch, heads: Heads) -> int:
        """What the tiles in shared memory need: the kept ones, and a ring of those that the loop loads.

        On AMD the kept tiles stay in registers, and one stage of the ring does; the weights may pass through.
        """
        if kind is Kind.ROWS:
            return 0
        kept, moving = (self.block_m, self.block_n) if kind is not Kind.DKDV else (self.block_n, self.block_m)
        ring = moving * heads.bytes_per_position * self.num_stages
        if heads.gathered:
            # Beside the staged tiles, two tiles of scores pass through shared memory to change their layout.
            ring += self.block_m * self.block_n * (heads.gathered * self.num_stages + 2 * F32_BYTES)
        if arch.vendor is Vendor.AMD:
            weights = self.block_m * self.block_n * BYTES[heads.dtype]
            return moving * heads.bytes_per_position * max(1, self.num_stages - 1) + weights
        own = padded(heads.qk) * BYTES[heads.dtype] if kind is Kind.FORWARD else heads.bytes_per_position
        return kept * own + ring

    def accumulator_registers(self, kind: Kind, arch: Arch, heads: Heads) -> int:
        """Registers per thread of the f32 tiles that live through the loop body."""
        square, qk, v = self.block_m * self.block_n, padded(heads.qk), padded(heads.v)
        elements = {
            Kind.FORWARD: square + self.block_m * v,
            Kind.ROWS: 0,
            Kind.DQ: 2 * square + self.block_m * qk,
            Kind.DKDV: 2 * square + self.block_n * (qk + v),
        }[kind]
        return elements // (self.num_warps * arch.warp_size)

    def _check_shared(self, kind: Kind, arch: Arch, heads: Heads) -> None:
        need = self.shared_bytes(kind, arch, heads)
        if need > arch.shared_per_block:
            raise ScheduleError(
                f"{kind}: blocks of {self.block_m} by {self.block_n} with {self.num_stages} stages need {need} bytes of"
                f" shared memory for heads of {heads.qk} and {heads.v} in {heads.dtype}, but {arch.name} has"
                f" {arch.shared_per_block}; use smaller blocks or fewer stages"
            )

    def _check_registers(self, kind: Kind, arch: Arch, heads: Heads) -> None:
        need = self.accumulator_registers(kind, arch, heads)
        threads = self.num_warps * arch.warp_size
        limit = min(arch.registers_per_thread, arch.registers_per_multiprocessor // threads)
        if need > limit:
            raise ScheduleError(
                f"{kind}: accumulators of blocks of {self.block_m} by {self.block_n} need {need} registers per thread"
                f" on {self.num_warps} warps, but {arch.name} has {limit}; use smaller blocks or more warps"
            )


def _check_power_of_two(kind: Kind, name: str, value: int, smallest: int) -> None:
    if value < smallest or value & (value - 1):
        raise ScheduleError(f"{kind}: {name} is {value}; it must be a power of two, at least {smallest}")


@dataclass(frozen=True)
class Schedule:
    """All kernels of one attention, and whether products of f32 operands may round them (`tf32`)."""

    forward: KernelSchedule
    rows: KernelSchedule
    dq: KernelSchedule
    dkdv: KernelSchedule
    tf32: bool = False
    parts: int = 1
    """Of the keys, in the forward pass: folded apart, then combined."""
    programs: int = 0
    """If not 0, instead of `parts`: how many programs the forward pass should have."""

    def validate(self, arch: Arch, heads: Heads) -> None:
        if self.parts < 1 or self.programs < 0:
            raise ScheduleError(f"keys cannot be split into {self.parts} parts for {self.programs} programs")
        if self.tf32 and not arch.tf32:
            raise ScheduleError(f"{arch.name} has no tf32 products; leave tf32 off")
        for kind in Kind:
            getattr(self, kind.value).validate(kind, arch, heads)

    def divides(self, length: int, kinds: Iterable[Kind] = tuple(Kind)) -> bool:
        """Whether every block of some kernels divides a length."""
        kernels: list[KernelSchedule] = [getattr(self, kind.value) for kind in kinds]
        return all(length % size == 0 for kernel in kernels for size in (kernel.block_m, kernel.block_n))

    def pass_options(self) -> str:
        """As `convert-attn-to-tile` takes them: `forward=128,64,8,3 rows=... tf32=false`."""
        kernels = [f.name for f in fields(self) if isinstance(getattr(self, f.name), KernelSchedule)]
        blocks = [f"{name}={','.join(map(str, getattr(self, name)))}" for name in kernels]
        split = [f"parts={self.parts} programs={self.programs}"] if self.parts > 1 or self.programs else []
        return " ".join([*blocks, f"tf32={str(self.tf32).lower()}", *split])
