"""Shared by the frontend tests: trace a definition, check that its text reads back, print single regions."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import torch
from xdsl.context import Context
from xdsl.parser import Parser

from attn_engine.dialects import attn
from attn_engine.frontend import Definition, Traced, build
from attn_engine.interpreters.scalar import run_region
from attn_engine.universe import make_context


@functools.cache
def _context() -> Context:
    return make_context()


def trace(definition: Definition, **options: object) -> Traced:
    """Build for half precision and head dim 64; the module verifies and its text reads back to itself."""
    traced = build(definition, **({"dtype": torch.float16, "head_dim": 64, "head_dim_v": 64} | options))
    traced.module.verify()
    text = str(traced.module)
    assert str(Parser(_context(), text).parse_module()) == text
    return traced


def region_ops(traced: Traced, name: str) -> list[str]:
    """The ops of one region as printed, one per line, values numbered from 0 and arguments by their bare names."""
    lines = [line.strip() for line in str(traced.module).splitlines()]
    start = next(i for i, line in enumerate(lines) if re.search(rf"\b{name} {{$", line))
    end = next(i for i in range(start, len(lines)) if lines[i].startswith("attn.yield"))
    ops = lines[start + 2 : end + 1]
    numbers: dict[str, str] = {}
    return [
        re.sub(r"%([A-Za-z]\w*?)(_\d+)?\b|%(\d+)", lambda m: _name(m, numbers), op)
        .replace(" : i64", "")
        .replace(", f32", "")
        .replace(" : f32", "")
        for op in ops
    ]


def _name(match: re.Match[str], numbers: dict[str, str]) -> str:
    return f"%{match[1]}" if match[1] else numbers.setdefault(match[3], f"%{len(numbers)}")


def attention_of(traced: Traced) -> attn.AttentionOp:
    return next(op for op in traced.module.walk() if isinstance(op, attn.AttentionOp))


def evaluate(function: Callable[..., object], *inputs: torch.Tensor, place: str = "score_mod") -> torch.Tensor:
    """What the traced function computes, element by element, by the oracle in fp64; differentiable."""
    traced = trace(Definition(**{"mask_mod" if place == "mask" else place: function}))
    block = getattr(attention_of(traced), place).block
    captures = [c.to(torch.float64) if c.is_floating_point() else c for c in traced.captures]
    zero = torch.zeros((), dtype=torch.int64)
    leading = len(block.args) - len(captures)
    arguments = [*inputs, *[zero] * (leading - len(inputs)), *captures]
    return run_region(block, arguments)[0]
