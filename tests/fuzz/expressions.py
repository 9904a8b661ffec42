"""Random expressions as Python source: on scores (floats), on positions (integers) and as conditions.

All float forms keep moderate arguments moderate and are smooth or have the kinks that torch has, so that a
comparison in float32 means something. No threshold is where multiples of a position are. {0}, {1} are float operands, {c} is a condition, {i} an integer.
"""

from __future__ import annotations

import random

# Captures by name: shape over b, h, q, k (sizes of the call) and r (always 8); bool, int or float values.
CAPTURES: dict[str, tuple[str, str]] = {
    "slopes": ("h", "float"),
    "temperature": ("", "float"),
    "shift": ("", "float"),
    "per_key": ("k", "float"),
    "per_row": ("bq", "float"),
    "bias": ("hqk", "float"),
    "dense": ("bhqk", "float"),
    "table": ("r", "float"),
    "buckets": ("hr", "float"),
    "lengths": ("b", "int"),
    "offset": ("", "int"),
    "docs_q": ("q", "int"),
    "docs_k": ("k", "int"),
    "seen": ("qk", "bool"),
    "seen_of_head": ("bhk", "bool"),
    "allowed": ("bhqk", "bool"),
}

LOADS = (
    "slopes[h]", "temperature", "shift", "per_key[kv]", "per_row[b, q]", "bias[h, q, kv]", "dense[b, h, q, kv]",
    "table[{i} % 8]", "table[-1 - {i} % 8]", "buckets[h, {i} % 8]",
)  # fmt: skip

UNARY = (
    "-{0}",
    "{0} * 0.5",
    "torch.tanh({0})",
    "torch.sin({0})",
    "torch.sin({0}) * 0.5",
    "torch.cos({0})",
    "torch.sigmoid({0})",
    "torch.erf({0})",
    "torch.erf({0} * 0.5)",
    "torch.relu({0})",
    "torch.nn.functional.silu({0})",
    "torch.nn.functional.gelu({0})",
    "torch.nn.functional.softplus({0})",
    "torch.nn.functional.elu({0})",
    "torch.abs({0})",
    "torch.exp(-torch.abs({0}))",
    "torch.exp2(-torch.abs({0}))",
    "torch.exp2(-torch.log2({0} * {0} + 1.5))",
    "torch.expm1(torch.tanh({0}))",
    "torch.log(torch.abs({0}) + 0.5)",
    "torch.log2({0} * {0} + 0.5)",
    "torch.log1p(torch.abs({0}))",
    "torch.sqrt({0} * {0} + 0.5)",
    "torch.rsqrt({0} * {0} + 0.5)",
    "(torch.abs({0}) + 0.5) ** 1.5",
    "torch.tanh({0}) ** 3",
    "torch.clamp({0}, -1.5, 1.5)",
    "4.0 * torch.tanh({0} / 4.0)",
    "torch.where({0} > 0.137, {0}, 0.25 * {0})",
    "torch.where(torch.isinf({0}) | torch.isnan({0}), 0.0, {0})",
    "1.0 / (1.0 + {0} * {0})",
    "2.0 - {0}",
)
# Steps, whose gradient is 0: they multiply a quantity that has one.
STEPS = (
    "torch.sign({0})",
    "torch.floor({0} * 1.9) + torch.floor({0} * 0.6)",
    "torch.ceil({0}) + torch.floor({0} * 0.7)",
    "torch.ceil({0} * 1.5)",
    "torch.round({0}) + torch.trunc({0} * 0.7)",
    "torch.trunc({0} * 1.5) - torch.round({0} * 0.4)",
    "({0} > 0.317).float()",
    "({0} <= temperature).float()",
    "torch.clamp({0}, -3.0, 3.0).int().float()",
)
BINARY = (
    "{0} + {1}",
    "{0} - {1}",
    "{0} * torch.tanh({1})",
    "torch.maximum({0}, {1})",
    "torch.minimum({0}, {1})",
    "torch.where({c}, {0}, {1})",
    "{0} / (1.0 + torch.abs({1}))",
    "(torch.abs({0}) + 0.5) ** torch.tanh({1})",
    "torch.logaddexp({0}, {1})",
    "torch.lerp({0}, {1}, 0.3)",
)
POSITIONS = (
    "q - kv",
    "kv - q",
    "q + 3",
    "kv // {m}",
    "kv // {m} - q // {n1}",
    "(q + kv) % {m}",
    "h * 3 + kv",
    "q * 2 - kv",
    "torch.abs(q - kv)",
    "torch.maximum(q, kv)",
    "torch.minimum(q, kv) + b",
    "(q ^ kv) & 7",
    "(q | kv) & {n1}",
    "kv >> 1",
    "(q << 1) - kv",
    "docs_k[kv]",
    "docs_q[q] - docs_k[kv]",
    "docs_k[kv // 2] + 1",
    "torch.where({c}, q, kv)",
    "({0} * 2.0).int()",
    "-kv // {m}",
    "(q - kv) // -{m}",
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
    "kv <= offset",
    "docs_q[q] == docs_k[kv]",
    "docs_k[kv] <= docs_q[q]",
    "kv < {n}",
    "(h % 2 == 0) | (q > kv)",
    "torch.abs(q - kv) <= {n}",
    "q * 2 >= kv + {n}",
    "kv // -{m} > -{n}",
    "seen[q, kv]",
    "seen_of_head[b, h, kv]",
    "allowed[b, h, q, kv]",
    "torch.maximum(q, kv) < {n} + 12",
    "torch.minimum(q - 3, kv) < {n}",
    "((q >> 2) ^ (kv >> 2)) < {n}",
    "(kv << 1) >= q - {n}",
    "(q & 7) >= (kv & 3)",
    "torch.where(kv > {n}, q > kv, kv > 2)",
)
LOGIC = (
    "({0}) & ({1})",
    "({0}) | ({1})",
    "({0}) | ({1})",
    "~({0})",
    "({0}) ^ ({1})",
    "torch.logical_and({0}, {1})",
    "torch.logical_not({0})",
    "torch.logical_or({0}, {1})",
)


class Expressions:
    """Draws expressions; what an atom may be depends on where the expression stands."""

    def __init__(self, rng: random.Random, kv: bool = True):
        self.rng = rng
        self.kv = kv

    def score(self, depth: int) -> str:
        """A float per query and key."""
        if depth == 0:
            return self.atom()
        kind = self.rng.random()
        if kind < 0.45:
            return "(" + self.rng.choice(UNARY).format(self.score(depth - 1)) + ")"
        if kind < 0.55:
            return f"({self.score(depth - 1)} + 0.3 * {self.rng.choice(STEPS).format(self.score(depth - 1))})"
        left, right = self.score(depth - 1), self.score(self.rng.randrange(depth))
        form = self.rng.choice(BINARY)
        return "(" + form.format(left, right, c=f"({self.condition(0)})" if "{c}" in form else "") + ")"

    def atom(self) -> str:
        kind = self.rng.random()
        if kind < 0.35:
            return "s"
        if kind < 0.85:
            return self.rng.choice(LOADS).format(i=f"({self.position()})")
        return f"(({self.position()}) % {self.rng.randint(3, 9)}) * 0.23"

    def position(self) -> str:
        form = self.rng.choice(POSITIONS)
        return form.format("s", m=self.rng.randint(2, 9), n1=self.rng.randint(1, 9), c=f"({self.simple_condition()})")

    def simple_condition(self) -> str:
        return self.rng.choice(CONDITIONS[:5]).format(n=self.rng.randint(0, 20), m=self.rng.randint(2, 9))

    def condition(self, depth: int) -> str:
        """A bool per query and key."""
        if depth == 0:
            return self.rng.choice(CONDITIONS).format(n=self.rng.randint(0, 20), m=self.rng.randint(2, 9))
        left, right = self.condition(depth - 1), self.condition(self.rng.randrange(depth))
        return self.rng.choice(LOGIC).format(left, right)
