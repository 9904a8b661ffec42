"""Tuning measures, keeps what is fastest, and reads it again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attn_engine import AttentionEngine, errors, meta_tensor
from attn_engine.ir.schedule import Heads, KernelSchedule, Kind, Schedule
from attn_engine.runtime import tune
from attn_engine.runtime.devices import Target
from attn_engine.runtime.schedules import CPU
from tests.runtime.attention_support import Compilations, causal, dense, qkv, triangle

HEADS = Heads(64, 64, "bf16")
GPU = Schedule(*(KernelSchedule(64, 64, 4, 2) for _ in Kind))


def engine(file: str = "", measure: bool = True) -> AttentionEngine:
    meta = [meta_tensor(2, 2, 20, 8, dtype=torch.float32)] * 3
    return AttentionEngine(
        meta,
        score_mod=lambda s, b, h, i, j: s * 8**-0.5,
        mask_mod=causal,
        tune=measure,
        tune_file=file,
        layout="bhsd",
        backend="cpu",
    )


def schedules_of(engine: AttentionEngine) -> set[tuple[int, ...]]:
    """The forward schedules that an engine's kernels have, read off their text."""
    sources = [c.source for c in engine.attention._memory.compiled.values()]
    return {size for size in (64, 128, 256) for source in sources if f"({size}, 8)" in source}


def test_the_fastest_candidate_of_each_kernel_is_taken():
    wanted = replace(GPU, forward=KernelSchedule(128, 64, 8, 2), dq=KernelSchedule(64, 64, 4, 3))

    def measure(schedule: Schedule) -> float:
        return 3.0 - (schedule.forward == wanted.forward) - (schedule.dq == wanted.dq)

    assert tune.search(GPU, Target("triton", "sm_90"), HEADS, measure) == wanted


def test_a_candidate_that_does_not_build_is_passed_over():
    def measure(schedule: Schedule) -> float:
        if schedule != GPU:
            raise RuntimeError("out of resources")
        return 1.0

    assert tune.search(GPU, Target("triton", "sm_90"), HEADS, measure) == GPU


@pytest.mark.parametrize("target", [Target("triton", "sm_90"), Target("triton", "gfx942"), Target("cpu", "cpu")])
def test_candidates_are_few_and_fit(target: Target):
    start = CPU.forward if target.backend == "cpu" else GPU.forward
    found = list(tune.candidates(start, Kind.FORWARD, target, HEADS))
    assert 2 <= len(found) <= 12
    assert start not in found


def test_engine_measures_once_and_keeps_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "tune.json"
    timed: list[int] = []

    def fake_seconds(call, device) -> float:
        call()
        timed.append(len(timed))
        return 1.0 / len(timed)  # the last candidate is the fastest

    monkeypatch.setattr("attn_engine.runtime.attention.seconds_of", fake_seconds)
    q, k, v = qkv()
    tuned = engine(str(file))
    o = tuned(q, k, v)
    torch.testing.assert_close(o.double(), dense(q, k, v, mask=triangle(20, 20)), rtol=1e-5, atol=1e-5)
    assert len(timed) > 4
    ((key, entry),) = json.loads(file.read_text()).items()
    assert entry["forward"][:2] == [256, 512]
    assert f"torch-{torch.__version__.split('+')[0]}" in key

    measured = len(timed)
    tuned(q, k, v)
    built = Compilations(monkeypatch)
    again = engine(str(file), measure=False)
    torch.testing.assert_close(again(q, k, v), o)
    assert len(timed) == measured
    assert built.count == 0
    with torch.no_grad():
        tuned(q, k, v)
    assert len(json.loads(file.read_text())) == 2


def test_without_a_file_or_tuning_the_default_is_taken(tmp_path: Path):
    q, k, v = qkv()
    plain = engine(str(tmp_path / "none.json"), measure=False)
    plain(q, k, v)
    assert not list(tmp_path.iterdir())
    assert schedules_of(plain) == {64}


@pytest.mark.parametrize("text", ["{", "[]", '{"a": {"forward": [1, 2]}}', '{"a": 3}'])
def test_a_file_that_is_no_tune_file(tmp_path: Path, text: str):
    file = tmp_path / "tune.json"
    file.write_text(text)
    with pytest.raises(errors.TuneFileError, match=r"tune\.json"):
        engine(str(file))(*qkv())
    assert file.read_text() == text


def test_a_file_that_cannot_be_written(tmp_path: Path):
    with pytest.raises(errors.TuneFileError, match="cannot be written"):
        tune.write_file(str(tmp_path / "no" / "such.json"), "key", CPU)


def test_seconds_are_of_the_shortest_call():
    assert 0 <= tune.seconds_of(lambda: None, torch.device("cpu")) < 0.1
