"""The line of the user's code that is running, for error messages."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import NoReturn

import torch

from attn_engine.errors import TraceError

_PACKAGE = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)


def _is_user_code(frame: FrameType) -> bool:
    file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
    if file.startswith("<") and (file.startswith("<frozen") or module.split(".")[0] in ("attn_engine", "torch")):
        return False
    if Path(file).name == "library.py" and str(Path(file).parent) == _PACKAGE:
        return True
    return not file.startswith((_PACKAGE, _TORCH))


def format_line(file: str, line: int, context: dict[str, object] | None = None) -> str:
    """`  file:line` and the text of that line."""
    text = linecache.getline(file, line, context).strip() or "(source text not available)"
    return f"  {file}:{line}\n    {text}"


def user_line() -> str:
    """The innermost line on the stack that is neither ours nor torch's."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if _is_user_code(frame):
            return format_line(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)
        frame = frame.f_back
    return "  (outside of any user function)"


def definition_line(function: object) -> str:
    """The line on which a function is defined."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if not isinstance(code, CodeType):
        code = getattr(type(function).__call__, "__code__", None)
    if not isinstance(code, CodeType):
        return f"  {function!r}"
    return format_line(code.co_filename, code.co_firstlineno)


def refusal(
    error: type[TraceError], problem: str, fix: str, function: Callable[..., object] | None = None
) -> TraceError:
    """An error at the running user line or, with `function`, at the definition of that function."""
    return error(problem, fix, definition_line(function) if function is not None else user_line())


def refuse(error: type[TraceError], problem: str, fix: str, function: Callable[..., object] | None = None) -> NoReturn:
    """Raise that error."""
    raise refusal(error, problem, fix, function)
