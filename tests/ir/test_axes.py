"""Dependence of scalars on axes, over every kind of region."""

import pytest

from attn_engine.dialects import attn
from attn_engine.ir.axes import ROW, SCORE, axes_of, axes_of_region, region_argument_axes
from tests.support.attn_cases import attention_module, parse
from tests.support.attn_lowered import SOFTMAX_BACKWARD, SOFTMAX_ONLINE


def only(module, kind):
    (op,) = [op for op in module.walk() if isinstance(op, kind)]
    return op


def by_name(axes):
    return {value.name_hint: found for value, found in axes.items() if value.name_hint}


def test_loads_take_the_axes_of_their_indices():
    axes = by_name(axes_of(only(attention_module(score_mod="alibi"), attn.AttentionOp), "score_mod"))
    assert axes["w"] == {"h"}
    assert axes["d"] == axes["df"] == {"q", "kv"}
    assert axes["t"] == {"h", "q", "kv"}
    assert axes["r"] == SCORE


def test_reductions_lose_the_key_and_nothing_else():
    axes = by_name(axes_of(only(attention_module("softmax_lse"), attn.AttentionOp), "row"))
    assert axes["m"] == axes["l"] == axes["lse"] == ROW
    assert axes["x"] == axes["p"] == SCORE


def test_a_count_depends_on_the_row_even_when_its_operand_is_a_constant():
    op = only(attention_module("mean", mask="causal"), attn.AttentionOp)
    block = op.row.block
    reduce = next(o for o in block.ops if isinstance(o, attn.RowReduceOp))
    constant = next(iter(block.ops)).results[0]
    reduce.operands[0] = constant
    assert axes_of_region(block, region_argument_axes(op, "row"))[reduce.result] == ROW


def test_constants_depend_on_nothing():
    axes = by_name(axes_of(only(attention_module(mask="window"), attn.AttentionOp), "mask"))
    assert axes["w"] == frozenset()
    assert axes["r"] == {"q", "kv"}


def test_states_and_row_vectors_are_per_row():
    online = only(parse(SOFTMAX_ONLINE), attn.OnlineOp)
    step = by_name(axes_of(online, "steps", 0))
    assert step["m0"] == step["bm"] == step["alpha"] == ROW
    assert step["e"] == SCORE
    assert by_name(axes_of(online, "epilogue"))["g"] == ROW

    backward = only(parse(SOFTMAX_BACKWARD), attn.BackwardOp)
    assert by_name(axes_of(backward, "rows"))["delta"] == ROW
    element = by_name(axes_of(backward, "element"))
    assert element["delta"] == ROW
    assert element["dp"] == element["ds"] == SCORE
    assert element["w"] == {"h"}


MODS = """
func.func @f(%q: tensor<?x?x?x4xf32>, %k: tensor<?x?x?x4xf32>, %v: tensor<?x?x?x4xf32>, %scale: f32) -> tensor<?x?x?x4xf32> {
  %o = attn.attention %q, %k, %v scale %scale : tensor<?x?x?x4xf32>, tensor<?x?x?x4xf32>, tensor<?x?x?x4xf32> -> tensor<?x?x?x4xf32>
  key_mod {
  ^bb0(%e: f32, %b: i64, %h: i64, %p: i64, %c: i64):
    %pc = arith.addi %p, %c : i64
    attn.yield %e : f32
  } row {
  ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64):
    attn.yield %s : f32
  } blocks {
  ^bb0(%lo: i64, %hi: i64, %b: i64, %h: i64, %sq: i64, %skv: i64):
    %n = arith.minsi %hi, %skv : i64
    attn.yield %lo, %lo, %n, %n : i64, i64, i64, i64
  }
  func.return %o : tensor<?x?x?x4xf32>
}
"""


def test_elements_have_a_channel_and_blocks_a_position():
    op = only(parse(MODS), attn.AttentionOp)
    axes = by_name(axes_of(op, "key_mod"))
    assert axes["e"] == {"b", "h", "kv", "channel"}
    assert axes["pc"] == {"kv", "channel"}
    assert by_name(axes_of(op, "blocks"))["n"] == {"q"}


def test_mods_of_a_recurrence_see_one_position():
    module = parse(
        """
func.func @f(%q: tensor<?x?x?x4xf32>, %scale: f32, %g: tensor<?x?x?xf32>) -> tensor<?x?x?x4xf32> {
  %o = attn.recurrence %q, %q, %q scale %scale decay %g : tensor<?x?x?x4xf32>, tensor<?x?x?x4xf32>, tensor<?x?x?x4xf32> decay tensor<?x?x?xf32> -> tensor<?x?x?x4xf32>
  decay_mod {
  ^bb0(%e: f32, %b: i64, %h: i64, %t: i64, %c: i64):
    %hf = arith.uitofp %h : i64 to f32
    %r = arith.mulf %e, %hf : f32
    attn.yield %r : f32
  }
  func.return %o : tensor<?x?x?x4xf32>
}"""
    )
    axes = by_name(axes_of(only(module, attn.RecurrenceOp), "decay_mod"))
    assert axes["hf"] == {"h"} and axes["t"] == {"q"}
    assert axes["r"] == {"b", "h", "q", "channel"}


def test_mistakes_are_named():
    op = only(parse(MODS), attn.AttentionOp)
    with pytest.raises(ValueError, match="no region 'mask'"):
        region_argument_axes(op, "mask")
    with pytest.raises(ValueError, match="1 axis sets for 5 block arguments"):
        axes_of_region(op.row.block, [SCORE])
