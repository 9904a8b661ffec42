"""Python's collector of cycles waits while IR is built."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Generator[None]:
    """Ops, their uses and their blocks refer to each other and live as long as their module.

    Every few hundred new ones the collector looks through them, and now and then through all that torch has, for
    garbage that is not there: a seventh of a compilation's time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
