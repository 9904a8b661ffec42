"""A plan whose kernels are looked at when they have been built: an assembler may undo what was scheduled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from attn_engine.backends.backend import Plan
from attn_engine.backends.gluon.examine import examine


class Guarded:
    """Calls the asynchronous plan, unless its kernels do not assemble or do not run as their schedule means.

    The first call decides, and its results are those of the plan that later calls use.
    """

    def __init__(self, plan: Plan, source: str, plain: Callable[[], Plan]):
        self.plan = plan
        self.reason: str | None = None
        """Why the plain plan is used."""
        self._source, self._plain = source, plain
        self._decided = False
        self._deciding = threading.Lock()

    def __call__(self, *arguments: Any) -> None:
        if not self._decided:
            with self._deciding:
                if not self._decided:
                    self._decide(arguments)
                    return
        self.plan(*arguments)

    def _decide(self, arguments: tuple[Any, ...]) -> None:
        from triton.runtime.errors import OutOfResources, PTXASError

        try:
            self.plan(*arguments)
            self.reason = examine(self._source).reason
        except (PTXASError, OutOfResources) as error:
            self.reason = f"a kernel does not assemble ({type(error).__name__})"
        if self.reason is not None:
            self.plan = self._plain()
            self.plan(*arguments)
        self._decided = True
