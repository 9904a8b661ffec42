"""One exception class per mistake that a user can make; the message says what to write instead."""

from __future__ import annotations


class AttnEngineError(Exception):
    """The base of every error that attn_engine raises on purpose."""


class UnsupportedOpError(AttnEngineError):
    """A backend met an op for which it has no emission rule."""

    def __init__(self, op: str, backend: str):
        super().__init__(f"backend '{backend}' cannot emit '{op}'; legalize it, or choose another backend")
        self.op = op
        self.backend = backend


class BackendError(AttnEngineError):
    """A backend's manifest is malformed, its name unknown, or its compiler absent."""
