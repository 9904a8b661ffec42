"""The way that was measured to be the fastest, in the tuner's file: found again instead of measured again.

An entry is that of a schedule with two names more: `{"backend": "gluon", "gradients": "triton", "forward": [...], ...}`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from attn_engine.runtime.devices import Target
from attn_engine.runtime.selection import Chosen, Way
from attn_engine.runtime.tune import Tuner, schedule_of, tune_key

WAYS = "ways"
"""In a key, where other entries have the backend whose schedules they compare."""


def choice_key(text: str, ways: Sequence[Way], request: object, device: torch.device) -> str:
    """Names the measurement of an attention, printed as `text`, by each of `ways`: others of them, another measurement."""
    target = ways[-1].target
    backends = tuple(dict.fromkeys(way.target.backend for way in ways))
    return tune_key(text, Target(WAYS, target.arch), (request, target.arch, backends), device)


def kept_way(tuner: Tuner, key: str, ways: Sequence[Way]) -> Way | None:
    """The way that was the fastest, if a measurement with this key is in the file."""
    entry = tuner.known().get(key)
    if entry is None:
        return None
    own = next((way for way in ways if way.target.backend == entry.get("backend")), None)
    return None if own is None else Way(own.target, schedule_of(entry, own.schedule), entry["gradients"])


def keep(tuner: Tuner, key: str, chosen: Chosen) -> Chosen:
    """Writes what measurements chose to the file; what was taken because nothing could be measured is not kept."""
    if chosen.why:
        way = chosen.way
        tuner.write(key, way.schedule, {"backend": way.target.backend, "gradients": way.gradients})
    return chosen


def told(tuner: Tuner, kept: Way, chosen: Chosen) -> Chosen:
    """The same with its reason, if the way that was kept was taken."""
    return replace(chosen, why=f"measured before, in {tuner.file}") if chosen.way == kept else chosen
