"""Random definitions as Python source: what fails prints as code that runs.

A `Case` is the text of a module with `make(captures...)`, and the shapes of its inputs.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

from tests.fuzz.expressions import CAPTURES, Expressions
from tests.fuzz.rows import KNOWN, row_function

LENGTHS = (1, 2, 7, 15, 16, 17, 31, 33, 40)


@dataclass(frozen=True)
class Case:
    """One definition and one call."""

    seed: int
    source: str
    captures: tuple[str, ...]
    row: str
    sizes: dict[str, int] = field(hash=False)

    def __str__(self) -> str:
        return f"# seed {self.seed}, {self.row}, {self.sizes}\n{self.source}"

    @property
    def parts(self) -> int:
        """Into how many parts the forward pass splits the keys."""
        return (1, 1, 2, 3)[self.seed % 4]

    @property
    def has_lse(self) -> bool:
        """The lse is asked for, and in the loss, where the row function is the softmax that needs no name."""
        return "def row(" not in self.source


def captures_of(text: str) -> tuple[str, ...]:
    """The captures that some source reads."""
    return tuple(name for name in CAPTURES if re.search(rf"\b{name}\b", text))


def _parts(rng: random.Random) -> tuple[str, list[tuple[str, str, str]]]:
    """(name of the row function, (function, arguments, body)...)."""
    draw, parts = Expressions(rng), []
    if rng.random() < 0.85:
        # The score itself has a part in it, or nothing would reach q and k.
        free = rng.random() < 0.7
        expression = f"s + {draw.score(rng.randint(0, 3))}" if free else draw.score(rng.randint(1, 3))
        parts.append(("score_mod", "s, b, h, q, kv", f"return {expression}"))
    if rng.random() < 0.75:
        parts.append(("mask_mod", "b, h, q, kv", f"return {draw.condition(rng.randint(0, 2))}"))
    row, body = row_function(rng)
    if row != "softmax" or rng.random() < 0.5:
        keyed = "kv" in body
        parts.append(("row", "s, b, h, q, kv" if keyed else "s, b, h, q", body))
    if rng.random() < 0.2:
        mod = rng.choice(("query_mod", "key_mod", "value_mod"))
        parts.append((mod, "x, b, h, position, channel", "return x * torch.sigmoid(x) + 0.01 * channel"))
    return row, parts


def generate(seed: int) -> Case:
    rng = random.Random(seed)
    row, parts = _parts(rng)
    captures = captures_of(" ".join(body for _, _, body in parts))
    functions = "".join(f"    def {name}({arguments}):\n        {body}\n\n" for name, arguments, body in parts)
    table = ", ".join(f'"{name}": {name}' for name, _, _ in parts)
    source = f"def make({', '.join(captures)}):\n{functions}    return {{{table}}}\n"
    hkv, group = rng.choice(((1, 1), (1, 2), (2, 1), (1, 3), (2, 2)))
    sizes = {
        "b": rng.choice((1, 1, 2)), "h": hkv * group, "hkv": hkv, "sq": rng.choice(LENGTHS), "skv": rng.choice(LENGTHS),
        "d": rng.choice((4, 8, 16)), "dv": rng.choice((4, 8, 16)),
    }  # fmt: skip
    return Case(seed, source, captures, row, sizes)


def known_rows() -> tuple[str, ...]:
    return (*KNOWN, "program")
