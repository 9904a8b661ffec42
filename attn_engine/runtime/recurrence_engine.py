"""`LinearAttentionEngine`: the ancestors' entry point for recurrences, bound to shapes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from attn_engine.errors import (
    ConcreteValueError,
    ControlFlowError,
    CustomInputError,
    InPlaceWriteError,
    LayoutError,
    MetaMismatchError,
    OperandError,
    RankError,
    ReturnValueError,
    SignatureError,
    TraceError,
)
from attn_engine.frontend.checks import DTYPES, check_tensor
from attn_engine.frontend.custom_io import CustomIO, MetaTensor, check_custom
from attn_engine.frontend.foreign import raised_at
from attn_engine.frontend.recurrence import Operands
from attn_engine.frontend.recurrence_mods import TracedMods, trace_mods
from attn_engine.frontend.source import refuse
from attn_engine.frontend.writes import version
from attn_engine.runtime import recurrence_mods
from attn_engine.runtime.eager import is_plain
from attn_engine.runtime.engine import check_meta
from attn_engine.runtime.recurrence import recurrence
from attn_engine.runtime.recurrence_inspect import (
    RecurrenceView,
    explain_recurrence,
    recurrence_ir,
    recurrence_source,
)
from attn_engine.runtime.recurrence_tune import RecurrenceTuner, tuning
from attn_engine.runtime.reference import is_reference

Mod = Callable[..., Tensor]
_OF_TENSORS_TOO = (ConcreteValueError, ControlFlowError, OperandError)
"""What tracing refuses and whole tensors cannot do either."""
AXES = {"batch": 0, "heads": 1, "seq_len": 2}


class LinearAttentionEngine:
    """A recurrence S_t = exp(decay_t) S_{t-1} + k_t v_t^T, o_t = q_t S_t, whose operands functions make of those given.

    The functions run on whole tensors, (batch, heads, tokens, channels), with any torch operation that keeps their
    shape; torch differentiates them. Those that go element by element run inside of the kernels, which load q, k, v and
    the decay as they are given; their values are made once more for gradients.

    Args:
        qkv_meta: `meta_tensor`s of q, k and v, each (batch, heads, tokens, channels); a dimension given as a
            name may vary from call to call. q and k may have fewer heads than v.
        q_mod, k_mod, v_mod: (x) or (x, inputs) -> the query, key or value; there is no scale but that of q_mod.
        decay_mod: (x) or (x, inputs) -> the log decay, of the decay given, which has one channel.
        custom_io: names and shapes of further tensors, passed to the call after decay in this order. Dimensions are
            "batch", "heads", "seq_len", 1, and last the channels; `inputs` holds them by name, with four
            dimensions that broadcast against the operand.
        tune: measure some forms at the first call of a kind, and of its gradients, and take the fastest.
        tune_file: JSON in which measured forms are found and kept; without `tune` it is only read.
        layout: of the tensors of a call, "bhsd" (batch, heads, tokens, channels) or "bshd".
        backend: by default ("auto") triton on a GPU and cpu elsewhere; "reference" goes token by token in torch
            operations, in float64, and has derivatives of any order.

    Raises:
        LayoutError, MetaMismatchError, CustomInputError: for arguments that do not fit.
        TraceError: of a call, for functions that give no tensor of the operand's shape, write into what they are given, or
            need a Python number where there is a tensor.
    """

    def __init__(
        self,
        qkv_meta: Sequence[MetaTensor],
        q_mod: Mod | None = None,
        k_mod: Mod | None = None,
        v_mod: Mod | None = None,
        decay_mod: Mod | None = None,
        custom_io: CustomIO | None = None,
        tune: bool = False,
        tune_file: str = "",
        layout: str = "bhsd",
        backend: str | None = None,
    ):
        if layout not in ("bshd", "bhsd"):
            raise LayoutError(layout)
        if len(qkv_meta) != 3:
            raise MetaMismatchError("qkv_meta", f"{len(qkv_meta)} entries", "three: q, k and v")
        self.meta, self.layout, self.backend = tuple(qkv_meta), layout, backend
        self.mods = {"q": q_mod, "k": k_mod, "v": v_mod, "decay": decay_mod}
        self.custom_io = custom_io or CustomIO()
        self.tuner = RecurrenceTuner(tune_file, measure=tune) if tune or tune_file else None
        self._regions: dict[tuple[object, ...], TracedMods | TraceError | None] = {}

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None = None,
        *custom: Tensor,
        initial_state: Tensor | None = None,
    ) -> Tensor:
        """o in the layout of v; decay is (batch, heads, tokens), or (batch, tokens, heads) with layout "bshd"."""
        with tuning(self.tuner):
            return self._run(q, k, v, decay, custom, initial_state, False)[0]

    def with_state(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None = None,
        *custom: Tensor,
        initial_state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """o, and the state (batch, heads, key channels, value channels) after the last token."""
        with tuning(self.tuner):
            return self._run(q, k, v, decay, custom, initial_state, True)

    # --- looking into it

    def ir(self, stage: str = "attn", view: RecurrenceView | None = None) -> str:
        """IR text, see `recurrence_ir`; of a view, dtype and sizes that `qkv_meta` tells are those told there."""
        return recurrence_ir(stage, self._seen(view), self._regions_of(view))

    def source(self, backend: str = "triton", view: RecurrenceView | None = None) -> str:
        """The text of the kernels and host functions for a backend."""
        return recurrence_source(backend, self._seen(view), self._regions_of(view))

    def explain(self, view: RecurrenceView | None = None) -> str:
        """The rule, where its functions run, and how each plan is cut for the device."""
        traced = self._regions_of(view)
        outside = () if traced is not None else tuple(f"{n}_mod" for n, mod in self.mods.items() if mod is not None)
        return explain_recurrence(self._seen(view), traced, outside)

    def _seen(self, view: RecurrenceView | None) -> RecurrenceView:
        (batch, shared, tokens, key), (_, heads, _, value) = self.meta[0].shape, self.meta[2].shape
        sizes = {"batch": batch, "shared_heads": shared, "tokens": tokens, "key": key, "heads": heads, "value": value}
        told = {name: size for name, size in sizes.items() if isinstance(size, int)}
        return replace(view or RecurrenceView(), dtype=self.meta[0].dtype, **told)

    def _regions_of(self, view: RecurrenceView | None) -> TracedMods | None:
        """The functions as regions; named inputs, which only a call brings, are stood in for."""
        shapes = self.custom_io.shapes.values()
        custom = [torch.empty([size if isinstance(size, int) else 2 for size in shape]) for shape in shapes]
        decay = torch.empty(0) if (view or RecurrenceView()).decay else None
        return self._traced([*(torch.empty(0) for _ in "qkv"), decay], self._inputs(custom))

    # --- running it

    def _run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None,
        custom: Sequence[Tensor],
        initial_state: Tensor | None,
        final: bool,
    ) -> tuple[Tensor, Tensor | None]:
        inside = self.layout == "bshd"
        for name, x in zip((*"qkv", *self.custom_io), (q, k, v, *custom), strict=False):
            check_tensor(name, x)
        if decay is not None:
            check_tensor("decay", decay)
            if decay.ndim != 3:
                raise RankError(
                    f"decay has {decay.ndim} dimensions, but needs 3 (batch, heads, tokens as the layout has them)"
                )
        given = [x.transpose(1, 2) if inside else x for x in (q, k, v)]
        for name, meta, tensor in zip("qkv", self.meta, given, strict=True):
            check_meta(name, meta, tensor)
        inputs = self._inputs(custom)
        self._check_sizes(inputs, given)
        heads_first = None if decay is None else decay.transpose(1, 2) if inside else decay
        traced = self._traced([*given, heads_first], inputs)
        if traced is not None and self._fit(traced, [*given, heads_first], inputs):
            read = tuple(list(self.custom_io).index(name) for name in traced.names)
            modified = recurrence_mods.Modified(traced, read, self._all_made, final, self.backend or "")
            log_decay = None if heads_first is None else heads_first.float()
            state = None if initial_state is None else initial_state.float()
            as_given = Operands(given[0], given[1], given[2], log_decay, None, None, state)
            o, state = recurrence_mods.run(modified, as_given, list(inputs.values()))
            return (o.transpose(1, 2) if inside else o), state
        *made, log_decay = self._all_made([*given, heads_first], list(inputs.values()))
        operands = [x.transpose(1, 2) for x in made if x is not None]
        o, state = recurrence(
            operands[0],
            operands[1],
            operands[2],
            decay=None if log_decay is None else log_decay.transpose(1, 2),
            scale=1.0,
            initial_state=initial_state,
            output_final_state=final,
            backend=self.backend,
        )
        return (o if inside else o.transpose(1, 2)), state

    def _traced(self, given: Sequence[Tensor | None], inputs: Mapping[str, Tensor]) -> TracedMods | None:
        """The functions as regions, if there are any and all are element by element; what traces or transforms runs them."""
        wanted = {n: m for (n, m), x in zip(self.mods.items(), given, strict=True) if m is not None and x is not None}
        if (
            not wanted
            or is_reference(self.backend)
            or not is_plain([*given, *inputs.values()])
            or not all(x.dtype in DTYPES for x in inputs.values())
        ):
            return None
        dtypes = tuple(x.dtype for x in inputs.values())
        if (dtypes, *wanted) not in self._regions:
            fixed = {name: _alike(self.custom_io.shapes[name]) for name in inputs}
            self._regions[dtypes, *wanted] = trace_mods(wanted, inputs, fixed)
        found = self._regions[dtypes, *wanted]
        return None if isinstance(found, TraceError) else found

    def _check_sizes(self, inputs: Mapping[str, Tensor], given: Sequence[Tensor]) -> None:
        """Named dimensions are those of q and k, or of v, or 1."""
        for name, tensor in inputs.items():
            for dimension, axis in AXES.items():
                sizes = {1, *(x.shape[axis] for x in given)}
                if tensor.shape[axis] not in sizes:
                    refuse(
                        CustomInputError,
                        f"input '{name}' has {tensor.shape[axis]} for '{dimension}'",
                        f"there are {', '.join(map(str, sorted(sizes)))} of q, k and v, or 1 for all",
                    )

    def _fit(self, traced: TracedMods, given: Sequence[Tensor | None], inputs: Mapping[str, Tensor]) -> bool:
        """Whether inputs hold a number for each element of the operands that read them: kernels take it by the element's
        place. What broadcasts in another way, or not at all, is for torch to tell."""
        shapes = {n: (*x.shape, 1)[:4] for n, x in zip(self.mods, given, strict=True) if x is not None}
        for operand, region in traced.regions.items():
            for name, argument in zip(traced.names, region.block.args[1 + len(shapes[operand]) :], strict=True):
                sizes = zip(_alike(self.custom_io.shapes[name]), inputs[name].shape, shapes[operand], strict=True)
                if argument.uses and not all(alike or size == own for alike, size, own in sizes):
                    return False
        return True

    def _all_made(self, given: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """q, k, v and the log decay as their functions make them."""
        named = dict(zip(self.custom_io, inputs, strict=True))
        made: list[Tensor | None] = []
        for name, x in zip(self.mods, given, strict=True):
            if x is None or name != "decay":
                made.append(None if x is None else self._made(name, x, named))
            else:
                log_decay = self._made(name, x[..., None], named)[..., 0]
                made.append(log_decay if is_reference(self.backend) else log_decay.float())
        return made

    def _inputs(self, custom: Sequence[Tensor]) -> dict[str, Tensor]:
        if len(custom) != len(self.custom_io):
            raise MetaMismatchError(
                "custom inputs", f"{len(custom)} tensors", f"{len(self.custom_io)}: {', '.join(self.custom_io)}"
            )
        named = dict(zip(self.custom_io, custom, strict=True))
        check_custom(self.custom_io, named)
        return {name: _placed(name, tensor, self.custom_io.shapes[name]) for name, tensor in named.items()}

    def _made(self, name: str, x: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """An operand as its mod makes it, in the dtype that it had."""
        mod = self.mods[name]
        if mod is None:
            return x
        arguments = (x,) if _parameters(name, mod) == 1 else (x, inputs)
        before = [version(tensor) for tensor in (x, *inputs.values())]
        try:
            result = cast("object", mod(*arguments))
        except Exception as error:
            told = self._told(error)
            if told is None:
                raise
            raise told from error
        if [version(tensor) for tensor in (x, *inputs.values())] != before:
            refuse(
                InPlaceWriteError,
                f"{name}_mod has written into what it is given, which is the caller's",
                "make another: x = x.add(1)",
                mod,
            )
        if not isinstance(result, Tensor):
            refuse(
                ReturnValueError,
                f"{name}_mod returns {'None' if result is None else f'a {type(result).__name__}'}",
                "return a tensor with one element for each element of the operand; every path needs a return",
                mod,
            )
        if result.shape != x.shape:
            refuse(
                ReturnValueError,
                f"{name}_mod returns shape {tuple(result.shape)} for an operand of shape {tuple(x.shape)}",
                "return one element for each element",
                mod,
            )
        return result if name == "decay" else result.to(x.dtype)

    def _told(self, error: Exception) -> TraceError | None:
        """What a trace has said of the line that has failed, if that holds for whole tensors too."""
        line = raised_at(error)
        refused = [found for found in self._regions.values() if isinstance(found, _OF_TENSORS_TOO)]
        found = next((found for found in refused if found.where == line), None)
        return None if found is None else type(found)(found.problem, found.fix, found.where)


def _parameters(name: str, mod: Mod) -> int:
    """1 for (x), 2 for (x, inputs)."""
    parameters = inspect.signature(mod).parameters.values()
    required = sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    if required not in (1, 2):
        signature = f"{name}_mod(x) or {name}_mod(x, inputs)"
        refuse(SignatureError, f"{name}_mod takes {required} arguments", f"write it as {signature}", mod)
    return required


def _alike(shape: tuple[int | str, ...]) -> tuple[bool, ...]:
    """Of batch, heads, tokens and channels: whether an input of this shape has one number for all."""
    named = {AXES[d] for d in shape if isinstance(d, str) and d in AXES}
    if shape and isinstance(shape[-1], int) and shape[-1] != 1:
        named.add(3)
    return tuple(place not in named for place in range(4))


def _placed(name: str, tensor: Tensor, shape: tuple[int | str, ...]) -> Tensor:
    """A custom input with four dimensions: each named one at its own place, a last size that is not 1 as channels."""
    order: list[tuple[int, int]] = []
    for axis, dimension in enumerate(shape):
        if isinstance(dimension, str) and dimension in AXES:
            order.append((AXES[dimension], axis))
        elif dimension != 1 and isinstance(dimension, int) and axis == len(shape) - 1:
            order.append((3, axis))
        elif dimension != 1:
            refuse(
                CustomInputError,
                f"input '{name}' of a recurrence has a dimension {dimension!r} at {axis}",
                "its dimensions are 'batch', 'heads', 'seq_len', 1, and last the number of channels",
            )
    kept = tensor.squeeze([axis for axis, dimension in enumerate(shape) if dimension == 1])
    places = [place for place, _ in order]
    kept = kept.permute(sorted(range(len(places)), key=places.__getitem__))
    for place in range(4):
        if place not in places:
            kept = kept.unsqueeze(place)
    return kept
