"""Writes what is derived: docs/passes.md from the passes, tables of backends, figures from bench/results.

`python docs/generate.py` writes; `python docs/generate.py --check` only says what is out of date, and exits with 1.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from attn_engine.backends.backend import BACKENDS, get_backend  # noqa: E402
from attn_engine.universe import PASSES  # noqa: E402
from docs.front_page import lines_of, picture, table  # noqa: E402

NO_FIGURES = "No figures have been recorded yet: `make gpu` on a GPU machine writes them to `bench/results`."
FIGURES = """\
# Figures

All that is recorded in `bench/results`, put together by `docs/generate.py`. Tables of GPUs name the card and the
versions; times are medians, and compare only within one table.
"""
HEADER = """\
# Passes

Generated from the passes by `docs/generate.py`; edit their docstrings instead. Any of them runs on IR text:
`attn-opt FILE.mlir -p 'NAME{option=value}'`. The order in which a compilation runs them stands in
`attn_engine/pipelines.py`.
"""


def field_docs(kind: type) -> dict[str, str]:
    """The string under each field of a class."""
    body = ast.parse(inspect.cleandoc("\n" + inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for statement, after in zip(body.body, body.body[1:], strict=False):
        named = isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        if named and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[statement.target.id] = str(after.value.value)  # type: ignore[union-attr]
    return found


def fenced_as_text(doc: str) -> str:
    """Fences without a language are IR or pseudo-code, never Python to run."""
    lines, inside = [], False
    for line in doc.splitlines():
        if line.startswith("```"):
            lines.extend(["```"] if inside else ["", "```text"] if lines and lines[-1] else ["```text"])
            inside = not inside
        else:
            if lines and lines[-1] == "```" and line:
                lines.append("")
            lines.append(line)
    return "\n".join(lines)


def default_text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "nothing"
    return str(value).lower() if isinstance(value, bool) else str(value)


def option_lines(kind: Any) -> Iterator[str]:
    docs = field_docs(kind)
    for field in fields(kind):
        if field.name != "name":
            default = "needed" if field.default is MISSING else f"default `{default_text(field.default)}`"
            yield f"- `{field.name}` ({default}): {docs.get(field.name, '')}"


def passes_page() -> str:
    """docs/passes.md."""
    parts = [HEADER]
    for name in sorted(PASSES):
        kind = PASSES[name]()
        doc = inspect.getdoc(kind)
        if not doc or kind.__doc__ == kind.__mro__[1].__doc__:
            raise SystemExit(f"pass '{name}' has no docstring")
        parts.append(f"## {name}\n\n{fenced_as_text(doc)}\n")
        options = list(option_lines(kind))
        if options:
            parts.append("Options:\n\n" + "\n".join(options) + "\n")
    return "\n".join(parts)


def figures() -> str:
    """The recorded results one after the other."""
    texts = [file.read_text().strip() for file in sorted((ROOT / "bench" / "results").glob("*.md"))]
    return "\n\n".join(texts) or NO_FIGURES


def backends() -> str:
    """A table of the backends that can be called, in the words of their manifests."""
    lines = ["| backend | level | |", "|---|---|---|"]
    for name in BACKENDS:
        about = inspect.getdoc(import_module(f"attn_engine.backends.{name}.backend")) or ""
        lines.append(f"| `{name}` | {get_backend(name).level} | {about.splitlines()[0]} |")
    return "\n".join(lines)


def between_marks(text: str, name: str, content: str) -> str:
    """A page with new content between `<!-- name -->` and `<!-- /name -->`."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"a page has lost its marks {begin} and {end}")
    return f"{before}{begin}\n{content}\n{end}{after}"


def derived() -> dict[Path, str]:
    """Every derived file and what it should hold."""
    text, backend_text = ((ROOT / name).read_text() for name in ("README.md", "docs/backends.md"))
    lines, speed = lines_of(ROOT / "bench" / "results"), ROOT / "docs" / "speed.svg"
    return {
        speed: picture(lines, speed.read_text() if speed.exists() else ""),
        ROOT / "docs" / "passes.md": passes_page(),
        ROOT / "docs" / "backends.md": between_marks(backend_text, "backends", backends()),
        ROOT / "docs" / "figures.md": f"{FIGURES}\n{figures()}\n",
        ROOT / "README.md": between_marks(text, "bench", table(lines)),
    }


def main(arguments: list[str]) -> int:
    stale = [path for path, text in derived().items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if "--check" in arguments:
            print(f"{path.relative_to(ROOT)} is out of date; run `python docs/generate.py`", file=sys.stderr)
        else:
            path.write_text(derived()[path])
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
