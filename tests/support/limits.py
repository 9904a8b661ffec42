"""Limits of processor time on what a test runs: a busy machine makes nothing fail."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limited(seconds: int, what: str) -> Iterator[None]:
    """A `TimeoutError` where `what` keeps this process busy for longer; of the main thread alone."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"{what} takes longer than {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
