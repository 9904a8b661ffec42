"""A few of the cases of `make parity`, on all paths, and that its verdicts can be bad."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_engine.errors import ArgumentError
from tests.parity import log
from tests.parity.cases import Case, cases, definitions
from tests.parity.check import compare, difference
from tests.parity.paths import PATHS, Path, right
from tests.parity.report import is_good, last_line, page

CASES = {str(case): case for case in cases()}
CASE = CASES["length: one position (f32)"]
RIGHT = right(CASE)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_paths_agree(path: Path):
    case = next(CASES[name] for name in ("alibi (f16)", "wide: alibi (f16)") if path.takes(CASES[name]))
    outcome = compare(path, case, right(case))
    if outcome.verdict == "skipped" and outcome.detail == path.missing():
        pytest.skip(outcome.detail)
    assert outcome.verdict == "agreed", outcome


def test_what_a_path_does_not_take_is_outside():
    path = next(path for path in PATHS if not path.takes(CASES["alibi (f16)"]))
    assert compare(path, CASES["alibi (f16)"], right(CASES["alibi (f16)"])).verdict == "outside"


def test_async_kernels_take_wide_heads():
    path = next(path for path in PATHS if path.name == "tile async")
    assert [str(case) for case in cases() if path.takes(case)] == [
        str(c) for c in cases() if str(c).startswith("wide") and c.dtype == "f16"
    ]


def test_every_row_function_and_mask_of_the_library_has_a_case():
    from attn_engine import library

    used = {name for d in definitions().values() for name in _names(d.make)}
    public = {n for n, f in vars(library).items() if callable(f) and getattr(f, "__module__", "") == library.__name__}
    left_out = {
        "softmax",
        "rotary",
        "rms_norm",
        "in_turn",
    }  # the default, and functions of operands: "rotated" stands for them
    assert {n for n in public if n[0] != "_"} - left_out <= used


def _names(function) -> set[str]:
    if not hasattr(function, "__code__"):
        return set()
    inner = [c for c in function.__code__.co_consts if hasattr(c, "co_names")]
    return {*function.__code__.co_names, *(n for code in inner for n in code.co_names)}


def fake(result) -> Path:
    def run(case: Case):
        if isinstance(result, Exception):
            raise result
        return result

    return Path("fake", "a test", run, {"f32": 1e-3, "f16": 1e-3})


def test_verdicts():
    wrong = {**RIGHT, "dq": RIGHT["dq"] + 0.01}
    assert compare(fake(RIGHT), CASE, RIGHT).verdict == "agreed"
    bad = compare(fake(wrong), CASE, RIGHT)
    assert (bad.verdict, bad.detail) == ("failed", "dq")
    assert compare(fake({"o": RIGHT["o"]}), CASE, RIGHT).verdict == "failed"
    assert compare(fake({**RIGHT, "o": RIGHT["o"] * torch.nan}), CASE, RIGHT).verdict == "failed"
    assert compare(fake(ArgumentError("no")), CASE, RIGHT).verdict == "skipped"
    assert compare(fake(KeyError("x")), CASE, RIGHT).verdict == "failed"
    assert compare(replace(fake(RIGHT), missing=lambda: "nothing here"), CASE, RIGHT).detail == "nothing here"


def test_infinities_must_be_in_the_same_places():
    assert difference({"lse": torch.tensor([-torch.inf, 1.0])}, {"lse": torch.tensor([-torch.inf, 1.0])})[0] == 0
    assert difference({"lse": torch.tensor([0.0, 1.0])}, {"lse": torch.tensor([-torch.inf, 1.0])})[0] == torch.inf


def test_the_report_counts_and_says_why():
    good = [compare(fake(RIGHT), CASE, RIGHT)] * 30
    skipped = compare(fake(ArgumentError("too odd")), CASE, RIGHT)
    failed = compare(fake(KeyError("x")), CASE, RIGHT)
    assert is_good([*good, skipped]) and not is_good([*good, failed]) and not is_good([*good[:10], skipped])
    text = page([CASE], [*good, skipped, failed])
    assert "- fake: ArgumentError: too odd (1 cases: length: one position (f32))" in text
    assert text.rstrip().endswith(last_line([*good, skipped, failed]))
    assert last_line([*good, skipped, failed]).endswith("32 runs: 30 agree, 1 skipped, 1 failures")


def test_a_run_goes_on_with_what_was_found_for_the_same_sources(tmp_path, monkeypatch: pytest.MonkeyPatch):
    file, outcome = tmp_path / "kept" / "log.jsonl", compare(fake(RIGHT), CASE, RIGHT)
    assert log.read(file, [CASE], ["fake"]) == []
    log.write(file, outcome)
    assert log.read(file, [CASE], ["fake"]) == [outcome]
    monkeypatch.setattr(log, "sources", lambda: "others")
    assert log.read(file, [CASE], ["fake"]) == []


def test_a_run_goes_on_without_what_it_does_not_ask_for_and_what_was_skipped(tmp_path):
    """A tool that was missing may be here now."""
    file, other = tmp_path / "log.jsonl", CASES["alibi (f16)"]
    log.write(file, compare(fake(RIGHT), CASE, RIGHT))
    assert log.read(file, [other], ["fake"]) == log.read(file, [CASE], ["another"]) == []
    log.write(file, compare(replace(fake(RIGHT), missing=lambda: "nothing here"), other, RIGHT))
    assert log.read(file, [other], ["fake"]) == []
