"""What a recurrence is called with: checks, and the module in the attn dialect that these tensors need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from xdsl.dialects import func
from xdsl.dialects.builtin import DYNAMIC_INDEX, ModuleOp, TensorType, f32, i32
from xdsl.ir import Attribute, Block, Region

from attn_engine.dialects import attn
from attn_engine.errors import (
    BatchError,
    DecayError,
    DeviceError,
    DtypeError,
    HeadCountError,
    HeadDimError,
    HeadDimLimitError,
    KeyLengthError,
    RankError,
    SequenceBoundsError,
    StateShapeError,
    UnsupportedOptionError,
)
from attn_engine.frontend.checks import DTYPES, MAX_HEAD_DIM
from attn_engine.frontend.packed import check_offsets
from attn_engine.frontend.recurrence_mods import TracedMods
from attn_engine.frontend.trace import ELEMENT_TYPES

MAX_VALUE_CHANNELS = 512
"""Programs share the value channels of a head among them."""
OPTIONAL = ("decay", "beta", "weight", "initial", "bounds")


@dataclass(frozen=True)
class Kind:
    """What of a call is compiled in: element type, channels, and which operands there are."""

    dtype: torch.dtype
    key: int
    value: int
    decay: str = ""
    """Nothing, "token" (one log decay per head and token) or "channel" (one per key channel)."""
    beta: bool = False
    weight: bool = False
    initial: bool = False
    bounds: bool = False
    final: bool = False
    mods: TracedMods | None = None
    """What operands become as kernels load them."""
    wide: bool = False
    """Whether o is float32, whatever the dtype."""


@dataclass(frozen=True, eq=False)
class Operands:
    """The tensors of one call in the order batch, head, token, channel; None for those that it has not."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None = None
    beta: Tensor | None = None
    weight: Tensor | None = None
    initial: Tensor | None = None
    bounds: Tensor | None = None

    @property
    def optional(self) -> list[Tensor | None]:
        return [self.decay, self.beta, self.weight, self.initial, self.bounds]

    def kind(self, final: bool) -> Kind:
        decay = "" if self.decay is None else "token" if self.decay.ndim == 3 else "channel"
        beta, weight, initial, bounds = (x is not None for x in self.optional[1:])
        return Kind(self.q.dtype, self.q.shape[3], self.v.shape[3], decay, beta, weight, initial, bounds, final)


def check_recurrence(x: Operands, exact: bool = False) -> None:
    """The first thing wrong with a call. Shapes are told as the user gave them: batch, token, head, channel. `exact` takes
    float64 too."""
    for name, tensor in (("q", x.q), ("k", x.k), ("v", x.v)):
        if tensor.ndim != 4:
            raise RankError(f"{name} has {tensor.ndim} dimensions, but needs 4 (batch, token, head, channel)")
    known = x.q.dtype in DTYPES or (exact and x.q.dtype == torch.float64)
    if not known or not x.q.dtype == x.k.dtype == x.v.dtype:
        raise DtypeError(
            f"q, k and v are {x.q.dtype}, {x.k.dtype}, {x.v.dtype}: pass all in one of float16, bfloat16, float32,"
            ' or in float64 with backend="reference"'
        )
    for name, tensor in zip(("k", "v", *OPTIONAL), (x.k, x.v, *x.optional), strict=True):
        if tensor is not None and tensor.device != x.q.device:
            raise DeviceError(f"{name} is on {tensor.device} but q is on {x.q.device}: pass {name}.to('{x.q.device}')")
    if x.beta is not None and x.weight is not None:
        raise UnsupportedOptionError("weight", "beside beta", "beta says how strongly a token writes")
    _check_shapes(x)
    _check_sequences(x)


def _check_shapes(x: Operands) -> None:
    batch, shared, tokens, key = x.q.shape
    heads = x.v.shape[1]
    if x.k.shape[0] != batch or x.v.shape[0] != batch:
        raise BatchError(f"q, k and v have batch sizes {batch}, {x.k.shape[0]}, {x.v.shape[0]}: they must agree")
    if x.k.shape[2] != tokens or x.v.shape[2] != tokens:
        raise KeyLengthError(f"q, k and v hold {tokens}, {x.k.shape[2]}, {x.v.shape[2]} tokens: they must agree")
    if x.k.shape[1] != shared or not shared or heads % shared:
        raise HeadCountError(
            f"q, k and v have {shared}, {x.k.shape[1]}, {heads} heads: those of q and k must agree, and those of v be a"
            " multiple of them; check that the order is batch, token, head, channel"
        )
    if x.k.shape[3] != key or not key or not x.v.shape[3]:
        raise HeadDimError(f"q, k and v have {key}, {x.k.shape[3]}, {x.v.shape[3]} channels: q and k must agree")
    for name, size, most in (("q", key, MAX_HEAD_DIM), ("v", x.v.shape[3], MAX_VALUE_CHANNELS)):
        if size > most:
            raise HeadDimLimitError(f"{name} has {size} channels, but at most {most} fit: use more heads")
    wanted = {"decay": (batch, heads, tokens), "beta": (batch, heads, tokens), "weight": (batch, heads, tokens)}
    for name, shape in wanted.items():
        tensor: Tensor | None = getattr(x, name)
        if tensor is None or tuple(tensor.shape) == shape or (name == "decay" and tensor.shape == (*shape, key)):
            continue
        own = (tensor.shape[0], *tensor.shape[1:3][::-1], *tensor.shape[3:])
        also = f" or {(batch, tokens, heads, key)}" if name == "decay" else ""
        raise StateShapeError(f"{name} has shape {own}, expected (batch, token, head) {(batch, tokens, heads)}{also}")


def check_values(x: Operands) -> None:
    """What only the numbers tell, which a device would have to be waited for."""
    if x.decay is not None and bool((x.decay > 0).any()):
        raise DecayError(
            f"decay is up to {x.decay.max().item():.3g}, but a log decay is at most 0: pass the logarithm of the factor of"
            " the state, as logsigmoid(gate) for a factor of sigmoid(gate)"
        )
    if x.bounds is not None:
        check_offsets("it", x.bounds)


def _check_sequences(x: Operands) -> None:
    sequences = x.q.shape[0]
    if x.bounds is not None:
        if x.bounds.ndim != 1 or not len(x.bounds) or x.bounds.dtype not in (torch.int32, torch.int64):
            raise SequenceBoundsError(f"it is {x.bounds.dtype} of shape {tuple(x.bounds.shape)}")
        if x.q.shape[0] != 1:
            raise SequenceBoundsError(f"the batch size is {x.q.shape[0]}, not 1")
        sequences = len(x.bounds) - 1
    state = (sequences, x.v.shape[1], x.q.shape[3], x.v.shape[3])
    if x.initial is not None and tuple(x.initial.shape) != state:
        raise StateShapeError(
            f"initial_state has shape {tuple(x.initial.shape)}, expected (sequence, head, key channel, value channel)"
            f" {state}"
        )


def build_recurrence(kind: Kind) -> ModuleOp:
    """`func.func @forward(q, k, v, scale, optional operands...)` with one `attn.recurrence`."""
    d = DYNAMIC_INDEX
    element = ELEMENT_TYPES[kind.dtype]
    keys, values = TensorType(element, [d, d, d, kind.key]), TensorType(element, [d, d, d, kind.value])
    wide = TensorType(f32, [d, d, d, kind.value])
    row, state = TensorType(f32, [d, d, d]), TensorType(f32, [d, d, kind.key, kind.value])
    types: dict[str, Attribute] = {"q": keys, "k": keys, "v": values, "scale": f32}
    decays = {"token": row, "channel": TensorType(f32, [d, d, d, kind.key])}
    optional: dict[str, Attribute | None] = {
        "decay": decays.get(kind.decay),
        "beta": row if kind.beta else None,
        "weight": row if kind.weight else None,
        "initial": state if kind.initial else None,
        "bounds": TensorType(i32, [d]) if kind.bounds else None,
    }
    types |= {name: type_ for name, type_ in optional.items() if type_ is not None}
    mods = kind.mods or TracedMods({}, (), ())
    types |= {f"input_{name}": type_ for name, type_ in zip(mods.names, mods.types, strict=True)}
    block = Block(arg_types=list(types.values()))
    named = dict(zip(types, block.args, strict=True))
    for name, argument in named.items():
        argument.name_hint = name
    op = attn.RecurrenceOp(
        operands=[
            *block.args[:4], *(named.get(name) for name in OPTIONAL),
            block.args[len(block.args) - len(mods.names) :],
        ],
        result_types=[wide if kind.wide else values, [state] if kind.final else []],
        regions=[[mods.regions[n].clone()] if n in mods.regions else [] for n in ("q", "k", "v", "decay")],
    )  # fmt: skip
    for result, name in zip(op.results, ("o", "final"), strict=False):
        result.name_hint = name
    block.add_ops([op, func.ReturnOp(*op.results)])
    return ModuleOp([func.FuncOp("forward", (list(types.values()), [r.type for r in op.results]), Region(block))])
