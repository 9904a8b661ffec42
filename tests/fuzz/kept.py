"""Cases that once failed, made small: each is the shortest definition that showed a fault of the compiler."""

from __future__ import annotations

from tests.fuzz.grammar import Case, captures_of

SIZES = {"b": 1, "h": 1, "hkv": 1, "sq": 7, "skv": 20, "d": 8, "dv": 4}

_KEPT: dict[str, tuple[dict[str, int], str]] = {
    # Keys that attain the maximum were found again by comparing scores, which other kernels round in another way.
    "gradient of a maximum, a table": (
        {"b": 2, "h": 2, "hkv": 2, "sq": 17, "skv": 17, "d": 8, "dv": 16},
        """
def make(per_row, table):
    def score_mod(s, b, h, q, kv):
        return s + per_row[b, q] / (1.0 + torch.abs(table[kv // 5 % 8]))

    def row(s, b, h, q):
        e = torch.exp(s - s.amax())
        return e * torch.tanh(s) / (e.sum() + torch.abs(s).sum())

    return {"score_mod": score_mod, "row": row}
""",
    ),
    "gradient of a maximum, a bias": (
        {"b": 2, "h": 2, "hkv": 2, "sq": 15, "skv": 16, "d": 16, "dv": 8},
        """
def make(temperature, per_key):
    def score_mod(s, b, h, q, kv):
        return s + per_key[kv] / (1.0 + torch.abs(temperature))

    def row(s, b, h, q):
        e = torch.exp(s - s.amax())
        return e * torch.tanh(s) / (e.sum() + torch.abs(s).sum())

    return {"score_mod": score_mod, "row": row}
""",
    ),
    # A step at the minimum of the row, which other kernels compute of scores that they round in their own way.
    "a step at the minimum": (
        {"b": 1, "h": 2, "hkv": 1, "sq": 17, "skv": 33, "d": 16, "dv": 8},
        """
def make():
    def row(s, b, h, q):
        return torch.where(s > s.amin(), torch.tanh(s), 3.0)

    return {"row": row}
""",
    ),
    # An output without a part in the scores.
    "a score of positions": (
        SIZES,
        """
def make():
    def score_mod(s, b, h, q, kv):
        return ((q - kv) % 7) * 0.23

    return {"score_mod": score_mod}
""",
    ),
    # Triton's interpreter could not tell whether a constant is a NaN.
    "unordered comparison with a constant": (
        SIZES,
        """
def make():
    def row(s, b, h, q):
        return s / (1.0 + torch.abs(s.amin()))

    return {"row": row}
""",
    ),
}


def kept() -> dict[str, Case]:
    """The cases by name."""
    return {
        name: Case(number, source.lstrip(), captures_of(source.split("\n", 2)[1]), name, sizes)
        for number, (name, (sizes, source)) in enumerate(_KEPT.items())
    }
