"""Makes `tests.support` importable, and keeps torch to one thread: tests run side by side, on small tensors."""

import gc
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = str(Path(__file__).parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # the GPU tests also run on a machine's own Python, which need not have it
    pass
else:
    # How fast examples come says something about the machine, which others may share, and nothing about the code.
    settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any_machine")


def pytest_configure() -> None:
    from tests.support.verified import verify_alike_once

    verify_alike_once()


def pytest_collection_finish() -> None:
    """What is loaded by now stays: the collector need not look through it again, nor after every few hundred objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
