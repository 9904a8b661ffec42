"""ALiBi with slopes that train, a sliding causal window and a tanh soft-cap: `attn-engine compile examples/alibi.py:alibi`."""

import torch

import attn_engine
from attn_engine.library import sliding_window

slopes = torch.nn.Parameter(2.0 ** -torch.arange(1, 9, dtype=torch.float32))


def score_mod(score, b, h, q_idx, kv_idx):
    """Soft-capped at 20, with a linear penalty on distance per head."""
    return 20 * torch.tanh(score / 20) + slopes[h] * (kv_idx - q_idx)


alibi = attn_engine.compile(score_mod=score_mod, mask_mod=sliding_window(1024))
