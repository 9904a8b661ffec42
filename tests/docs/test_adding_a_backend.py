"""The page that adds a backend keeps its promises: its code is short, and changes nothing shared but the table."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.docs.test_lines import counted
from tests.docs.test_snippets import fences

PAGE = (Path(__file__).parents[2] / "docs" / "adding_a_backend.md").read_text()
CODE = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
LONGEST = 300


def test_it_is_short():
    lines = [line for line in CODE.split("\n") if line.strip()]
    assert 100 < len(lines) <= LONGEST


def test_it_is_as_long_as_it_says():
    """Up to the manifest and its line in the table."""
    own = PAGE.partition("## 6. ")[0]
    (said,) = re.findall(r"in (\d+) lines of code", own)
    assert counted("\n".join(fence.text for fence in fences(own) if fence.language == "python")) == int(said)


def test_only_the_table_changes():
    """Nothing that is imported from the engine is assigned to, or deleted from, but for the table of backends."""
    tree = ast.parse(CODE)
    shared = {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom | ast.Import)
        and (getattr(node, "module", None) or node.names[0].name).startswith("attn_engine")
        for alias in node.names
    }
    assert {"BACKENDS", "tile", "attn_engine"} <= shared
    changed: set[str] = set()
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
        for target in targets:
            while isinstance(target, ast.Attribute | ast.Subscript):
                target = target.value
            changed |= {target.id} & shared if isinstance(target, ast.Name) else set()
    assert changed == {"BACKENDS"}
