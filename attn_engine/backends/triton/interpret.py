"""Runs emitted text in Triton's interpreter, on CPU tensors: the text that ships is the text that is tested.

No environment variable is needed: the functions of the text are wrapped where they stand. bfloat16 is
refused, for the interpreter computes it as raw bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import triton.experimental.gluon.language  # noqa: F401  # pyright: ignore[reportUnusedImport]  (imported before any kernel is interpreted; afterwards it does not compile)
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

from attn_engine.backends.backend import Plan
from attn_engine.backends.triton.build import load, plans_of
from attn_engine.errors import InterpreterError

interpreter: Any = triton_interpreter
_REFUSED = (torch.bfloat16,)


class _Kernel:
    """A kernel that runs in the interpreter when it is launched."""

    def __init__(self, function: Callable[..., None]):
        self.function = interpreter.InterpretedFunction(function)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            for argument in arguments:
                if isinstance(argument, torch.Tensor) and argument.dtype in _REFUSED:
                    raise InterpreterError(f"the interpreter computes {argument.dtype} wrongly; use float16 or float32")
            with np.errstate(all="ignore"), warnings.catch_warnings(), _amended():
                # the interpreter turns arrays of one element into Python numbers
                warnings.simplefilter("ignore", DeprecationWarning)
                self.function[grid](*arguments, **options)

        return launch


def interpret(source: str) -> Mapping[str, Plan]:
    """The plans of a text; their kernels run in the interpreter. Like `build`, for CPU tensors and tests."""
    if "tl.bfloat16" in source:
        raise InterpreterError("the interpreter computes bfloat16 wrongly; emit for float16 or float32")
    module = load(source)
    namespace = dict(vars(module))
    for name in namespace["KERNELS"]:
        kernel: Any = namespace[name]
        namespace[name] = _Kernel(kernel.fn)
    return {name: _rebound(plan, namespace) for name, plan in plans_of(module).items()}


def _rebound(plan: Any, namespace: dict[str, Any]) -> Plan:
    return type(plan)(plan.__code__, namespace, plan.__name__, plan.__defaults__, plan.__closure__)


class _amended:
    """The interpreter with other folds, another splat and other bounds of loops.

    It folds element by element; these folds take whole slices, in the same function. It takes what a comparison of
    two numbers gives for a number of their type. Its numbers are arrays of one element, which newer versions of numpy
    do not take for integers.
    """

    def __enter__(self) -> None:
        self.saved = interpreter.ReduceOps.generic_reduce, interpreter.ScanOps.generic_scan
        interpreter.ReduceOps.generic_reduce = _reduce
        interpreter.ScanOps.generic_scan = _scan
        self.splat = interpreter.InterpreterBuilder.create_splat
        interpreter.InterpreterBuilder.create_splat = _splat_with(self.splat)
        self.patch = interpreter._patch_lang_tensor
        interpreter._patch_lang_tensor = _patch_with(self.patch)

    def __exit__(self, *_: object) -> None:
        interpreter.ReduceOps.generic_reduce, interpreter.ScanOps.generic_scan = self.saved
        interpreter.InterpreterBuilder.create_splat = self.splat
        interpreter._patch_lang_tensor = self.patch


def _index(value: Any) -> int:
    return int(value.handle.data.item())


def _patch_with(original: Callable[..., Any]) -> Callable[..., Any]:
    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", _index)

    return patch


def _splat_with(original: Callable[..., Any]) -> Callable[..., Any]:
    def splat(self: Any, type_: Any, value: Any) -> Any:
        if value.data.dtype == np.bool_:
            return interpreter.TensorHandle(np.full(type_.shape, value.data.reshape(()), dtype=np.bool_), tl.int1)
        return original(self, type_, value)

    return splat


def _combine(fold: Any, left: Any, right: Any, dtype: tl.dtype) -> Any:
    shape = left.shape
    left, right = (fold.to_tensor(np.ascontiguousarray(x).reshape(-1), dtype) for x in (left, right))
    return np.asarray(fold.combine_fn.fn(left, right).handle.data).reshape(shape)


def _reduce(self: Any, operands: Sequence[Any]) -> list[Any]:
    """A tree of halves along the axis, in log2(size) calls of the combine function."""
    (operand,) = operands
    data = np.moveaxis(operand.handle.data, self.axis, 0)
    while data.shape[0] > 1:
        half = data.shape[0] // 2
        data = _combine(self, data[:half], data[half:], operand.dtype)
    return [self.to_tensor(data[0], operand.dtype)]


def _scan(self: Any, operands: Sequence[Any]) -> list[Any]:
    """Hillis and Steele: log2(size) steps of doubling distance."""
    (operand,) = operands
    data = np.array(np.moveaxis(operand.handle.data, self.axis, 0))
    distance = 1
    while distance < data.shape[0]:
        combined = _combine(self, np.roll(data, distance, 0), data, operand.dtype)
        data[distance:] = combined[distance:]
        distance *= 2
    return [self.to_tensor(np.moveaxis(data, 0, self.axis), operand.dtype)]
