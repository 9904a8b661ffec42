"""Measured forms of recurrences."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from attn_engine import LinearAttentionEngine, meta_tensor
from attn_engine.errors import TuneFileError
from attn_engine.frontend.recurrence import Kind
from attn_engine.ir import schedule as attention
from attn_engine.runtime import recurrence_tune, tune
from attn_engine.runtime.recurrence_compile import Place, Request, Schedule
from attn_engine.runtime.recurrence_tune import RecurrenceTuner, search
from attn_engine.runtime.tune import Tuner
from attn_engine.runtime.tune_file import FORM, add_entry, read_entries
from tests.recurrence.support import assert_near, reference

REQUEST = Request(Kind(torch.bfloat16, 128, 128, "token"), "triton", Schedule(), place=Place("sm_90", 64, 4096, True))


@pytest.fixture(autouse=True)
def forgotten():
    yield
    recurrence_tune._FOUND.clear()


def engine(key, file="", **options):
    metas = [meta_tensor("B", 2, "S", n, dtype=torch.float32) for n in (key, key, 16)]
    return LinearAttentionEngine(metas, tune_file=str(file), **options)


def counting(monkeypatch):
    """The measurements made from here on; later candidates are always faster."""
    seen = []

    def seconds(run, device):
        run()
        seen.append(1)
        return 1.0 / len(seen)

    monkeypatch.setattr(recurrence_tune, "seconds_of", seconds)
    return seen


def call(engine, key):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 70, key, generator=generator).requires_grad_() for _ in range(2))
    v, g = torch.randn(1, 2, 70, 16, generator=generator).requires_grad_(), -torch.rand(1, 2, 70, generator=generator)
    o = engine(q, k, v, g)
    o.square().sum().backward()
    wide = [x.detach().double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    right, _ = reference(*wide, decay=g.double().transpose(1, 2), scale=1.0)
    right.square().sum().backward()
    assert_near("o", o.detach(), right.detach().transpose(1, 2))
    assert_near("dk", k.grad, wide[1].grad.transpose(1, 2))


def test_the_fastest_form_is_taken_and_kept_forward_and_backward(tmp_path, monkeypatch):
    file, seen = tmp_path / "forms.json", counting(monkeypatch)
    call(engine(8, file, tune=True), 8)
    entries = json.loads(file.read_text())
    assert [entry["chunk"] for entry in entries.values()] == [128, 128]
    assert len(seen) == 6
    call(engine(8, file, tune=True), 8)
    recurrence_tune._FOUND.clear()
    call(engine(8, file), 8)
    assert len(seen) == 6
    assert {request.schedule.chunk for request in recurrence_tune._FOUND.values()} == {128}


@pytest.mark.parametrize("mod", [None, lambda x: x * 1.0])
def test_calls_of_others_are_not_measured(mod, monkeypatch):
    seen = counting(monkeypatch)
    call(engine(48, tune=True, q_mod=mod), 48)
    assert len(seen) == 6
    recurrence_tune._FOUND.clear()
    call(engine(48, q_mod=mod), 48)
    assert len(seen) == 6
    assert not recurrence_tune._FOUND


def test_gradients_in_a_graph_are_measured(monkeypatch):
    seen = counting(monkeypatch)
    tuned = engine(56, tune=True)
    call(torch.compile(lambda *x: tuned(*x), backend="aot_eager"), 56)
    assert len(seen) == 6


def test_without_a_file_and_without_measuring_nothing_changes(tmp_path):
    call(engine(24, tmp_path / "none.json"), 24)
    assert all(request.schedule.chunk == 64 for request in recurrence_tune._FOUND.values())
    assert not (tmp_path / "none.json").exists()


def test_each_option_goes_on_from_the_best():
    wanted = {"pieces": 8, "chained": False, "turned": True, "num_stages": 3}

    def time(request):
        if request.schedule.num_warps == 8:
            raise RuntimeError("does not fit")
        return 10.0 - sum(getattr(request.schedule, name) == value for name, value in wanted.items())

    found = search(REQUEST, time)
    assert {name: getattr(found.schedule, name) for name in wanted} == wanted
    assert found.place is None
    assert search(REQUEST, lambda request: float(request != REQUEST)) == REQUEST


@pytest.mark.parametrize("change", [{"chains": False}, {"careful": True}])
def test_what_a_place_rules_out_is_not_tried(change):
    kind, seen = Kind(torch.bfloat16, 128, 128, "token", beta=True), []
    start = replace(REQUEST, kind=kind, place=replace(REQUEST.place, **change))
    search(start, lambda request: seen.append(request.schedule) or 1.0)
    assert any(s.chained for s in seen) == ("careful" in change)
    assert any(s.value_block < 64 for s in seen) == ("chains" in change)


def test_care_is_kept_where_channels_are_narrow():
    kind, seen = Kind(torch.bfloat16, 128, 32, "token", beta=True), []
    start = replace(REQUEST, kind=kind, place=replace(REQUEST.place, careful=True))
    assert search(start, lambda request: seen.append(request) or 1.0) == start
    assert seen == [start]


@pytest.mark.parametrize(
    "change", [{"chunk": "x"}, {"chunk": 0}, {"pieces": -1}, {"pad": 1}, {"num_warps": True}, {"chunk": 64.0}]
)
def test_other_options_of_a_form_are_refused(change, tmp_path):
    (tmp_path / "forms.json").write_text(json.dumps({"a": change}))
    with pytest.raises(TuneFileError, match="no form of a recurrence at 'a'"):
        read_entries(str(tmp_path / "forms.json"), FORM)


@pytest.mark.parametrize("text", ["no", "[]", '{"a": 3}', '{"a": {"warp": 3}}'])
def test_other_files_are_refused(text, tmp_path):
    (tmp_path / "forms.json").write_text(text)
    with pytest.raises(TuneFileError):
        call(engine(40, tmp_path / "forms.json"), 40)
    assert RecurrenceTuner().measure


def test_one_file_holds_attentions_and_recurrences(tmp_path):
    """Each finds its own entries, and leaves those of the other where they are."""
    file = str(tmp_path / "tuned.json")
    schedule = attention.Schedule(*[attention.KernelSchedule(32, 16, 4, 1)] * 4)
    tune.write_file(file, "attention", schedule)
    add_entry(file, FORM, "recurrence", {"chunk": 32})
    tune.write_file(file, "another", schedule, {"backend": "cpu", "gradients": ""})
    assert set(Tuner(file).known()) == {"attention", "another"}
    assert read_entries(file, FORM) == {"recurrence": {"chunk": 32}}
