"""Masks that whole blocks skip, against the same maps with their masks inside."""

from __future__ import annotations

import pytest
import torch
from xdsl.dialects import scf
from xdsl.parser import Parser

from attn_engine.backends.tilelang.guard import guard_masks
from attn_engine.dialects import tile
from attn_engine.interpreters import tile_buffer
from attn_engine.universe import make_context

TEXT = """
tile.kernel @k(%x: !tile.global<2 x f32>, %a: !tile.global<2 x f32>, %b: !tile.global<2 x f32>, %n: i32) attributes {threads = 128 : i64} {
  %s = tile.buffer_alloc : !tile.buffer<16x16xf32, register>
  %p = tile.buffer_alloc : !tile.buffer<16x16xf32, register>
  %e = tile.buffer_alloc : !tile.buffer<16x16xf32, register>
  %c0 = arith.constant 0 : i32
  tile.copy_in %x[%c0, %c0] dims [0, 1] into %s : !tile.global<2 x f32>, !tile.buffer<16x16xf32, register>
  tile.buffer_map (%s, %n) axes [[0, 1], []] into (%p, %e) : (!tile.buffer<16x16xf32, register>, i32) into (!tile.buffer<16x16xf32, register>, !tile.buffer<16x16xf32, register>) {
  ^bb0(%v: f32, %m: i32):
    %j = tile.index 1
    %c = arith.cmpi slt, %j, %m : i32
    %z = arith.constant 1.0 : f32
    %w = arith.select %c, %v, %z : f32
    SECOND
  }
  tile.copy_out %p, %a[%c0, %c0] dims [0, 1] : !tile.buffer<16x16xf32, register>, !tile.global<2 x f32>
  tile.copy_out %e, %b[%c0, %c0] dims [0, 1] : !tile.buffer<16x16xf32, register>, !tile.global<2 x f32>
  tile.end
}
tile.plan @run(%x: !tile.global<2 x f32>, %a: !tile.global<2 x f32>, %b: !tile.global<2 x f32>, %n: i32) {
  %one = arith.constant 1 : i32
  tile.launch @k grid(%one) args(%x, %a, %b, %n) : !tile.global<2 x f32>, !tile.global<2 x f32>, !tile.global<2 x f32>, i32
  tile.end
}
"""
PLAIN = "%d = arith.addf %v, %v : f32\n    tile.yield %w, %d : f32, f32"
FROM_MASKED = "%d = arith.addf %w, %w : f32\n    tile.yield %w, %d : f32, f32"
BOTH_MASKED = """%d = arith.addf %w, %w : f32
    %y = arith.select %c, %d, %z : f32
    tile.yield %w, %y : f32, f32"""


def run(text: str, visible: int, guarded: bool) -> tuple[list[torch.Tensor], int]:
    module = Parser(make_context(), text).parse_module()
    kernel = next(op for op in module.ops if isinstance(op, tile.KernelOp))
    if guarded:
        guard_masks(kernel.body.block)
        module.verify()
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    outputs = [torch.zeros(16, 16), torch.zeros(16, 16)]
    tile_buffer.run_plan(module, "run", [x, *outputs, visible])
    return outputs, sum(isinstance(op, scf.IfOp) for op in kernel.walk())


@pytest.mark.parametrize("visible", [0, 10, 16])
@pytest.mark.parametrize(("second", "branches"), [(PLAIN, 1), (FROM_MASKED, 0), (BOTH_MASKED, 1)])
def test_same_as_without_a_branch(second: str, branches: int, visible: int):
    """What is computed from a masked value needs it masked before."""
    text = TEXT.replace("SECOND", second)
    want, _ = run(text, visible, False)
    got, found = run(text, visible, True)
    assert found == branches
    torch.testing.assert_close(got, want, rtol=0, atol=0)
