"""The demo, shortened: it succeeds as it stands, and fails where the compiler is made wrong."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from attn_engine.runtime import op
from examples.demo import __main__ as demo
from examples.demo.blocks import EMPTY, FULL, PARTIAL, kind_of, wrong_blocks
from examples.demo.model import Config

SMALL = Config(layers=1, heads=2, head_dim=16, context=128, window=48, batch=2)
Fault = Callable[[list[Tensor]], list[Tensor]]


def run(monkeypatch: pytest.MonkeyPatch, out: Path, fault: Fault | None = None) -> tuple[int, str]:
    """The exit code and the text of a demo of ten steps; `fault` changes what the backward op returns."""
    monkeypatch.setattr(demo, "Config", lambda: SMALL)
    if fault is not None:
        right = op.backward
        monkeypatch.setattr(op, "backward", lambda *arguments: fault(right(*arguments)))
    text = io.StringIO()
    code = demo.main(["--steps", "10", "--out", str(out), "--device", "cpu"], Console(file=text, width=120))
    return code, text.getvalue()


def test_succeeds_and_draws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    code, text = run(monkeypatch, tmp_path / "folder")
    assert code == 0, text
    assert (tmp_path / "folder" / "demo.png").read_bytes().startswith(b"\x89PNG")
    for expected in ("traced", "math.tanh", "attn.accumulate_grad", "tile.kernel @backward_dq", "def forward"):
        assert expected in text
    assert "FAILED" not in text


def negated_slopes(gradients: list[Tensor]) -> list[Tensor]:
    return [*gradients[:3], *(-g for g in gradients[3:])]


def no_slopes(gradients: list[Tensor]) -> list[Tensor]:
    return [*gradients[:3], *(torch.zeros_like(g) for g in gradients[3:])]


def negated_queries(gradients: list[Tensor]) -> list[Tensor]:
    return [-gradients[0], *gradients[1:]]


@pytest.mark.parametrize(
    ("fault", "claim"),
    [
        (negated_slopes, "FAILED the slopes trained to the same values"),
        (no_slopes, "FAILED the compiled slopes trained"),
        (negated_queries, "FAILED the two loss curves agree"),
    ],
)
def test_fails_on_wrong_gradients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: Fault, claim: str):
    code, text = run(monkeypatch, tmp_path / "demo.png", fault)
    assert code == 1
    assert claim in text


def test_kinds_of_blocks():
    ranges = [[8, 16, 24, 40]]
    assert [kind_of(k, k + 8, ranges) for k in (0, 8, 16, 24, 32, 40)] == [
        EMPTY,
        PARTIAL,
        FULL,
        PARTIAL,
        PARTIAL,
        EMPTY,
    ]


def test_wrong_blocks_are_counted():
    visible = torch.tensor([[True, False], [True, True]]).repeat_interleave(4, 0).repeat_interleave(4, 1)
    assert wrong_blocks(np.array([[FULL, EMPTY], [FULL, PARTIAL]]), visible, 4) == 0
    assert wrong_blocks(np.array([[EMPTY, FULL], [FULL, PARTIAL]]), visible, 4) == 2
