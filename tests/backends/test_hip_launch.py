"""The launchers of a HIP library, called through C, with a runtime that only notes what it is told."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from attn_engine.backends.hip import toolchain
from attn_engine.backends.hip.build import load_plans
from attn_engine.backends.hip.emit import emit
from attn_engine.errors import BackendError
from tests.support.hip import FORWARD, emulates, parse

RUNTIME = Path(__file__).parent.parent / "support" / "fake_hip_runtime.c"

TEMPORARY = """
tile.kernel @copy(%x: !tile.global<2 x f32>, %y: !tile.global<2 x f32>, %a: i32, %b: i32, %c: i32, %d: i32, %e: i32, %f: i32, %g: i32, %s: f32) attributes {threads = 64 : i64, explicit_barriers} {
  %v = tile.buffer_alloc : !tile.buffer<4x8xf32, shared>
  %c0 = arith.constant 0 : i32
  tile.copy_in %x[%c0, %c0] dims [0, 1] into %v : !tile.global<2 x f32>, !tile.buffer<4x8xf32, shared>
  tile.barrier
  tile.copy_out %v, %y[%c0, %c0] dims [0, 1] : !tile.buffer<4x8xf32, shared>, !tile.global<2 x f32>
  tile.end
}
tile.plan @twice(%x: !tile.global<2 x f32>, %y: !tile.global<2 x f32>, %n: i32, %s: f32) {
  %zero = arith.constant 1.5 : f32
  %one = arith.constant 1 : i32
  %a = tile.dim %x, 0 : !tile.global<2 x f32>
  %b = tile.dim %x, 1 : !tile.global<2 x f32>
  %t = tile.alloc(%a, %b) : !tile.global<2 x f32>
  tile.fill %t, %zero : !tile.global<2 x f32>, f32
  tile.launch @copy grid(%one) args(%t, %y, %a, %a, %a, %a, %a, %a, %a, %s) : !tile.global<2 x f32>, !tile.global<2 x f32>, i32, i32, i32, i32, i32, i32, i32, f32
  tile.launch @copy grid(%n) args(%x, %y, %a, %a, %a, %a, %a, %a, %a, %s) : !tile.global<2 x f32>, !tile.global<2 x f32>, i32, i32, i32, i32, i32, i32, i32, f32
  tile.end
}
"""


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if not toolchain.has_clang():
        pytest.skip("no clang++-19 here; apt-get install clang-19 llvm-19 lld-19")
    target = tmp_path_factory.mktemp("runtime") / "libamdhip64.so"
    compiler = shutil.which("gcc") or toolchain.clang()
    subprocess.run([compiler, "-w", "-shared", "-fPIC", str(RUNTIME), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target), mode=ctypes.RTLD_GLOBAL)


def number(runtime: ctypes.CDLL, name: str) -> int:
    return ctypes.c_int.in_dll(runtime, name).value


def test_a_launch(runtime: ctypes.CDLL, tmp_path: Path):
    library = toolchain.compile_library(emit(parse(FORWARD.read_text())), "gfx942", tmp_path)
    plans = load_plans(library, lambda: 77)
    assert set(plans) == {"forward_full", "forward_causal"}
    q, k = torch.zeros(2, 4, 130, 64).half(), torch.zeros(2, 2, 65, 64).half()
    before = number(runtime, "fake_launches")
    plans["forward_causal"](q, k, k, q, torch.zeros(2, 4, 130), 0.125)
    assert number(runtime, "fake_launches") == before + 1
    assert list((ctypes.c_uint * 3).in_dll(runtime, "fake_grid")) == [2, 4, 2]
    assert ctypes.c_uint.in_dll(runtime, "fake_threads").value == 256
    assert ctypes.c_float.in_dll(runtime, "fake_last_float").value == 0.125
    assert ctypes.c_void_p.in_dll(runtime, "fake_stream").value == 77
    plans["forward_full"](q[:, :, :0], k, k, q, torch.zeros(2, 4, 0), 0.125)
    assert number(runtime, "fake_launches") == before + 1, "an empty grid launches nothing"


def test_temporaries_are_given_back(runtime: ctypes.CDLL, tmp_path: Path):
    library = toolchain.compile_library(emit(parse(TEMPORARY)), "gfx90a", tmp_path)
    before = number(runtime, "fake_launches")
    load_plans(library, lambda: None)["twice"](torch.zeros(4, 8), torch.zeros(4, 8), 3, 2.0)
    assert number(runtime, "fake_launches") == before + 3, "a fill and two kernels"
    assert number(runtime, "fake_live") == 0


@emulates
def test_temporaries_and_fills_emulated():
    from attn_engine.backends.hip.build import emulate

    plans = emulate(emit(parse(TEMPORARY)))
    x, y = torch.randn(4, 8), torch.zeros(8, 4).T
    plans["twice"](x, y, 0, 2.0)
    assert torch.equal(y, torch.full((4, 8), 1.5))
    plans["twice"](x, y, 1, 2.0)
    assert torch.equal(y, x)


@emulates
def test_a_barrier_that_some_threads_miss_is_an_error():
    """The emulation says what a device would hang on."""
    from attn_engine.backends.hip.build import emulate

    source = emit(parse(TEMPORARY)).replace("attn::barrier();", "if (attn::thread() < 32) attn::barrier();")
    with pytest.raises(BackendError, match="lanes of one wave part: at a barrier and at the end"):
        emulate(source)["twice"](torch.zeros(4, 8), torch.zeros(4, 8), 1, 2.0)


@emulates
def test_an_index_outside_of_a_tile_is_an_error():
    from attn_engine.backends.hip.build import emulate

    source = emit(parse(TEMPORARY)).replace("attn::barrier();", "v.set(4, 0, 1.0f);")
    with pytest.raises(BackendError, match=r"outside of a tile in LDS \(program 0,0,0 thread 0\)"):
        emulate(source)["twice"](torch.zeros(4, 8), torch.zeros(4, 8), 1, 2.0)


CALLER = """
#include <attn_tensor.h>
#include <stdio.h>

int forward_full(const attn_tensor *q, const attn_tensor *k, const attn_tensor *v, const attn_tensor *o,
                 const attn_tensor *lse, float scale, void *stream);

int main(void) {
  static _Float16 q[2 * 70 * 64], k[33 * 64], v[33 * 64], o[2 * 70 * 64];
  static float lse[2 * 70];
  const int64_t heads[] = {1, 2, 70, 64}, head_strides[] = {2 * 70 * 64, 70 * 64, 64, 1};
  const int64_t keys[] = {1, 1, 33, 64}, key_strides[] = {33 * 64, 33 * 64, 64, 1};
  const int64_t rows[] = {1, 2, 70}, row_strides[] = {140, 70, 1};
  for (int i = 0; i < 33 * 64; ++i) v[i] = 0.5f + i % 64;
  attn_tensor a = {q, heads, head_strides}, b = {k, keys, key_strides}, c = {v, keys, key_strides};
  attn_tensor d = {o, heads, head_strides}, e = {lse, rows, row_strides};
  int status = forward_full(&a, &b, &c, &d, &e, 0.125f, 0);
  printf("%d %.1f %.1f %.4f\\n", status, (double)o[0], (double)o[2 * 70 * 64 - 1], lse[139]);
  return status;
}
"""


@emulates
def test_a_caller_in_c(tmp_path: Path):
    """Without Python: all keys are alike, so that the output is their value, and lse the logarithm of how many there are."""
    library = toolchain.compile_emulated(emit(parse(FORWARD.read_text())), tmp_path)
    (tmp_path / "caller.c").write_text(CALLER)
    program = tmp_path / "caller"
    options = [
        "-x",
        "c",
        "-std=gnu11",
        f"-I{toolchain.INCLUDE}",
        str(tmp_path / "caller.c"),
        "-x",
        "none",
        str(library),
    ]
    subprocess.run([toolchain.clang(), *options, f"-Wl,-rpath,{tmp_path}", "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=True)
    assert done.stdout == "0 0.5 63.5 3.4965\n"
