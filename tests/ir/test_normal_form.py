"""What the normal form sees through, and what it refuses to."""

import pytest
from xdsl.parser import Parser

from attn_engine.dialects.attn import AttentionOp, RowReduceOp
from attn_engine.ir.expression import show
from attn_engine.ir.normal_form import NormalForms, is_invariant, raw_form
from attn_engine.ir.value_range import value_range
from attn_engine.universe import make_context

T = "tensor<?x?x?x8xf32>"


def row_block(code: str):
    """The row block of an attention with captures %wc and %tc."""
    lines = [line.strip() for line in code.strip().splitlines()]
    outputs = len(lines[-1].split(":")[0].split(",")) - 1
    results = f" outputs {', '.join(['tensor<?x?x?xf32>'] * outputs)}" if outputs else ""
    names = "%o" + "".join(f", %r{i}" for i in range(outputs))
    text = f"""
func.func @f(%q: {T}, %k: {T}, %v: {T}, %scale: f32, %wk: tensor<?xf32>, %th: tensor<?xf32>) {{
  {names} = attn.attention %q, %k, %v scale %scale captures %wk, %th : {T}, {T}, {T} captures tensor<?xf32>, tensor<?xf32> -> {T}{results} row {{
  ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64, %wc: tensor<?xf32>, %tc: tensor<?xf32>):
    {chr(10).join(lines)}
  }}
  func.return
}}"""
    module = Parser(make_context(), text).parse_module()
    module.verify()
    return next(op for op in module.walk() if isinstance(op, AttentionOp)).row.block


def values(block):
    return list(block.last_op.values)


def reductions(block):
    return [op.result for op in block.ops if isinstance(op, RowReduceOp)]


SOFTMAX = """
%m = attn.row_reduce max %s
%x = arith.subf %s, %m : f32
%e = math.exp %x : f32
%l = attn.row_reduce sum %e
%p = arith.divf %e, %l : f32
%ll = math.log %l : f32
%lse = arith.addf %m, %ll : f32
attn.yield %p, %lse : f32, f32
"""


def test_softmax_weight_is_one_product():
    block = row_block(SOFTMAX)
    product, number = NormalForms(block)[values(block)[0]].terms[0]
    assert number == 1.0
    assert [power for _, power in product.factors] == [-1]
    assert len(product.exponent.terms) == 2


def test_weight_from_lse_is_the_same_expression():
    block = row_block(
        SOFTMAX.replace(
            "attn.yield %p, %lse", "%d = arith.subf %s, %lse : f32\n%p2 = math.exp %d : f32\nattn.yield %p, %p2"
        )
    )
    forms = NormalForms(block)
    p, p2 = values(block)
    assert forms[p] == forms[p2], (show(forms[p]), show(forms[p2]))


def test_base_two_is_the_same_expression():
    code = """
    %m = attn.row_reduce max %s
    %c = arith.constant 1.44269504 : f32
    %a = arith.mulf %s, %c : f32
    %b2 = arith.mulf %m, %c : f32
    %x = arith.subf %a, %b2 : f32
    %e2 = math.exp2 %x : f32
    %y = arith.subf %s, %m : f32
    %e = math.exp %y : f32
    attn.yield %e2, %e : f32, f32
    """
    block = row_block(code)
    forms = NormalForms(block)
    assert len({forms[v] for v in values(block)}) == 1


INVARIANCE = {
    "softmax": ("%d = arith.addf %l, %zero : f32", True),
    "softmax1": ("%n = arith.negf %m : f32\n%g = math.exp %n : f32\n%d = arith.addf %g, %l : f32", True),
    "one plus l": ("%d = arith.addf %one, %l : f32", False),
    "clamped": ("%y = arith.subf %l, %two : f32\n%d = arith.maximumf %y, %one : f32", False),
}


@pytest.mark.parametrize("name", INVARIANCE)
def test_invariance_to_the_maximum(name):
    code, expected = INVARIANCE[name]
    block = row_block(f"""
    %zero = arith.constant 0.0 : f32
    %one = arith.constant 1.0 : f32
    %two = arith.constant 2.0 : f32
    %m = attn.row_reduce max %s
    %x = arith.subf %s, %m : f32
    %e = math.exp %x : f32
    %l = attn.row_reduce sum %e
    {code}
    %p = arith.divf %e, %d : f32
    attn.yield %p : f32
    """)
    assert is_invariant(block, values(block), reductions(block)[0]) is expected


def test_lse_is_invariant_to_the_maximum_but_the_saved_maximum_is_not():
    block = row_block(SOFTMAX)
    m = reductions(block)[0]
    assert is_invariant(block, values(block), m)
    assert not is_invariant(block, [m], m)


def test_row_factor_leaves_a_clamp_only_when_positive():
    code = """
    %zero = arith.constant 0.0 : f32
    %a = math.exp %s : f32
    %l = attn.row_reduce sum {}
    %x = arith.mulf %s, %l : f32
    %p = arith.maximumf %x, %zero : f32
    attn.yield %p : f32
    """
    positive, signed = row_block(code.format("%a")), row_block(code.format("%s"))
    assert len(NormalForms(positive)[values(positive)[0]].terms[0][0].factors) == 2
    assert len(NormalForms(signed)[values(signed)[0]].terms[0][0].factors) == 1


def test_square_root_of_a_square_is_an_absolute_value():
    code = """
    %x = arith.mulf %s, %s : f32
    %r = math.sqrt %x : f32
    %a = math.absf %s : f32
    attn.yield %r, %a : f32, f32
    """
    block = row_block(code)
    forms = NormalForms(block)
    assert len({forms[v] for v in values(block)}) == 1


def test_signs():
    code = """
    %e = math.exp %s : f32
    %l = attn.row_reduce sum %e
    %one = arith.constant 1.0 : f32
    %m = arith.maximumf %s, %one : f32
    %t = attn.row_reduce sum %s
    %i = arith.divf %one, %l : f32
    attn.yield %l, %m, %t, %i : f32, f32, f32, f32
    """
    block = row_block(code)
    forms = NormalForms(block)
    assert [value_range(forms[v]).positive for v in values(block)] == [True, True, False, True]


def test_raw_form_of_a_sum_takes_out_the_row_factor():
    block = row_block(SOFTMAX)
    m, total = reductions(block)
    raw = raw_form(block)
    product, _ = raw[total].terms[0]
    assert [(p, c) for p, c in product.exponent.terms] == [(raw[m].terms[0][0], -1.0)]
