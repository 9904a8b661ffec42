"""Files of what was measured: JSON, an object of entries, read and added to by several processes.

An entry of an attention has the schedule of each kernel, and where backends were compared two names more; one of a
recurrence has the options of its form that are not the default. Both kinds may be in one file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from attn_engine.backends.backend import BACKENDS
from attn_engine.errors import TuneFileError
from attn_engine.ir.schedule import Kind
from attn_engine.runtime.recurrence_compile import Schedule

SCHEDULE, FORM = "schedule", "form of a recurrence"
KERNELS = tuple(kind.value for kind in Kind)
NAMES = ("backend", "gradients")


def _is_schedule(entry: dict[str, Any]) -> bool:
    """Schedules of all kernels, and where backends were compared, both names."""
    named = [entry[name] for name in NAMES if name in entry]
    return all(_are_sizes(entry.get(name)) for name in KERNELS) and (
        not named or (len(named) == len(NAMES) and named[0] in BACKENDS and named[1] in ("", *BACKENDS))
    )


def _are_sizes(sizes: Any) -> bool:
    return (
        isinstance(sizes, list)
        and len(cast("list[Any]", sizes)) == 4
        and all(type(size) is int and size > 0 for size in cast("list[Any]", sizes))
    )


def _is_form(entry: dict[str, Any]) -> bool:
    """Options of a form, whose numbers are at least 1."""
    defaults = vars(Schedule())
    return all(
        type(value) is type(defaults.get(name)) and (type(value) is not int or value >= 1)
        for name, value in entry.items()
    )


KINDS: dict[str, Callable[[dict[str, Any]], bool]] = {SCHEDULE: _is_schedule, FORM: _is_form}


def read_entries(file: str, kind: str) -> dict[str, Any]:
    """Entries of one kind that were measured before, none where there is no file; TuneFileError where one is of no kind."""
    return {key: entry for key, entry in _read(file, kind).items() if KINDS[kind](entry)}


def add_entry(file: str, kind: str, key: str, entry: dict[str, Any]) -> None:
    """Adds an entry; what others wrote meanwhile stays."""
    _write(file, _read(file, kind) | {key: entry})


def _read(file: str, kind: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(file).read_text())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise TuneFileError(file, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise TuneFileError(file, f"is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise TuneFileError(file, "holds no object of entries")
    entries = cast("dict[str, Any]", found)
    for key, entry in entries.items():
        if not isinstance(entry, dict) or not any(is_kind(cast("dict[str, Any]", entry)) for is_kind in KINDS.values()):
            raise TuneFileError(file, f"has no {kind} at '{key}'")
    return entries


def _write(file: str, entries: dict[str, Any]) -> None:
    """Replaces the file at once: who reads meanwhile reads the old one or the new one."""
    path = Path(file)
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        scratch.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
        scratch.replace(path)
    except OSError as error:
        raise TuneFileError(file, f"cannot be written: {error.strerror}") from error
