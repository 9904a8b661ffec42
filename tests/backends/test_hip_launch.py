"""The launchers of a HIP library, called through C, with a runtime that only notes what it is told."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from attn_engine.backends.hip import build as build_module
from attn_engine.backends.hip import toolchain
from attn_engine.backends.hip.build import load_plans
from attn_engine.backends.hip.emit import emit
from attn_engine.errors import BackendError
from attn_engine.runtime import devices
from tests.support.hip import FORWARD, emulates, needs_clang, parse

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
def test_the_emulated_file_is_the_compiled_one(tmp_path: Path):
    """Of one text: no part of it is for one of them alone."""
    source, hashes = emit(parse(TEMPORARY)), set[str]()
    for name in ("device", "emulation"):
        (tmp_path / name).mkdir()
        if name == "device":
            toolchain.compile_object(source, "gfx90a", tmp_path / name)
        else:
            toolchain.compile_emulated(source, tmp_path / name)
        hashes.add(hashlib.sha256((tmp_path / name / "kernels.hip").read_bytes()).hexdigest())
    assert hashes == {hashlib.sha256(source.encode()).hexdigest()}
    assert "#if" not in source


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


AS_HIP_DECLARES = """
#define HIP_INCLUDE_HIP_HIP_RUNTIME_API_H
typedef enum hipError_t { hipSuccess } hipError_t;
typedef struct ihipStream_t *hipStream_t;
struct dim3 { unsigned x, y, z; constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {} };
extern "C" {
hipError_t hipLaunchKernel(const void *, dim3, dim3, void **, size_t, hipStream_t);
hipError_t hipMallocAsync(void **, size_t, hipStream_t);
hipError_t hipFreeAsync(void *, hipStream_t);
hipError_t __hipPopCallConfiguration(dim3 *, dim3 *, size_t *, hipStream_t *);
}
"""


@needs_clang
@pytest.mark.parametrize("declared", [False, True], ids=["alone", "after hip_runtime.h"])
@pytest.mark.parametrize("side", ["device", "host"])
def test_what_hipcc_adds_is_not_in_the_way(side: str, declared: bool, tmp_path: Path):
    """Its options, clang's own HIP headers in front of the text, and HIP's declarations where a file includes them."""
    (tmp_path / "kernels.hip").write_text(emit(parse(FORWARD.read_text())))
    (tmp_path / "hip_runtime.h").write_text(AS_HIP_DECLARES)
    first = ["-include", "__clang_hip_runtime_wrapper.h", *(["-include", str(tmp_path / "hip_runtime.h")] * declared)]
    options = [
        "-std=c++17",
        "-O1",
        "-x",
        "hip",
        "--offload-arch=gfx90a",
        f"--offload-{side}-only",
        "-nogpuinc",
        "-nogpulib",
    ]
    inline = ["-mllvm", "-amdgpu-early-inline-all=true", "-mllvm", "-amdgpu-function-calls=false", "-fsyntax-only"]
    command = [toolchain.clang(), *options, *inline, *first, f"-I{toolchain.INCLUDE}", str(tmp_path / "kernels.hip")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    old = subprocess.run([*command, "-std=c++14"], capture_output=True, text=True, check=False)
    assert "compile as C++17" in old.stderr


HIPCC = """#!/bin/sh
# Stands in for hipcc: notes how it is called, and makes a library with one plan.
echo "$@" > DIRECTORY/called
while [ $# -gt 1 ]; do shift; done
COMPILER -x c -shared -fPIC DIRECTORY/plan.c -o "$1"
"""
PLAN = """
const char attn_plans[] = "fill(tensor, f32)";
struct attn_tensor { float *data; const long *size, *stride; };
void *stream_seen;
int fill(const struct attn_tensor *x, float value, void *stream) {
  for (long i = 0; i < x->size[0]; ++i) x->data[i * x->stride[0]] = value;
  stream_seen = stream;
  return stream != (void *)88;
}
"""


class Stream:
    cuda_stream = 88


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runtime: ctypes.CDLL) -> Path:
    """A torch with ROCm, a device, a runtime library and hipcc, all of them pretended."""
    (tmp_path / "plan.c").write_text(PLAN)
    compiler = shutil.which("gcc") or toolchain.clang()
    (tmp_path / "hipcc").write_text(HIPCC.replace("DIRECTORY", str(tmp_path)).replace("COMPILER", compiler))
    (tmp_path / "hipcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.version, "hip", "6.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(devices, "arch_of", lambda device: "gfx942")
    monkeypatch.setattr(build_module, "find_library", lambda name: runtime._name if name == "amdhip64" else None)
    return tmp_path


def test_built_by_hipcc_and_launched_on_torchs_stream(rocm: Path):
    assert build_module.check().ok
    x = torch.zeros(6)[::2]
    build_module.build("// any text\n")["fill"](x, 2.5)
    assert torch.equal(x, torch.full((3,), 2.5))
    called = (rocm / "called").read_text()
    assert all(
        option in called for option in ("--offload-arch=gfx942", "-std=c++17", f"-I{toolchain.INCLUDE}", "-shared")
    )


def test_without_hipcc_clang_builds(rocm: Path, runtime: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(toolchain, "hipcc", lambda: None)
    q, k = torch.zeros(1, 1, 64, 64).half(), torch.zeros(1, 1, 65, 64).half()
    before = number(runtime, "fake_launches")
    build_module.build(emit(parse(FORWARD.read_text())))["forward_full"](q, k, k, q, torch.zeros(1, 1, 64), 0.125)
    assert number(runtime, "fake_launches") == before + 1
    assert ctypes.c_void_p.in_dll(runtime, "fake_stream").value == 88


@needs_clang
def test_without_rocm_a_build_stops_at_the_code_object():
    if build_module.check().ok:
        pytest.skip("ROCm is here")
    with pytest.raises(
        BackendError, match=r"stops at the code object here \(gfx942; copy_kernel: \d+ registers, .*\): no ROCm device"
    ):
        build_module.build(emit(parse(TEMPORARY)))


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
