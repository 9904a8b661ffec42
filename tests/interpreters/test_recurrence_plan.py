"""The chunked recurrence written by hand at the tile level equals the recurrence token by token."""

from pathlib import Path

import pytest
import torch
from xdsl.dialects import math

from attn_engine.backends.cpu.backend import BACKEND as CPU
from attn_engine.backends.triton.interpret import interpret
from attn_engine.interpreters.attn_recurrence import run_recurrence
from attn_engine.interpreters.scalar import SCALAR_OPS
from attn_engine.interpreters.tile import run_plan
from attn_engine.universe import PASSES, make_context
from tests.backends.triton_support import source_of
from tests.support.attn_cases import parse

PLAN = Path(__file__).parents[1] / "filecheck" / "tile" / "recurrence_chunked.mlir"
T = "tensor<?x?x?x?xf32>"
RECURRENCE = f"""
func.func @recurrence(%q: {T}, %k: {T}, %v: {T}, %scale: f32, %g: tensor<?x?x?xf32>) -> ({T}, {T}) {{
  %o, %s = attn.recurrence %q, %k, %v scale %scale decay %g : {T}, {T}, {T} decay tensor<?x?x?xf32> -> {T} final {T}
  func.return %o, %s : {T}, {T}
}}"""
SCALE = 0.25


@pytest.fixture(scope="module")
def plan():
    return parse(PLAN.read_text())


def inputs(tokens, decay):
    """Four heads of values on two of queries and keys; `decay` is the rate: a chunk forgets all at 1, little at 0.01."""
    generator = torch.Generator().manual_seed(tokens)
    q, k = (torch.randn(2, 2, tokens, 16, generator=generator) for _ in range(2))
    v = torch.randn(2, 4, tokens, 32, generator=generator)
    return q, k, v, torch.nn.functional.logsigmoid(torch.randn(2, 4, tokens, generator=generator)) * decay


def run(plan, q, k, v, g, exact=False):
    real = torch.float64 if exact else torch.float32
    o, final = torch.full(v.shape, torch.nan, dtype=real), torch.full((2, 4, 16, 32), torch.nan, dtype=real)
    run_plan(plan, "recurrence", [q, k, v, g, o, final, SCALE], exact=exact)
    return o, final


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 130])
@pytest.mark.parametrize("decay", [1.0, 0.01])
def test_equals_the_recurrence(plan, tokens, decay):
    q, k, v, g = inputs(tokens, decay)
    want = run_recurrence(parse(RECURRENCE), q, k, v, SCALE, g)
    for got, expected in zip(run(plan, q, k, v, g, exact=True), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    for got, expected in zip(run(plan, q, k, v, g), want, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


def test_a_decay_of_minus_infinity_forgets(plan):
    q, k, v, g = inputs(130, 0.01)
    g[:, :, 70] = float("-inf")
    g[:, 0, 0] = float("-inf")
    want = run_recurrence(parse(RECURRENCE), q, k, v, SCALE, g)
    for got, expected in zip(run(plan, q, k, v, g), want, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-3)


def on_cpu(text):
    module = parse(text)
    PASSES["cpu-legalize"]()().apply(make_context(), module)
    return CPU.build(CPU.emit(module))["recurrence"]


def in_the_triton_interpreter(text):
    return interpret(source_of(text))["recurrence"]


@pytest.mark.parametrize("compiled", [on_cpu, in_the_triton_interpreter])
def test_backends_run_the_same_plan(compiled):
    q, k, v, g = inputs(65, 0.1)
    o, final = torch.full(v.shape, torch.nan), torch.full((2, 4, 16, 32), torch.nan)
    compiled(PLAN.read_text())(q, k, v, g, o, final, SCALE)
    want = run_recurrence(parse(RECURRENCE), q, k, v, SCALE, g)
    for got, expected in zip((o, final), want, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


def test_no_exponent_is_positive(plan, monkeypatch):
    seen = []

    def watched(op, args, dtype_of):
        seen.append(args[0].max().item())
        return original(op, args, dtype_of)

    original = SCALAR_OPS[math.ExpOp]
    monkeypatch.setitem(SCALAR_OPS, math.ExpOp, watched)
    run(plan, *inputs(130, 1.0))
    assert seen and max(seen) <= 0
