"""The cases that every path must agree on: row functions, masks, captures, distances and lengths, in f32 and f16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from attn_engine import library
from tests.backends.test_differential import DEFINITIONS, Definition, S
from tests.backends.test_distances import SKV, SQ, relative, t5, twice, windowed
from tests.support.compare import qkv, randn

DTYPES = {"f32": torch.float32, "f16": torch.float16}
POSITIONS = torch.arange(S)


@dataclass(frozen=True)
class Case:
    """One definition on tensors of one kind: results, lse where there is one, and all gradients are compared."""

    name: str
    dtype: str
    definition: Definition

    @property
    def sizes(self) -> dict[str, int]:
        return {"h": 4, "hkv": 2, "sq": S, **self.definition.sizes}

    @property
    def is_wide(self) -> bool:
        """Whether its heads are of a size that kernels with asynchronous copies take."""
        return self.dtype == "f16" and self.sizes.get("d") == WIDE["d"]

    def tensors(self) -> list[Tensor]:
        return qkv(**self.sizes, dtype=DTYPES[self.dtype])

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype})"


def _near(b, h, q, kv):
    return (kv - q) <= h


def _by_table(table):
    return {"mask_mod": lambda b, h, q, kv: table[h, q // 8, kv // 8]}


def _keys_and_queries(of_query, of_key):
    return {"score_mod": lambda s, b, h, q, kv: s * torch.sigmoid(of_query[q]) + of_key[kv]}


def _everywhere(number, per_batch):
    return {"score_mod": lambda s, b, h, q, kv: s * (1 + number) + per_batch[b]}


def _gated(gate):
    return {"value_mod": lambda x, b, h, position, channel: x * torch.sigmoid(gate[h, channel])}


ROWS = {
    "row: temperature": Definition(
        lambda t: {"row": library.softmax_with_temperature(t)}, {"t": randn(4, seed=5).abs() + 0.5}
    ),
    "row: library sink": Definition(lambda t: {"row": library.softmax_with_sink(t)}, {"t": randn(4)}),
    "row: centred": Definition(lambda: {"row": library.softmax_centred}),
    "row: log-cosh": Definition(lambda: {"row": library.log_cosh_softmax}),
    "row: sigmoid of a length": Definition(lambda: {"row": library.sigmoid_of_length(S)}),
    "row: squared relu": Definition(lambda: {"row": library.squared_relu, "mask_mod": library.causal}),
    "row: relu by length": Definition(lambda: {"row": library.relu_by_length, "mask_mod": library.causal}),
    "row: identity": Definition(lambda: {"row": library.identity}),
    "row: 3-norm": Definition(lambda: {"row": library.p_norm(3.0)}),
    "row: softplus": Definition(lambda: {"row": library.softplus_normalised, "mask_mod": library.causal}),
}
MASKS = {
    "mask: or of two": Definition(
        lambda: {"mask_mod": library.or_masks(library.prefix_lm(5), library.sliding_window(7))}
    ),
    "mask: by head": Definition(lambda: {"mask_mod": _near}),
    "mask: table of blocks": Definition(_by_table, {"table": randn(4, 5, 5, seed=8) > -0.3}),
    "mask: nothing visible": Definition(lambda: {"mask_mod": lambda b, h, q, kv: (kv > 40) & (q >= 0)}),
}
CAPTURES = {
    "captures: per query and per key": Definition(
        _keys_and_queries, {"of_query": randn(S, seed=3), "of_key": randn(S, seed=4)}
    ),
    "captures: a number, and one per batch entry": Definition(
        _everywhere, {"number": randn(seed=3).abs(), "per_batch": randn(2, seed=4)}, {"b": 2}
    ),
    "captures: of value channels": Definition(_gated, {"gate": randn(2, 16, seed=3)}),
}
DISTANCES = {
    "distances: T5 buckets": Definition(t5, {"table": randn(4, 12)}),
    "distances: relative positions": Definition(relative, {"table": randn(4, SQ + SKV - 1)}, {"sq": SQ, "skv": SKV}),
    "distances: a factor, and a window": Definition(windowed, {"table": randn(1, SQ + SKV)}, {"sq": SQ, "skv": SKV}),
    "distances: two parts": Definition(twice, {"table": randn(4, 7), "slopes": randn(4).abs()}, {"sq": SQ, "skv": SKV}),
}
LENGTHS = {
    "one position": {"sq": 1},
    "whole blocks": {"sq": 64},
    "a block and one": {"sq": 33},
    "more keys": {"sq": 20, "skv": 70},
    "more queries": {"sq": 70, "skv": 20},
    "one query": {"sq": 1, "skv": 50},
}
WIDE = {"d": 64, "sq": 140, "h": 2, "hkv": 1}

_CAUSAL = Definition(lambda: {"mask_mod": library.causal})


def definitions() -> dict[str, Definition]:
    """All definitions by name, of every kind."""
    lengths = {f"length: {name}": replace(_CAUSAL, sizes=sizes) for name, sizes in LENGTHS.items()}
    wide = {
        "wide: causal": replace(_CAUSAL, sizes=WIDE),
        "wide: window": Definition(lambda: {"mask_mod": library.sliding_window(33)}, sizes=WIDE),
        "wide: soft cap": Definition(lambda: {"score_mod": library.soft_cap(3.0)}, sizes=WIDE),
        "wide: alibi": Definition(lambda t: {"score_mod": library.alibi(t)}, {"t": randn(2)}, sizes=WIDE),
        "wide: T5 buckets": Definition(t5, {"table": randn(2, 12)}, sizes=WIDE),
        "wide: window of distances": Definition(windowed, {"table": randn(1, 2 * WIDE["sq"])}, sizes=WIDE),
    }
    return {**DEFINITIONS, **ROWS, **MASKS, **CAPTURES, **DISTANCES, **lengths, **wide}


def cases() -> Iterator[Case]:
    """Every definition in both types."""
    for name, definition in definitions().items():
        for dtype in DTYPES:
            yield Case(name, dtype, definition)


def size_of(case: Case) -> int:
    """Scores of a case: about what it costs to interpret."""
    sizes = case.sizes
    return prod((sizes.get("b", 1), sizes["h"], sizes["sq"], sizes.get("skv", sizes["sq"])))
