"""Building callables: files of source text, Triton's interpreter switch, and what is missing without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attn_engine.backends.source_module import source_path
from attn_engine.backends.triton.backend import BACKEND
from attn_engine.backends.triton.build import load
from tests.backends.triton_support import map_kernel, source_of

ROOT = Path(__file__).parent.parent.parent
DOUBLE = map_kernel("    %y = arith.addf %a, %a : f32\n    tile.yield %y : f32", ["f32"], "f32")

PROGRAM = """
import torch
from attn_engine.backends.triton.backend import BACKEND
from tests.backends.test_triton_build import DOUBLE
from tests.backends.triton_support import source_of
assert BACKEND.check().ok
x, y = torch.randn(64), torch.empty(64)
BACKEND.build(source_of(DOUBLE))["plan"](x, y)
assert torch.equal(y, x + x)
print("built")
"""


def test_the_same_text_is_one_module():
    source = source_of(DOUBLE)
    assert load(source) is load(source)
    assert source_path(source, "triton").read_text() == source
    assert load(source) is not load(source + "\n")


def test_a_spoiled_file_is_written_again():
    source = source_of(DOUBLE) + "# spoiled\n"
    source_path(source, "triton").write_text("raise SystemExit")
    assert source_path(source, "triton").read_text() == source


def test_the_interpreter_switch_of_triton():
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    result = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.stdout == "built\n", result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_the_reason_is_given():
    availability = BACKEND.check()
    assert not availability.ok and "GPU" in availability.reason


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here")
def test_a_plan_on_the_gpu():
    x, y = torch.randn(64, device="cuda"), torch.empty(64, device="cuda")
    BACKEND.build(source_of(DOUBLE))["plan"](x, y)
    assert torch.equal(y, x + x)
