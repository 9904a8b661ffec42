"""From a kind of recurrence to callables, kept in memory by what was compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from xdsl.dialects.builtin import ModuleOp

from attn_engine import pipelines
from attn_engine.arch import ARCHES, Arch, get_arch
from attn_engine.backends.backend import get_backend
from attn_engine.frontend.recurrence import Kind, build_recurrence
from attn_engine.runtime.devices import Target
from attn_engine.runtime.driver import run_passes
from attn_engine.runtime.schedules import OLDEST

PER_THREAD = 64
"""Registers of a thread that may hold its part of a state."""
WARPS, WARP = 4, 32
WARPGROUP_ROWS = 64
"""Rows of a product of four warps: a state of fewer value channels is no left operand."""


@dataclass(frozen=True)
class Schedule:
    """Options of `convert-recurrence-to-tile`; see there."""

    chunk: int = 64
    value_block: int = 64
    pieces: int = 1
    num_warps: int = 4
    num_stages: int = 2
    pad: bool = True
    tf32: bool = False
    descriptors: bool = False
    turned: bool = False
    chained: bool = False

    def spec(self) -> str:
        options = {name: str(value).lower() for name, value in vars(self).items()}
        return f"convert-recurrence-to-tile{{{' '.join(f'{n}={v}' for n, v in options.items())}}}"


@dataclass(frozen=True)
class Request:
    """One compilation: the forward plan, and its backward plan once that is asked for."""

    kind: Kind
    backend: str
    schedule: Schedule
    wrt: tuple[str, ...] = ()
    grouped: bool = True


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
            backend = get_backend(self.request.backend)
            tiles = to_tile(module(), self.request)
            self.sources[name] = backend.emit(tiles)
            self.plans[name] = backend.build(self.sources[name])[name.split("_")[0]]
        return self.plans[name]


def to_tile(module: ModuleOp, request: Request) -> ModuleOp:
    """Kernels and the plan of a module; `module` is consumed."""
    passes = (request.schedule.spec(), *pipelines.TILE_CLEANUP, *get_backend(request.backend).pipeline)
    run_passes(module, passes)
    return module


_CACHE: dict[Request, Compiled] = {}


def compiled_for(request: Request) -> Compiled:
    """The compilation of this process for a request."""
    if request not in _CACHE:
        _CACHE[request] = Compiled(request)
    return _CACHE[request]


# --- the schedule that a target gets by default ------------------------------------------------------


def default_schedule(
    target: Target, kind: Kind, programs: int, tokens: int, tf32: bool, stepwise: bool, blocks: bool = False
) -> Schedule:
    """`programs` is the number of heads of all sequences; `stepwise` goes token by token.

    `blocks` says that all tensors lie as descriptors want them (see `in_blocks`).
    """
    if target.backend == "cpu":
        return Schedule(chunk=1 if stepwise else 64, pad=False)
    arch = get_arch(target.arch if target.arch in ARCHES else OLDEST)
    if stepwise:
        return Schedule(chunk=1, value_block=16, num_warps=1 if kind.key <= WARP else WARPS, num_stages=1)
    value_block = _value_block(max(kind.key, kind.value))
    schedule = Schedule(value_block=value_block, num_stages=_stages(arch, kind, value_block), tf32=tf32)
    if blocks and arch.copies_blocks and not kind.bounds:
        schedule = replace(schedule, descriptors=True, turned=value_block >= WARPGROUP_ROWS)
    if kind.beta:
        return schedule
    return replace(schedule, pieces=_pieces(arch, programs * -(-kind.value // value_block), tokens))


def _value_block(key: int) -> int:
    """Value channels of a program, so that a state [key, block] of f32 leaves registers for the products."""
    padded = 1 << (key - 1).bit_length()
    return max(16, min(64, PER_THREAD * WARPS * WARP // padded))


def _stages(arch: Arch, kind: Kind, value_block: int) -> int:
    """Two, if two rounds of the tiles of q, k and v and the operands of the products fit into shared memory."""
    size = kind.dtype.itemsize
    channels = max(kind.key, kind.value)
    padded = 1 << (channels - 1).bit_length()
    tiles = 64 * (2 * padded + value_block) * size
    products = (64 * 64 + padded * value_block) * size
    return 2 if 2 * tiles + products <= arch.shared_per_block else 1


def _pieces(arch: Arch, programs: int, tokens: int) -> int:
    """1 if the programs fill half of the device; else the power of two that just does not overfill it."""
    slots = 2 * arch.multiprocessors
    pieces = 1
    while programs and 2 * programs <= slots and programs * pieces * 2 <= slots and tokens >= pieces * 2 * 256:
        pieces *= 2
    return pieces


def source_of(request: Request, wrt: tuple[str, ...] = (), d_final: bool = False) -> str:
    """The text of the forward plan, or with `wrt` of the backward plan, for any backend on any machine."""
    found = Compiled(replace(request, wrt=wrt))
    module = found.adjoint(d_final) if wrt else build_recurrence(request.kind)
    return get_backend(request.backend).emit(to_tile(module, request))
