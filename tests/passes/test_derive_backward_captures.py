"""attn-derive-backward: gradients of captured tensors, wherever a function reads them, and of subsets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_engine.dialects import attn
from attn_engine.errors import UnsupportedGradientError
from tests.passes.test_derive_backward import every_third_row_sees_nothing, inputs, plain, softmax_one, with_lse
from tests.support.gradients import check_gradients, derive
from tests.support.scalar_builder import At, Value, attention

# (row, score_mod, shapes as names of axes) --------------------------------------------


def alibi(x: Value, at: At) -> Value:
    return x + at.c[0][at.h] * (at.kv - at.q).real()


def table(x: Value, at: At) -> Value:
    """A bias looked up by distance; negative indices count from the end, several elements share an entry."""
    return x + at.c[0][at.h, at.q - at.kv]


def gathered(x: Value, at: At) -> Value:
    return x + at.c[1][at.c[0][at.kv]]


def row_temperature(s: Value, at: At) -> Value:
    t = at.c[0][at.b, at.q].exp()
    scaled = s * t
    e = (scaled - scaled.max()).exp()
    return e / e.sum()


def temperature_of_differences(s: Value, at: At) -> Value:
    e = ((s - s.max()) * at.c[0][at.h]).exp()
    return e / e.sum()


def column_temperature(s: Value, at: At) -> Value:
    e = ((s - s.max()) * at.c[0][at.kv].exp()).exp()
    return e / e.sum()


def sink(s: Value, at: At) -> tuple[Value, Value]:
    x = at.c[0][at.h]
    m = s.max().maximum(x)
    e = (s - m).exp()
    total = e.sum() + (x - m).exp()
    return e / total, m + total.log()


def sink_in_a_row(s: Value, at: At) -> tuple[Value, Value]:
    """An output whose gradient belongs to the row alone, beside code in which a dead row would leave NaN."""
    return (s > 0.0).where(s, 0.0), s.sum() * at.c[0][at.h] + at.c[0][at.h] * at.c[0][at.h]


def weighted(s: Value, at: At) -> Value:
    e = (s - s.max()).exp() * at.c[0][at.kv].exp()
    return e / e.sum()


def two_uses(x: Value, at: At) -> Value:
    return x * at.c[0][at.h] + at.c[0][at.kv] * at.c[1][()]


CAPTURES: dict[str, tuple[Any, Any, Any]] = {
    "slopes": (plain, alibi, ["h"]),
    "dense bias": (with_lse, lambda x, at: x + at.c[0][at.b, at.h, at.q, at.kv], ["bhqk"]),
    "bias per row": (with_lse, lambda x, at: x + at.c[0][at.q] * x, ["q"]),
    "bias per column": (plain, lambda x, at: x * at.c[0][at.kv], ["k"]),
    "scalar": (softmax_one, lambda x, at: x * at.c[0][()], [""]),
    "lookup": (plain, table, ["hK"]),
    "gather": (plain, gathered, ["k#", "K"]),
    "trained cap": (plain, lambda x, at: (x / at.c[0][at.h]).tanh() * at.c[0][at.h], ["h"]),
    "two uses": (plain, two_uses, ["k", ""]),
    "row temperature": (row_temperature, None, ["bq"]),
    "temperature of differences": (temperature_of_differences, None, ["h"]),
    "column temperature": (column_temperature, None, ["k"]),
    "sink": (sink, None, ["h"]),
    "row gradient": (sink_in_a_row, None, ["h"]),
    "column weights": (weighted, None, ["k"]),
    "trained threshold": (lambda s, at: (plain(s, at) - at.c[0][at.h] * 0.1).maximum(0.0), None, ["h"]),
    "trained power": (lambda s, at: (s * s + 1.0) ** at.c[0][at.h], None, ["h"]),
    "normaliser": (lambda s, at: s / (s.abs().sum() + at.c[0][at.q].exp()), alibi, ["q"]),
}


def capture(shape: str, q: torch.Tensor, k: torch.Tensor, seed: int) -> torch.Tensor:
    """`b`, `h`, `q`, `k` as in the inputs, K as long as all distances; # holds indices into another K."""
    sizes = {"b": q.shape[0], "h": q.shape[1], "q": q.shape[2], "k": k.shape[2], "K": q.shape[2] + k.shape[2]}
    generator = torch.Generator().manual_seed(seed)
    dims = [sizes[axis] for axis in shape if axis != "#"]
    if "#" in shape:
        return torch.randint(0, sizes["K"], dims, generator=generator)
    return torch.randn(dims, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", CAPTURES)
def test_captures(name: str) -> None:
    row, score_mod, shapes = CAPTURES[name]
    q, k, v = inputs()
    captures = [capture(shape, q, k, seed) for seed, shape in enumerate(shapes)]
    if name == "normaliser":
        captures = [torch.rand(max(q.shape[1], q.shape[2]), dtype=torch.float64)]
    integers = [i for i, shape in enumerate(shapes) if "#" in shape]
    trained = [i for i in range(len(shapes)) if i not in integers]
    for mask in (None, every_third_row_sees_nothing):
        module = attention(row, score_mod, mask, [c.ndim for c in captures], integers)
        check_gradients(module, (q, k, v), captures, ["q", "k", "v", *trained])


@pytest.mark.parametrize("wrt", [["q"], ["k"], ["v"], ["q", "v"], [0], ["k", 1]])
def test_subsets(wrt: list[str | int]) -> None:
    """Only what is asked for is computed."""
    q, k, v = inputs()
    captures = [torch.rand(q.shape[1], dtype=torch.float64), torch.rand((), dtype=torch.float64)]

    def score_mod(x: Value, at: At) -> Value:
        return x * at.c[0][at.h] + at.c[1][()] * at.kv.real()

    _, backward = check_gradients(attention(with_lse, score_mod, captures=[1, 0]), (q, k, v), captures, wrt)
    assert {n for n in "qkv" if getattr(backward, f"d{n}") is not None} == {w for w in wrt if isinstance(w, str)}
    written = {op.capture.index for op in backward.walk() if isinstance(op, attn.AccumulateGradOp)}  # type: ignore[union-attr]
    assert len(written) == sum(isinstance(w, int) for w in wrt)


@pytest.mark.parametrize("wrt", [["q", "v", 0], [0]])
def test_captures_of_mods(wrt: list[str | int]) -> None:
    q, k, v = inputs()
    module = attention(plain, value_mod=lambda x, at: x * at.c[0][at.h], captures=[1])
    check_gradients(module, (q, k, v), [torch.rand(k.shape[1], dtype=torch.float64) + 0.5], wrt)


def test_unsupported() -> None:
    module = attention(plain, lambda x, at: x + at.c[0][at.h].real(), captures=[1], integers=[0])
    with pytest.raises(UnsupportedGradientError, match="capture 0"):
        derive(module, [0])
