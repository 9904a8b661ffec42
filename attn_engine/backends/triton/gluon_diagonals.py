"""What a warp says to load numbers of diagonals, and to add sums along them to memory, as PTX.

Of eight columns and eight rows of a product a thread has two neighbours in a row; of a tile of 64 columns it has 32
elements, in two rows that are eight apart. Elements as far from the diagonal as others of its own are often the same
distance: of 32 there are 18. `$0` to `$31` are results, arguments follow; the address of a thread's first element says
where all of them are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

ELEMENTS = 32
LOADED_CONSTRAINTS = ",".join(["=&f"] * ELEMENTS + ["l"] * ELEMENTS)
ADDED_CONSTRAINTS = ",".join(["=f"] * ELEMENTS + ["f"] * ELEMENTS + ["l"] * ELEMENTS)
_BYTES = 4
_EIGHTS, _PAIR = range(8), range(2)
"""Of the columns, and of neighbours."""


def _places(step: int) -> list[int]:
    """By how many bytes an element's number is behind that of the first; `step` is by how many columns places grow."""
    return [_BYTES * step * (8 * (n // 4 - n // 2 % 2) + n % 2) for n in range(ELEMENTS)]


def loaded(step: int) -> str:
    """Each number once."""
    places = _places(step)
    owners = {place: n for n, place in reversed([*enumerate(places)])}
    loads = [f"ld.global.nc.f32 ${n}, [${ELEMENTS} + {place}];" for place, n in owners.items()]
    moves = [f"mov.f32 ${n}, ${owners[place]};" for n, place in enumerate(places) if owners[place] != n]
    return f"{{ {' '.join([*loads, *moves])} }}"


# --- sums ----------------------------------------------------------------------------------------
# A thread's row is 2 * turn + odd of eight, its columns 2 * own + 0 and 1 of each eight. The eight threads with the same
# `own` have the same diagonals, in columns that are as much further on as their rows are. Turned to the columns of the
# first row, where they may come from the eight columns before, sums of theirs are divided among them: adding element by
# element, threads would wait for each other.


def _own(eight: int, neighbour: int) -> str:
    """The register of a sum of a thread's own elements, by how many eights it is behind the diagonal."""
    return f"own{2 * (eight + 1) + neighbour}" if -1 <= eight < len(_EIGHTS) else "none"


def _own_sums() -> Iterator[str]:
    """In odd rows a neighbour is where the other one is in even rows, the second one a pair further on."""
    for eight in range(-1, len(_EIGHTS)):
        first, second = (_own(eight, neighbour) for neighbour in _PAIR)
        for neighbour in _PAIR:
            parts = [4 * eight + neighbour] if eight >= 0 else []
            parts += [4 * (eight + 1) + 2 + neighbour] if eight + 1 < len(_EIGHTS) else []
            operation = "add.f32" if len(parts) > 1 else "mov.f32"
            yield f"{operation} {_own(eight, neighbour)}, {', '.join(f'${ELEMENTS + n}' for n in parts)};"
        yield f"selp.f32 given, {second}, {first}, odd; selp.f32 {second}, {first}, {second}, odd; mov.f32 {first}, given;"


def _turned_sums() -> Iterator[str]:
    """Of ten eights: those of threads that wrap around are one behind."""
    for n in range(20):
        eight, neighbour = n // 2 - 2, n % 2
        yield f"selp.f32 sum{n}, {_own(eight + 1, neighbour)}, {_own(eight, neighbour)}, wraps{neighbour};"
        yield f"shfl.sync.idx.b32 sum{n}, sum{n}, from{neighbour}, 31, 0xffffffff;"


def _exchange(low: str, high: str, is_high: str, lanes: int) -> Iterator[str]:
    """Adds what two threads have of two sums: one keeps the first, the other the second, as `low`."""
    yield f"selp.f32 given, {low}, {high}, {is_high}; selp.f32 {low}, {high}, {low}, {is_high};"
    yield f"shfl.sync.bfly.b32 given, given, {lanes}, 31, 0xffffffff; add.f32 {low}, {low}, given;"


def _turns(neighbour: int, by: str) -> str:
    """Which thread's columns are `by` pairs further on, and whether they are in the eight behind."""
    turned = f"setp.lt.u32 wraps{neighbour}, own, {by}; add.u32 from{neighbour}, own, {by};"
    return f"{turned} and.b32 from{neighbour}, from{neighbour}, 3; or.b32 from{neighbour}, from{neighbour}, row;"


def added(step: int) -> str:
    """Each sum of a warp's elements, by one of its threads."""
    moved = [f"red.relaxed.gpu.global.add.f32 [at + {_BYTES * step * 8 * (n // 2 - 2)}], sum{n};" for n in (0, 2, 4)]
    text = [
        ".reg .pred wraps0, wraps1, late, second, odd; .reg .b32 lane, own, row, turn, from0, from1, t; .reg .b64 at;",
        f".reg .f32 none, given, {', '.join(f'own{n}' for n in range(18))}, {', '.join(f'sum{n}' for n in range(20))};",
        "mov.f32 none, 0f00000000; mov.u32 lane, %laneid; and.b32 own, lane, 3; and.b32 row, lane, 28;",
        "bfe.u32 turn, lane, 3, 2; bfe.u32 t, lane, 2, 1; setp.ne.u32 odd, t, 0;",
        _turns(0, "turn"),
        "add.u32 t, t, turn;",
        _turns(1, "t"),
        *_own_sums(),
        *_turned_sums(),
        "setp.ge.u32 late, turn, 2; and.b32 t, turn, 1; setp.ne.u32 second, t, 0;",
        *(line for n in range(10) for line in _exchange(f"sum{n}", f"sum{n + 10}", "late", 16)),
        *(line for n in range(0, 10, 2) for line in _exchange(f"sum{n}", f"sum{n + 1}", "second", 8)),
        *(line for n in (0, 2) for line in _exchange(f"sum{n}", f"sum{n + 6}", "odd", 4)),
        *_exchange("sum4", "none", "odd", 4),
        # A thread has the diagonals of its row's columns, five eights further on if `late`, one more if `second`, and
        # three eights if `odd`.
        "mad.lo.u32 t, turn, 3, 0; @late add.u32 t, t, 38; @odd add.u32 t, t, 25;",
        f"mul.wide.s32 at, t, {_BYTES * step}; add.s64 at, at, ${2 * ELEMENTS};",
        *moved[:2],
        f"@!odd {moved[2]}",
    ]
    return f"{{ {' '.join(text)} }}"


STATEMENTS: dict[str, tuple[Callable[[int], str], str]] = {
    "LOADED": (loaded, LOADED_CONSTRAINTS),
    "ADDED": (added, ADDED_CONSTRAINTS),
}
"""By name: the text for a step, and its constraints."""
