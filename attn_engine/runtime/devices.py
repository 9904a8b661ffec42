"""Which backend and schedule a device gets; what a torch device is called in `arch`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from attn_engine.backends.backend import BACKENDS, get_backend
from attn_engine.errors import BackendUnavailableError
from attn_engine.runtime.env import named_backend


@dataclass(frozen=True)
class Target:
    """Where kernels run: a backend, and the architecture that schedules are made for."""

    backend: str
    arch: str


@cache
def arch_of(device: torch.device) -> str:
    """`sm_90`, `gfx942`, or `cpu`."""
    if device.type != "cuda":
        return device.type
    cuda: Any = torch.cuda
    properties: Any = cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def target_of(device: torch.device, backend: str | None) -> Target:
    """The backend asked for, else the environment's, else triton on a GPU and cpu elsewhere."""
    name = named_backend(backend) or ("triton" if device.type == "cuda" else "cpu")
    return Target(name, arch_of(device)) if is_usable(name) else _refuse(name)


@cache
def is_usable(name: str) -> bool:
    return get_backend(name).check().ok


def _refuse(name: str) -> Target:
    others = [n for n in BACKENDS if n != name and is_usable(n)]
    raise BackendUnavailableError(name, get_backend(name).check().reason, others)
