"""Looking into a recurrence: its IR at each stage, its kernels' text, and how it is cut for a device, on any machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from xdsl.dialects.builtin import ModuleOp

from attn_engine.arch import get_arch
from attn_engine.backends.backend import get_backend
from attn_engine.dialects import attn
from attn_engine.errors import ArgumentError, StageError
from attn_engine.frontend.recurrence import Kind, build_recurrence
from attn_engine.frontend.recurrence_mods import TracedMods
from attn_engine.passes.attn_schedule_recurrence import form_of
from attn_engine.runtime.devices import Target
from attn_engine.runtime.inspect import STAGES
from attn_engine.runtime.recurrence_compile import Compiled, Request, default_schedule, scheduled, to_tile

DECAYS = ("token", "channel", "")
_SWEEPS = (attn.RecurrenceOp, attn.SweepOp, attn.DeltaBackwardOp)


@dataclass(frozen=True)
class RecurrenceView:
    """For which tensors and device a recurrence is looked at: sizes of a call, which operands it has, and which plans."""

    dtype: torch.dtype = torch.bfloat16
    batch: int = 1
    heads: int = 32
    shared_heads: int | None = None
    """Of q and k; as many as of v if absent."""
    tokens: int = 4096
    key: int = 128
    value: int = 128
    decay: str = "token"
    """"token" (one log decay per head and token), "channel" (one per key channel), or nothing."""
    beta: bool = False
    """The delta rule."""
    weight: bool = False
    """One number for each token that it writes with, as Mamba-2 has; none beside beta."""
    packed: bool = False
    """Sequences one behind the other, as `cu_seqlens` tells: `batch` of them, of `tokens` in all."""
    initial: bool = False
    final: bool = False
    backward: bool = False
    """With the plan of the gradients of every operand."""
    arch: str = "sm_90"

    def __post_init__(self) -> None:
        if self.decay not in DECAYS:
            raise ArgumentError(f"decay is '{self.decay}': there are {', '.join(map(repr, DECAYS))}")
        if self.beta and self.weight:
            raise ArgumentError("weight is not there beside beta, which says how strongly a token writes")
        if self.arch != "cpu":
            get_arch(self.arch)

    @property
    def wrt(self) -> tuple[str, ...]:
        """What the backward plan differentiates by."""
        optional = {"decay": bool(self.decay), "beta": self.beta, "weight": self.weight, "initial": self.initial}
        return ("q", "k", "v", *(name for name, there in optional.items() if there))

    def __str__(self) -> str:
        channels = f"{self.key}" if self.key == self.value else f"{self.key}/{self.value}"
        return f"B{self.batch} H{self.heads} T{self.tokens} D{channels}"


def recurrence_ir(stage: str = "attn", view: RecurrenceView | None = None, mods: TracedMods | None = None) -> str:
    """IR text: "traced" (the recurrence and its operands' functions), "attn" (its gradients too, each op with the form in
    which it is cut for the device), "tile" (kernels and plans of Triton)."""
    view = view or RecurrenceView()
    if stage not in STAGES:
        raise StageError(stage, STAGES)
    if stage == "traced":
        return str(build_recurrence(_kind(view, mods)))
    found = plans_of(view, mods)
    return "\n".join(str(to_tile(m, r) if stage == "tile" else m) for m, r in found)


def recurrence_source(
    backend: str = "triton", view: RecurrenceView | None = None, mods: TracedMods | None = None
) -> str:
    """The text of the kernels and host functions for a backend."""
    emit = get_backend(backend).emit
    return "\n".join(emit(to_tile(*plan)) for plan in plans_of(view or RecurrenceView(), mods, backend))


def plans_of(
    view: RecurrenceView, mods: TracedMods | None = None, backend: str = "triton"
) -> list[tuple[ModuleOp, Request]]:
    """The forward plan, and with `view.backward` the backward plan, scheduled and not yet lowered.

    Functions of operands are run by torch for gradients: these see what the functions made.
    """
    kind = _kind(view, mods)
    heads = view.batch * view.heads
    schedule, place = default_schedule(Target(backend, view.arch), kind, heads, view.tokens, False, False, True)
    grouped = view.shared_heads not in (None, view.heads)
    request = Request(kind, backend, schedule, view.wrt, grouped, place)
    found = [(build_recurrence(kind), request)]
    if view.backward:
        plain = replace(request, kind=replace(kind, mods=None))
        found.append((Compiled(plain).adjoint(view.final), plain))
    return [(scheduled(module, of), of) for module, of in found]


def explain_recurrence(view: RecurrenceView, mods: TracedMods | None, outside: tuple[str, ...] = ()) -> str:
    """A page of text: the rule, which functions run inside of kernels, and how each plan is cut for the device.

    `outside` names the functions that torch runs before the kernels.
    """
    lines = [_rule(view)]
    inside = () if mods is None else tuple(f"{name}_mod" for name in mods.regions)
    lines += [f"inside of the kernels: {', '.join(inside)}"] if inside else []
    lines += [f"run by torch, before the kernels: {', '.join(outside)}"] if outside else []
    for (module, request), name in zip(plans_of(view, mods), ("forward", "backward"), strict=False):
        told = f" ({', '.join(f'd_{x}' for x in request.wrt)})" if name == "backward" else ""
        lines.append(f"{name}{told} of {view} on {view.arch}, chunks of {request.schedule.chunk} tokens:")
        lines += [f"  {line}" for line in _cuts(module)]
    return "\n".join(lines)


def _rule(view: RecurrenceView) -> str:
    before = "S_{t-1}"
    if view.decay:
        before = "exp(decay_t) S_{t-1}"
    if view.beta:
        return f"S_t = (I - beta_t k_t k_t^T) {before} + beta_t k_t v_t^T, o_t = scale q_t S_t"
    return f"S_t = {before} + {'weight_t ' if view.weight else ''}k_t v_t^T, o_t = scale q_t S_t"


def _cuts(module: ModuleOp) -> Iterator[str]:
    for op in module.walk():
        if not isinstance(op, _SWEEPS):
            continue
        form = form_of(op.attributes)
        made = ", ".join(r.name_hint or "?" for r in op.results)
        turned = ", the state turned" if form["turned"] else ""
        block = f"{form['value_block']} value channels a program{turned}"
        kernels = f"{form['num_warps']} warps, {form['num_stages']} stages"
        yield f"{made}: {_pieces(form)}; {block}, {kernels}"


def _pieces(form: dict[str, int]) -> str:
    if form["pieces"] == 1:
        return "one sweep over whole sequences"
    if form["chained"]:
        return f"a chain of {form['pieces']} pieces of a sequence"
    return f"{form['pieces']} pieces of a sequence side by side, between two passes"


def _kind(view: RecurrenceView, mods: TracedMods | None) -> Kind:
    there = {
        "beta": view.beta,
        "weight": view.weight,
        "bounds": view.packed,
        "initial": view.initial,
        "final": view.final,
    }
    return Kind(view.dtype, view.key, view.value, view.decay, **there, mods=mods)
