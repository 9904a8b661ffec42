"""The only place that reads the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """What the environment says; see each field."""

    backend: str | None
    """ATTN_ENGINE_BACKEND: the backend of every call that names none."""
    verify_each: bool
    """ATTN_ENGINE_VERIFY=1: verify the IR after every pass."""


def settings() -> Settings:
    return Settings(
        backend=os.environ.get("ATTN_ENGINE_BACKEND") or None,
        verify_each=os.environ.get("ATTN_ENGINE_VERIFY", "0") == "1",
    )
