"""The demo on a GPU: the same curves as plain torch there."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


def test_demo(tmp_path: Path):
    from rich.console import Console

    from examples.demo.__main__ import main

    text = io.StringIO()
    code = main(["--steps", "60", "--device", "cuda", "--out", str(tmp_path)], Console(file=text, width=120))
    assert code == 0, text.getvalue()
