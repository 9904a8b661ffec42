"""tile-assign-memory: kernels compute over buffers, to the bit, what they computed over values."""

from __future__ import annotations

import pytest
import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.parser import Parser
from xdsl.utils.arg_spec import parse_pipeline

from attn_engine.dialects import tile
from attn_engine.dialects.tile_buffer_memory import BufferAllocOp, CopyOp
from attn_engine.errors import PassError
from attn_engine.interpreters import tile as value_level
from attn_engine.interpreters import tile_buffer as buffered_level
from attn_engine.universe import PASSES, make_context
from tests.support.attn_cases import attention_text, captures_for, random_inputs
from tests.support.attn_lowered import SOFTMAX_BACKWARD

COMMON = "attn-simplify,attn-analyze-mask,attn-derive-online,attn-simplify"


def lowered(text: str, pipeline: str) -> ModuleOp:
    module = Parser(make_context(), text).parse_module()
    for spec in parse_pipeline(pipeline):
        PASSES[spec.name]().from_spec(spec).apply(make_context(), module)
        module.verify()
    return module


def buffered(module: ModuleOp) -> ModuleOp:
    result = module.clone()
    PASSES["tile-assign-memory"]()().apply(make_context(), result)
    result.verify()
    return Parser(make_context(), str(result)).parse_module()


def assert_same(module: ModuleOp, plan: str, inputs: list, outputs: list[torch.Tensor], scale: float) -> None:
    """Both levels write the same outputs, which come between the inputs in `inputs` and the rest where None stands."""
    results = []
    for level, text in ((value_level, module), (buffered_level, buffered(module))):
        mine = [o.clone() for o in outputs]
        fresh = iter(mine)
        level.run_plan(text, plan, [*(next(fresh) if i is None else i for i in inputs), scale])
        results.append(mine)
    for value, buffer in zip(*results, strict=True):
        torch.testing.assert_close(buffer, value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("sq", "skv"), [(40, 40), (17, 33), (3, 0)])
@pytest.mark.parametrize(
    ("row", "score_mod", "mask"),
    [
        ("softmax", None, "causal"),
        ("softmax_lse", "alibi", "window"),
        ("softmax", "bias", "lengths"),
        ("sigmoid", "softcap", "holes"),
        ("softmax_sink", None, None),
        ("retention", "temperature", "lengths"),
    ],
)
def test_forward(row: str, score_mod: str | None, mask: str | None, sq: int, skv: int):
    q, k, v = random_inputs(b=2, hq=4, hkv=2, sq=sq, skv=skv, d=8, dtype=torch.float32)
    captures = [c.float() if c.is_floating_point() else c for c in captures_for(q, k, row, score_mod, mask)]
    text = attention_text(row, score_mod, mask).replace("tensor<?x?x?x?xf32>", "tensor<?x?x?x8xf32>")
    module = lowered(text, f"{COMMON},convert-attn-to-tile{{forward=16,16,4,2}}")
    outputs = [torch.full_like(q, 7.0), *([torch.full(q.shape[:3], 7.0)] if row == "softmax_lse" else [])]
    assert_same(module, "forward", [q, k, v, *[None] * len(outputs), *captures], outputs, 0.3)


@pytest.mark.parametrize("analyze", [False, True])
def test_backward_but_for_gradients_of_captures(analyze: bool):
    q, k, v = random_inputs(b=2, hq=4, hkv=2, sq=17, skv=33, d=8, dtype=torch.float32)
    d_o, slopes, o, lse = torch.randn_like(q), torch.rand(4) + 0.5, torch.randn_like(q), torch.randn(2, 4, 17) + 3
    text = SOFTMAX_BACKWARD.replace("tensor<?x?x?x?xf32>", "tensor<?x?x?x8xf32>").replace(
        "grad_captures [0]", "grad_captures []"
    )
    text = text.replace("    attn.accumulate_grad %dw0, %slopes_[%h] : tensor<?xf32>\n", "").replace(
        "%dq, %dk, %dv, %dw =", "%dq, %dk, %dv ="
    )
    text = (
        text.replace(" d_captures tensor<?xf32>\n", "\n")
        .replace(", tensor<?xf32>) {", ") {")
        .replace("%dv, %dw :", "%dv :")
    )
    text = text.replace("tensor<?x?x?x8xf32>, tensor<?xf32>\n}", "tensor<?x?x?x8xf32>\n}")
    blocks = "rows=16,16,4,1 dq=16,32,4,2 dkdv=32,16,4,1"
    module = lowered(text, f"{'attn-analyze-mask,' if analyze else ''}convert-attn-to-tile{{{blocks}}}")
    outputs = [torch.full_like(t, 7.0) for t in (q, k, v)]
    assert_same(module, "backward", [q, k, v, o, d_o, lse, slopes, None, None, None], outputs, 0.3)


LOOP = """
tile.kernel @k(%x: !tile.global<1 x f32>, %y: !tile.global<2 x f32>, %n: i32) attributes {{num_warps = 1 : i64}} {{
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %c16 = arith.constant 16 : i32
  %zero = arith.constant dense<0.0> : tensor<16xf32>
  %a0 = tile.load %x[%c0] dims [0] : !tile.global<1 x f32> -> tensor<16xf32>
  %b0 = tile.load %x[%c16] dims [0] : !tile.global<1 x f32> -> tensor<16xf32>
  %a, %b, %c = scf.for %i = %c0 to %n step %c1 iter_args(%p = %a0, %q = %b0, %r = %zero) -> (tensor<16xf32>, tensor<16xf32>, tensor<16xf32>) : i32 {{
    %s = tile.map (%p, %r) axes [[0], [0]] : (tensor<16xf32>, tensor<16xf32>) -> tensor<16xf32> {{
    ^bb0(%e: f32, %f: f32):
      %g = arith.addf %e, %f : f32
      tile.yield %g : f32
    }}
    scf.yield {carried} : tensor<16xf32>, tensor<16xf32>, tensor<16xf32>
  }}
  tile.store %a, %y[%c0, %c0] dims [1] : tensor<16xf32>, !tile.global<2 x f32>
  tile.store %b, %y[%c0, %c16] dims [1] : tensor<16xf32>, !tile.global<2 x f32>
  tile.store %c, %y[%c1, %c0] dims [1] : tensor<16xf32>, !tile.global<2 x f32>
  tile.end
}}
tile.plan @p(%x: !tile.global<1 x f32>, %y: !tile.global<2 x f32>, %n: i32) {{
  %one = arith.constant 1 : i32
  tile.launch @k grid(%one) args(%x, %y, %n) : !tile.global<1 x f32>, !tile.global<2 x f32>, i32
  tile.end
}}"""


@pytest.mark.parametrize(
    "carried", ["%q, %p, %s", "%s, %p, %r", "%s, %s, %q", "%r, %q, %p", "%p, %q, %s", "%q, %r, %p"]
)
@pytest.mark.parametrize("trips", [0, 1, 2, 5])
def test_what_loops_carry(carried: str, trips: int):
    module = lowered(LOOP.format(carried=carried), "attn-simplify")
    x, y = torch.randn(32), torch.full((2, 32), torch.nan)
    assert_same(module, "p", [x, None], [y], trips)


def test_an_accumulator_stays_where_it_is():
    module = buffered(lowered(LOOP.format(carried="%p, %q, %s"), "attn-simplify"))
    assert not any(isinstance(op, CopyOp) for op in module.walk())
    swapped = buffered(lowered(LOOP.format(carried="%q, %p, %s"), "attn-simplify"))
    assert sum(isinstance(op, CopyOp) for op in swapped.walk()) == 4


def test_kernels_say_their_threads():
    module = buffered(lowered(LOOP.format(carried="%p, %q, %s"), "attn-simplify"))
    (kernel,) = (op for op in module.walk() if isinstance(op, tile.KernelOp))
    assert str(kernel.attributes["threads"]) == "32 : i64" and "num_warps" not in kernel.attributes


def test_tiles_of_truth_values_are_computed_where_they_are_read():
    text = attention_text("softmax", None, "causal").replace("tensor<?x?x?x?xf32>", "tensor<?x?x?x8xf32>")
    module = buffered(lowered(text, f"{COMMON},convert-attn-to-tile{{forward=16,16,4,1}}"))
    types = [str(op.result.type) for op in module.walk() if isinstance(op, BufferAllocOp)]
    assert types and not any("16x16xi" in type_ for type_ in types)


def with_last(op: str) -> ModuleOp:
    text = LOOP.format(carried="%p, %q, %s").replace("  tile.store %a,", f"  %last = {op}\n  tile.store %last,")
    return lowered(text, "attn-simplify")


@pytest.mark.parametrize("direction", ["", "reverse 1 "])
def test_running_sums(direction: str):
    module = with_last(f"tile.scan sum %a, 0 {direction}: tensor<16xf32> -> tensor<16xf32>")
    x, y = torch.randn(32), torch.full((2, 32), torch.nan)
    assert_same(module, "p", [x, None], [y], 3)


def test_what_has_no_rule_is_named():
    with pytest.raises(PassError, match=r"tile-assign-memory: no rule for tile\.concat"):
        buffered(with_last("tile.concat %a axis 0 : tensor<16xf32> -> tensor<16xf32>"))
