"""lit configuration: every .mlir file here runs its RUN lines."""

import os
import sys

sys.path.insert(0, os.path.dirname(__file__))
from forks import ForkedTest

config.name = "attn_engine"  # type: ignore[name-defined]  # noqa: F821
config.test_source_root = os.path.dirname(__file__)  # type: ignore[name-defined]  # noqa: F821
config.test_format = ForkedTest()  # type: ignore[name-defined]  # noqa: F821
config.suffixes = [".mlir"]  # type: ignore[name-defined]  # noqa: F821
config.environment["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]  # type: ignore[name-defined]  # noqa: F821
