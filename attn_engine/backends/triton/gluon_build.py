"""Gluon text to callables, and whether this machine can run them."""

from __future__ import annotations

from collections.abc import Mapping

from attn_engine.backends.backend import Availability, Plan
from attn_engine.backends.triton import build as triton_build
from attn_engine.backends.triton.replay import replayed

_HOPPER = 9


def build(source: str) -> Mapping[str, Plan]:
    """One callable per plan. A kernel is compiled at its first launch, for the device of its tensors."""
    module = triton_build.load(source)
    return replayed({name: getattr(module, name) for name in module.PLANS})


def check() -> Availability:
    """Triton must be installed and see a Hopper GPU."""
    available = triton_build.check()
    if not available.ok:
        return available
    import torch

    major, minor = torch.cuda.get_device_capability()
    if major != _HOPPER:
        return Availability(False, f"the async level is for Hopper (9.0), this device has {major}.{minor}")
    return Availability(True)
