"""The backend that a measurement chose is kept in the tuner's file, and taken from there without measuring again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from attn_engine import AttentionEngine, errors, meta_tensor
from attn_engine.runtime import attention
from attn_engine.runtime.devices import target_of
from tests.runtime.attention_support import causal, dense, qkv, triangle
from tests.support.engines import ORACLE

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention may run on the CPU backend or in the interpreter; schedules are not searched."""
    targets = (target_of(CPU, ORACLE), target_of(CPU, "cpu"))
    monkeypatch.setattr(attention, "choose", lambda *_: targets)
    monkeypatch.setattr("attn_engine.runtime.tune.search", lambda default, *_: default)


class Clock:
    """Times of the plans in the order in which they are measured: forward and backward of each backend."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *seconds: float):
        self.left = list(seconds)
        monkeypatch.setattr(attention, "seconds_of", self.take)

    def take(self, call, device) -> float:
        call()
        return self.left.pop(0)


def engine(file: Path, tune: bool = True) -> AttentionEngine:
    meta = [meta_tensor(2, 2, 20, 8, dtype=torch.float32)] * 3
    scaled = {"score_mod": lambda s, b, h, i, j: s * 8**-0.5, "mask_mod": causal}
    return AttentionEngine(meta, **scaled, tune=tune, tune_file=str(file), layout="bhsd")


def results(made: AttentionEngine) -> list[torch.Tensor]:
    q, k, v = qkv()
    o = made(q, k, v)
    return [o.detach(), *torch.autograd.grad(o.square().sum(), (q, k, v))]


def taken(made: AttentionEngine) -> str:
    (line,) = [line for line in made.attention.choices() if line.startswith("taken")]
    return line


@pytest.mark.parametrize(
    ("seconds", "names"),
    [
        ((1.0, 2.0, 3.0, 4.0), (ORACLE, "")),
        ((3.0, 4.0, 1.0, 2.0), ("cpu", "")),
        ((1.0, 2.0, 3.0, 1.0), (ORACLE, "cpu")),
    ],
)
def test_a_choice_is_measured_once_and_kept(tmp_path, monkeypatch, seconds, names):
    """Also by an engine that only reads the file, and where forward and gradients are of two backends."""
    file = tmp_path / "tune.json"
    clock = Clock(monkeypatch, *seconds)
    first = results(engine(file))
    assert not clock.left
    q, k, v = qkv()
    torch.testing.assert_close(first[0].double(), dense(q, k, v, mask=triangle(20, 20)), rtol=1e-5, atol=1e-5)
    (entry,) = [entry for key, entry in json.loads(file.read_text()).items() if "/ways/" in key]
    assert (entry["backend"], entry["gradients"]) == names
    for tune in (True, False):
        again = engine(file, tune)
        for one, other in zip(results(again), first, strict=True):
            torch.testing.assert_close(one, other)
        assert taken(again).startswith(f"taken: {names[0]},") and f"measured before, in {file}" in taken(again)
        assert (f"gradients by {names[1]}" in taken(again)) == bool(names[1])


def test_another_question_is_measured_anew(tmp_path, monkeypatch):
    """Here one without gradients: its choice is an entry of its own."""
    file = tmp_path / "tune.json"
    Clock(monkeypatch, 1.0, 2.0, 3.0, 4.0)
    results(engine(file))
    clock = Clock(monkeypatch, 2.0, 1.0)
    made = engine(file)
    with torch.no_grad():
        made(*qkv())
    assert not clock.left and taken(made).startswith("taken: cpu,")


def test_without_an_entry_nothing_is_measured_unless_asked(tmp_path, monkeypatch):
    clock = Clock(monkeypatch, 1.0)
    made = engine(tmp_path / "tune.json", tune=False)
    results(made)
    assert clock.left and taken(made).startswith(f"taken: {ORACLE},") and not list(tmp_path.iterdir())


def test_a_backend_that_there_is_not(tmp_path, monkeypatch):
    file = tmp_path / "tune.json"
    Clock(monkeypatch, 1.0, 2.0, 3.0, 4.0)
    results(engine(file))
    file.write_text(file.read_text().replace(f'"{ORACLE}"', '"cuda"'))
    with pytest.raises(errors.TuneFileError, match="has no schedule at"):
        results(engine(file))
