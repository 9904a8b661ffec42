"""Packed sequences: each as if it were alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import attn_engine
from attn_engine.errors import NotATensorError, SequenceBoundsError, StateShapeError
from tests.recurrence.support import assert_near, exact, inputs, leaves, loss_weights, reference


def one_by_one(x, bounds, tokens):
    """The reference, sequence by sequence; tokens past the last bound give 0."""
    outputs, finals = [], []
    for n, (begin, end) in enumerate(pairwise(bounds)):
        begin, end = min(begin, tokens), min(end, tokens)
        part = {name: t[:, begin:end] for name, t in x.items() if name != "initial_state"}
        o, final = reference(**part, initial_state=x["initial_state"][n : n + 1])
        outputs.append(o)
        finals.append(final)
    rest = tokens - min(bounds[-1], tokens)
    return torch.cat([*outputs, x["v"].new_zeros(1, rest, *x["v"].shape[2:])], 1), torch.cat(finals)


@pytest.mark.parametrize(
    "bounds",
    [
        [0, 70, 135],
        [0, 0, 64, 64, 65, 190, 190],
        [0, 1, 2, 3, 130],
        [0, 70, 100],  # tokens past the end
        [0, 150],
        [0, 60, 400],  # a bound past the end
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_equals_one_by_one(bounds, dtype):
    tokens = 190 if bounds[-1] == 190 else 150 if bounds[-1] in (100, 150, 400) else bounds[-1]
    given = inputs(tokens, batch=1, sequences=len(bounds) - 1)
    got, want = leaves(given), exact(given)
    cu = torch.tensor(bounds, dtype=dtype)
    o, final = attn_engine.recurrence(**got, cu_seqlens=cu, output_final_state=True, backend="cpu")
    right_o, right_final = one_by_one(want, bounds, tokens)
    assert_near("o", o.detach(), right_o.detach())
    assert_near("final", final.detach(), right_final.detach())
    d_o, d_final = loss_weights(o, final)
    ((o * d_o).sum() + (final * d_final).sum()).backward()
    ((right_o * d_o).sum() + (right_final * d_final).sum()).backward()
    for name in given:
        assert_near(f"d_{name}", got[name].grad, want[name].grad)


def test_packed_equals_padded():
    lengths = [858 % 200, 839 % 200, 826 % 200, 851 % 200]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    given = {n: x for n, x in inputs(int(bounds[-1]), batch=1).items() if n != "initial_state"}
    o, final = attn_engine.recurrence(**given, cu_seqlens=bounds, output_final_state=True, backend="cpu")
    for n, (begin, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        # Padding neither decays nor writes.
        padded = {
            name: torch.nn.functional.pad(x[:, begin:end], (0, 0) * (x.ndim - 2) + (0, 200 - end + begin))
            for name, x in given.items()
        }
        alone, last = attn_engine.recurrence(**padded, output_final_state=True, backend="cpu")
        assert_near("o", o[:, begin:end], alone[:, : end - begin].double(), 1e-5)
        assert_near("final", final[n], last[0].double(), 1e-5)


def test_wrong_bounds():
    given = inputs(10, batch=1)
    for wrong in (torch.tensor([0.0, 10.0]), torch.tensor([[0, 10]]), torch.tensor([], dtype=torch.int32)):
        with pytest.raises(SequenceBoundsError, match="cu_seqlens"):
            attn_engine.recurrence(given["q"], given["k"], given["v"], cu_seqlens=wrong)
    with pytest.raises(SequenceBoundsError, match="batch size is 2"):
        x = inputs(10)
        attn_engine.recurrence(x["q"], x["k"], x["v"], cu_seqlens=torch.tensor([0, 10]))
    with pytest.raises(
        StateShapeError, match=r"initial_state has shape \(1, 4, 16, 24\), expected .* \(2, 4, 16, 24\)"
    ):
        attn_engine.recurrence(**given, cu_seqlens=torch.tensor([0, 4, 10]))
    with pytest.raises(NotATensorError, match="cu_seqlens is a list"):
        attn_engine.recurrence(given["q"], given["k"], given["v"], cu_seqlens=[0, 10])
