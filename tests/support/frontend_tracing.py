"""Shared by the frontend tests: trace a definition, check that its text reads back, print single regions."""

from __future__ import annotations

import re

import torch
from xdsl.parser import Parser

from attn_engine.frontend import Definition, Traced, build
from attn_engine.universe import make_context


def trace(definition: Definition, **options: object) -> Traced:
    """Build for half precision and head dim 64; the module verifies and its text reads back to itself."""
    traced = build(definition, **({"dtype": torch.float16, "head_dim": 64, "head_dim_v": 64} | options))
    traced.module.verify()
    text = str(traced.module)
    assert str(Parser(make_context(), text).parse_module()) == text
    return traced


def region_ops(traced: Traced, name: str) -> list[str]:
    """The ops of one region as printed, one per line, values numbered from 0 and arguments by their bare names."""
    lines = [line.strip() for line in str(traced.module).splitlines()]
    start = next(i for i, line in enumerate(lines) if re.search(rf"\b{name} {{$", line))
    end = next(i for i in range(start, len(lines)) if lines[i].startswith("attn.yield"))
    ops = lines[start + 2 : end + 1]
    numbers: dict[str, str] = {}
    return [
        re.sub(r"%([A-Za-z]\w*?)(_\d+)?\b|%(\d+)", lambda m: _name(m, numbers), op).replace(" : i64", "").replace(", f32", "").replace(" : f32", "")
        for op in ops
    ]


def _name(match: re.Match[str], numbers: dict[str, str]) -> str:
    return f"%{match[1]}" if match[1] else numbers.setdefault(match[3], f"%{len(numbers)}")
