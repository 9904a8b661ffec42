"""Kernels touch nothing outside of captured tensors, tails of blocks among them: the interpreters check every access."""

from __future__ import annotations

import pytest

from tests.support.compare import check, qkv, randn
from tests.support.engines import ALL, SMALL


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("size", [1, 15, 33])
def test_b68_gradients_of_tables_that_end_with_the_keys(backend: str, size: int):
    """per_key[kv] has one element per key: its gradient is written by blocks of keys, and the last one has a tail."""
    make = lambda per_key, per_row: {"score_mod": lambda s, b, h, i, j: s * per_key[j] + s * per_row[i]}  # noqa: E731
    check(make, qkv(sq=size), {"per_key": randn(size), "per_row": randn(size, seed=1)}, backend, schedule=SMALL)


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("name", ["query_mod", "key_mod", "value_mod"])
def test_b68_tables_of_operand_functions(backend: str, name: str):
    """A table of positions and channels, neither of which fills a block."""
    table = randn(21, 12)

    def make():
        return {name: lambda x, b, h, position, channel: x * table[position, channel]}

    check(make, qkv(sq=21, d=12), backend=backend, schedule=SMALL)
