"""Random row functions: known ones, and programs of reductions and elementwise steps that nobody wrote before."""

from __future__ import annotations

import random

KNOWN = {
    "softmax": "e = torch.exp(s - s.amax())\n        return e / e.sum()",
    "softmax1": "m = torch.clamp(s.amax(), min=0.0)\n        e = torch.exp(s - m)\n        return e / (torch.exp(-m) + e.sum())",
    "sink": "m = torch.maximum(s.amax(), slopes[h])\n        e = torch.exp(s - m)\n        return e / (torch.exp(slopes[h] - m) + e.sum())",
    "sigmoid": "return torch.sigmoid(s)",
    "relu": "return torch.relu(s)",
    "square": "return s * s / (1.0 + (s * s).sum())",
    "retention": "return s / torch.clamp(torch.abs(s).sum(), min=1.0)",
    "cosine": "return s / torch.sqrt((s * s).sum() + 0.1)",
    "mean": "return torch.tanh(s) - torch.tanh(s).sum() / torch.ones_like(s).sum()",
    "scaled": "m = s.amax()\n        e = torch.exp(s - m)\n        return e / e.sum() * torch.sigmoid(m)",
    "spread": "return torch.sigmoid(s - s.amin())",
    "first of maxima": "return torch.sigmoid(s - s.max(dim=-1).values)",
    "two sums": "e = torch.exp(s - s.amax())\n        return e * torch.tanh(s) / (e.sum() + torch.abs(s).sum())",
    "centred": "x = s - s.mean()\n        e = torch.exp(x - x.amax())\n        return e / e.sum()",
    "softmax of tanh": "x = torch.tanh(s)\n        e = torch.exp(x)\n        return e / e.sum()",
    "temperature per key": "e = torch.exp((s - s.amax()) * torch.sigmoid(per_key[kv]))\n        return e / e.sum()",
    "sparse": "e = torch.exp(s - s.amax())\n        return torch.relu(e / e.sum() - 0.05)",
    "twice": "e = torch.exp(s - s.amax())\n        p = e / e.sum()\n        f = torch.exp(p - p.amax())\n        return f / f.sum()",
    "first of minima": "return torch.sigmoid(s - torch.min(s, -1)[0]) * 0.3",
    "three loops": "x = torch.tanh(s - s.mean())\n        return torch.sigmoid(x - x.mean())",
    "four loops": "x = torch.tanh(s - s.mean())\n        y = torch.tanh(x - x.mean())\n        return torch.sigmoid(y - y.max(dim=-1).values)",
    "normalised": "x = s - s.mean()\n        return x * torch.rsqrt((x * x).mean() + 0.1)",
}

_ELEMENT = (
    "torch.tanh({x})",
    "torch.sigmoid({x})",
    "torch.abs({x})",
    "{x} * 0.5",
    "torch.relu({x})",
    "torch.exp(-torch.abs({x}))",
    "torch.log1p({x} * {x})",
    "{x} + 0.1 * s",
    "{x} - slopes[h]",
    "{x} * torch.sigmoid(per_key[kv])",
    "torch.clamp({x}, -1.0, 1.0)",
    "1.0 / (1.0 + {x} * {x})",
)
_ROW = ("{x}.sum() / 8.0", "{x}.mean()", "{x}.amax()", "{x}.amin()", "torch.tanh({x}).sum() * 0.1", "({x} * {x}).mean()")  # fmt: skip
_BOTH = (
    "{x} - {r}",
    "torch.tanh({x} + {r})",
    "{x} * torch.sigmoid({r})",
    "{x} / (1.0 + torch.abs({r}))",
    "torch.maximum({x}, {r} * 0.5)",
    "torch.where({x} > 0.0, {x}, {r} * 0.1)",
    "torch.exp(torch.minimum({x} - {r}, temperature * 0.1))",
)


def program(rng: random.Random) -> str:
    """The body of a row function of a few steps: elementwise, a reduction, both together."""
    lines, elements, rows = list[str](), ["s"], list[str]()
    for n in range(rng.randint(1, 5)):
        x = elements[-1] if rng.random() < 0.7 else rng.choice(elements)
        kind = rng.random()
        if kind < 0.35 or (kind >= 0.7 and not rows):
            lines.append(f"r{n} = {rng.choice(_ROW).format(x=x)}")
            rows.append(f"r{n}")
        elif kind < 0.7:
            lines.append(f"x{n} = {rng.choice(_ELEMENT).format(x=x)}")
            elements.append(f"x{n}")
        else:
            lines.append(f"x{n} = {rng.choice(_BOTH).format(x=x, r=rng.choice(rows))}")
            elements.append(f"x{n}")
    if rows and elements[-1] == "s":
        lines.append(f"x = {rng.choice(_BOTH).format(x='s', r=rows[-1])}")
        elements.append("x")
    ends = (f"return {elements[-1]}", f"return {elements[-1]} / (1.0 + torch.abs({elements[-1]}).sum())")
    return "\n        ".join([*lines, rng.choice(ends)])


def row_function(rng: random.Random) -> tuple[str, str]:
    """A name and a body."""
    if rng.random() < 0.35:
        return "program", program(rng)
    name = rng.choice([*KNOWN, "softmax", "softmax"])
    return name, KNOWN[name]
