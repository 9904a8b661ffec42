"""Barriers that not all come to are found in CUDA source, and only those."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from xdsl.parser import Parser

from attn_engine.backends.tilelang.backend import BACKEND
from attn_engine.backends.tilelang.barriers import barriers_of_some
from attn_engine.backends.tilelang.build import build, load
from attn_engine.errors import EndlessKernelError
from attn_engine.universe import make_context

BRANCH = "if ((((int)threadIdx.x) >> 6) == 2) {\n"


def kernel(body: str, threads: int = 256) -> str:
    return f'extern "C" __global__ void __launch_bounds__({threads}, 1) k(float* x) {{\n{body}}}\n'


ROLES = """
  if (((int)threadIdx.x) < 128) {
    for (int i = 0; i < n; ++i) {
      x[i] = 0;
    }
  } else {
    tl::__sync_thread_partial(3, 128);
    BODY
  }
"""


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("__syncthreads();\n", ""),
        ("if (0 < n) {\n__syncthreads();\n}\n", ""),
        ("for (int i = 0; i < 3; ++i) {\n__syncthreads();\n}\n", ""),
        (f"{BRANCH}x[0] = 1;\n}}\n__syncthreads();\n", ""),
        (ROLES.replace("BODY", "tl::__sync_thread_partial(3, 128);"), ""),
        (f"{BRANCH}__syncthreads();\n}}\n", "waits for 256 threads where 64 threads come"),
        (f"{BRANCH}for (int i = 0; i < 8; ++i) {{\n__syncthreads();\n}}\n}}\n", "256 threads where 64 threads"),
        (ROLES.replace("BODY", f"{BRANCH}tl::__sync_thread_partial(3, 128);\n}}"), "128 threads where 64 threads"),
        ("if ((((int)threadIdx.x) < 8) && (((int)threadIdx.x) != 3)) {\n__syncthreads();\n}\n", "where 7 threads"),
        ("if ((5 < (int)threadIdx.x) && (threadIdx.x < 8)) {\n__syncthreads();\n}\n", "where 2 threads"),
        ("if ((n + ((int)threadIdx.x)) < 9) {\n__syncthreads();\n}\n", "where some threads come"),
    ],
)
def test_barriers(body: str, found: str):
    lost = barriers_of_some(kernel(body))
    assert len(lost) == bool(found) and all(found in text for text in lost)


@pytest.mark.parametrize("branch", ["", BRANCH])
def test_a_kernel_that_would_never_end_is_not_built(monkeypatch: pytest.MonkeyPatch, branch: str):
    """Also where the same text is built again."""
    tilelang = pytest.importorskip("tilelang")
    text = kernel(f"{branch}__syncthreads();\n" + "}\n" * bool(branch))
    made = SimpleNamespace(get_kernel_source=lambda: text)
    monkeypatch.setattr(tilelang, "compile", lambda program, compile_flags: made)
    source = BACKEND.emit(Parser(make_context(), "tile.kernel @k() {\n  tile.end\n}").parse_module())
    build(source)
    build(source)
    module: Any = load(source)
    if not branch:
        assert module.COMPILE(None) is made
        return
    with pytest.raises(EndlessKernelError, match=r"waits for 256 threads where 64 threads come.*another backend"):
        module.COMPILE(None)
