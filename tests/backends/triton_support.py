"""Helpers of the Triton tests: IR text to source, and a kernel of one map of scalar code."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from xdsl.dialects.builtin import ModuleOp
from xdsl.parser import Parser

from attn_engine.backends.triton.emit import emit
from attn_engine.backends.triton.interpret import interpret
from attn_engine.backends.triton.legalize import TritonPassSizesPass
from attn_engine.passes.tile_expand_math import TileExpandMathPass
from attn_engine.universe import make_context


def parse(text: str) -> ModuleOp:
    module = Parser(make_context(), text).parse_module()
    module.verify()
    return module


def legal(module: ModuleOp) -> ModuleOp:
    """What the backend's pipeline makes of a module, in place."""
    TileExpandMathPass(keep=("math.erf",)).apply(make_context(), module)
    TritonPassSizesPass().apply(make_context(), module)
    module.verify()
    return module


def source_of(text: str) -> str:
    return emit(legal(parse(text)))


def run(text: str, plan: str, *arguments: Tensor | float) -> None:
    """The plan of an IR text, in Triton's interpreter."""
    interpret(source_of(text))[plan](*arguments)


def map_kernel(body: str, operands: Sequence[str], result: str, size: int = 64) -> str:
    """A kernel of one program that maps `size` elements: `body` yields from %a, %b, ...; types are element types."""
    names = "abcdef"[: len(operands)]
    pairs = list(zip(names, operands, strict=True))
    globals_ = ", ".join(f"%{n}g: !tile.global<1 x {t}>" for n, t in [*pairs, ("out", result)])
    loads = "\n".join(
        f"  %{n}t = tile.load %{n}g[%zero] dims [0] : !tile.global<1 x {t}> -> tensor<{size}x{t}>" for n, t in pairs
    )
    values, types = ", ".join(f"%{n}t" for n in names), ", ".join(f"tensor<{size}x{t}>" for _, t in pairs)
    block = ", ".join(f"%{n}: {t}" for n, t in pairs)
    actual = ", ".join(f"%{n}g" for n in [*names, "out"])
    kinds = ", ".join(f"!tile.global<1 x {t}>" for t in [*operands, result])
    return f"""
tile.kernel @kernel({globals_}) {{
  %zero = arith.constant 0 : i32
{loads}
  %r = tile.map ({values}) axes [{", ".join("[0]" for _ in pairs)}] : ({types}) -> tensor<{size}x{result}> {{
  ^bb0({block}):
{body}
  }}
  tile.store %r, %outg[%zero] dims [0] : tensor<{size}x{result}>, !tile.global<1 x {result}>
  tile.end
}}
tile.plan @plan({globals_}) {{
  %one = arith.constant 1 : i32
  tile.launch @kernel grid(%one) args({actual}) : {kinds}
  tile.end
}}
"""
