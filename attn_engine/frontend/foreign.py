"""Errors that torch, numpy or Python raise because they met a traced value, told as ours: at the user's line, with a way out.

torch looks at the types of numbers before it asks whom to call, so that `torch.minimum(x, 3)` is its own TypeError. Whether a
traced value stands in the expression that failed is read from the source; what a user raises, and errors in expressions
without one, stay themselves.
"""

from __future__ import annotations

import ast
import dis
import linecache
import re
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType, FunctionType, MethodType, TracebackType
from typing import Any, NamedTuple, cast

from attn_engine.errors import AttnEngineError, OperandError
from attn_engine.frontend.operators import contains_traced
from attn_engine.frontend.source import format_line, is_ours, is_user_code, is_user_file

_RAISING = frozenset({"RAISE_VARARGS", "RERAISE"})
_TENSORS_ONLY = re.compile(r"must be (a )?Tensor|combination of arguments")
_NO_NUMBERS = (
    "torch takes tensors only there: write torch.clamp(x, min=a, max=b) where bounds are numbers, an operator as in x > 3 or"
    " x & y, or torch.tensor(3.0) in place of a number"
)
_ELSEWHERE = (
    "a traced value stands for one number that is not known yet: use operators, torch.where and elementwise torch functions"
    " on it, and do the rest outside of the function"
)
_BINDING = re.compile(r"\(\) (takes|missing|got) ")
"""What Python says of a function that is called with other arguments than it has."""
_LONGEST = 60


class _Expression(NamedTuple):
    """What failed: its text, and its syntax, which are nothing where there is no source."""

    text: str
    syntax: ast.expr | None


def raised_at(error: Exception) -> str | None:
    """The user's line that an error comes from."""
    frames = [step for step in _steps(error.__traceback__) if is_user_code(step.tb_frame)]
    return None if not frames else _place(frames[-1])


def _place(step: TracebackType) -> str:
    return format_line(step.tb_frame.f_code.co_filename, step.tb_lineno, step.tb_frame.f_globals)


def explained(error: Exception) -> OperandError | None:
    """What to raise in place of an error that a traced function has ended with; None where that is the user's own."""
    steps = list(_steps(error.__traceback__))
    last = next((n for n in reversed(range(len(steps))) if is_user_code(steps[n].tb_frame)), None)
    if isinstance(error, AttnEngineError) or last is None or any(is_ours(s.tb_frame) for s in steps[last + 1 :]):
        return None
    step = steps[last]
    frame = step.tb_frame
    instruction = [i for i in dis.get_instructions(frame.f_code) if i.offset <= step.tb_lasti][-1]  # caches come behind
    expression = _expression(frame, instruction)
    if (
        instruction.opname in _RAISING
        or not _is_traced(frame, expression)
        or _calls_users(frame, expression, str(error))
    ):
        return None
    said = re.sub(r"'Symbol' object|\bSymbol\b", "a traced value", str(error).strip().partition("\n")[0])
    said = said.removesuffix(", but expected one of:")
    what = expression.text if 0 < len(expression.text) <= _LONGEST else "this line"
    fix = _NO_NUMBERS if _TENSORS_ONLY.search(said) else _ELSEWHERE
    return OperandError(f"{what} raises {type(error).__name__}: {said}", fix, _place(step))


def _steps(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _expression(frame: FrameType, instruction: dis.Instruction) -> _Expression:
    """The source of what an instruction computes."""
    place = instruction.positions
    first, last, begin, end = (None,) * 4 if place is None else place
    if first is None or last is None or begin is None or end is None:
        return _Expression("", None)
    lines = [x.encode() for x in linecache.getlines(frame.f_code.co_filename, frame.f_globals)[first - 1 : last]]
    if len(lines) != last - first + 1:
        return _Expression("", None)
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    text = " ".join(b"".join(lines).decode().split())
    try:
        return _Expression(text, ast.parse(f"({text})", mode="eval").body)
    except SyntaxError:
        return _Expression("", None)


def _is_traced(frame: FrameType, expression: _Expression) -> bool:
    """Whether a traced value stands in an expression; where that is not known, in the function."""
    if expression.syntax is None:
        return _holds_traced(frame.f_locals.values())
    names = [node.id for node in ast.walk(expression.syntax) if isinstance(node, ast.Name)]
    return _holds_traced([_found(frame, name) for name in names])


def _holds_traced(values: Iterable[object]) -> bool:
    """Whether there is a traced value among these, or in collections of them."""
    tables = [cast("Mapping[object, object]", value) for value in values if isinstance(value, Mapping)]
    return contains_traced(values) or any(contains_traced(table.values()) for table in tables)


def _found(frame: FrameType, name: str) -> object:
    return frame.f_locals.get(name, frame.f_globals.get(name))


def _calls_users(frame: FrameType, expression: _Expression, said: str) -> bool:
    """Whether it is a call of what the user has written, which takes other arguments."""
    if not isinstance(expression.syntax, ast.Call):
        return False
    value = _called(frame, expression.syntax.func)
    if value is None:
        return bool(_BINDING.search(said))
    if isinstance(value, MethodType):
        value = value.__func__
    if isinstance(value, type):
        value = value.__init__
    return isinstance(value, FunctionType) and is_user_file(value.__code__.co_filename)


def _called(frame: FrameType, called: ast.expr) -> Any:
    """What is called by a name, or as an attribute that stands where it is looked for; None for anything else."""
    names: list[str] = []
    while isinstance(called, ast.Attribute):
        names.append(called.attr)
        called = called.value
    value = _found(frame, called.id) if isinstance(called, ast.Name) else None
    for name in reversed(names):
        value = cast("Any", vars(value).get(name)) if hasattr(value, "__dict__") else None
    return value
