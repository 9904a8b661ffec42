"""`python -m tests.fuzz --cases 2000 [--seed 0]`: see `tests.fuzz.run`, which other processes import."""

import sys

from tests.fuzz.run import main

if __name__ == "__main__":
    sys.exit(main())
