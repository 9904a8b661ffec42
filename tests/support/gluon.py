"""Modules and plans of Gluon for Hopper in bf16, of definitions and for devices that need not be here."""

from __future__ import annotations

import torch
from xdsl.dialects.builtin import ModuleOp

from attn_engine.backends.backend import get_backend
from attn_engine.frontend import Definition, build
from attn_engine.runtime import driver
from attn_engine.runtime.devices import Target
from attn_engine.runtime.driver import Facts, Request
from attn_engine.runtime.schedules import default_schedule

GRADIENTS = ("q", "k", "v")


def module(
    definition: Definition, wrt: tuple[str, ...] = (), d: int = 128, lse: bool = True, dv: int | None = None
) -> ModuleOp:
    """What the backend emits for bf16."""
    traced = build(definition, dtype=torch.bfloat16, head_dim=d, head_dim_v=dv or d, return_lse=lse)
    schedule = default_schedule(Target("gluon", "sm_90"), traced.module)
    request = Request(wrt, "gluon", schedule, Facts(positive_scale=True))
    return driver.to_tile(driver.to_attn(traced.module, wrt), request, get_backend("gluon"))


def parts(
    definition: Definition, wrt: tuple[str, ...] = GRADIENTS, d: int = 128, fused: bool = False
) -> list[driver.Part]:
    """Forward and backward for bf16, each at the level of the backend that has kernels for it."""
    traced = build(definition, dtype=torch.bfloat16, head_dim=d, head_dim_v=d)
    schedule = default_schedule(Target("gluon", "sm_90"), traced.module)
    request = Request(wrt, "gluon", schedule, Facts(positive_scale=True), deterministic=not fused)
    return driver.to_parts(driver.to_attn(traced.module, wrt), request)
