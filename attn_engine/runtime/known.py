"""What is known of a call of an attention besides its functions, so far as kernels follow from it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attn_engine.frontend.checks import Sizes, check_qkv
from attn_engine.ir.schedule import Length
from attn_engine.runtime.captures import CaptureRules
from attn_engine.runtime.decoding import Decoding
from attn_engine.runtime.driver import Compiled, Facts
from attn_engine.runtime.eager import Kind, keep
from attn_engine.runtime.layouts import in_blocks
from attn_engine.runtime.op import Call
from attn_engine.runtime.vectorize import needs_gradient

MOST_PARTS = 8
"""Batches whose gradients of a table that all share are stored one by one."""
MULTIPLES = (128, 64, 1)
"""Classes of lengths by what divides them: few, because each is a compilation of its own."""


class Known(NamedTuple):
    """What a call's values say of how it is compiled."""

    facts: Facts
    """In which `multiple` is the largest of `MULTIPLES`."""
    length: Length
    in_blocks: bool
    """Descriptors can be made of q, k and v."""
    tables_in_blocks: bool
    """And of captured tables."""
    decoding: Decoding


class Settled(NamedTuple):
    """What runs a kind of call."""

    compiled: Compiled
    group: int
    """So many query heads are rows of one head."""


def known_of(rules: CaptureRules, inputs: Call, sizes: Sizes, few: Decoding) -> Known:
    """Of a call with these inputs, in which `few` heads of a group are rows of q already."""
    q, k, v, captures, scale = inputs
    length = Length.of(max(sizes.q_len, sizes.kv_len))
    multiple = next(m for m in MULTIPLES if q.shape[2] % m == sizes.kv_len % m == 0)
    exact = torch.is_grad_enabled() and rules.exact(captures, sizes)
    few_batches = exact and sizes.batch <= MOST_PARTS
    facts = Facts(scale > 0, rules.covered(captures, sizes), exact, few_batches, multiple)
    # Kernels for few queries use no descriptors.
    blocks, tables = (not few.few and in_blocks(x) for x in ((q, k, v), rules.tables(captures)))
    return Known(facts, length, blocks, tables, few)


def wrt_of(q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor]) -> tuple[str, ...]:
    """What needs a gradient: "q", "k", "v" and capture positions; empty outside of autograd."""
    if not torch.is_grad_enabled():
        return ()
    operands = [name for name, tensor in (("q", q), ("k", k), ("v", v)) if needs_gradient(tensor)]
    return (*operands, *(str(n) for n, capture in enumerate(captures) if needs_gradient(capture)))


_SIZES: dict[object, Sizes] = {}


def checked_sizes(q: Tensor, k: Tensor, v: Tensor, exact: bool, kind: Kind | None) -> Sizes:
    """The sizes of a call, or the first thing wrong with its query, key and value; plain tensors are checked once a kind."""
    if kind is None:
        return check_qkv(q, k, v, exact)
    key = (kind, exact)
    return _SIZES.get(key) or keep(_SIZES, key, check_qkv(q, k, v, exact))
