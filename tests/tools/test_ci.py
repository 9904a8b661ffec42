""".ci/run: installs what is missing where it may, says what is missing where it may not, then tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / ".ci" / "run"
TOOLS = ("bash", "dirname", "env", "mktemp", "rm")
COMMANDS = ("make", "g++", "clang++-19", "llvm-objdump-19", "ld.lld-19", "python3")
PACKAGES = "g++ clang-19 llvm-19 lld-19"


def run(folder: Path, present: tuple[str, ...]) -> tuple[list[str], str]:
    """What a machine with these commands is asked to do, and what is said on stderr."""
    log = folder / "log"
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (folder / tool).symlink_to(found)
    for name in (*present, "apt-get"):
        (folder / name).write_text(f'#!{folder}/bash\necho "{name} $*" >> {log}\n')
        (folder / name).chmod(0o755)
    environment = {"PATH": str(folder), "HOME": str(folder)}
    done = subprocess.run([str(folder / "bash"), str(RUN)], env=environment, capture_output=True, text=True, check=True)
    return [line for line in log.read_text().splitlines() if not line.startswith("python3")], done.stderr


def test_complete_machines_are_left_alone(tmp_path: Path):
    asked, said = run(tmp_path, COMMANDS)
    assert asked == ["make --keep-going test"]
    assert said == ""


def test_what_is_missing(tmp_path: Path):
    asked, said = run(tmp_path, ("make", "python3"))
    if os.geteuid() == 0:
        install = f"apt-get install -qq -y --no-install-recommends {PACKAGES}"
        assert asked == ["apt-get update -qq", install, "make --keep-going test"]
    else:
        assert asked == ["make --keep-going test"]
        assert f"not installed: {PACKAGES}" in said


def test_failing_tests_fail(tmp_path: Path):
    (tmp_path / "bad").mkdir()
    with pytest.raises(subprocess.CalledProcessError):
        run(tmp_path / "bad", tuple(c for c in COMMANDS if c != "make"))
