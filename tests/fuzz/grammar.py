"""Random definitions as Python source: what fails prints as code that runs.

A `Case` is the text of a module with `make(captures...)`, and the shapes of its inputs. Expressions stay of
moderate size whatever they are applied to, so that a comparison in float32 means something.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

# Captures by name: shape over b, h, q, k (sizes of the call), and whether the values are integers.
CAPTURES: dict[str, tuple[str, bool]] = {
    "slopes": ("h", False),
    "temperature": ("", False),
    "per_key": ("k", False),
    "per_row": ("bq", False),
    "bias": ("hqk", False),
    "table": ("r", False),
    "lengths": ("b", True),
    "docs_q": ("q", True),
    "docs_k": ("k", True),
}

SCORE_ATOMS = ("s", "s", "slopes[h]", "temperature", "per_key[kv]", "per_row[b, q]", "bias[h, q, kv]", "table[(q - kv) % 8]", "table[kv // 5 % 8]")  # fmt: skip
SCORE_UNARY = (
    "torch.tanh({0})",
    "{0} * 0.5",
    "-{0}",
    "torch.sin({0})",
    "torch.sigmoid({0})",
    "torch.relu({0})",
    "torch.abs({0})",
    "torch.exp(-torch.abs({0}))",
    "torch.log1p(torch.abs({0}))",
    "torch.sqrt({0} * {0} + 0.5)",
    "torch.clamp({0}, -1.5, 1.5)",
    "4.0 * torch.tanh({0} / 4.0)",
    "torch.where({0} > 0.1, {0}, 0.25 * {0})",
    "1.0 / (1.0 + {0} * {0})",
)
SCORE_BINARY = (
    "{0} + {1}",
    "{0} + {1}",
    "{0} - {1}",
    "{0} * torch.tanh({1})",
    "torch.maximum({0}, {1})",
    "torch.minimum({0}, {1})",
    "torch.where({2}, {0}, {1})",
    "{0} / (1.0 + torch.abs({1}))",
)
POSITIONS = (
    "(kv - q) * 0.1",
    "torch.abs(q - kv) * 0.05",
    "((q + 3) % 5) * 0.2",
    "(kv // 3 - q // 4) * 0.1",
    "(h + 1) * 0.3",
)

CONDITIONS = (
    "q >= kv",
    "kv - q < {n}",
    "q - kv < {n}",
    "(q - {n}) // {m} == (kv - {n}) // {m}",
    "(q + kv) % {m} == 0",
    "(kv - q) % {m} != 1",
    "kv < lengths[b]",
    "q < lengths[b] + {n}",
    "docs_q[q] == docs_k[kv]",
    "docs_k[kv] <= docs_q[q]",
    "kv < {n}",
    "(h % 2 == 0) | (q > kv)",
    "torch.abs(q - kv) <= {n}",
    "q * 2 >= kv + {n}",
    "kv // -{m} > -{n}",
)

ROWS = {
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
    "two sums": "e = torch.exp(s - s.amax())\n        return e * torch.tanh(s) / (e.sum() + torch.abs(s).sum())",
    "centred": "x = s - s.mean()\n        e = torch.exp(x - x.amax())\n        return e / e.sum()",
    "softmax of tanh": "x = torch.tanh(s)\n        e = torch.exp(x)\n        return e / e.sum()",
}


@dataclass(frozen=True)
class Case:
    """One definition and one call."""

    seed: int
    source: str
    captures: tuple[str, ...]
    row: str
    sizes: dict[str, int] = field(hash=False)

    def __str__(self) -> str:
        return f"# seed {self.seed}, {self.sizes}\n{self.source}"


def score(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(SCORE_ATOMS if rng.random() < 0.8 else POSITIONS)
    if rng.random() < 0.4:
        return "(" + rng.choice(SCORE_UNARY).format(score(rng, depth - 1)) + ")"
    two = score(rng, depth - 1), score(rng, rng.randrange(depth))
    return "(" + rng.choice(SCORE_BINARY).format(*two, f"({condition(rng, 0)})") + ")"


def condition(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(CONDITIONS).format(n=rng.randint(0, 20), m=rng.randint(2, 9))
    left, right = condition(rng, depth - 1), condition(rng, rng.randrange(depth))
    form = rng.choice(("({0}) & ({1})", "({0}) | ({1})", "({0}) | ({1})", "~({0})", "({0}) ^ ({1})"))
    return form.format(left, right)


def generate(seed: int) -> Case:
    rng = random.Random(seed)
    row = rng.choice([*ROWS, "softmax", "softmax"])
    parts = []
    if rng.random() < 0.75:
        # The score itself has a part in it, or nothing would reach q and k.
        expression = f"s + {score(rng, rng.randint(0, 3))}" if rng.random() < 0.7 else score(rng, rng.randint(1, 3))
        parts.append(("score_mod", "s, b, h, q, kv", f"return {expression}"))
    if rng.random() < 0.75:
        parts.append(("mask_mod", "b, h, q, kv", f"return {condition(rng, rng.randint(0, 2))}"))
    if row != "softmax" or rng.random() < 0.5:
        parts.append(("row", "s, b, h, q", ROWS[row]))
    if rng.random() < 0.15:
        parts.append(
            (
                rng.choice(("query_mod", "key_mod", "value_mod")),
                "x, b, h, position, channel",
                "return x * torch.sigmoid(x) + 0.01 * channel",
            )
        )
    text = " ".join(body for _, _, body in parts)
    captures = tuple(name for name in CAPTURES if f"{name}[" in text or (name == "temperature" and name in text))
    functions = "".join(f"    def {name}({arguments}):\n        {body}\n\n" for name, arguments, body in parts)
    table = ", ".join(f'"{name}": {name}' for name, _, _ in parts)
    source = f"def make({', '.join(captures)}):\n{functions}    return {{{table}}}\n"
    lengths = (1, 2, 7, 15, 16, 17, 31, 33, 40)
    hkv, group = rng.choice(((1, 1), (1, 2), (2, 1), (1, 3), (2, 2)))
    sizes = {
        "b": rng.choice((1, 1, 2)), "h": hkv * group, "hkv": hkv, "sq": rng.choice(lengths), "skv": rng.choice(lengths),
        "d": rng.choice((4, 8, 16)), "dv": rng.choice((4, 8, 16)),
    }  # fmt: skip
    return Case(seed, source, captures, row, sizes)
