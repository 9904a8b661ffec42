"""These tests see the table of backends as it ships, whatever other tests of the process have added to it."""

import pytest

from attn_engine.backends.backend import BACKENDS


@pytest.fixture(autouse=True)
def shipped_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tile_interpreter", "triton_interpreted"):
        monkeypatch.delitem(BACKENDS, name, raising=False)
