"""Processes that compile some of the Triton kernels that a call launches, and run none of them.

A call that launches many kernels compiles them one by one. Several processes that make the same call, each of which
compiles a part of its kernels, leave all of them in Triton's cache in a fraction of the time. Results are not written.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass
class _Part:
    number: int = 0
    count: int = 1
    patched: bool = False


_PART = _Part()


def compile_part(call: Callable[[], object], number: int, count: int) -> None:
    """Compiles the `number`-th of `count` parts of what `call` launches; this process runs no Triton kernel from here on.

    What `call` refuses, it refuses again, with its error, where it runs.
    """
    _PART.number, _PART.count = number, count
    if not _PART.patched:
        _patch()
    with contextlib.suppress(Exception):
        call()


def _patch() -> None:
    """Launches compile only; tuners compile all configurations that they would choose from."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    kernel: Any = JITFunction
    launch = kernel.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        plain = sorted((n, str(x)) for n, x in options.items() if not isinstance(x, Tensor))
        if zlib.crc32(repr((self.src, plain)).encode()) % _PART.count == _PART.number:
            launch(self, *args, grid=grid, warmup=True, **options)

    def each(self: Any, *args: Any, **options: Any) -> None:
        self.nargs, self.best_config = dict(zip(self.arg_names, args, strict=False)), self.configs[0]
        for config in self.prune_configs(options):
            with contextlib.suppress(Exception):  # a configuration that does not fit: tuning leaves it out, too
                self.fn.run(*args, **options, **config.all_kwargs())

    kernel.run = compiled
    tuners: list[Any] = [Autotuner, *Autotuner.__subclasses__()]
    for tuner in tuners:
        tuner.run = each
    _PART.patched = True
