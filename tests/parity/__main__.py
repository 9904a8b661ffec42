"""`python -m tests.parity [--jobs 2] [--out docs/parity.md]`: every case through every path; the last line counts them.

With `--log` it can be stopped and started again: outcomes of the same sources are kept and not run again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from pathlib import Path as File

from tests.parity.cases import cases
from tests.parity.log import read, write
from tests.parity.paths import PATHS
from tests.parity.processes import run
from tests.parity.report import is_good, last_line, page


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--paths", default=",".join(path.name for path in PATHS))
    parser.add_argument("--cases", default="", help="only cases whose name has this in it")
    parser.add_argument("--out", type=File, help="where the report goes")
    parser.add_argument(
        "--log", type=File, help="where outcomes are kept, a line each; those that it has are not run again"
    )
    return parser.parse_args()


def main() -> int:
    options = _options()
    chosen = [case for case in cases() if options.cases in str(case)]
    log, paths = options.log, options.paths.split(",")
    outcomes = read(log, chosen, paths) if log else []
    for outcome in run(chosen, paths, options.jobs, outcomes):
        outcomes.append(outcome)
        if log:
            write(log, outcome)
        if outcome.verdict in ("failed", "skipped"):
            print(
                f"{outcome.verdict}: {outcome.case} ({outcome.dtype}) on {outcome.path}: {outcome.detail}", flush=True
            )
    if options.out:
        options.out.write_text(page(chosen, outcomes))
    print(last_line(outcomes))
    return 0 if is_good(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
