"""A small byte-level transformer whose attention is handed in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import attn_engine
from attn_engine.library import sliding_window

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
MakeAttend = Callable[[Tensor], Attend]
"""From the slopes of a layer to its attention."""

CAP = 20.0


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of a training step; the window is that of the attention."""

    layers: int = 2
    heads: int = 4
    head_dim: int = 16
    context: int = 512
    window: int = 128
    batch: int = 4

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


def compiled_attention(slopes: Tensor, window: int) -> attn_engine.Attention:
    """ALiBi with slopes that train, a sliding causal window and a tanh soft-cap: one score, one mask."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return CAP * torch.tanh(score / CAP) - slopes[h] * (q_idx - kv_idx)

    return attn_engine.compile(score_mod=score_mod, mask_mod=sliding_window(window))


def dense_attention(slopes: Tensor, window: int) -> Attend:
    """The same formula in plain torch, with the whole matrix of scores."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = CAP * torch.tanh(q @ k.mT * q.shape[-1] ** -0.5 / CAP)
        position = torch.arange(q.shape[2], device=q.device)
        distance = position[:, None] - position
        scores = scores - slopes[:, None, None] * distance
        visible = (distance >= 0) & (distance < window)
        return scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v

    return attend


class Block(nn.Module):
    """Attention and a perceptron, each on normalised input and added to it."""

    def __init__(self, config: Config, make_attend: MakeAttend):
        super().__init__()
        width, self.heads = config.width, config.heads
        self.slopes = nn.Parameter(2.0 ** -torch.arange(1, config.heads + 1, dtype=torch.float32))
        self.attend = make_attend(self.slopes)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ByteModel(nn.Module):
    """Logits of the next byte at each position."""

    def __init__(self, config: Config, make_attend: MakeAttend):
        super().__init__()
        self.embed = nn.Embedding(256, config.width)
        self.blocks = nn.ModuleList([Block(config, make_attend) for _ in range(config.layers)])
        self.norm, self.head = nn.LayerNorm(config.width), nn.Linear(config.width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def slopes(self) -> Tensor:
        """[layers, heads], a copy."""
        return torch.stack([block.slopes.detach().cpu().clone() for block in self.blocks])
