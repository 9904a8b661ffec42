"""The kernel options of torch's flex_attention: block sizes, warps and stages edit a schedule, promises are accepted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from attn_engine.errors import KernelOptionError
from attn_engine.ir.schedule import KernelSchedule, Schedule

FORWARD = ("forward",)
BACKWARD = ("rows", "dq", "dkdv")

_SIZES: dict[str, tuple[tuple[str, ...], str]] = {
    "BLOCK_M": (FORWARD, "block_m"),
    "BLOCK_N": (FORWARD, "block_n"),
    "BLOCK_M1": (("dkdv",), "block_m"),
    "BLOCK_N1": (("dkdv",), "block_n"),
    "BLOCK_M2": (("dq",), "block_m"),
    "BLOCK_N2": (("dq",), "block_n"),
    "num_warps": (FORWARD + BACKWARD, "num_warps"),
    "num_stages": (FORWARD + BACKWARD, "num_stages"),
}

# What a user promises or prefers, and the compiler knows or decides itself: these change no result.
_HINTS = frozenset(
    {
        "PRESCALE_QK",
        "ROWS_GUARANTEED_SAFE",
        "BLOCKS_ARE_CONTIGUOUS",
        "WRITE_DQ",
        "FORCE_USE_FLEX_ATTENTION",
        "USE_TMA",
    }
)
_BACKENDS = ("AUTO", "TRITON")
_PREFIXES = {"fwd_": FORWARD, "bwd_": BACKWARD, "": FORWARD + BACKWARD}


@dataclass(frozen=True)
class KernelOptions:
    """Edits of a schedule as (kernel, field, value), and the backend that was asked for."""

    edits: tuple[tuple[str, str, int], ...] = ()
    backend: str | None = None
    parts: int | None = None
    """Of the keys in the forward pass, instead of as many as the device can use."""

    def apply(self, schedule: Schedule) -> Schedule:
        for kernel, name, value in self.edits:
            edited: KernelSchedule = replace(getattr(schedule, kernel), **{name: value})
            schedule = replace(schedule, **{kernel: edited})
        return schedule if self.parts is None else replace(schedule, parts=self.parts, programs=0)


def read_kernel_options(options: Mapping[str, object] | None) -> KernelOptions:
    """Torch's options, prefixes `fwd_` and `bwd_` included.

    Raises:
        KernelOptionError: for a key that does not exist or has no meaning here, or a value that it cannot have.
    """
    edits: list[tuple[str, str, int]] = []
    backend: str | None = None
    parts: int | None = None
    for key, value in (options or {}).items():
        prefix = next(p for p in _PREFIXES if key.startswith(p))
        name = key.removeprefix(prefix)
        if name in _SIZES:
            edits += _edits(key, name, _PREFIXES[prefix], value)
        elif name == "BACKEND":
            backend = _backend(key, value)
        elif name == "SPLIT_KV":
            parts = _positive(key, value)
        elif name not in _HINTS:
            known = ", ".join(sorted([*_SIZES, *_HINTS, "BACKEND", "SPLIT_KV"]))
            raise KernelOptionError(key, f"unknown here; there are {known}, and with fwd_ or bwd_ before them")
        elif not isinstance(value, bool):
            raise KernelOptionError(key, f"{value!r} is neither True nor False")
    return KernelOptions(tuple(edits), backend, parts)


def _edits(key: str, name: str, wanted: tuple[str, ...], value: object) -> list[tuple[str, str, int]]:
    value = _positive(key, value)
    kernels, field = _SIZES[name]
    if name in ("BLOCK_M", "BLOCK_N") and wanted is BACKWARD:
        kernels = BACKWARD
    smallest = 16 if field.startswith("block") else 1
    if field != "num_stages" and (value < smallest or value & (value - 1)):
        raise KernelOptionError(key, f"{value} is no power of two from {smallest} up")
    return [(kernel, field, value) for kernel in kernels if kernel in wanted]


def _positive(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise KernelOptionError(key, f"{value!r} is no positive whole number")
    return value


def _backend(key: str, value: object) -> str | None:
    if value not in _BACKENDS:
        raise KernelOptionError(key, f"{value!r} is not among {', '.join(_BACKENDS)}")
    return "triton" if value == "TRITON" else None
