"""The line of the user's code that is running, for error messages."""

from __future__ import annotations

import inspect
import linecache
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import NoReturn

import numpy as np
import torch

from attn_engine.errors import TraceError

_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple(str(Path(module.__file__ or "").parent) for module in (torch, np))
_PYTHON = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})


def is_user_file(file: str) -> bool:
    """Whether a file is neither ours nor torch's, numpy's or Python's own."""
    if Path(file).name == "library.py" and str(Path(file).parent) == _PACKAGE:
        return True
    if file.startswith(_PYTHON) and not any(name in file for name in ("site-packages", "dist-packages")):
        return False
    return not file.startswith((_PACKAGE, *_LIBRARIES))


def is_ours(frame: FrameType) -> bool:
    """Whether a frame runs a file of ours."""
    return frame.f_code.co_filename.startswith(_PACKAGE)


def is_user_code(frame: FrameType) -> bool:
    """Whether a frame runs what a user has written."""
    file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
    if file.startswith("<") and (file.startswith("<frozen") or module.split(".")[0] in ("attn_engine", "torch")):
        return False
    return is_user_file(file)


def format_line(file: str, line: int, context: dict[str, object] | None = None) -> str:
    """`  file:line` and the text of that line."""
    text = linecache.getline(file, line, context).strip() or "(source text not available)"
    return f"  {file}:{line}\n    {text}"


def user_line() -> str:
    """The innermost line on the stack that is neither ours nor of a library that calls back."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if is_user_code(frame):
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
