"""The programs of docs/lines.md are as long as their table says, and short."""

from __future__ import annotations

import re

from tests.docs.test_snippets import ROOT, fences

PAGE = (ROOT / "docs" / "lines.md").read_text()
MOST = {"softmax, as a row": 10, "softmax, as an update of blocks": 40}


def counted(text: str) -> int:
    return sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith("#"))


def test_counts():
    table = {name: int(lines) for name, lines in re.findall(r"^\| ([^|]+) \| (\d+) \|", PAGE, re.M)}
    names = re.findall(r"^## (.+)$", PAGE, re.M)
    programs = dict(zip(names, (fence.text for fence in fences(PAGE) if fence.language == "python"), strict=True))
    assert {name: counted(text) for name, text in programs.items()} == table
    assert all(table[name] <= most for name, most in MOST.items())
