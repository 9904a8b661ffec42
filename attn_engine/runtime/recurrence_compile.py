"""From a kind of recurrence to callables, kept in memory by what was compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from xdsl.dialects.builtin import ModuleOp

from attn_engine import pipelines
from attn_engine.arch import ARCHES, Arch, Vendor, get_arch
from attn_engine.backends.backend import Level, get_backend
from attn_engine.backends.triton.build import assembler_version
from attn_engine.frontend.recurrence import Kind, build_recurrence
from attn_engine.ir.schedule import padded
from attn_engine.runtime.devices import Target
from attn_engine.runtime.driver import run_passes
from attn_engine.runtime.schedules import OLDEST

WARPS, WARP = 4, 32
CHUNK, SHORT = 64, 32
DELTA_TILES = 6
"""Tiles of a chunk by the key channels that the gradients of the delta rule hold at a time."""
DECODED = 8192
"""Numbers of a state per program of a step."""
RIGHT_ASSEMBLER = (13,)
"""The ptxas 12.8 that Triton 3.6 brings gets some kernels for Hopper wrong: see `attn-schedule-recurrence`."""
FEW_TOKENS = 4
"""Up to so many tokens go one by one when no gradient is needed: a chunk of 64 would be mostly empty."""


@dataclass(frozen=True)
class Schedule:
    """Options of `convert-recurrence-to-tile`; see there."""

    chunk: int = CHUNK
    value_block: int = 64
    pieces: int = 1
    num_warps: int = 4
    num_stages: int = 2
    pad: bool = True
    tf32: bool = False
    descriptors: bool = False
    turned: bool = False
    chained: bool = False
    split_f32: bool = False
    part: int = 64

    def spec(self) -> str:
        options = {name: str(value).lower() for name, value in vars(self).items()}
        return f"convert-recurrence-to-tile{{{' '.join(f'{n}={v}' for n, v in options.items())}}}"


@dataclass(frozen=True)
class Place:
    """What `attn-schedule-recurrence` decides by; tokens are rounded down to a power of two."""

    arch: str
    heads: int
    tokens: int
    blocks: bool
    chains: bool = True
    careful: bool = False

    def spec(self, chunk: int) -> str:
        options = {name: str(value).lower() for name, value in vars(self).items()}
        return f"attn-schedule-recurrence{{chunk={chunk} {' '.join(f'{n}={v}' for n, v in options.items())}}}"


@dataclass(frozen=True)
class Request:
    """One compilation: the forward plan, and its backward plan once that is asked for."""

    kind: Kind
    backend: str
    schedule: Schedule
    wrt: tuple[str, ...] = ()
    grouped: bool = True
    place: Place | None = None


@dataclass(eq=False)
class Compiled:
    """The plans of a request, built when first called."""

    request: Request
    plans: dict[str, Callable[..., None]] = field(default_factory=dict[str, Callable[..., None]])
    sources: dict[str, str] = field(default_factory=dict[str, str])

    def forward(self) -> Callable[..., None]:
        return self._plan("forward", lambda: build_recurrence(self.request.kind))

    def backward(self, d_final: bool) -> Callable[..., None]:
        """The plan of the gradients; with `d_final` the loss depends on the final state too."""
        return self._plan("backward_final" if d_final else "backward", lambda: self.adjoint(d_final))

    def adjoint(self, d_final: bool) -> ModuleOp:
        """The backward function alone."""
        request = self.request
        module = build_recurrence(replace(request.kind, final=request.kind.final or d_final))
        options = f"wrt={','.join(request.wrt)} d_final={str(d_final).lower()} grouped={str(request.grouped).lower()}"
        run_passes(module, (f"attn-derive-recurrence-backward{{{options}}}",))
        forward = module.body.block.first_op
        assert forward is not None
        module.body.block.erase_op(forward)
        return module

    def _plan(self, name: str, module: Callable[[], ModuleOp]) -> Callable[..., None]:
        if name not in self.plans:
            self.plans[name] = self._built(scheduled(module(), self.request), name)
        return self.plans[name]

    def _built(self, module: ModuleOp, name: str) -> Callable[..., None]:
        """Calls that differ in heads and tokens alone have one plan, if these decide nothing."""
        key = (str(module), self.request.backend, self.request.schedule)
        if key not in _BUILT:
            backend = get_backend(self.request.backend)
            source = backend.emit(to_tile(module, self.request))
            _BUILT[key] = source, backend.build(source)[name.split("_")[0]]
        self.sources[name], plan = _BUILT[key]
        return plan


_BUILT: dict[tuple[str, str, Schedule], tuple[str, Callable[..., None]]] = {}


def scheduled(module: ModuleOp, request: Request) -> ModuleOp:
    """The same module, each op with the form that its place asks for."""
    if request.place is not None:
        run_passes(module, (request.place.spec(request.schedule.chunk),))
    return module


def to_tile(module: ModuleOp, request: Request) -> ModuleOp:
    """Kernels and the plan of a module; `module` is consumed."""
    backend = get_backend(request.backend)
    run_passes(module, (request.schedule.spec(), *pipelines.TILE_CLEANUP, *(backend.recurrences or backend.pipeline)))
    return module


_CACHE: dict[Request, Compiled] = {}


def compiled_for(request: Request) -> Compiled:
    """The compilation of this process for a request."""
    if request not in _CACHE:
        _CACHE[request] = Compiled(request)
    return _CACHE[request]


# --- the schedule that a target gets by default ------------------------------------------------------


def default_schedule(
    target: Target, kind: Kind, heads: int, tokens: int, tf32: bool, stepwise: bool, blocks: bool = False
) -> tuple[Schedule, Place | None]:
    """`heads` are those of all sequences; `stepwise` goes token by token.

    `blocks` says that all tensors lie as descriptors want them (see `in_blocks`).
    """
    if get_backend(target.backend).on_host:
        return Schedule(chunk=1 if stepwise else 64, pad=False), None
    arch = get_arch(target.arch if target.arch in ARCHES else OLDEST)
    if stepwise:
        block = _step_block(kind, arch, heads) if tokens <= FEW_TOKENS else 16
        return Schedule(chunk=1, value_block=block, num_warps=1 if kind.key <= WARP else WARPS, num_stages=1), None
    backend = get_backend(target.backend)
    buffered = backend.level is Level.BUFFERED
    copies = blocks and arch.copies_blocks and not buffered and not kind.bounds
    careful = not buffered and arch.copies_blocks and assembler_version() < RIGHT_ASSEMBLER
    place = Place(arch.name, heads, 1 << tokens.bit_length() - 1 if tokens else 0, copies, not buffered, careful)
    split_f32 = arch.tf32 and arch.vendor is Vendor.NVIDIA
    chunk = _chunk(kind, arch)
    return Schedule(chunk=chunk, tf32=tf32, descriptors=copies, split_f32=split_f32, part=backend.part), place


def _step_block(kind: Kind, arch: Arch, heads: int) -> int:
    """Value channels per program of a step: long rows of the state for memory, but half of them where a device has
    multiprocessors for twice as many programs. Steps over many tokens have small parts, for they go one after the other."""
    block = max(16, min(64, DECODED // kind.key))
    programs = heads * -(-padded(kind.value) // block)
    return block // 2 if block > WARP and 2 * programs <= arch.multiprocessors else block


def _chunk(kind: Kind, arch: Arch) -> int:
    """Tokens per chunk. Operands that take registers leave room for tiles of few tokens only. The gradients of the delta
    rule need several tiles of a chunk at a time: 64 KiB hold them for 64 tokens of up to 64 channels in 16 bits."""
    if arch.operands_in_registers:
        return SHORT
    tiles = DELTA_TILES * CHUNK * padded(kind.key) * kind.dtype.itemsize
    return SHORT if kind.beta and tiles > arch.shared_per_block else CHUNK


def source_of(request: Request, wrt: tuple[str, ...] = (), d_final: bool = False) -> str:
    """The text of the forward plan, or with `wrt` of the backward plan, for any backend on any machine."""
    found = Compiled(replace(request, wrt=wrt))
    module = found.adjoint(d_final) if wrt else build_recurrence(request.kind)
    return get_backend(request.backend).emit(to_tile(scheduled(module, request), request))
