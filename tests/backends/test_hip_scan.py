"""Running sums on HIP, emulated, against the interpreter of the buffered level; and what the device's code has for them."""

from __future__ import annotations

import math

import pytest
import torch

from attn_engine.arch import get_arch
from attn_engine.backends.hip.build import emulate
from attn_engine.backends.hip.emit import emit
from attn_engine.backends.hip.predict import predict
from attn_engine.backends.hip.toolchain import inspect
from attn_engine.errors import UnsupportedOpError
from attn_engine.interpreters.tile_buffer import run_plan
from tests.support.hip import emulates, needs_clang, parse

SCAN = """
tile.kernel @k(%x: !tile.global<2 x f32>, %y: !tile.global<3 x f32>, %v: !tile.global<2 x f32>) attributes {threads = 256 : i64, explicit_barriers} {
  %s = tile.buffer_alloc layout #tile.mfma<INSTR, acc, WAVES> : !tile.buffer<64x128xf32, register>
  %t = tile.buffer_alloc layout #tile.mfma<INSTR, acc, WAVES> : !tile.buffer<64x128xf32, register>
  %row = tile.buffer_alloc layout #tile.sliced<1, #tile.mfma<INSTR, acc, WAVES>> : !tile.buffer<64xf32, register>
  %col = tile.buffer_alloc layout #tile.sliced<0, #tile.mfma<INSTR, acc, WAVES>> : !tile.buffer<128xf32, register>
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  tile.copy_in %x[%c0, %c0] dims [0, 1] into %s : !tile.global<2 x f32>, !tile.buffer<64x128xf32, register>
  tile.buffer_scan KIND %s, 0 REVERSE into %t : !tile.buffer<64x128xf32, register>, !tile.buffer<64x128xf32, register>
  tile.copy_out %t, %y[%c0, %c0, %c0] dims [1, 2] : !tile.buffer<64x128xf32, register>, !tile.global<3 x f32>
  tile.buffer_scan KIND %s, 1 REVERSE into %s : !tile.buffer<64x128xf32, register>, !tile.buffer<64x128xf32, register>
  tile.copy_out %s, %y[%c1, %c0, %c0] dims [1, 2] : !tile.buffer<64x128xf32, register>, !tile.global<3 x f32>
  tile.copy_in %x[%c0, %c1] dims [0] into %row : !tile.global<2 x f32>, !tile.buffer<64xf32, register>
  tile.buffer_scan KIND %row, 0 REVERSE into %row : !tile.buffer<64xf32, register>, !tile.buffer<64xf32, register>
  tile.copy_out %row, %v[%c0, %c0] dims [1] : !tile.buffer<64xf32, register>, !tile.global<2 x f32>
  tile.copy_in %x[%c1, %c0] dims [1] into %col : !tile.global<2 x f32>, !tile.buffer<128xf32, register>
  tile.buffer_scan KIND %col, 0 REVERSE into %col : !tile.buffer<128xf32, register>, !tile.buffer<128xf32, register>
  tile.copy_out %col, %v[%c1, %c0] dims [1] : !tile.buffer<128xf32, register>, !tile.global<2 x f32>
  tile.end
}
tile.plan @run(%x: !tile.global<2 x f32>, %y: !tile.global<3 x f32>, %v: !tile.global<2 x f32>) {
  %one = arith.constant 1 : i32
  tile.launch @k grid(%one) args(%x, %y, %v) : !tile.global<2 x f32>, !tile.global<3 x f32>, !tile.global<2 x f32>
  tile.end
}
"""


def scan(instruction: str, waves: str, kind: str, reverse: bool) -> str:
    names = {"INSTR": instruction, "WAVES": waves, "KIND": kind, "REVERSE": "reverse" if reverse else ""}
    text = SCAN
    for name, value in names.items():
        text = text.replace(name, value)
    return text


def results(text: str, x: torch.Tensor) -> list[list[torch.Tensor]]:
    """Of the emulation, and of the interpreter: scans of the tile along each axis, of its second column and row."""
    module = parse(text)
    both = [[torch.zeros(2, 64, 128), torch.zeros(2, 128)] for _ in range(2)]
    emulate(emit(module))["run"](x, *both[0])
    run_plan(module, "run", [x, *both[1]])
    return both


@emulates
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("instruction", "waves", "kind"),
    [("32x32x8", "1x4", "sum"), ("16x16x16", "2x2", "sum"), ("16x16x16", "4x1", "max"), ("32x32x16", "2x2", "min")],
)
def test_scans(instruction: str, waves: str, kind: str, reverse: bool):
    """Along lanes and along their runs, over several waves and over one, in place and not."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    got, want = results(scan(instruction, waves, kind, reverse), x)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert want[0][0, 5, 7] != want[0][1, 5, 7]


@emulates
def test_a_nan_stays_from_its_place_on():
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(4))
    x[9, 40] = math.nan
    got, want = results(scan("32x32x8", "1x4", "sum", False), x)
    assert torch.equal(got[0].isnan(), want[0].isnan())
    assert got[0][0, 9:, 40].isnan().all()
    assert not got[0][0, :9].isnan().any()


@pytest.mark.parametrize("element", ["i32", "f16"])
def test_of_what_lanes_do_not_pass_on(element: str):
    text = scan("32x32x8", "1x4", "sum", False)
    module = parse(text.replace("xf32, register", f"x{element}, register").replace("x f32>", f"x {element}>"))
    with pytest.raises(UnsupportedOpError, match=rf"tile\.buffer_scan on {element}: only on f32"):
        emit(module)


@needs_clang
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
def test_compiled(arch: str):
    """Neighbours come from the next lanes without LDS; what waves tell each other lies there, as predicted."""
    module = parse(scan("16x16x16", "2x2", "sum", False))
    (kernel,) = inspect(emit(module), arch).values()
    assert kernel.spills == 0
    assert kernel.shared == predict(module, get_arch(arch))["k"].shared
    assert all(f"row_shr:{step}" in kernel.machine for step in (1, 2, 4, 8))


NUMBER = """
tile.kernel @k(%x: !tile.global<1 x f32>, %y: !tile.global<1 x f32>, %n: i32) attributes {threads = 64 : i64, explicit_barriers} {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %one = arith.constant 1.0 : f32
  %zero = arith.constant 0.0 : f32
  %a, %b = scf.for %i = %c0 to %n step %c1 iter_args(%p = %one, %q = %zero) -> (f32, f32) : i32 {
    %e = tile.load %x[%i] dims [] : !tile.global<1 x f32> -> f32
    %r = arith.addf %p, %e : f32
    scf.yield %q, %r : f32, f32
  }
  tile.store %a, %y[%c0] dims [] : f32, !tile.global<1 x f32>
  tile.store %b, %y[%c1] dims [] : f32, !tile.global<1 x f32>
  tile.end
}
tile.plan @run(%x: !tile.global<1 x f32>, %y: !tile.global<1 x f32>, %n: i32) {
  %one = arith.constant 1 : i32
  tile.launch @k grid(%one) args(%x, %y, %n) : !tile.global<1 x f32>, !tile.global<1 x f32>, i32
  tile.end
}
"""


@emulates
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_numbers_that_a_loop_carries(steps: int):
    """They change places at once."""
    module = parse(NUMBER)
    x, got, want = torch.arange(1.0, 6.0), torch.zeros(2), torch.zeros(2)
    emulate(emit(module))["run"](x, got, steps)
    run_plan(module, "run", [x, want, steps])
    assert torch.equal(got, want)
