"""The only place that reads the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """What the environment says; see each field."""

    backend: str | None
    """ATTN_ENGINE_BACKEND: the backend of every call that names none; "auto" is as if it were not set."""
    verify_each: bool
    """ATTN_ENGINE_VERIFY=1: verify the IR after every pass."""


_BACKEND = "ATTN_ENGINE_BACKEND"
AUTO = "auto"
"""Names no backend: the device's own is taken, or the one of several that should be fastest."""


def named_backend(backend: str | None) -> str | None:
    """The backend asked for by a call or else by the environment, if one was."""
    name = backend or os.environ.get(_BACKEND) or None
    return None if name == AUTO else name


def settings() -> Settings:
    return Settings(
        backend=os.environ.get(_BACKEND) or None,
        verify_each=os.environ.get("ATTN_ENGINE_VERIFY", "0") == "1",
    )
