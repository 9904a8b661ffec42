"""The schedule of a kernel of roles: blocks, rings, registers, and what is in flight. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 1 << 20


@dataclass(frozen=True)
class AsyncSchedule:
    """What the passes towards the async level take as options, with the values that were best on an H100."""

    block_n: int = 128
    """Keys of a block; smaller where shared memory is short."""
    stages: int = 2
    """Blocks of keys, and of values, that a ring holds."""
    consumers: int = 2
    """Warpgroups that compute, 64 queries each."""
    consumer_registers: int = 240
    producer_registers: int = 24
    l2_bytes: int = 8 * _MIB
    """Keys and values of the heads that run at the same time."""
    pin: bool = True
    """Whether to keep the assembler from hoisting the wait for a product above the exponentials."""
