"""Every Python block of README.md and docs/ runs, those of one page one after the other in one namespace."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\S*)$")


@dataclass(frozen=True)
class Fence:
    """A fenced block: its language, its text, and the line of the page on which the text starts."""

    language: str
    text: str
    line: int


def fences(text: str) -> list[Fence]:
    found: list[Fence] = []
    opened: tuple[str, int] | None = None
    lines = text.splitlines()
    for number, line in enumerate(lines):
        match = FENCE.match(line)
        if match and opened is None:
            opened = match.group(1), number + 1
        elif line == "```" and opened is not None:
            language, first = opened
            found.append(Fence(language, "\n".join(lines[first:number]), first))
            opened = None
    assert opened is None, "a fence is not closed"
    return found


def execute(page: Path, blocks: list[Fence]) -> dict[str, object]:
    """Runs Python blocks as lines of their page, so that tracebacks and error messages show them."""
    namespace: dict[str, object] = {"__name__": page.stem}
    for block in blocks:
        exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)
    return namespace


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    torch.manual_seed(0)
    execute(page, [f for f in fences(page.read_text()) if f.language == "python"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path):
    """Paths of this repository that the prose names in backticks."""
    for name in re.findall(r"`((?:attn_engine|tests|docs|bench|examples)/[\w./]+\.\w+)`", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_python_that_does_not_run_is_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```python\nx = 1\n```\n\n```text\nnot python\n```\n\n```python\nassert x == 2\n```\n")
    blocks = fences(page.read_text())
    assert [(f.language, f.line) for f in blocks] == [("python", 3), ("text", 7), ("python", 11)]
    with pytest.raises(AssertionError):
        execute(page, [f for f in blocks if f.language == "python"])


def test_readme_has_python():
    assert any(f.language == "python" for f in fences((ROOT / "README.md").read_text()))


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_make_targets_exist(page: Path):
    targets = set(re.findall(r"(?:^|`)make (\w+)", page.read_text(), flags=re.MULTILINE))
    for target in targets:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


def test_the_demo_that_make_starts_exists():
    started = re.findall(r"python -m (\S+) --out", (ROOT / "Makefile").read_text())
    assert "examples.demo" in started
    assert (ROOT / "examples" / "demo" / "__main__.py").exists()
