"""One exception class per mistake that a user can make; the message says what to write instead."""

from __future__ import annotations


class AttnEngineError(Exception):
    """The base of every error that attn_engine raises on purpose."""
