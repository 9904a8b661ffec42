"""What a warp says to load and to add diagonals, thread by thread: PTX has few instructions here, and is run as it stands."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attn_engine.backends.triton.gluon_diagonals import ELEMENTS, added, loaded

LANES, BASE = 32, 1 << 20
Registers = dict[str, Any]


def distances() -> np.ndarray:
    """Of the elements of each thread: column minus row of a tile of 16 rows and 64 columns, as products give it."""
    lane, n = np.arange(LANES)[:, None], np.arange(ELEMENTS)[None, :]
    row, column = lane // 4 + 8 * (n // 2 % 2), lane % 4 * 2 + n % 2 + n // 4 * 8
    assert {*zip(row.flat, column.flat, strict=True)} == {(r, c) for r in range(16) for c in range(64)}
    return column - row


def _value(registers: Registers, text: str) -> Any:
    if text in registers:
        return registers[text]
    return struct.unpack(">f", bytes.fromhex(text[2:]))[0] if text.startswith("0f") else int(text, 0)


def _address(registers: Registers, text: str) -> int:
    name, offset = re.fullmatch(r"\[(\S+) \+ (-?\d+)\]", text).groups()  # type: ignore[union-attr]
    return registers[name] + int(offset)


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "mov": lambda a: a,
    "add": lambda a, b: a + b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "mad.lo": lambda a, b, c: a * b + c,
    "mul.wide": lambda a, b: a * b,
    "bfe": lambda a, first, count: a >> first & (1 << count) - 1,
    "setp.lt": lambda a, b: a < b,
    "setp.ge": lambda a, b: a >= b,
    "setp.ne": lambda a, b: a != b,
    "selp": lambda a, b, chosen: a if chosen else b,
}


def run(text: str, warp: list[Registers], memory: dict[int, float]) -> None:
    """Every instruction by all threads before the next one; registers that nothing has written are an error."""
    assert text[0] == "{"
    assert text[-1] == "}"
    for statement in filter(None, map(str.strip, text[1:-1].split(";"))):
        if statement.startswith(".reg"):
            continue
        predicate, operation, rest = re.fullmatch(r"(?:@(!?\w+) )?(\S+) (.*)", statement).groups()  # type: ignore[union-attr]
        arguments = re.findall(r"\[.*?\]|[^,\s]+", rest)
        before = [dict(registers) for registers in warp]
        for lane, registers in enumerate(warp):
            if predicate is None or before[lane][predicate.lstrip("!")] != predicate.startswith("!"):
                _step(operation, arguments, lane, registers, before, memory)


def _step(
    operation: str,
    arguments: list[str],
    lane: int,
    registers: Registers,
    before: list[Registers],
    memory: dict[int, float],
) -> None:
    target, *sources = arguments
    if operation == "ld.global.nc.f32":
        registers[target] = memory[_address(before[lane], sources[0])]
    elif operation == "red.relaxed.gpu.global.add.f32":
        place = _address(before[lane], target)
        memory[place] = memory.get(place, 0.0) + before[lane][sources[0]]
    elif operation.startswith("shfl.sync"):
        assert sources[2:] == ["31", "0xffffffff"]
        number = _value(before[lane], sources[1])
        registers[target] = before[lane ^ number if ".bfly." in operation else number][sources[0]]
    else:
        rule = next(rule for name, rule in _ARITHMETIC.items() if operation.startswith(f"{name}."))
        registers[target] = rule(*(_value(before[lane], source) for source in sources))


def warp(first: int, step: int) -> list[Registers]:
    """Threads that know the address of their first element, as argument number `first`."""
    places = BASE + 4 * step * distances()[:, 0]
    return [{f"${first}": int(place), "%laneid": lane} for lane, place in enumerate(places)]


@pytest.mark.parametrize("step", [1, -1])
def test_loads(step: int):
    memory = {BASE + 4 * place: float(place) for place in range(-100, 101)}
    threads = warp(ELEMENTS, step)
    run(loaded(step), threads, memory)
    found = np.array([[thread[f"${n}"] for n in range(ELEMENTS)] for thread in threads])
    np.testing.assert_array_equal(found, step * distances())
    assert loaded(step).count("ld.") == 18


@pytest.mark.parametrize("step", [1, -1])
def test_sums(step: int):
    values = np.random.default_rng(0).integers(-99, 99, (LANES, ELEMENTS)).astype(float)
    memory: dict[int, float] = {}
    threads = warp(2 * ELEMENTS, step)
    for thread, own in zip(threads, values, strict=True):
        thread.update((f"${ELEMENTS + n}", value) for n, value in enumerate(own))
    run(added(step), threads, memory)
    wanted = np.zeros(200)
    np.add.at(wanted, 100 + step * distances(), values)
    places = range(-100, 100)
    np.testing.assert_array_equal([memory.pop(BASE + 4 * place, 0.0) for place in places], wanted)
    assert not memory
