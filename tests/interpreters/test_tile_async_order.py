"""Vector clocks: which accesses of a slot race."""

from __future__ import annotations

import pytest
import torch

from attn_engine.dialects.tile_async_copy import ProxyFenceOp
from attn_engine.interpreters.tile_async_order import AsyncProtocolError, History, Thread, merge
from attn_engine.interpreters.tile_async_state import Barrier, Slot, storage

OP = ProxyFenceOp()
ALL = ((0, 4), (0, 8))
LEFT, RIGHT = ((0, 4), (0, 4)), ((0, 4), (4, 8))


def test_unordered_writes_race_and_reads_do_not():
    first, second = Thread(1), Thread(2)
    history = History()
    history.record(first, ALL, OP, writes=False)
    history.record(second, ALL, OP, writes=False)
    with pytest.raises(AsyncProtocolError, match="a race"):
        history.record(second, ALL, OP, writes=True)


def test_different_parts_do_not_race():
    history = History()
    history.record(Thread(1), LEFT, OP, writes=True)
    history.record(Thread(2), RIGHT, OP, writes=True)
    with pytest.raises(AsyncProtocolError):
        history.record(Thread(3), ALL, OP, writes=False)


def test_a_phase_orders_what_came_before_its_arrivals():
    writer, reader, barrier, history = Thread(1), Thread(2), Barrier(1), History()
    history.record(writer, ALL, OP, writes=True)
    barrier.arrive(writer.release())
    assert barrier.has_ended(0)
    merge(reader.clock, barrier.seen(0))
    history.record(reader, ALL, OP, writes=False)
    history.record(writer, ALL, OP, writes=False)
    history.record(writer, LEFT, OP, writes=False)
    # what the writer does after its arrival is not covered
    with pytest.raises(AsyncProtocolError):
        history.record(reader, ALL, OP, writes=True)


def test_work_in_flight_is_ordered_by_its_wait_alone():
    role, history = Thread(1), History()
    work = role.start(2)
    history.record(work, ALL, OP, writes=False)
    with pytest.raises(AsyncProtocolError):
        history.record(role, ALL, OP, writes=True)
    merge(role.clock, work.clock)
    history.record(role, ALL, OP, writes=True)


def test_views_know_which_part_they_are():
    """Halves of a slot, as they are and transposed; another element type is the whole slot."""
    ring = storage((2, 4, 8), torch.float32)
    slot = Slot(ring, 1, ring.data[1])
    right = slot.view(slot.data.narrow(1, 4, 4))
    low = slot.view(slot.data.narrow(0, 2, 2))
    slot.view(slot.data.narrow(1, 0, 4).T).write(Thread(1), OP, torch.zeros(4, 4))
    right.write(Thread(2), OP, torch.zeros(4, 4))
    with pytest.raises(AsyncProtocolError):
        low.write(Thread(3), OP, torch.zeros(2, 8))
    other = storage((1, 4, 8), torch.float32)
    alias = Slot(other, 0, other.data[0].view(torch.float16).view(8, 8))
    alias.write(Thread(1), OP, torch.zeros(8, 8).half())
    with pytest.raises(AsyncProtocolError):
        Slot(other, 0, other.data[0, 3:]).write(Thread(2), OP, torch.zeros(1, 8))
