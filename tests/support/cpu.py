"""Programs of tile ops on the CPU backend against the tile interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.parser import Parser

from attn_engine.backends.backend import get_backend
from attn_engine.interpreters.tile import run_plan
from attn_engine.universe import PASSES, make_context

CPU = get_backend("cpu")


def parse(text: str) -> ModuleOp:
    module = Parser(make_context(), text).parse_module()
    module.verify()
    return module


def emit(module: ModuleOp) -> str:
    """Source text; the same after printing and parsing."""
    again = parse(str(module))
    source = CPU.emit(module)
    assert CPU.emit(again) == source
    return source


def legalized(text: str) -> ModuleOp:
    module = parse(text)
    PASSES["cpu-legalize"]()().apply(make_context(), module)
    return module


def check(
    text: str, arguments: Sequence[torch.Tensor | float], name: str = "plan", rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """Runs a plan on both and compares all tensors afterwards."""
    module = legalized(text)
    want = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    run_plan(parse(text), name, want)
    CPU.build(emit(module))[name](*arguments)
    for got, expected in zip(arguments, want, strict=True):
        if isinstance(got, torch.Tensor):
            torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, equal_nan=True)


def program(body: str, types: str, grid: tuple[int, int, int] = (2, 3, 2)) -> str:
    """A kernel over a grid: %i on axis 0, %h on axis 1 and %b on axis 2; and its plan."""
    names = ", ".join(part.split(":")[0] for part in types.split(", "))
    kinds = ", ".join(part.split(":")[1] for part in types.split(", "))
    return f"""
    tile.kernel @kernel({types}) {{
      %c0 = arith.constant 0 : i32
      %c1 = arith.constant 1 : i32
      %c4 = arith.constant 4 : i32
      %i = tile.program_id 0
      %h = tile.program_id 1
      %b = tile.program_id 2
      %i4 = arith.muli %i, %c4 : i32
      {body}
      tile.end
    }}
    tile.plan @plan({types}) {{
      %x_ = arith.constant {grid[0]} : i32
      %y_ = arith.constant {grid[1]} : i32
      %z_ = arith.constant {grid[2]} : i32
      tile.launch @kernel grid(%x_, %y_, %z_) args({names}) : {kinds}
      tile.end
    }}"""


G4 = "!tile.global<4 x f32>"
XY = f"%x: {G4}, %y: {G4}"
LOAD = f"%t = tile.load %x[%b, %h, %i4, %c0] dims [2, 3] : {G4} -> tensor<4x4xf32>"
STORE = f"tile.store %r, %y[%b, %h, %i4, %c0] dims [2, 3] : tensor<4x4xf32>, {G4}"


def xy(rows: int = 8) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, rows, 4), torch.full((2, 3, rows, 4), 7.0)]
