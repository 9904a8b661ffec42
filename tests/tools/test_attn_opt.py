"""`attn-opt`: every pass by name on IR text, and IR that does not verify."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from attn_engine.tools.attn_opt import AttnOpt
from attn_engine.universe import DIALECTS, PASSES

FOLDS = """
func.func @f() -> i64 {
  %a = arith.constant 2 : i64
  %b = arith.addi %a, %a : i64
  func.return %b : i64
}
"""


def run(file: Path, *arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    AttnOpt(args=[str(file), *arguments]).run()
    return capsys.readouterr().out


def test_registers_our_dialects_and_passes(tmp_path: Path):
    opt = AttnOpt(args=[])
    assert set(PASSES) <= set(opt.available_passes)
    assert set(DIALECTS) <= set(opt.ctx.registered_dialect_names)


def test_runs_a_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "a.mlir"
    file.write_text(FOLDS)
    assert "arith.addi" in run(file, capsys=capsys)
    folded = run(file, "-p", "attn-simplify", capsys=capsys)
    assert "arith.addi" not in folded
    assert "arith.constant 4" in folded


def test_a_failed_verification_is_exit_code_1(tmp_path: Path):
    file = tmp_path / "a.mlir"
    file.write_text("func.func @f(%a: f32) { %b = attn.load %a[] : f32 -> f32\n func.return }")
    done = subprocess.run(
        [sys.executable, "-m", "attn_engine.tools.attn_opt", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert done.stdout == ""
