"""What a backend is: a frozen manifest, and the one table of all of them.

Every backend folder has the same files: `backend.py` (the manifest `BACKEND`), `legalize.py` (its few
target rules as passes), `emit.py` (tile IR to text, one op, one rule), `types.py` (how types and scalar
ops are spelled), `build.py` (text to callables).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from xdsl.dialects.builtin import ModuleOp
from xdsl.utils.arg_spec import parse_pipeline
from xdsl.utils.exceptions import ArgSpecParseError
from xdsl.utils.str_enum import StrEnum

from attn_engine.errors import BackendError

Plan = Callable[..., None]
"""A host function: the arguments of a `tile.plan`, in order; outputs are written in place."""


class Level(StrEnum):
    """The level of the tile dialect that a backend consumes."""

    VALUE = "value"
    BUFFERED = "buffered"
    ASYNC = "async"


@dataclass(frozen=True)
class Availability:
    """Whether a backend can build and run here, and if not, what is missing."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True)
class Examination:
    """What an assembler made of kernels, in words, and why they do not run as their schedule means, if they do not."""

    lines: tuple[str, ...]
    reason: str | None = None


@dataclass(frozen=True)
class Overlap:
    """How much of other work a backend's loop over keys runs beside its products on Hopper: what backends are ranked by."""

    share: float
    """Of the work that is no product, calibrated on an H200 with heads of 128 in 16 bits (bench/results)."""
    why: str
    heads: tuple[int, ...] = ()
    """Sizes of heads for which it does; empty if for all."""
    gradients: bool = True
    """Whether the loops of gradients do so too; otherwise they go to plain kernels by prediction."""


@dataclass(frozen=True)
class Backend:
    """One target: how tile IR becomes text, and text becomes callables.

    `emit` takes nothing but the module: text printed by `attn-opt` and parsed again gives the same source.
    """

    name: str
    level: Level
    pipeline: tuple[str, ...]
    """Passes from the value level to what `emit` takes, each as in `attn-opt -p`: `"name"` or `"name{option=1}"`."""
    emit: Callable[[ModuleOp], str]
    build: Callable[[str], Mapping[str, Plan]]
    """Source text to one callable per `tile.plan`, by name."""
    check: Callable[[], Availability]
    examine: Callable[[str], Examination] | None = None
    """Looks at the machine code of a text's kernels; None where there is nothing to look for."""
    suffix: str = field(default=".py")
    """File name suffix of the source text."""
    rest: str | None = None
    """The backend that gradients go to for which this one has no kernels; None if it takes all that it can emit."""
    gradients: tuple[str, ...] = ()
    """Passes for a plan of gradients where there is a `rest`, in place of `pipeline`; without any, all go there."""
    late: tuple[str, ...] = ()
    """In place of `gradients`, and tried before them, passes for a kernel of all gradients, whose sums are a step late."""
    ordered: tuple[str, ...] = ()
    """In place of `gradients`, passes whose kernel of all gradients adds up sums in the same order in every run; without any, none does."""
    recurrences: tuple[str, ...] = ()
    """In place of `pipeline`, passes for recurrences, whose kernels have the warps that all backends give them."""
    part: int = 64
    """Of recurrences: channels of tokens that each have a decay which a kernel does at a time."""
    guard: Callable[[Plan, str, Callable[[], Plan]], Plan] | None = None
    """Makes of a plan of gradients, its text, and of how to build it for `rest`, one that goes there if need be."""
    copies_blocks: bool = False
    """Whether it prints copies of whole blocks through descriptors, for devices that have them."""
    knows_whole: bool = False
    """Whether kernels gain enough from lengths that are multiples of their blocks to be compiled for them apart."""
    channels: int = 0
    """Of forward passes: what tiles round head dims up to a multiple of, if not to a power of two."""
    smallest_tile: int = 1
    """Rows and columns that each tile of a kernel must have, whatever it is for."""
    masks_once: bool = True
    """Whether gradients of scores do without a mask of their own where that of the weights is enough."""
    sums_diagonals: bool = False
    """Whether it prints `tile.add_diagonals`, and `tile.load_diagonals`."""
    fuses: bool = False
    """Whether its kernel of dk and dv may find dq too, as sums in memory in no particular order."""
    on_host: bool = False
    """Whether kernels run in the host's own threads: tiles have any size, and blocks are as large as pay for calls there."""
    overlap: Overlap | None = None
    """What it is ranked by where a user names no backend; None if it is taken only by name, or by its device."""
    one_loop: bool = False
    """Whether it pipelines one loop of a kernel only, and so wants all blocks in one."""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise BackendError(f"backend name '{self.name}' is not an identifier")
        if self.level not in tuple(Level):
            raise BackendError(f"backend '{self.name}': level '{self.level}' is none of {', '.join(Level)}")
        for pass_spec in (*self.pipeline, *self.gradients, *self.late, *self.ordered, *self.recurrences):
            self._check_pass(pass_spec)
        for part in ("emit", "build", "check"):
            if not callable(getattr(self, part)):
                raise BackendError(f"backend '{self.name}': {part} is not callable")

    def _check_pass(self, spec: str) -> None:
        from attn_engine.universe import PASSES

        try:
            names = [parsed.name for parsed in parse_pipeline(spec)]
        except ArgSpecParseError as error:
            raise BackendError(f"backend '{self.name}': cannot parse pass '{spec}': {error}") from error
        for name in names:
            if name not in PASSES:
                raise BackendError(f"backend '{self.name}': no pass is named '{name}'; see attn_engine.universe.PASSES")


def _lazy(module: str) -> Callable[[], Backend]:
    def get() -> Backend:
        loaded: Any = import_module(f"attn_engine.backends.{module}")
        return loaded.BACKEND

    return get


BACKENDS: dict[str, Callable[[], Backend]] = {
    "cpu": _lazy("cpu.backend"),
    "gluon": _lazy("gluon.backend"),
    "hip": _lazy("hip.backend"),
    "tilelang": _lazy("tilelang.backend"),
    "triton": _lazy("triton.backend"),
}


def get_backend(name: str) -> Backend:
    """The manifest of a backend by name; a name that is not in the table is an error that lists the table."""
    if name not in BACKENDS:
        raise BackendError(f"no backend is named '{name}'; there are {', '.join(BACKENDS)}")
    return BACKENDS[name]()
