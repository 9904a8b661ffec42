"""Whether all threads that a barrier waits for come to it, read off the source that TileLang generates.

TileLang puts barriers in front of writes to shared memory, also where only some threads write: a tile that is held twice is
written once. Half of the threads then wait for the other half, in a branch that these do not take, and the kernel never ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_BOUNDS = re.compile(r"__launch_bounds__\((\d+)")
_BRANCH = re.compile(r"^(?:\} else )?if \((.*)\) \{$")
_BARRIER = re.compile(r"__syncthreads\(\)|__sync_thread_partial\(\d+, (\d+)\)|__sync_thread_partial<\d+, (\d+)>\(\)")
_THREAD = re.compile(r"\(\(int\)threadIdx\.x\)|(\(int\))?threadIdx\.x")
_TOKEN = re.compile(r"[\s\d()<>=+\-*/%&|^~!t]+")

Threads = frozenset[int]


def _within(condition: str, threads: Threads) -> Threads | None:
    """Those of some threads for which a condition holds; None if it depends on more than the thread."""
    text = _THREAD.sub("t", condition)
    if not _TOKEN.fullmatch(text) or text.count("(") != text.count(")"):
        return None
    python = text.replace("&&", " and ").replace("||", " or ").replace("/", "//")
    python = re.sub(r"!(?!=)", " not ", python)
    compiled = compile(python.strip(), "<condition>", "eval")
    return frozenset(t for t in threads if eval(compiled, {"__builtins__": {}}, {"t": t}))


def _walk(source: str, threads: Threads) -> Iterator[tuple[str, Threads | None]]:
    """Every line with the threads that come to it, where these are known."""
    scopes: list[Threads | None] = [threads]
    others: Threads | None = threads
    for line in (raw.strip() for raw in source.splitlines()):
        yield line, scopes[-1]
        if line.startswith("}") and len(scopes) > 1:
            taken, outer = scopes.pop(), scopes[-1]
            others = outer if outer is None or taken is None or outer == taken else outer - taken
        branch, opened = _BRANCH.match(line), line.count("{") - line.count("}") + line.startswith("}")
        if branch is not None and "threadIdx" in branch[1]:
            scopes.append(None if scopes[-1] is None else _within(branch[1], scopes[-1]))
        elif line == "} else {":
            scopes.append(others)
        else:
            scopes += [scopes[-1]] * max(opened, 0)
            del scopes[max(1, len(scopes) + min(opened, 0)) :]


def barriers_of_some(source: str) -> list[str]:
    """Barriers to which not all come that they wait for, each with how many do."""
    bounds = _BOUNDS.search(source)
    if bounds is None:
        return []
    everyone = frozenset(range(int(bounds[1])))
    found: list[str] = []
    for line, threads in _walk(source[bounds.end() :], everyone):
        for barrier in _BARRIER.finditer(line):
            wanted = int(barrier[1] or barrier[2] or len(everyone))
            if threads is None or len(threads) != wanted:
                come = "some threads" if threads is None else f"{len(threads)} threads"
                found.append(f"{barrier[0]} waits for {wanted} threads where {come} come")
    return found
