"""Arguments that other libraries refuse, or read in another way than a recurrence would take them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from attn_engine.compat import fla, mamba_ssm
from attn_engine.compat.attention_autotuner import RetNetAttnFunc
from attn_engine.errors import (
    ArgumentError,
    DtypeError,
    NotATensorError,
    RankError,
    StateShapeError,
    UnsupportedOptionError,
)
from attn_engine.library_recurrence import normalized_linear_attention

X = torch.randn(1, 10, 2, 8)
G = -torch.rand(1, 10, 2)
"""Of every token and head; as a decay it says something else than one of every channel."""
DT, A = torch.rand(1, 4, 4), -torch.rand(4)
M = torch.randn(1, 4, 4, 8)


@pytest.mark.parametrize(
    ("call", "error", "told"),
    [
        (lambda: fla.chunk_simple_gla(X, X, X, g=-X.abs()), StateShapeError, r"g has .*\(batch, token, head\)"),
        (lambda: fla.fused_chunk_simple_gla(X, X, X, g=-X.abs()), StateShapeError, "g has"),
        (lambda: fla.parallel_simple_gla(X, X, X, g=-X.abs()), StateShapeError, "g has"),
        (lambda: fla.chunk_simple_gla(X, X, X, g_gamma=G), StateShapeError, r"g_gamma has .*\(head\)"),
        (lambda: fla.chunk_gla(X, X, X, G), StateShapeError, r"g has .*head, key channel\)"),
        (lambda: fla.fused_recurrent_gla(X, X, X, G), StateShapeError, "gk has"),
        (lambda: fla.chunk_delta_rule(X, X, X, None), NotATensorError, "beta is a NoneType"),
        (lambda: fla.chunk_delta_rule(X, X, X, X), StateShapeError, "beta has"),
        (lambda: fla.chunk_gated_delta_rule(X, X, X, -X.abs(), G.exp()), StateShapeError, "g has"),
        (lambda: fla.fused_recurrent_gated_delta_rule(X, X, X, gk=G), StateShapeError, "gk has"),
        (lambda: fla.chunk_kda(X, X, X, G, G.exp()), StateShapeError, "g has"),
        (lambda: fla.chunk_kda(X, X, X, -X.abs(), None), NotATensorError, "beta is a NoneType"),
        (lambda: fla.chunk_retention(X[0], X, X), RankError, "q has 3"),
        (lambda: fla.chunk_retention(X, X, None), NotATensorError, "v is a NoneType"),
        (lambda: fla.chunk_linear_attn(X, X, X[0]), RankError, "v has 3"),
        (lambda: fla.chunk_linear_attn(X, X, X, initial_state=(1, 2, 3)), StateShapeError, "tuple of 3"),
        (lambda: fla.chunk_lightning_attn(X, X, X, 0, 0), ArgumentError, "num_layers is 0"),
        (lambda: mamba_ssm.mamba_chunk_scan_combined([1], DT, A, M, M, 8), NotATensorError, "x is a list"),
        (lambda: mamba_ssm.mamba_chunk_scan_combined(M[0], DT, A, M, M, 8), RankError, "x has 3"),
        (lambda: mamba_ssm.mamba_chunk_scan_combined(M, DT, A, M[0], M, 8), RankError, "B has 3"),
        (lambda: mamba_ssm.mamba_chunk_scan_combined(M, DT, A, M, M, 8, initial_states=M[0]), RankError, "initial_st"),
        (lambda: RetNetAttnFunc(X, X, X, None), NotATensorError, "mask is a NoneType"),
        (lambda: RetNetAttnFunc(X[0], X, X, X), RankError, "3 and 4 dimensions"),
        (lambda: normalized_linear_attention(X, X, X, output_final_state=True), UnsupportedOptionError, "returns it"),
    ],
)
def test_mistakes(call, error, told):
    with pytest.raises(error, match=told):
        call()


@pytest.mark.parametrize("function", [fla.chunk_gdn, fla.fused_recurrent_gdn, fla.chunk_kda, fla.fused_recurrent_kda])
@pytest.mark.parametrize(("name", "wrong"), [("A_log", torch.zeros(10, 1)), ("dt_bias", torch.zeros(3))])
def test_gates_are_made_of_as_many_numbers_as_there_are_heads(function, name, wrong):
    """What broadcasts would be a gate of something else: one per token, say."""
    channels = function in (fla.chunk_kda, fla.fused_recurrent_kda)
    right = {"A_log": torch.zeros(2), "dt_bias": torch.zeros(16 if channels else 2)}
    call = lambda **more: function(X, X, X, g=X if channels else G, beta=G.exp(), use_gate_in_kernel=True, **more)  # noqa: E731
    call(**right)
    with pytest.raises(StateShapeError, match=f"{name} has shape .* elements"):
        call(**right | {name: wrong})


def test_indices_of_states_are_integers():
    state, x, of_keys = torch.zeros(2, 3, 8), torch.zeros(1, 3), torch.zeros(1, 8)
    with pytest.raises(DtypeError, match=r"state_batch_indices is torch.float32: pass int32 or int64"):
        mamba_ssm.selective_state_update(
            state, x, x, -torch.rand(3, 8), of_keys, of_keys, state_batch_indices=torch.zeros(1)
        )
    with pytest.raises(RankError, match="x has 3 dimensions, but needs 2"):
        mamba_ssm.selective_state_update(state, x[None], x, -torch.rand(3, 8), of_keys, of_keys)


def test_a_normalized_result_may_be_left_in_float32():
    q, k, v = (F.elu(X.bfloat16()) + 1 for _ in range(3))
    wide = normalized_linear_attention(q, k, v, output_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.bfloat16(), normalized_linear_attention(q, k, v))
