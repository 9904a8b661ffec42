"""From a traced attention to callables: the only place that orders the stages.

traced module -> attn passes -> tile passes -> text -> callables. Everything after tracing is keyed by the
text of the traced module and a `Request`, and kept in memory.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from xdsl.context import Context
from xdsl.dialects import func
from xdsl.dialects.builtin import ModuleOp, StringAttr, f32
from xdsl.passes import PassPipeline
from xdsl.utils.arg_spec import parse_pipeline

from attn_engine import pipelines
from attn_engine.backends.backend import Backend, Level, Plan, get_backend
from attn_engine.dialects import attn, tile
from attn_engine.errors import AsyncUnsupportedError, NondeterministicError
from attn_engine.ir.schedule import Kind, Schedule
from attn_engine.passes.lowering.backward import fuses
from attn_engine.passes.lowering.diagonals import by_distance
from attn_engine.passes.lowering.score_gradients import ScoreGradient, score_gradients, stored
from attn_engine.runtime.collector import no_collection
from attn_engine.runtime.env import settings
from attn_engine.runtime.schedules import apart, convert_spec, with_gradients
from attn_engine.universe import PASSES, make_context


@dataclass(frozen=True)
class Facts:
    """What the values of a call promise to its kernels, other than by their types."""

    positive_scale: bool = False
    covered: bool = False
    """Captures are at least as long as the tensors."""
    exact: bool = False
    """Captures that train are just as long as the tensors."""
    few_batches: bool = False
    """As few as that each may have a gradient of its own of a table that all share, before these are added up."""
    multiple: int = 1
    """Divides both lengths. If every block divides it, no block goes beyond its tensor."""


@dataclass(frozen=True)
class Request:
    """What a compilation needs besides the definition: gradients wanted, backend, schedule, what is known of the calls."""

    wrt: tuple[str, ...]
    backend: str
    schedule: Schedule
    facts: Facts = Facts()
    descriptors: bool = False
    """Blocks of the operands are copied through descriptors."""
    deterministic: bool = False
    """Sums have one order: the same bits every run."""
    gradients: str = ""
    """The backend of the plan of gradients, if it is another."""


@dataclass(frozen=True)
class Signature:
    """How many results of each kind the plans write, in order, and which captures get gradients."""

    outputs: int
    saved: int
    gradients: tuple[str, ...]
    """Of q, k and v, those with a gradient."""
    grad_captures: tuple[int, ...]
    stored: frozenset[int] = frozenset()
    """Of these, those whose gradients have the type of the capture; others are sums, in f32."""


@dataclass(frozen=True)
class Compiled:
    """Callables of one attention on one backend, and the stages that led to them."""

    signature: Signature
    plans: Mapping[str, Any]
    source: str
    lower: Callable[[], Sequence[Part]] = field(repr=False)
    """Lowers the attention again."""
    key: str = field(default="")
    descriptors: bool = False
    """Whether tensors must lie as descriptors want them."""
    parts: tuple[tuple[str, str], ...] = ()
    """Backend and text of each part of the source, but for those that look at their own kernels."""

    @property
    def tile_ir(self) -> str:
        """The kernels before they became source. Nothing that runs needs this text, and it takes long to print."""
        return "\n".join(str(part.tiles) for part in self.lower())


@cache
def context() -> Context:
    return make_context()


@no_collection()
def run_passes(module: ModuleOp, specs: tuple[str, ...]) -> None:
    """Applies passes in order, each verified if the settings say so."""
    verify = settings().verify_each
    for spec in specs:
        for parsed in parse_pipeline(spec):
            PassPipeline((PASSES[parsed.name]().from_pass_spec(parsed),)).apply(context(), module)
        if verify:
            module.verify()
    if not verify:
        module.verify()


def to_attn(module: ModuleOp, wrt: tuple[str, ...]) -> ModuleOp:
    """Analysed attn IR, with the backward function beside it if gradients are wanted."""
    result = module.clone()
    run_passes(result, (*pipelines.ATTN_ANALYSIS, *pipelines.derive_backward(wrt), *pipelines.ATTN_LOWERING))
    return result


def signature(module: ModuleOp) -> Signature:
    """Read off lowered attn IR."""
    online = next(o for o in module.walk() if isinstance(o, attn.OnlineOp))
    backward = next((o for o in module.walk() if isinstance(o, attn.BackwardOp)), None)
    gradients: tuple[str, ...] = ()
    captures: tuple[int, ...] = ()
    if backward is not None:
        gradients = tuple(n for n in ("q", "k", "v") if getattr(backward, f"d{n}") is not None)
        captures = tuple(a.value.data for a in backward.grad_captures)
    return Signature(len(online.outputs), len(online.saved), gradients, captures)


def _kinds(module: ModuleOp) -> list[Kind]:
    """The kernels that the functions of a module become."""
    backward = [any(isinstance(o, attn.BackwardOp) for o in function.walk()) for function in functions(module)]
    return [kind for kind in Kind if (kind is not Kind.FORWARD) in backward]


def to_tile(module: ModuleOp, request: Request, backend: Backend, fused: bool = False, apart: bool = False) -> ModuleOp:
    """Kernels and plans at the level that the backend takes; `module` is consumed.

    `fused` gradients have one kernel; those of keys and values are `apart` if they have one each.
    """
    if request.deterministic and backend.level is Level.BUFFERED and _sums_captures(module):
        raise NondeterministicError(backend.name)
    facts = request.facts
    flags: dict[str, int | str] = {
        "pad": not backend.on_host,
        "positive_scale": facts.positive_scale,
        "covered": facts.covered,
    }
    flags |= {"one_loop": backend.one_loop, "fused": fused, "apart": apart}
    flags["alike"] = bool(backend.ordered) and backend.gradients == backend.ordered
    flags["whole"] = backend.knows_whole and request.schedule.divides(facts.multiple, _kinds(module))
    flags["descriptors"] = backend.copies_blocks and request.descriptors
    flags["exact"] = facts.exact and backend.level in (Level.VALUE, Level.ASYNC)
    flags["by_batch"] = flags["exact"] and facts.few_batches and not backend.on_host
    flags["diagonals"] = backend.sums_diagonals and not request.deterministic
    flags["distances"] = '"loaded"' if backend.sums_diagonals else '"gathered"'
    flags["rounded"] = fused
    flags["single"] = request.deterministic
    flags["table_tile"] = backend.smallest_tile
    flags["masks_once"] = backend.masks_once
    convert = convert_spec(request.schedule, flags, backend.channels)
    ordered = pipelines.DETERMINISTIC if request.deterministic else ()
    run_passes(module, (convert, *ordered, *pipelines.TILE_CLEANUP, *backend.pipeline))
    return module


def _sums_captures(module: ModuleOp) -> bool:
    """Whether programs add to gradients together."""
    return any(isinstance(o, attn.BackwardOp) and bool(o.grad_captures) for o in module.walk())


_REASON = "plain"
"""The attribute of a plan that another backend was asked for: why it has no kernels."""


@dataclass(frozen=True)
class Part:
    """Some of the plans of an attention, at the level of the backend that they go to."""

    backend: Backend
    tiles: ModuleOp
    plain: Callable[[], Part] | None = None
    """The same for the backend that takes over if the kernels come out badly."""

    @property
    def reason(self) -> str | None:
        """Why a backend that was asked for has no kernels for it."""
        found = [o.attributes.get(_REASON) for o in self.tiles.ops if isinstance(o, tile.PlanOp)]
        return next((reason.data for reason in found if isinstance(reason, StringAttr)), None)

    @property
    def source(self) -> str:
        return self.backend.emit(self.tiles)

    def build(self, source: str) -> Mapping[str, Plan]:
        """The callables of its plans."""
        plans, plain, guard = self.backend.build(source), self.plain, self.backend.guard
        if plain is None or guard is None:
            return plans

        def other(name: str) -> Plan:
            part = plain()
            return part.build(part.source)[name]

        return {name: guard(plan, source, partial(other, name)) for name, plan in plans.items()}


def to_parts(module: ModuleOp, request: Request) -> list[Part]:
    """Every plan for the backend asked for, or, what that has no kernels for, for the one that it leaves the rest to."""
    backend = get_backend(request.backend)
    if request.gradients:
        return [
            part
            for function in functions(module)
            for part in to_parts(ModuleOp([function.clone()]), _own(function, request))
        ]
    if backend.rest is None:
        return [Part(backend, to_tile(module, request, backend))]
    return [_part(function, request, backend, get_backend(backend.rest)) for function in functions(module)]


def _own(function: func.FuncOp, request: Request) -> Request:
    """The request for one plan, of which only gradients go to the backend for them."""
    backward = any(isinstance(o, attn.BackwardOp) for o in function.walk())
    return replace(request, backend=request.gradients if backward else request.backend, gradients="")


def _part(function: func.FuncOp, request: Request, backend: Backend, rest: Backend) -> Part:
    """One plan. A forward that the backend refuses is refused: its user chooses again."""
    gradients = next((o for o in function.walk() if isinstance(o, attn.BackwardOp)), None)

    def plain(reason: str = "") -> Part:
        tiles = to_tile(ModuleOp([function.clone()]), request, rest)
        for plan in [o for o in tiles.ops if isinstance(o, tile.PlanOp) and reason]:
            plan.attributes[_REASON] = StringAttr(reason)
        return Part(rest, tiles)

    if gradients is None:
        return Part(backend, to_tile(ModuleOp([function.clone()]), request, backend))
    if not backend.gradients:
        return plain()
    if request.deterministic and gradients.grad_captures and _adds(function, request, backend):
        return plain("gradients of captured tensors in a fixed order")

    def short(reason: str = "") -> Part:
        return _gradients(function, gradients, request, backend, plain, steps=2)

    def without(reason: str = "") -> Part:
        return _gradients(function, gradients, request, backend, short)

    if request.deterministic and backend.ordered and not gradients.grad_captures and fuses(gradients):
        # Programs take turns: what they add has one order, and nothing else must make it the same.
        own = replace(request, deterministic=False), replace(backend, gradients=backend.ordered)
        return _gradients(function, gradients, *own, without, fused=True)
    if request.deterministic or not backend.fuses or not fuses(gradients, _leaving(gradients, request)):
        return without()

    def shorter(reason: str = "") -> Part:
        return _gradients(function, gradients, request, backend, without, fused=True, steps=2)

    def in_step(reason: str = "") -> Part:
        return _gradients(function, gradients, request, backend, shorter, fused=True)

    if not backend.late or gradients.grad_captures:
        return in_step()
    return _gradients(function, gradients, request, replace(backend, gradients=backend.late), in_step, fused=True)


def _leaving(op: attn.BackwardOp, request: Request) -> list[int]:
    """The contributions of scores that may leave the kernel of all gradients: in blocks of their captures' types, or along diagonals."""
    blocks = [n for n, gradient in _blocks(op, request).items() if gradient.bounded]
    return [*blocks, *by_distance(op)]


def _blocks(op: attn.BackwardOp, request: Request) -> dict[int, ScoreGradient]:
    facts = request.facts
    return score_gradients(op, facts.exact, request.deterministic, facts.exact and facts.few_batches)


def _adds(function: func.FuncOp, request: Request, backend: Backend) -> bool:
    """Whether programs add to gradients, rather than store each a part of its own.

    What a block of rows adds in a fixed order would become a part for each consumer: these have no order, and none of
    their sizes is bounded by that of the whole, from which the steps of fixed sums follow.
    """
    tiles = to_tile(ModuleOp([function.clone()]), request, replace(backend, pipeline=()))
    return any(isinstance(o, tile.AtomicAddOp | tile.ScatterAddOp) for o in tiles.walk())


def _gradients(
    function: func.FuncOp,
    op: attn.BackwardOp,
    request: Request,
    backend: Backend,
    otherwise: Callable[..., Part],
    fused: bool = False,
    steps: int = 1,
) -> Part:
    """The plan of gradients by a backend's own kernels, or, given a reason why there are none, what there is otherwise.

    `steps` go through the positions of one: shorter ones leave registers for scores of much arithmetic.
    """
    way = replace(backend, pipeline=backend.gradients, knows_whole=True)
    found = stored([*_blocks(op, request).values()])
    schedule = with_gradients(request.schedule, op, fused, steps, frozenset(found))
    own = replace(request, schedule=schedule)
    try:
        return Part(backend, to_tile(ModuleOp([function.clone()]), own, way, fused, apart(op)), otherwise)
    except AsyncUnsupportedError as error:
        return otherwise(error.reason)


def functions(module: ModuleOp) -> list[func.FuncOp]:
    return [o for o in module.body.block.ops if isinstance(o, func.FuncOp)]


_CACHE: dict[str, Compiled] = {}
_COMPILING = threading.RLock()


def cache_key(text: str, request: Request) -> str:
    return hashlib.sha256(f"{request!r}\n{text}".encode()).hexdigest()


def compile_traced(module: ModuleOp, text: str, request: Request) -> Compiled:
    """Compiled callables for a traced module whose printed form is `text`; the same text and request compile once."""
    key = cache_key(text, request)
    if key not in _CACHE:
        # One at a time: neither the IR's context nor, in Python 3.11, the parser of generated text may be shared by threads.
        with _COMPILING:
            if key not in _CACHE:
                _CACHE[key] = _compile(module, request, key)
    return _CACHE[key]


def lookup(key: str) -> Compiled:
    """A compilation of this process by its key."""
    return _CACHE[key]


def _stored(shape: Signature, parts: Sequence[Part]) -> frozenset[int]:
    """Read off the types of the last arguments of the backward: gradients of captures, then the scale."""
    plans = [
        o for part in parts for o in part.tiles.ops if isinstance(o, tile.PlanOp) and o.sym_name.data == "backward"
    ]
    gradients = plans[0].body.block.args[-1 - len(shape.grad_captures) : -1] if plans else ()
    pairs = zip(shape.grad_captures, gradients, strict=bool(plans))
    return frozenset(n for n, memory in pairs if tile.element_of(memory) != f32)


def _compile(module: ModuleOp, request: Request, key: str) -> Compiled:
    def lower() -> list[Part]:
        return to_parts(to_attn(module, request.wrt), request)

    lowered = to_attn(module, request.wrt)
    shape = signature(lowered)
    parts = to_parts(lowered, request)
    shape = replace(shape, stored=_stored(shape, parts))
    sources = [part.source for part in parts]
    plans = {name: p for part, text in zip(parts, sources, strict=True) for name, p in part.build(text).items()}
    texts = tuple((part.backend.name, text) for part, text in zip(parts, sources, strict=True) if part.plain is None)
    descriptors = request.descriptors or any(part.backend.level is Level.ASYNC for part in parts)
    return Compiled(shape, plans, "\n".join(sources), lower, key, descriptors, texts)
