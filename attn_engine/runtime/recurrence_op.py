"""The torch ops of recurrences, forward and backward, with autograd and fake kernels.

Tensors are batch, head, token, channel; any strides. What is compiled follows from them inside of the ops, so that a
graph holds tensors and plain numbers only. Calls that nothing but autograd looks at are made without the ops (see `eager`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.library import custom_op

from attn_engine.errors import SecondDerivativeError, UnsupportedOptionError
from attn_engine.frontend.recurrence import Operands, check_values
from attn_engine.frontend.recurrence_mods import TracedMods
from attn_engine.runtime.devices import target_of
from attn_engine.runtime.eager import is_plain, keep, kind_of, launch, trains
from attn_engine.runtime.layouts import in_blocks
from attn_engine.runtime.recurrence_compile import Compiled, Request, compiled_for, default_schedule
from attn_engine.runtime.recurrence_tune import active_tuner, tuned
from attn_engine.runtime.reference import refuse_transforms
from attn_engine.runtime.vectorize import in_turn

WHAT, INSTEAD = "a recurrence", 'backend="reference" has it, token by token and in float64'
"""For errors of derivatives that it does not have."""


def compilation(
    x: Operands,
    final: bool,
    stepwise: bool,
    backend: str,
    others: Sequence[Tensor],
    wrt: tuple[str, ...] = (),
    mods: TracedMods | None = None,
    wide: bool = False,
) -> Compiled:
    """The compilation for these tensors, which are real: ops are given no others; `others` have channels too. An empty
    `backend` is the device's own."""
    chosen = target_of(x.q.device, backend or None), torch.get_float32_matmul_precision()
    key = (kind_of((x.q, x.k, x.v, *x.optional, *others)), final, stepwise, chosen, wrt, mods, wide)
    found = _DECIDED.get(key)
    if found is None:
        found = keep(_DECIDED, key, _decided(x, final, stepwise, backend, others, wrt, mods, wide))
    return found


_DECIDED: dict[object, Compiled] = {}


def _decided(
    x: Operands,
    final: bool,
    stepwise: bool,
    backend: str,
    others: Sequence[Tensor],
    wrt: tuple[str, ...],
    mods: TracedMods | None,
    wide: bool,
) -> Compiled:
    kind, target = replace(x.kind(final), mods=mods, wide=wide), target_of(x.q.device, backend or None)
    sequences = x.q.shape[0] if x.bounds is None else x.bounds.shape[0] - 1
    heads, tokens = x.v.shape[1], x.v.shape[2]
    tf32 = x.q.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    decays = [x.decay] if x.decay is not None and x.decay.ndim == 4 else []
    blocks = in_blocks([x.q, x.k, x.v, *decays, *others])
    schedule, place = default_schedule(target, kind, sequences * heads, tokens, tf32, stepwise, blocks)
    return compiled_for(Request(kind, target.backend, schedule, wrt, x.q.shape[1] != heads, place))


def _look(compiled: Compiled, x: Operands) -> None:
    """At the values of a call where that costs nothing: on a CPU, and elsewhere if kernels are yet to be built."""
    if x.q.device.type == "cpu" or not (compiled.plans or torch.cuda.is_current_stream_capturing()):
        check_values(x)


def _forward(compiled: Compiled, q: Tensor, *others: Any) -> None:
    """Runs the forward plan; with a tuner, in the form that is fastest."""

    def run(which: Compiled) -> None:
        launch(which.forward(), q.device, (q, *others))

    run(tuned(active_tuner(), compiled, run, q.device))


def _output(v: Tensor, wide: bool = False) -> Tensor:
    """o with heads where v has them."""
    b, h, t, channels = v.shape
    dtype = torch.float32 if wide else v.dtype
    if v.stride(1) < v.stride(2):
        return v.new_empty((b, t, h, channels), dtype=dtype).transpose(1, 2)
    return v.new_empty((b, h, t, channels), dtype=dtype)


def _results(q: Tensor, v: Tensor, bounds: Tensor | None, final: bool, wide: bool = False) -> list[Tensor]:
    """o and the final state."""
    if not final:
        return [_output(v, wide)]
    sequences = v.shape[0] if bounds is None else bounds.shape[0] - 1
    return [_output(v, wide), q.new_empty((sequences, v.shape[1], q.shape[3], v.shape[3]), dtype=torch.float32)]


def recurrence_of_mods(
    x: Operands, mods: TracedMods, inputs: Sequence[Tensor], scale: float, final: bool, backend: str
) -> list[Tensor]:
    """[o, the final state if that is asked for], without gradients; the mods run inside of the kernels."""
    results = _results(x.q, x.v, x.bounds, final)
    given = [t for t in x.optional if t is not None]
    compiled = compilation(x, final, False, backend, results[:1], mods=mods)
    if "decay" not in mods.regions:
        _look(compiled, x)
    _forward(compiled, x.q, x.k, x.v, scale, *given, *inputs, *results)
    return results


def _recur(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    weight: Tensor | None,
    initial: Tensor | None,
    bounds: Tensor | None,
    scale: float,
    final: bool,
    stepwise: bool,
    backend: str,
    wide: bool,
) -> list[Tensor]:
    results = _results(q, v, bounds, final, wide)
    x = Operands(q, k, v, decay, beta, weight, initial, bounds)
    given = [t for t in x.optional if t is not None]
    compiled = compilation(x, final, stepwise, backend, results[:1], wide=wide)
    _look(compiled, x)
    _forward(compiled, q, k, v, scale, *given, *results)
    return results


recurrence = custom_op("attn_engine::recurrence", _recur, mutates_args=())


@recurrence.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    weight: Tensor | None,
    initial: Tensor | None,
    bounds: Tensor | None,
    scale: float,
    final: bool,
    stepwise: bool,
    backend: str,
    wide: bool,
) -> list[Tensor]:
    return _results(q, v, bounds, final, wide)


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    weight: Tensor | None,
    state: Tensor,
    bounds: Tensor | None,
    scale: float,
    backend: str,
    wide: bool,
) -> Tensor:
    o = _output(v, wide)
    x = Operands(q, k, v, decay, beta, weight, state, bounds)
    given = [t for t in x.optional if t is not None]
    compiled = compilation(x, True, True, backend, [o], wide=wide)
    _look(compiled, x)
    launch(compiled.forward(), q.device, (q, k, v, scale, *given, o, state))
    return o


recurrence_step = custom_op("attn_engine::recurrence_step", _step, mutates_args=("state",))


@recurrence_step.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    weight: Tensor | None,
    state: Tensor,
    bounds: Tensor | None,
    scale: float,
    backend: str,
    wide: bool,
) -> Tensor:
    return _output(v, wide)


def _gradient_results(inputs: dict[str, Tensor | None], wrt: str) -> list[Tensor]:
    """Like the operands, but gradients of what is not q, k or v are contiguous and float32."""
    found: list[Tensor] = []
    for name in wrt.split():
        operand = inputs[name]
        assert operand is not None
        if name in ("q", "k", "v"):
            found.append(torch.empty_like(operand))
        else:
            found.append(operand.new_empty(operand.shape, dtype=torch.float32))
    return found


def _differentiate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    weight: Tensor | None,
    initial: Tensor | None,
    bounds: Tensor | None,
    d_o: Tensor,
    final: Tensor | None,
    d_final: Tensor | None,
    scale: float,
    backend: str,
    wrt: str,
    tuner: str,
) -> list[Tensor]:
    inputs = {"q": q, "k": k, "v": v, "decay": decay, "beta": beta, "weight": weight, "initial": initial}
    results = _gradient_results(inputs, wrt)
    x = Operands(q, k, v, decay, beta, weight, initial, bounds)
    gradients = [r for n, r in zip(wrt.split(), results, strict=True) if n in ("q", "k", "v")]
    compiled = compilation(x, False, False, backend, [d_o, *gradients], tuple(wrt.split()))
    start = initial.transpose(2, 3) if initial is not None and beta is None else initial
    given = [x for x in (decay, beta, weight, start, bounds) if x is not None]
    states = [] if d_final is None else [final, d_final, d_final.transpose(2, 3)]

    def run(which: Compiled) -> None:
        launch(which.backward(d_final is not None), q.device, (q, k, v, scale, *given, d_o, *states, *results))

    run(tuned(tuner, compiled, run, q.device))
    return results


recurrence_backward = custom_op("attn_engine::recurrence_backward", _differentiate, mutates_args=())


@recurrence_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    weight: Tensor | None,
    initial: Tensor | None,
    bounds: Tensor | None,
    d_o: Tensor,
    final: Tensor | None,
    d_final: Tensor | None,
    scale: float,
    backend: str,
    wrt: str,
    tuner: str,
) -> list[Tensor]:
    inputs = {"q": q, "k": k, "v": v, "decay": decay, "beta": beta, "weight": weight, "initial": initial}
    return _gradient_results(inputs, wrt)


ARGUMENTS = (
    "q", "k", "v", "decay", "beta", "weight", "initial", "bounds", "scale", "final", "stepwise", "backend", "wide",
)  # fmt: skip


_TENSORS, _GRADIENT_TENSORS = ARGUMENTS.index("scale"), ARGUMENTS.index("scale") + 3
"""So many arguments of an op come first, and are tensors or None."""


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    q, k, v, decay, beta, weight, initial, bounds, scale, _final, _stepwise, backend, _wide = inputs
    ctx.save_for_backward(q, k, v, decay, beta, weight, initial, bounds, *output[1:])
    ctx.scale, ctx.backend, ctx.shape, ctx.tuner = scale, backend, output[0].shape, active_tuner()


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    wrt = [name for name, needed in zip(ARGUMENTS, ctx.needs_input_grad, strict=True) if needed]
    q, k, v, decay, beta, weight, initial, bounds, *rest = ctx.saved_tensors
    d_o = grads[0] if grads[0] is not None else v.new_zeros(ctx.shape)
    d_final = grads[1] if len(grads) > 1 else None
    final = rest[0] if d_final is not None else None
    found = gradients(
        q, k, v, decay, beta, weight, initial, bounds, d_o.to(v.dtype), final, d_final, ctx.scale, ctx.backend,
        " ".join(wrt), ctx.tuner,
    )  # fmt: skip
    named = dict(zip(wrt, found, strict=True))
    return tuple(named.get(name) for name in ARGUMENTS)


recurrence.register_autograd(_gradients, setup_context=_setup)


def _no_second_gradients(ctx: Any, *grads: Any) -> None:
    raise SecondDerivativeError(INSTEAD, WHAT)


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """What would be saved is for second derivatives."""


recurrence_backward.register_autograd(_no_second_gradients, setup_context=_keep_nothing)
recurrence.register_vmap(in_turn(recurrence))
recurrence_backward.register_vmap(in_turn(recurrence_backward))


def _no_mapped_steps(*_: Any) -> NoReturn:
    raise UnsupportedOptionError(
        "torch.vmap", "of recurrence_step, which writes into its state", "make the mapped axis a part of the batch"
    )


recurrence_step.register_vmap(_no_mapped_steps)


# --- calls -------------------------------------------------------------------------------------


class _Recurred(torch.autograd.Function):
    """The forward op for autograd alone."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        results = _recur(*arguments)
        _setup(ctx, arguments, results)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, list(grads))


def recur(*arguments: Any) -> list[Tensor]:
    """[o, the final state if that is asked for]; `stepwise` goes token by token, `wide` leaves o in float32. See `ARGUMENTS`."""
    tensors = arguments[:_TENSORS]
    if not is_plain(tensors):
        _refuse(tensors)
        return recurrence(*arguments)
    if not trains(tensors):
        return _recur(*arguments)
    function: Any = _Recurred
    return list(function.apply(*arguments))


def _refuse(tensors: Sequence[Tensor | None]) -> None:
    """Derivatives that torch would take to be zero; while it compiles, its own compiler decides."""
    if not torch.compiler.is_compiling():
        refuse_transforms([x for x in tensors if x is not None], WHAT, INSTEAD)


def gradients(*arguments: Any) -> list[Tensor]:
    """Those with respect to the operands named in `wrt`, in its order; `tuner` is that of the forward call."""
    tensors = arguments[:_GRADIENT_TENSORS]
    return (_differentiate if is_plain(tensors) and not trains(tensors) else recurrence_backward)(*arguments)


def step(*arguments: Any) -> Tensor:
    """o; the state is read and replaced."""
    tensors, state = arguments[:_TENSORS], arguments[ARGUMENTS.index("initial")]
    if not is_plain(tensors) or trains(tensors):
        _refuse(tensors)
        return recurrence_step(*arguments)
    o = _step(*arguments)
    if not state.is_inference():
        torch.autograd.graph.increment_version(state)
    return o
