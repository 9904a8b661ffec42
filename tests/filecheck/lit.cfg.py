"""lit configuration: every .mlir file here runs its RUN lines."""

import os
import sys

import lit.formats

config.name = "attn_engine"  # type: ignore[name-defined]  # noqa: F821
config.test_source_root = os.path.dirname(__file__)  # type: ignore[name-defined]  # noqa: F821
config.test_format = lit.formats.ShTest(execute_external=False)  # type: ignore[name-defined]  # noqa: F821
config.suffixes = [".mlir"]  # type: ignore[name-defined]  # noqa: F821
config.environment["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]  # type: ignore[name-defined]  # noqa: F821
