"""What error to expect: torch with float32 scores, and weights rounded to the input's type.

`exact` and `rounded` give o, lse and all gradients of softmax(scale * q k^T + bias + slopes * distance, visible) v,
by the same formulas: in float64, and with the roundings of torch where the weights, and so their gradient, have
the type of the inputs, and where sum(p * dp) of a row is taken from the stored o, as in any backward that has no
matrix of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

DISTANCE = 0.01
NAMES = ("o", "lse", "dq", "dk", "dv", "dbias", "dslopes")
FLOAT32_NAMES = ("lse", "dbias", "dslopes")


@dataclass(frozen=True)
class Problem:
    """q, k, v of one dtype, [B, H, S, D]; bias [H, Sq, Skv] and slopes [H] in float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor
    slopes: Tensor
    visible: Tensor
    d_o: Tensor
    d_lse: Tensor

    @property
    def scale(self) -> float:
        return self.q.shape[3] ** -0.5


@dataclass(frozen=True)
class Weights:
    """What forward and backward share: o, p, its gradient, and sum(p * dp) - d_lse of each row."""

    o: Tensor
    lse: Tensor
    p: Tensor
    dp: Tensor
    delta: Tensor


def distances(p: Problem, real: torch.dtype) -> Tensor:
    sq, skv = p.visible.shape
    return DISTANCE * (torch.arange(skv) - torch.arange(sq)[:, None]).to(real)


def weights(p: Problem, real: torch.dtype, rounding: Callable[[Tensor], Tensor]) -> Weights:
    s = p.scale * (p.q.to(real) @ p.k.to(real).mT) + p.bias.to(real)
    s = s + p.slopes.to(real)[:, None, None] * distances(p, real)
    dead = ~p.visible.any(-1, keepdim=True)
    lse = torch.logsumexp(s.masked_fill(~p.visible, float("-inf")), -1, keepdim=True)
    weight = torch.where(p.visible, torch.exp(s - torch.where(dead, 0.0, lse)), 0.0)
    dp = rounding(p.d_o.to(real) @ p.v.to(real).mT)
    o = rounding(rounding(weight) @ p.v.to(real))
    delta = (o * p.d_o.to(real)).sum(-1, keepdim=True) - torch.where(dead, 0.0, p.d_lse.to(real)[..., None])
    return Weights(o, lse.squeeze(-1), weight, dp, delta)


def gradients(p: Problem, ds: Tensor, rounding: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Of what the scores are made of, from the gradient of the scores."""
    q, k = p.q.to(ds.dtype), p.k.to(ds.dtype)
    return {
        "dq": rounding(p.scale * (ds @ k)),
        "dk": rounding(p.scale * (ds.mT @ q)),
        "dbias": ds.sum(0),
        "dslopes": (ds * distances(p, ds.dtype)).sum((0, 2, 3)),
    }


def evaluate(p: Problem, real: torch.dtype, rounding: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """All results with arithmetic in `real`; `rounding` is to the type of the inputs."""
    w = weights(p, real, rounding)
    results = {
        "o": w.o,
        "lse": w.lse,
        "dv": rounding(rounding(w.p).mT @ p.d_o.to(real)),
        **gradients(p, w.p * (w.dp - w.delta), rounding),
    }
    return {name: value.double() for name, value in results.items()}


def terms(p: Problem) -> dict[str, Tensor]:
    """The size of what is subtracted in each gradient: with one key, dp and delta cancel and leave rounding alone."""
    w = weights(p, torch.float64, lambda t: t)
    sizes = replace(p, q=p.q.abs(), k=p.k.abs())
    return {name: t.abs() for name, t in gradients(sizes, w.p * (w.dp.abs() + w.delta.abs()), lambda t: t).items()}


def exact(p: Problem) -> dict[str, Tensor]:
    return evaluate(p, torch.float64, lambda t: t)


def rounded(p: Problem) -> dict[str, Tensor]:
    return evaluate(p, torch.float32, lambda t: t.to(p.q.dtype).float())


def rms(values: list[Tensor]) -> float:
    """Over all elements of all seeds that are finite; 0 if there is none."""
    flat = torch.cat([v.flatten() for v in values])
    flat = flat[flat.isfinite()]
    return flat.square().mean().sqrt().item() if flat.numel() else 0.0
