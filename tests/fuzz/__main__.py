"""`python -m tests.fuzz --cases 2000 [--seed 0]`: random definitions through every path; failures print as code."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

import torch

from tests.fuzz.check import check_case
from tests.fuzz.grammar import generate
from tests.support.engines import ALL


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000, help="how many cases must be compared")
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--backends", default=",".join(ALL), help="a list out of " + ", ".join(ALL))
    options = parser.parse_args()
    torch.set_num_threads(1)
    verdicts: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    seed = options.seed
    while verdicts["agreed"] + verdicts["failed"] < options.cases:
        outcome = check_case(generate(seed), options.backends.split(","))
        verdicts[outcome.verdict] += 1
        if outcome.verdict == "agreed":
            rows[outcome.case.row] += 1
        if outcome.verdict == "failed":
            print(f"{outcome.case}# {outcome.detail}\n", flush=True)
        seed += 1
    print("compared rows:", ", ".join(f"{row} {count}" for row, count in rows.most_common()))
    print(f"drawn {sum(verdicts.values())}, ill-conditioned {verdicts['ill-conditioned']} (drawn again)")
    print(f"{verdicts['agreed'] + verdicts['failed']} cases, {verdicts['failed']} failures")
    return 1 if verdicts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
