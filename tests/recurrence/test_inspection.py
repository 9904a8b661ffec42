"""Looking into recurrences: stages, text of kernels and how they are cut, on any machine."""

from __future__ import annotations

import pytest
import torch
from xdsl.parser import Parser

import attn_engine
from attn_engine import CustomIO, LinearAttentionEngine, RecurrenceView, errors, meta_tensor
from attn_engine.runtime import recurrence_compile
from attn_engine.universe import make_context

F32 = torch.float32
META = [meta_tensor(1, 2, "tokens", 8, dtype=F32)] * 2 + [meta_tensor(1, 4, "tokens", 16, dtype=F32)]


def engine(**mods) -> LinearAttentionEngine:
    return LinearAttentionEngine(META, layout="bhsd", **mods)


@pytest.mark.parametrize("decay", ["", "token", "channel"])
@pytest.mark.parametrize("beta", [False, True])
@pytest.mark.parametrize("stage", ["traced", "attn", "tile"])
def test_every_stage_is_text_that_reads_again(stage: str, beta: bool, decay: str):
    view = RecurrenceView(decay=decay, beta=beta, backward=True, final=True, initial=True)
    text = attn_engine.recurrence_ir(stage, view)
    for part in text.split("\nbuiltin.module"):
        Parser(make_context(), part if part.startswith("builtin") else f"builtin.module{part}").parse_module().verify()
    assert ("d_initial" in text) == (stage != "traced")


@pytest.mark.parametrize(("option", "named"), [("weight", "weight"), ("packed", "bounds")])
def test_weights_and_packed_sequences(option: str, named: str):
    for stage in ("traced", "attn", "tile"):
        with_it, without = (
            attn_engine.recurrence_ir(stage, RecurrenceView(backward=True, **{option: there}))
            for there in (True, False)
        )
        assert named in with_it and named not in without
    assert ("weight_t k_t" in engine().explain(RecurrenceView(**{option: True}))) == (option == "weight")


@pytest.mark.parametrize(
    ("wrong", "error", "told"),
    [
        ({"decay": "head"}, errors.ArgumentError, "'token', 'channel', ''"),
        ({"beta": True, "weight": True}, errors.ArgumentError, "beside beta"),
        ({"arch": "sm_99"}, errors.ScheduleError, "unknown architecture 'sm_99'; known are"),
    ],
)
def test_views_of_nothing_are_errors(wrong, error, told):
    with pytest.raises(error, match=told):
        RecurrenceView(**wrong)


def test_an_unknown_stage_is_an_error():
    with pytest.raises(errors.StageError):
        attn_engine.recurrence_ir("lowered")


def test_the_text_is_that_of_a_call(monkeypatch):
    """An engine with a function inside of the kernel and an input that it reads: the same text as when it runs."""
    monkeypatch.setattr(recurrence_compile, "_CACHE", {})
    monkeypatch.setattr(recurrence_compile, "_BUILT", {})
    made = LinearAttentionEngine(
        META,
        k_mod=lambda x, inputs: x * inputs["gain"],
        custom_io=CustomIO({"gain": (1, "heads", 1, 8)}),
        layout="bhsd",
    )
    q, k, v = (torch.randn(*(7 if n == "tokens" else n for n in m.shape)) for m in META)
    made(q, k, v, -torch.rand(1, 4, 7), torch.rand(1, 2, 1, 8))
    (called,) = recurrence_compile._CACHE.values()
    assert called.sources["forward"] == made.source("cpu", RecurrenceView(arch="cpu"))


def test_sizes_are_the_engines_where_it_knows_them():
    told = engine().explain(RecurrenceView(heads=99, tokens=512, backward=True))
    assert "forward of B1 H4 T512 D8/16 on sm_90" in told
    assert "backward (d_q, d_k, d_v, d_decay) of B1 H4" in told


def test_it_says_where_functions_run():
    def by_tokens(x):
        return x - x.mean(2, keepdim=True)

    assert "inside of the kernels: q_mod, decay_mod" in engine(q_mod=torch.exp, decay_mod=torch.neg).explain()
    assert "run by torch, before the kernels: q_mod, k_mod" in engine(q_mod=by_tokens, k_mod=torch.exp).explain()
    assert "decay_mod" not in engine(q_mod=torch.exp, decay_mod=torch.neg).explain(RecurrenceView(decay=""))


@pytest.mark.parametrize(
    ("heads", "tokens", "cut"),
    [
        (8, 32768, "pieces of a sequence side by side, between two passes"),
        (128, 4096, "one sweep over whole sequences"),
        (160, 8192, "a chain of"),
    ],
)
def test_it_says_how_sequences_are_cut(heads: int, tokens: int, cut: str):
    made = LinearAttentionEngine([meta_tensor(1, heads, tokens, 128, dtype=torch.bfloat16)] * 3)
    (line,) = made.explain().splitlines()[2:]
    assert cut in line
