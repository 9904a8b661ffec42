"""Derived pages are up to date, and the generator says so when they are not."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from attn_engine.backends.backend import BACKENDS
from attn_engine.universe import PASSES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_derived_pages_are_up_to_date(generate: ModuleType):
    assert generate.main(["--check"]) == 0, "run `python docs/generate.py`"


def test_stale_pages_are_found(generate: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys):
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    monkeypatch.setattr(generate, "derived", lambda: {page: "new\n"})
    assert generate.main(["--check"]) == 1
    assert "page.md is out of date" in capsys.readouterr().err
    assert generate.main([]) == 0
    assert page.read_text() == "new\n"
    assert generate.main(["--check"]) == 0


def test_every_pass_is_on_the_page():
    headings = [line[3:] for line in (ROOT / "docs" / "passes.md").read_text().splitlines() if line.startswith("## ")]
    assert headings == sorted(PASSES)


def test_figures_replace_what_stood_between_the_marks(generate: ModuleType, monkeypatch, tmp_path: Path):
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "bench" / "results" / "card.md").write_text("| a | b |\n")
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    text = "before\n<!-- bench -->\nold\n<!-- /bench -->\nafter\n"
    found = generate.between_marks(text, "bench", generate.figures())
    assert found == "before\n<!-- bench -->\n| a | b |\n<!-- /bench -->\nafter\n"
    with pytest.raises(SystemExit, match="lost its marks"):
        generate.between_marks("no marks", "bench", "")


def test_every_backend_is_in_the_table():
    page = (ROOT / "docs" / "backends.md").read_text()
    assert [name for name in BACKENDS if f"| `{name}` |" not in page] == []


def test_options_come_from_fields_and_their_strings(generate: ModuleType):
    assert list(generate.option_lines(Optional)) == ["- `depth` (default `2`): How deep."]


@dataclass(frozen=True)
class Optional:
    """A pass, but for applying it."""

    name = "optional"
    depth: int = 2
    """How deep."""


def test_fences_of_docstrings_are_text(generate: ModuleType):
    assert generate.fenced_as_text("a\n```\nb\n```\nc") == "a\n\n```text\nb\n```\n\nc"
