"""Tables of blocks on HIP: what they skip is never read, nothing visible is skipped, and their kernels take no scratch."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from xdsl.rewriter import Rewriter

import attn_engine
from attn_engine import library
from attn_engine.arch import get_arch
from attn_engine.backends.hip.emit import emit
from attn_engine.backends.hip.predict import predict
from attn_engine.backends.hip.toolchain import has_compiler, inspect
from attn_engine.dialects import tile
from attn_engine.passes.lowering import block_ranges
from attn_engine.runtime.inspect import View
from tests.support.block_tables import check_documents, check_skipped
from tests.support.hip import EMULATED, SMALL, emulates, emulation, needs_clang, parse

IDS = torch.arange(64) // 9


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    with emulation():
        yield


@emulates
@pytest.mark.parametrize("first", [0, 8])
def test_skipped_keys_are_never_read(first: int):
    check_skipped(EMULATED, SMALL, 64, first, heads=1)


@emulates
@pytest.mark.parametrize(("size", "first", "dtype"), [(200, 0, torch.float16), (100, 5, torch.float32)])
def test_causal_documents(size: int, first: int, dtype: torch.dtype):
    """With several steps over the other blocks."""
    with mock.patch.object(block_ranges, "ELEMENTS", 16):
        check_documents(EMULATED, SMALL, size, first, (2, 1), 1, dtype)


def first_keys(b, h, q, kv):
    return (IDS[q] == IDS[kv]) | (kv < 16)


@needs_clang
@pytest.mark.parametrize(
    ("arch", "mask"),
    [("gfx90a", library.document(IDS)), ("gfx942", first_keys), ("gfx950", library.document(IDS))],
    ids=["documents", "two runs", "deep"],
)
def test_compiles_as_predicted(arch: str, mask):
    """Tables of queries for the forward and dq, and of keys for dk and dv."""
    if not has_compiler(arch):
        pytest.skip("pip install ziglang")
    view = View(torch.bfloat16, 64, 64, backward=True, arch=arch, backend="hip")
    module = parse(attn_engine.compile(mask_mod=mask).ir("tile", view))
    for op in [o for o in module.ops if not isinstance(o, tile.KernelOp) or "ranges" not in o.sym_name.data]:
        Rewriter.erase_op(op)
    needs, found = predict(module, get_arch(arch)), inspect(emit(module), arch)
    assert len(found) == 3
    for name, kernel in found.items():
        assert (kernel.spills, kernel.mfma, kernel.shared) == (0, 0, needs[name.removesuffix("_kernel")].shared)
        assert kernel.registers <= 128


@needs_clang
def test_two_runs_of_wide_heads_take_no_scratch():
    """Fewer keys in a block of the forward; loops over several ranges of blocks are one."""
    view = View(torch.bfloat16, 128, 128, arch="gfx942", backend="hip")
    text = attn_engine.compile(mask_mod=first_keys).source("hip", view)
    assert {name: kernel.spills for name, kernel in inspect(text, "gfx942").items()} == {
        "forward_q_ranges_256_32_kernel": 0,
        "forward_kernel_kernel": 0,
    }
