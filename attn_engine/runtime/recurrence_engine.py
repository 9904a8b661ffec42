"""`LinearAttentionEngine`: the ancestors' entry point for recurrences, bound to shapes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from attn_engine.errors import CustomInputError, LayoutError, MetaMismatchError, ReturnValueError, SignatureError
from attn_engine.frontend.custom_io import CustomIO, MetaTensor, check_custom
from attn_engine.frontend.source import refuse
from attn_engine.runtime.engine import check_meta
from attn_engine.runtime.recurrence import recurrence

Mod = Callable[..., Tensor]
AXES = {"batch": 0, "heads": 1, "seq_len": 2}


class LinearAttentionEngine:
    """A recurrence S_t = exp(decay_t) S_{t-1} + k_t v_t^T, o_t = q_t S_t, whose operands functions make of those given.

    The functions run on whole tensors, (batch, heads, tokens, channels), with any torch operation that keeps their
    shape; torch differentiates them.

    Args:
        qkv_meta: `meta_tensor`s of q, k and v, each (batch, heads, tokens, channels); a dimension given as a
            name may vary from call to call. q and k may have fewer heads than v.
        q_mod, k_mod, v_mod: (x) or (x, inputs) -> the query, key or value; there is no scale but that of q_mod.
        decay_mod: (x) or (x, inputs) -> the log decay, of the decay given, which has one channel.
        custom_io: names and shapes of further tensors, passed to the call after decay in this order. Dimensions are
            "batch", "heads", "seq_len", 1, and last the channels; `inputs` holds them by name, with four
            dimensions that broadcast against the operand.
        layout: of the tensors of a call, "bhsd" (batch, heads, tokens, channels) or "bshd".
        backend: by default triton on a GPU and cpu elsewhere.

    Raises:
        LayoutError, MetaMismatchError, CustomInputError: for arguments that do not fit.
    """

    def __init__(
        self,
        qkv_meta: Sequence[MetaTensor],
        q_mod: Mod | None = None,
        k_mod: Mod | None = None,
        v_mod: Mod | None = None,
        decay_mod: Mod | None = None,
        custom_io: CustomIO | None = None,
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
        return self._run(q, k, v, decay, custom, initial_state, True)

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
        given = [x.transpose(1, 2) if inside else x for x in (q, k, v)]
        for name, meta, tensor in zip("qkv", self.meta, given, strict=True):
            check_meta(name, meta, tensor)
        inputs = self._inputs(custom)
        made = [self._made(name, x, inputs).transpose(1, 2) for name, x in zip("qkv", given, strict=True)]
        if decay is not None:
            heads_first = decay.transpose(1, 2) if inside else decay
            decay = self._made("decay", heads_first[..., None], inputs)[..., 0].transpose(1, 2)
        o, state = recurrence(
            made[0],
            made[1],
            made[2],
            decay=decay,
            scale=1.0,
            initial_state=initial_state,
            output_final_state=final,
            backend=self.backend,
        )
        return (o if inside else o.transpose(1, 2)), state

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
        result = mod(x) if _parameters(name, mod) == 1 else mod(x, inputs)
        if result.shape != x.shape:
            refuse(
                ReturnValueError,
                f"{name}_mod returns shape {tuple(result.shape)} for an operand of shape {tuple(x.shape)}",
                "return one element for each element",
                mod,
            )
        return result if name == "decay" else result.to(x.dtype)


def _parameters(name: str, mod: Mod) -> int:
    """1 for (x), 2 for (x, inputs)."""
    parameters = inspect.signature(mod).parameters.values()
    required = sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    if required not in (1, 2):
        signature = f"{name}_mod(x) or {name}_mod(x, inputs)"
        refuse(SignatureError, f"{name}_mod takes {required} arguments", f"write it as {signature}", mod)
    return required


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
