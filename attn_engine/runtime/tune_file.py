"""Files of what was measured: JSON, an object of entries, read and added to by several processes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from attn_engine.errors import TuneFileError


def read_entries(file: str, what: str, is_entry: Callable[[Any], bool]) -> dict[str, Any]:
    """What was measured before, nothing where there is no file; TuneFileError where an entry is no `what`."""
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
        if not is_entry(entry):
            raise TuneFileError(file, f"has no {what} at '{key}'")
    return entries


def write_entries(file: str, entries: dict[str, Any]) -> None:
    """Replaces the file at once: who reads meanwhile reads the old one or the new one."""
    path = Path(file)
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        scratch.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
        scratch.replace(path)
    except OSError as error:
        raise TuneFileError(file, f"cannot be written: {error.strerror}") from error
