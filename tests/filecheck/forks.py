"""RUN lines in forks of a process that has loaded the compiler: to start Python takes ten times as long as what they run."""

from __future__ import annotations

import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable
from tempfile import TemporaryFile

import filecheck.main
import lit.formats
import lit.Test
from lit import TestRunner

from attn_engine.tools import attn_opt
from attn_engine.universe import DIALECTS, PASSES

PROGRAMS: dict[str, Callable[[], object]] = {"attn-opt": attn_opt.main, "filecheck": filecheck.main.main}

for load in (*DIALECTS.values(), *PASSES.values()):
    load()


class ForkedTest(lit.formats.ShTest):
    """Tests whose lines are pipelines of `PROGRAMS`; others go to lit's own shell. A program that fails fails its line."""

    def execute(self, test, litConfig):
        script = TestRunner.parseIntegratedTestScript(test)
        if isinstance(script, lit.Test.Result):
            return script
        values = TestRunner.getDefaultSubstitutions(test, *TestRunner.getTempPaths(test))
        lines = [
            re.fullmatch(TestRunner.kPdbgRegex, line).group(2)
            for line in TestRunner.applySubstitutions(script, values, {}, test.config.recursiveExpansionLimit)
        ]
        pipelines = [stages(line) for line in lines]
        if any(stage[0] not in PROGRAMS for pipeline in pipelines for stage in pipeline):
            return super().execute(test, litConfig)
        for line, pipeline in zip(lines, pipelines, strict=True):
            passed, said = b"", [line]
            for stage in pipeline:
                code, passed, errors = run(stage, passed)
                said.append(errors)
                if code:
                    said.append(f"{stage[0]} ends with {code}")
                    return lit.Test.Result(lit.Test.FAIL, "\n".join(said))
        return lit.Test.Result(lit.Test.PASS)


def stages(line: str) -> list[list[str]]:
    """The programs of a pipeline with their arguments; what is not one has a first word that names no program."""
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.whitespace_split, words.commenters = True, ""
    found: list[list[str]] = [[]]
    for word in words:
        if word == "|":
            found.append([])
        elif re.fullmatch("[();<>|&]+", word):
            return [[word]]
        else:
            found[-1].append(word)
    return [stage or ["|"] for stage in found]


def run(stage: list[str], given: bytes) -> tuple[int, bytes, str]:
    """The exit code of a program on these bytes, what it wrote, and its errors."""
    with TemporaryFile() as source, TemporaryFile() as out, TemporaryFile() as errors:
        source.write(given)
        source.seek(0)
        child = os.fork()
        if child == 0:
            os._exit(_main(stage, [f.fileno() for f in (source, out, errors)]))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        errors.seek(0)
        return code, out.read(), errors.read().decode(errors="replace")


def _main(stage: list[str], files: list[int]) -> int:
    """As a process of its own runs it."""
    try:
        for standard, file in enumerate(files):
            os.dup2(file, standard)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        sys.argv = stage
        try:
            PROGRAMS[stage[0]]()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        sys.stdout.flush()
        return code
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stderr.flush()
