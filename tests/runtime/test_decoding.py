"""Few queries over many keys: small blocks of queries, keys in parts where a device would be idle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import attn_engine
from attn_engine.backends.backend import BACKENDS, get_backend
from attn_engine.errors import KernelOptionError
from attn_engine.frontend.build import build
from attn_engine.frontend.checks import Sizes
from attn_engine.frontend.definition import Definition
from attn_engine.runtime import driver
from attn_engine.runtime.decoding import Decoding, adapted, decoding
from attn_engine.runtime.devices import Target
from attn_engine.runtime.driver import Request
from attn_engine.runtime.schedules import default_schedule
from tests.support.compare import check, qkv, randn

H100 = Target("triton", "sm_90")
WHOLE, PARTS = Decoding(16), Decoding(16, parts=True)


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def sizes(q_len: int, kv_len: int, batch: int = 1, heads: int = 8) -> Sizes:
    return Sizes(batch, heads, heads, q_len, kv_len, 64, 64)


def test_classes_of_calls():
    assert decoding(sizes(1, 8192), H100) == decoding(sizes(16, 1024), H100) == PARTS
    assert decoding(sizes(1, 8192, batch=128), H100) == WHOLE
    assert decoding(sizes(17, 8192), H100) == decoding(sizes(1, 1023), H100) == Decoding()
    assert decoding(sizes(1, 8192), Target("tilelang", "sm_90")) == Decoding()


def test_schedules_of_few_queries():
    module = build(Definition(), dtype=torch.bfloat16, head_dim=128, head_dim_v=128).module
    default = default_schedule(H100, module)
    parts = adapted(default, PARTS, H100, module)
    assert (parts.forward.block_m, parts.programs) == (16, 132)
    assert adapted(default, WHOLE, H100, module).programs == 0
    assert adapted(default, Decoding(), H100, module) is default
    assert parts.dq == default.dq and "programs=132" in parts.pass_options()


def launches(attend: attn_engine.Attention, *tensors: torch.Tensor) -> int:
    attend(*tensors)
    (compiled,) = attend._memory.compiled.values()
    return compiled.tile_ir.split("tile.plan @forward")[1].count("tile.launch")


@pytest.mark.usefixtures("four_threads")
def test_parts_on_threads():
    tensors = qkv(h=1, sq=1, skv=2100)
    assert launches(attn_engine.compile(backend="cpu"), *tensors) == 2
    assert launches(attn_engine.compile(backend="cpu"), *qkv(h=9, sq=1, skv=1100)) == 1
    assert launches(attn_engine.compile(backend="cpu"), *qkv(h=1, sq=40, skv=2100)) == 1
    bias = randn(2100)
    check(lambda bias: {"score_mod": lambda s, b, h, q, kv: s + bias[kv]}, tensors, {"bias": bias})


def test_the_option_of_flex_attention():
    q, k, v = qkv(sq=3, skv=700)
    want = attn_engine.flex_attention(q, k, v)
    for parts in (1, 2, 5):
        got = attn_engine.flex_attention(q, k, v, kernel_options={"SPLIT_KV": parts})
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    with pytest.raises(KernelOptionError, match="SPLIT_KV"):
        attn_engine.flex_attention(q, k, v, kernel_options={"SPLIT_KV": 0})


def test_what_runs_on_the_host_gets_its_blocks_under_any_name(monkeypatch: pytest.MonkeyPatch):
    """Schedules, parts and tiles without padding are of what a backend says of itself."""
    monkeypatch.setitem(BACKENDS, "mine", lambda: replace(get_backend("cpu"), name="mine"))
    module = build(Definition(), dtype=torch.float32, head_dim=24, head_dim_v=24).module
    texts: list[str] = []
    for name in ("cpu", "mine"):
        target = Target(name, "")
        schedule = adapted(default_schedule(target, module), PARTS, target, module)
        lowered = driver.to_tile(driver.to_attn(module, ()), Request((), name, schedule), get_backend(name))
        texts.append(str(lowered))
    assert texts[0] == texts[1] and "x24xf32" in texts[0] and "x32xf32" not in texts[0]
