"""What was right of one op is not taken for another: every change that makes an op wrong is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from xdsl.dialects import arith
from xdsl.dialects.builtin import IntegerAttr, ModuleOp, StringAttr, f32, i32, i64
from xdsl.ir import Block, Operation
from xdsl.irdl import OpDef
from xdsl.parser import Parser
from xdsl.utils.exceptions import VerifyException

from attn_engine.dialects import tile
from attn_engine.universe import make_context

TEXT = """
tile.kernel @kernel() attributes {num_warps = 4 : i64} {
  tile.end
}
func.func @f(%a: i32, %n: index) -> i32 {
  %zero = arith.constant 0 : i32
  %b = arith.addi %a, %zero : i32
  %c = scf.for %i = %n to %n step %n iter_args(%sum = %b) -> (i32) {
    %more = arith.addi %sum, %a : i32
    scf.yield %more : i32
  }
  func.return %c : i32
}
"""


def module() -> ModuleOp:
    return Parser(make_context(), TEXT).parse_module()


def no_property(constant: Operation) -> None:
    del constant.properties["value"]


def unknown_property(constant: Operation) -> None:
    constant.properties["other"] = StringAttr("x")


def wrong_property(constant: Operation) -> None:
    constant.properties["value"] = StringAttr("x")


def wrong_result(sum_: Operation) -> None:
    sum_.results[0]._type = i64


def wrong_operand(sum_: Operation) -> None:
    sum_.operands[0]._type = f32


def fewer_operands(sum_: Operation) -> None:
    sum_.operands = [sum_.operands[0]]


def terminator_before_the_end(yield_: Operation) -> None:
    assert yield_.parent is not None
    yield_.parent.add_op(arith.ConstantOp(IntegerAttr(1, i32)))


def blocks_in_a_region_of_one(kernel: Operation) -> None:
    kernel.regions[0].add_block(Block([tile.EndOp()]))


CHANGES = {
    no_property: "arith.constant",
    unknown_property: "arith.constant",
    wrong_property: "arith.constant",
    wrong_result: "arith.addi",
    wrong_operand: "arith.addi",
    fewer_operands: "arith.addi",
    terminator_before_the_end: "scf.yield",
    blocks_in_a_region_of_one: "tile.kernel",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_found(change: Callable[[Operation], None]) -> None:
    assert OpDef.verify.__module__ == "tests.support.verified"
    changed = module()
    changed.verify()
    op = next(o for o in changed.walk() if o.name == CHANGES[change])
    change(op)
    for _ in range(2):
        with pytest.raises(VerifyException):
            op.verify(verify_nested_ops=False)
