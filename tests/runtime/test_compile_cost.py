"""What it costs to prove, check and lower a softmax, in processor time, and that it is paid once."""

from __future__ import annotations

import time

import torch

import attn_engine
from attn_engine import library
from attn_engine.frontend.build import build
from attn_engine.frontend.definition import Definition
from attn_engine.frontend.online_check import check_online_func
from attn_engine.runtime import driver
from attn_engine.runtime.evaluator import check_definition, evaluate
from tests.frontend.test_online_check import Softmax
from tests.support.compare import leaf, qkv
from tests.support.engines import counted_compilations

LIMIT = 0.5
"""Seconds of one processor."""


def seconds(definition: Definition) -> float:
    """Of tracing, checks and proofs: everything before kernels."""
    start = time.process_time()
    traced = build(definition, dtype=torch.float32, head_dim=64, head_dim_v=64, return_lse=True)
    check_definition(definition)
    driver.to_attn(traced.module, ("q", "k", "v"))
    return time.process_time() - start


def test_proofs_of_a_softmax():
    seconds(Definition(row=library.softmax))
    assert min(seconds(Definition(row=library.softmax, mask_mod=library.causal)) for _ in range(3)) < LIMIT


def test_checks_of_an_online_softmax():
    seconds(Definition(row=library.softmax))
    online = Softmax()

    def check() -> float:
        start = time.process_time()
        check_online_func(online, evaluate)
        return time.process_time() - start

    assert min(check() for _ in range(3)) + seconds(Definition(row=online)) < LIMIT


def test_once():
    tensors = [leaf(t) for t in qkv(sq=40)]
    attend = attn_engine.compile(row=library.softmax)
    attend(*tensors)
    start = time.process_time()
    with counted_compilations() as count:
        attn_engine.attention(*tensors, row=library.softmax)
        attend(*tensors)
    assert count() == 0 and time.process_time() - start < LIMIT
