"""README's figures: one line for each definition out of tables of `bench/results`, and a picture of the same lines."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path

NUMBER = re.compile(r"\d+(?:\.\d+)?")
MOST = 4.0
"""Bars end here; what is longer says how long."""
HEADER = """\
| definition | shape | forward ms | fastest peer | speed | backward ms | fastest peer | speed |
|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Timed:
    """Milliseconds of ours, and of the fastest peer in the same run."""

    ours: float
    peer: str
    theirs: float

    @property
    def speed(self) -> float:
        return self.theirs / self.ours


@dataclass(frozen=True)
class Line:
    """One definition; None where no peer runs it, or was timed beside it."""

    definition: str
    shape: str
    forward: Timed | None
    backward: Timed | None

    def ways(self) -> tuple[Timed | None, Timed | None]:
        return self.forward, self.backward


def rows(text: str) -> list[list[str]]:
    """Cells of a page's first table, its header first."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("|"):
            found.append([cell.strip() for cell in line.strip().strip("|").split("|")])
        elif found:
            break
    return found[:1] + found[2:]


def first_number(cell: str) -> float | None:
    found = NUMBER.match(cell)
    return float(found[0]) if found else None


def fastest(ours: float | None, peers: dict[str, float | None]) -> Timed | None:
    known = {name: time for name, time in peers.items() if time is not None}
    if ours is None or not known:
        return None
    peer = min(known, key=lambda name: known[name])
    return Timed(ours, peer, known[peer])


def attention(text: str) -> Iterator[Line]:
    """Of a table whose cells read `forward ms, TFLOP/s / backward ms, TFLOP/s`, a column for each contender."""
    header, *body = rows(text)
    contenders = [name for name in header[2:-1] if name != "deterministic"]
    for row in body:
        cells = dict(zip(header, row, strict=True))
        ways = [{name: way(cells[name], n) for name in contenders} for n in (0, 1)]
        forward, backward = (fastest(times.pop("ours"), times) for times in ways)
        yield Line(cells["mask"], cells["shape"], forward, backward)


def way(cell: str, n: int) -> float | None:
    parts = cell.split("/")
    return first_number(parts[n].strip()) if n < len(parts) else None


def forward(text: str) -> Iterator[Line]:
    """Of a table whose cells read `forward ms, TFLOP/s`, a column for each contender."""
    header, *body = rows(text)
    for definition, shape, *cells in body:
        times = dict(zip(header[2:], map(first_number, cells[:-1]), strict=False))
        yield Line(definition, shape, fastest(times.pop("ours"), times), None)


def custom(text: str) -> Iterator[Line]:
    """Of a table of definitions beside one peer each: ms, TFLOP/s, the peer's ms and a ratio, for both ways."""
    for definition, shape, *cells in rows(text)[1:]:
        name = re.sub(r" \(.*\)|, heads of \d+ and \d+", "", definition)
        peer = "dense formula" if name.startswith(("sigmoid", "relu")) else "FlexAttention"
        forward, backward = (fastest(first_number(cells[n]), {peer: first_number(cells[n + 2])}) for n in (0, 4))
        if forward or backward:
            yield Line(name, shape, forward, backward)


def recurrence(text: str) -> Iterator[Line]:
    """Of a table whose lines are contenders, ours first; times of peers are the second number of `R of MS`."""
    _, *body = rows(text)
    peers = {row[0]: row[1] for row in body if not row[1].startswith("attn_engine")}
    for shape, contender, *cells in body:
        if contender == "attn_engine":
            peer = peers.get(shape, "a copy of the state")
            name, _, size = re.sub(r" (B\d)", r"|\1", shape, count=1).partition("|")
            ways = [fastest(first_number(cells[n]), {peer: second_number(cells[n + 2])}) for n in (0, 3)]
            yield Line(name, size, *ways)


def second_number(cell: str) -> float | None:
    found = NUMBER.findall(cell)
    return float(found[1]) if len(found) > 1 else None


READERS: dict[str, Callable[[str], Iterator[Line]]] = {
    "attention_h200": attention,
    "hopper_forward_h200": forward,
    "custom_h200": custom,
    "recurrence_h200": recurrence,
}
"""How the first table of a page of `bench/results` is read."""


def lines_of(results: Path) -> list[Line]:
    """All definitions of the recorded pages that README shows."""
    found: dict[tuple[str, str], Line] = {}
    for name, reader in READERS.items():
        page = results / f"{name}.md"
        for line in reader(page.read_text()) if page.exists() else ():
            key = (line.definition, line.shape)
            found[key] = faster_peers(found[key], line) if key in found else line
    return list(found.values())


def faster_peers(first: Line, second: Line) -> Line:
    """Of two lines of one definition, the peer that came closest, for each way."""
    ways = [[way for way in both if way] for both in zip(first.ways(), second.ways(), strict=True)]
    return replace(first, **dict(zip(("forward", "backward"), (slowest(way) for way in ways), strict=True)))


def slowest(ways: list[Timed]) -> Timed | None:
    return min(ways, key=lambda timed: timed.speed, default=None)


def table(lines: list[Line]) -> str:
    text = [HEADER]
    for line in lines:
        cells = [line.definition, line.shape]
        for timed in line.ways():
            cells += [ms(timed.ours), f"{timed.peer} {ms(timed.theirs)}", times(timed)] if timed else [""] * 3
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def ms(time: float) -> str:
    return f"{time:.{3 if time < 0.1 else 2 if time < 10 else 1 if time < 100 else 0}f}"


def times(timed: Timed) -> str:
    """How many times as fast as the peer; bold where that is less than once."""
    digits = f"{timed.speed:.2f}x" if timed.speed < 9.95 else f"{timed.speed:.0f}x"
    return f"**{digits}**" if timed.speed < 0.995 else digits


def picture(lines: list[Line], before: str) -> str:
    """An SVG of the speeds; what stood there before, if it shows the same ones."""
    digest = hashlib.sha256(repr([astuple(line) for line in lines]).encode()).hexdigest()
    return before if digest in before else drawn(lines, digest)


def drawn(lines: list[Line], digest: str) -> str:
    import matplotlib  # only what draws needs it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {"svg.fonttype": "none", "svg.hashsalt": "attn_engine", "font.size": 8, "axes.spines.top": False}
    with matplotlib.rc_context({**style, "axes.spines.right": False}):
        figure, axes = pyplot.subplots(figsize=(7.5, 0.27 * len(lines) + 1), layout="constrained")
        for n, (label, color) in enumerate((("forward", "#2a6f97"), ("backward", "#e08e45"))):
            shown = [(y, timed.speed) for y, line in enumerate(lines) if (timed := line.ways()[n])]
            heights, speeds = [y + 0.38 * n - 0.19 for y, _ in shown], [speed for _, speed in shown]
            axes.barh(heights, [min(s, MOST) for s in speeds], height=0.36, label=label, color=color)
            for y, s in zip(heights, speeds, strict=True):
                if s > MOST:
                    axes.text(MOST, y, f" {s:.{s < 10:d}f}x", va="center", fontsize=6)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_xlim(0, MOST * 1.05)
        axes.set_ylim(len(lines) - 0.4, -0.6)
        axes.set_yticks(range(len(lines)), [f"{line.definition}, {line.shape}" for line in lines])
        axes.set_xlabel("speed beside the fastest peer of the same run (1: as fast as it)")
        axes.legend(frameon=False, loc="lower right")
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Description": digest})
        pyplot.close(figure)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
