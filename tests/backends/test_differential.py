"""Definitions of every kind on every backend: results and all gradients against eager torch in float64."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from attn_engine import library
from tests.support.compare import Make, check, qkv, randn
from tests.support.engines import ALL, SMALL

S = 37
IDS = torch.repeat_interleave(torch.arange(4), torch.tensor([3, 14, 1, 19]))


@dataclass(frozen=True)
class Definition:
    """Functions, captures, and sizes that differ from two query heads per key head."""

    make: Make
    captures: dict[str, Tensor] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)


def rotated(x, b, h, position, channel):
    return x * torch.cos(position * 0.1 + channel)


def distance(s, b, h, q, kv):
    return s - torch.abs(q - kv) * 0.05 * (h + 1)


def per_batch(lengths):
    return {"mask_mod": lambda b, h, q, kv: (kv < lengths[b]) & (q >= kv)}


def dilated(b, h, q, kv):
    return ((q - kv) % 3 == 0) & (q >= kv)


def sinks(sinks):
    def row(s, b, h):
        m = torch.maximum(s.amax(), sinks[h])
        e = torch.exp(s - m)
        return e / (e.sum() + torch.exp(sinks[h] - m))

    return {"row": lambda s, b, h, q: row(s, b, h)}


def two_level(gate, table):
    def score_mod(s, b, h, q, kv):
        biased = s * torch.sigmoid(gate[h]) + table[q // 8, kv // 8]
        return torch.where(q - kv > 20, 5.0 * torch.tanh(biased / 5.0), biased)

    return {"score_mod": score_mod, "mask_mod": library.or_masks(library.sliding_window(9), library.document(IDS))}


DEFINITIONS = {
    "plain": Definition(dict),
    "one head, wide values": Definition(dict, sizes={"h": 1, "hkv": 1, "d": 8, "dv": 24}),
    "causal": Definition(lambda: {"mask_mod": library.causal}),
    "causal from the end": Definition(
        lambda: {"mask_mod": library.causal_bottom_right(S, 20)}, sizes={"skv": 20}
    ),
    "window": Definition(lambda: {"mask_mod": library.sliding_window(5)}),
    "prefix": Definition(lambda: {"mask_mod": library.prefix_lm(11)}),
    "documents": Definition(lambda: {"mask_mod": library.and_masks(library.document(IDS), library.causal)}),
    "dilated": Definition(lambda: {"mask_mod": dilated}),
    "lengths": Definition(per_batch, {"lengths": torch.tensor([30, 0])}, {"b": 2}),
    "alibi": Definition(lambda slopes: {"score_mod": library.alibi(slopes)}, {"slopes": randn(4)}),
    "bias": Definition(lambda bias: {"score_mod": library.bias(bias)}, {"bias": randn(4, S, S)}),
    "broadcast bias": Definition(lambda bias: {"score_mod": library.bias(bias)}, {"bias": randn(1, 1, 1, S)}),
    "soft cap": Definition(lambda: {"score_mod": library.soft_cap(2.0), "mask_mod": library.causal}),
    "distance": Definition(lambda: {"score_mod": distance}),
    "two levels": Definition(two_level, {"gate": randn(4), "table": randn(5, 5)}),
    "operand functions": Definition(
        lambda: {"query_mod": rotated, "key_mod": rotated, "value_mod": lambda x: torch.tanh(x)}
    ),
    "sigmoid": Definition(lambda: {"row": library.sigmoid, "mask_mod": library.causal}),
    "relu": Definition(lambda: {"row": library.relu, "score_mod": distance}),
    "retention": Definition(lambda: {"row": library.retention, "mask_mod": library.causal}),
    "cosine": Definition(lambda: {"row": library.cosine}),
    "softmax and one": Definition(lambda: {"row": library.softmax1, "mask_mod": library.sliding_window(5)}),
    "sinks": Definition(sinks, {"sinks": randn(4)}),
}  # fmt: skip


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("name", DEFINITIONS)
def test_every_definition_on_every_backend(name: str, backend: str):
    definition = DEFINITIONS[name]
    tensors = qkv(**({"h": 4, "hkv": 2, "sq": S} | definition.sizes))
    check(definition.make, tensors, definition.captures, backend, schedule=SMALL)
