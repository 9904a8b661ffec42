"""The Gluon emitter: text from the async level, and what an assembler makes of it without a device."""

from __future__ import annotations

import re
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
from xdsl.dialects.builtin import ModuleOp
from xdsl.parser import Parser
from xdsl.printer import Printer

from attn_engine.backends.triton.emit_gluon import emit
from attn_engine.backends.triton.gluon_ahead import Assembly, compile_ahead
from attn_engine.errors import UnsupportedOpError
from attn_engine.universe import make_context

FILES = Path(__file__).parents[1] / "filecheck"
FORWARD = (FILES / "tile" / "hopper_forward.mlir").read_text()
EVERY_OP = (FILES / "dialects" / "tile_async.mlir").read_text()

pytest.importorskip("triton")


def parse(text: str) -> ModuleOp:
    module = Parser(make_context(), text).parse_module()
    module.verify()
    return module


@cache
def assembly(text: str, kernel: str) -> Assembly:
    return compile_ahead(emit(parse(text)), kernel)


def order(loop: list[str]) -> str:
    """A loop's products (H), exponentials (E) and waits for 1 or 0 products (1, 0), without repetition."""
    kinds = {"HGMMA": "H", "MUFU.EX2": "E", "WARPGROUP.DEPBAR": "W"}
    letters = [(kinds[name], text) for text in loop for name in kinds if name in text]
    names = [letter if letter != "W" else text.rsplit(",", 1)[1].strip()[-1] for letter, text in letters]
    return re.sub(r"(.)\1+", r"\1", "".join(names))


@pytest.mark.parametrize("text", [FORWARD, EVERY_OP])
def test_print_and_parse_give_the_same_text(text: str):
    module, stream = parse(text), StringIO()
    Printer(stream).print_op(module)
    assert emit(parse(stream.getvalue())) == emit(module)


@pytest.mark.parametrize("kernel", ["causal", "full"])
def test_hopper_forward_is_scheduled_as_written(kernel: str):
    """Two roles of 8 + 16 + 8 products; the exponentials hide under the product for the output."""
    compiled = assembly(FORWARD, kernel)
    assert compiled.products == 64
    assert compiled.spilled_bytes == 0
    assert compiled.warnings == ()
    assert compiled.shared <= 227 * 1024
    assert "setmaxnreg.inc.sync.aligned.u32 \t240" in compiled.ptx
    assert "setmaxnreg.dec.sync.aligned.u32 \t24;" in compiled.ptx
    loops = compiled.loops()
    assert [sum("HGMMA" in text for text in loop) for loop in loops] == [16, 16]
    assert [order(loop) for loop in loops] == ["H1E0", "H1E0"]
    assert all("LDL" not in text and "STL" not in text for loop in loops for text in loop)


def test_without_the_pin_the_assembler_hoists_the_wait():
    """Why the op is there: the wait for all products moves up, and nothing overlaps."""
    loose = re.sub(r"%lpin = tile\.pin %ln : (\S+)\n", "", FORWARD).replace("%lpin", "%ln")
    assert {order(loop) for loop in assembly(loose, "causal").loops()} != {"H1E0"}


def test_a_score_function_is_a_map():
    """Softcap and a bias by distance on every score: more instructions, the same schedule."""
    mod = """%rw = tile.range %row0 : tensor<64xi32>
          %jn = arith.muli %j, %c128 : i32
          %nj = arith.subi %n0, %jn : i32
          %cl = tile.range %nj : tensor<128xi32>
          %s = tile.map (%raw, %rw, %cl) axes [[0, 1], [0], [1]] : (tensor<64x128xf32>, tensor<64xi32>, tensor<128xi32>) -> tensor<64x128xf32> {
          ^bb1(%x: f32, %row: i32, %col: i32):
            %cap = arith.constant 30.0 : f32
            %slope = arith.constant -0.01 : f32
            %y = arith.divf %x, %cap : f32
            %e = math.exp2 %y : f32
            %d = arith.subi %row, %col : i32
            %f = arith.sitofp %d : i32 to f32
            %bias = arith.mulf %f, %slope : f32
            %r = arith.addf %e, %bias : f32
            tile.yield %r : f32
          }
          """
    text = FORWARD.replace("%s = tile.wait 1, %sp", "%raw = tile.wait 1, %sp")
    text = text.replace("%bm = tile.reduce", mod + "%bm = tile.reduce")
    compiled = assembly(text, "causal")
    assert compiled.products == 64 and compiled.warnings == ()
    assert {order(loop) for loop in compiled.loops()} == {"H1E0"}
    plain = assembly(FORWARD, "causal")
    assert len(compiled.loops()[0]) > len(plain.loops()[0]) + 64


def test_every_op_compiles():
    compiled = assembly(EVERY_OP, "async")
    assert compiled.products == 12  # three products of 64 x 64 x 64
    assert "cp.reduce.async.bulk.tensor" in compiled.ptx
    assert "UTMAREDG" in compiled.sass


def test_views_of_slots_compile():
    compiled = assembly(EVERY_OP, "halves")
    assert compiled.products == 16  # two roles, 64 x 64 x 128
    assert len(re.findall(r"UTMALDG", compiled.sass)) >= 3


def test_an_op_without_a_rule_is_an_error():
    text = """tile.kernel @k(%x: tensor<64x64xf16>) {
      %y = tile.transpose %x : tensor<64x64xf16> -> tensor<64x64xf16>
      tile.end
    }"""
    with pytest.raises(UnsupportedOpError, match=r"'gluon' cannot emit 'tile\.transpose'"):
        emit(parse(text))


def test_carries_are_assigned_at_once():
    """Swapped carries need the old values of both."""
    text = """tile.kernel @k(%n: i32) {
      %c0 = arith.constant 0 : i32
      %c1 = arith.constant 1 : i32
      %x, %y = scf.for %i = %c0 to %n step %c1 iter_args(%a = %c0, %b = %c1) -> (i32, i32) : i32 {
        scf.yield %b, %a : i32, i32
      }
      tile.end
    }"""
    assert "a, b = b, a" in emit(parse(text))
