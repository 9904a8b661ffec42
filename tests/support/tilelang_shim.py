"""The language of TileLang's programs on its CPU target: blocks one after the other, fragments and shared memory local.

`run_on_cpu` gives the plans of a program's text, unchanged but for the module that it takes the language from.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import tilelang
import tilelang.cpu.language as _T
import torch
from tilelang.cpu.language import *  # noqa: F403
from tilelang.language import WSID, GemmWarpPolicy, ws_op  # noqa: F401

from attn_engine.backends.backend import BACKENDS, Availability, Plan, get_backend
from attn_engine.backends.tilelang.build import load, plans_of
from attn_engine.runtime import devices

_HERE = "import tests.support.tilelang_shim as T"


def Kernel(*blocks, threads=None):
    return _T.Kernel(*blocks)


def StridedTensor(shape, strides, dtype):
    """Contiguous: the CPU target passes no strides."""
    return _T.Tensor(shape, dtype)


def _held(dtype):
    """The CPU target has no bfloat16: what would be rounded to it stays float32."""
    return "float32" if dtype == "bfloat16" else dtype


def cast(value, dtype):
    return _T.cast(value, _held(dtype))


def alloc_shared(shape, dtype):
    return _T.alloc_local(shape, _held(dtype))


def alloc_fragment(shape, dtype):
    return _T.alloc_local(shape, _held(dtype))


def fill(target, value, annotations=None):
    return _T.fill(target, value)


def Parallel(*extents, annotations=None):
    return _T.grid(*extents) if len(extents) > 1 else _T.serial(*extents)


def Pipelined(trips, num_stages=0, annotations=None):
    return _T.serial(trips)


def abs(x):
    """The CPU target knows no fabs."""
    return _T.Select(x < 0, x * -1, x)


def copy(source, target, disable_tma=False, annotations=None):
    return _T.copy(source, target)


def gemm(a, b, c, transpose_A=False, transpose_B=False, policy=None, clear_accum=False, annotations=None):
    return _T.gemm(a, b, c, transpose_A, transpose_B, clear_accum=clear_accum)


def _reduce(start, combine):
    """A reduction along either axis of a tile, or of a vector to its only element."""

    @_T.macro
    def rows(source, target, kept, reduced):
        for i in _T.serial(kept):
            target[i] = start if start is not None else source[i, 0]
            for j in _T.serial(reduced):
                target[i] = combine(target[i], source[i, j])

    @_T.macro
    def columns(source, target, reduced, kept):
        for i in _T.serial(kept):
            target[i] = start if start is not None else source[0, i]
            for j in _T.serial(reduced):
                target[i] = combine(target[i], source[j, i])

    @_T.macro
    def vector(source, target, reduced):
        target[0] = start if start is not None else source[0]
        for j in _T.serial(reduced):
            target[0] = combine(target[0], source[j])

    def reduce(source, target, dim, clear, annotations=None):
        assert clear
        form = vector if len(source.shape) == 1 else (columns, rows)[dim]
        return form(source, target, *source.shape)

    return reduce


reduce_sum = _reduce(0.0, lambda a, b: a + b)
reduce_max = _reduce(None, lambda a, b: _T.max(a, b))
reduce_min = _reduce(None, lambda a, b: _T.min(a, b))


@_T.macro
def _sums(source, target, kept, summed, dim, reverse):
    """Along one axis of a tile; the target may be the source."""
    for i in _T.serial(kept):
        total = _T.alloc_local((1,), source.dtype)
        total[0] = 0.0
        for j in _T.serial(summed):
            k = summed - 1 - j if reverse else j
            total[0] = total[0] + (source[k, i] if dim == 0 else source[i, k])
            if dim == 0:
                target[k, i] = total[0]
            else:
                target[i, k] = total[0]


@_T.macro
def _vector_sums(source, target, summed, reverse):
    total = _T.alloc_local((1,), source.dtype)
    total[0] = 0.0
    for j in _T.serial(summed):
        k = summed - 1 - j if reverse else j
        total[0] = total[0] + source[k]
        target[k] = total[0]


def cumsum(source, target, dim, reverse):
    if len(source.shape) == 1:
        return _vector_sums(source, target, source.shape[0], reverse)
    return _sums(source, target, source.shape[1 - dim], source.shape[dim], dim, reverse)


def get_thread_binding():
    return 0


def atomic_add(place, value):
    """Programs run one after the other."""
    return _T.buffer_store(place.buffer, place + value, place.indices)


SIZES: dict[str, int] = {}
"""Of the tensors that a program is made for: it is made anew for each set of sizes, which is quicker than for any.

But not than for any once where a test calls with many.
"""


def dynamic(name, dtype="int32"):
    return SIZES.get(name) or _T.dynamic(name, dtype)


def _sizes(program, arguments):
    """The name that a program gives each size of its tensors, with what it is."""
    names = re.findall(r"^        (\w+): T\.", inspect.getsource(program), re.MULTILINE)
    tensors = [(n, a) for n, a in zip(names, arguments, strict=True) if isinstance(a, torch.Tensor)]
    return {f"{name}_size_{axis}": size for name, a in tensors for axis, size in enumerate(a.shape)}


@functools.cache
def _compiled(program, facts, sizes):
    SIZES.clear()
    SIZES.update(sizes)
    options = {"tirx.disable_vectorize": True}  # g++ has no vectors of half
    made = program(*facts, 1)
    return tilelang.compile(made, target={"kind": "c"}, execution_backend="cython", pass_configs=options)


def _built(program, *facts, of_any_size=False):
    def call(*arguments):
        dense = [a.contiguous() if isinstance(a, torch.Tensor) else a for a in arguments]
        sizes = {} if of_any_size else _sizes(program, dense)
        _compiled(program, facts, tuple(sizes.items()))(*dense)
        for argument, passed in zip(arguments, dense, strict=True):
            if isinstance(argument, torch.Tensor) and passed is not argument:
                argument.copy_(passed)

    return call


def run_on_cpu(source: str, of_any_size: bool = False) -> Mapping[str, Plan]:
    """The plans of a program's text, on the CPU."""
    language = "import tilelang.language as T"
    assert language in source
    module: Any = load(source.replace(language, _HERE))
    module._built, module.CUDA = functools.partial(_built, of_any_size=of_any_size), False
    return plans_of(module)


@contextmanager
def on_cpu() -> Iterator[None]:
    """The `tilelang` backend runs its programs on the CPU, as if they were on a device."""
    manifest = replace(get_backend("tilelang"), check=lambda: Availability(True), build=run_on_cpu)
    devices.is_usable.cache_clear()
    with mock.patch.dict(BACKENDS, {"tilelang": lambda: manifest}):
        yield
    devices.is_usable.cache_clear()
