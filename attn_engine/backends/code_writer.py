"""A small text writer for emitters: indentation, unique names, literals, one rule per op.

Names derive from printed name hints and from the order of definition alone, so that a module which
was printed and parsed again gives the same text.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import TypeVar

from xdsl.dialects.builtin import FloatAttr, IntegerAttr, i1
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.utils.hints import isa

from attn_engine.errors import UnsupportedOpError

Rule = TypeVar("Rule", bound=Callable[..., object])


class Names:
    """Python and C names of SSA values: the hint, then hint_1, hint_2, ... in order of first sight.

    A value without a hint is called `v`. `reserved` are names that generated text must not shadow.
    """

    def __init__(self, reserved: Iterable[str] = ()):
        self._taken = {*reserved, *keyword.kwlist, *keyword.softkwlist}
        self._of: dict[SSAValue, str] = {}
        self._next: dict[str, int] = {}

    def fresh(self, hint: str) -> str:
        """A name that nothing else has."""
        base = re.sub(r"\W", "_", hint) or "v"
        base = f"v{base}" if base[0].isdigit() else base
        name = base
        while name in self._taken:
            self._next[base] = self._next.get(base, 0) + 1
            name = f"{base}_{self._next[base]}"
        self._taken.add(name)
        return name

    def of(self, value: SSAValue) -> str:
        """The text that stands for a value; a new name the first time."""
        if value not in self._of:
            self._of[value] = self.fresh(value.name_hint or "v")
        return self._of[value]

    def bind(self, value: SSAValue, text: str) -> str:
        """Lets `text` (a literal, or the name of another value) stand for a value."""
        self._of[value] = text
        return text


class CodeWriter:
    """Lines of text with indentation.

    ```
    writer = CodeWriter()
    with writer.block("for i in range(n):"):
        writer.line("total += i")
    writer.text()
    ```
    """

    def __init__(self, indent: str = "    "):
        self._lines: list[str] = []
        self._indent = indent
        self._depth = 0

    def line(self, text: str = "") -> None:
        self._lines.append(self._indent * self._depth + text if text else "")

    def lines(self, text: str) -> None:
        """Several lines at the current indentation (a fixed prelude, say)."""
        for line in text.strip("\n").split("\n"):
            self.line(line)

    @contextmanager
    def block(self, header: str, footer: str | None = None) -> Generator[None]:
        """A header line, an indented body, and (for brace languages) a footer line."""
        self.line(header)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if footer is not None:
            self.line(footer)

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


def python_literal(attribute: Attribute) -> str:
    """A scalar constant as Python text: exact for every float, `True`/`False` for i1."""
    if isa(attribute, IntegerAttr):
        integer = attribute.value.data
        return str(integer != 0) if attribute.type == i1 else f"{integer}"
    if isinstance(attribute, FloatAttr):
        value = attribute.value.data
        return repr(value) if math.isfinite(value) else f"float('{value}')"
    raise ValueError(f"not a scalar constant: {attribute}")


def find_rule(rules: Mapping[type[Operation], Rule], op: Operation, backend: str) -> Rule:
    """The emission rule of an op; an unknown op is an error that names it and the backend."""
    rule = rules.get(type(op))
    if rule is None:
        raise UnsupportedOpError(op.name, backend)
    return rule
