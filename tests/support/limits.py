"""Limits of time on what a test runs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limited(seconds: int, what: str) -> Iterator[None]:
    """A `TimeoutError` where `what` takes longer; of the main thread alone."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"{what} takes longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
