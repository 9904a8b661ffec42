"""The Gluon emitter: text from the async level, and what an assembler makes of it without a device."""

from __future__ import annotations

import re
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.parser import Parser
from xdsl.printer import Printer

from attn_engine.backends.triton import gluon_ahead
from attn_engine.backends.triton.emit_gluon import emit
from attn_engine.backends.triton.gluon_ahead import Assembly, compile_ahead
from attn_engine.errors import DescriptorError, UnsupportedOpError, UnsupportedTileShapeError
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


def test_a_kernel_is_assembled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """By Triton; again only for remarks on a kernel that Triton takes from its cache."""
    assembled: list[str] = []
    again = gluon_ahead.remarks_of
    monkeypatch.setattr(gluon_ahead, "remarks_of", lambda ptx: assembled.append(ptx) or again(ptx))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    source = emit(parse(EVERY_OP))
    first = compile_ahead(source, "async")
    assert not assembled and first.products
    assert compile_ahead(source, "async") == first
    assert len(assembled) == 1


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


def test_captures_are_read_where_they_are_used():
    """A slope per head (a scalar), a bias per column (a load) and documents (gathers), by names through the roles."""
    globals_ = "!tile.global<1 x f32>", "!tile.global<2 x f32>", "!tile.global<2 x i32>"
    parameters = "%slopes: {}, %bias: {}, %doc: {}".format(*globals_)
    inner = parameters.replace(":", "_:")
    code = """%rw = tile.range %row0 : tensor<64xi32>
          %jn = arith.muli %j, %c128 : i32
          %nj = arith.subi %n0, %jn : i32
          %cl = tile.range %nj : tensor<128xi32>
          %slope = tile.gather %slopes_[%h : i32] : !tile.global<1 x f32> -> f32
          %vector = tile.load %bias_[%h, %nj] dims [1] bounded [0] limits(%skv_) : !tile.global<2 x f32> -> tensor<128xf32>
          %s = tile.map (%raw, %rw, %cl, %slope, %vector, %doc_, %b, %sq_) axes [[0, 1], [0], [1], [], [1], [], [], []] : (tensor<64x128xf32>, tensor<64xi32>, tensor<128xi32>, f32, tensor<128xf32>, !tile.global<2 x i32>, i32, i32) -> tensor<64x128xf32> {
          ^bb1(%x: f32, %row: i32, %col: i32, %sl: f32, %bi: f32, %ids: !tile.global<2 x i32>, %bb: i32, %lim: i32):
            %ok = arith.cmpi slt, %row, %lim : i32
            %id = tile.gather %ids[%bb, %row : i32, i32] if %ok : !tile.global<2 x i32> -> i32
            %same = arith.cmpi eq, %id, %bb : i32
            %f = arith.sitofp %col : i32 to f32
            %xs = arith.mulf %f, %sl : f32
            %xb = arith.addf %xs, %bi : f32
            %y = arith.select %same, %x, %xb : f32
            tile.yield %y : f32
          }
          """
    text = FORWARD.split("\ntile.plan @forward_causal")[0]
    text = text.replace("%scale: f32) attributes", f"%scale: f32, {parameters}) attributes")
    text = text.replace("tile.roles (%qd", "tile.roles (%slopes, %bias, %doc, %qd")
    text = text.replace(
        " : (!tile.descriptor<1x1x64x128xf16>, !tile.desc",
        f" : ({', '.join(globals_)}, !tile.descriptor<1x1x64x128xf16>, !tile.desc",
    )
    text = text.replace("^bb0(%wg: i32, ", f"^bb0(%wg: i32, {inner}, ")
    text = text.replace("%s = tile.wait 1, %sp", "%raw = tile.wait 1, %sp").replace(
        "%bm = tile.reduce", code + "%bm = tile.reduce"
    )
    compiled = assembly(text, "causal")
    assert compiled.products == 64 and compiled.warnings == ()
    # the producer reads none of them
    producer = emit(parse(text)).split("def causal_role_1(")[1].split(")")[0]
    assert "slopes" not in producer and "bias" not in producer and "doc" not in producer


def test_kernels_without_roles():
    """A preprocessing kernel: loads, a map, a reduction and stores, in layouts of their own."""
    text = """tile.kernel @delta(%x: !tile.global<2 x f16>, %y: !tile.global<2 x f16>, %d: !tile.global<1 x f32>, %n: i32) attributes {num_warps = 4 : i64} {
      %c0 = arith.constant 0 : i32
      %c64 = arith.constant 64 : i32
      %p = tile.program_id 0
      %m = arith.muli %p, %c64 : i32
      %a = tile.load %x[%m, %c0] dims [0, 1] bounded [0] limits(%n) : !tile.global<2 x f16> -> tensor<64x128xf16>
      %b = tile.load %y[%m, %c0] dims [0, 1] bounded [0] limits(%n) : !tile.global<2 x f16> -> tensor<64x128xf16>
      %full = arith.cmpi slt, %m, %n : i32
      %zero = arith.constant dense<0.0> : tensor<64x128xf32>
      %t = scf.if %full -> (tensor<64x128xf32>) {
        %u = tile.map (%a, %b) axes [[0, 1], [0, 1]] : (tensor<64x128xf16>, tensor<64x128xf16>) -> tensor<64x128xf32> {
        ^bb0(%e: f16, %f: f16):
          %g = arith.extf %e : f16 to f32
          %h = arith.extf %f : f16 to f32
          %r = arith.mulf %g, %h : f32
          tile.yield %r : f32
        }
        scf.yield %u : tensor<64x128xf32>
      } else {
        scf.yield %zero : tensor<64x128xf32>
      }
      %s = tile.reduce sum %t, 1 : tensor<64x128xf32> -> tensor<64xf32>
      tile.store %s, %d[%m] dims [0] bounded [0] limits(%n) : tensor<64xf32>, !tile.global<1 x f32>
      tile.end
    }"""
    compiled = assembly(text, "delta")
    assert compiled.products == 0 and compiled.spilled_bytes == 0
    assert "ld.global" in compiled.ptx and "st.global" in compiled.ptx


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


@pytest.mark.parametrize(("shape", "ok"), [("3x64x64", True), ("2x96x64", False), ("3", True)])
def test_sizes_are_powers_of_two_but_for_stages(shape: str, ok: bool):
    module = parse(f"tile.kernel @k() {{ %r = tile.ring : !tile.buffer<{shape}xf16, shared>\n tile.end }}")
    if ok:
        assert "gl.allocate_shared_memory" in emit(module)
        return
    with pytest.raises(UnsupportedTileShapeError, match="power of two"):
        emit(module)


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


def test_descriptors_of_tensors():
    """Strides as they are; those of axes of size 1 do not matter; what cannot be described says what to do."""
    from triton.experimental.gluon import language as gl

    from attn_engine.backends.triton.gluon_host import describe

    layout, block = gl.NVMMASharedLayout.get_default_for([1, 1, 64, 64], gl.float16), [1, 1, 64, 64]
    rows = torch.zeros(2, 100, 3, 64, dtype=torch.float16).transpose(1, 2)
    assert describe(rows, block, layout).strides == [19200, 64, 192, 1]
    single = torch.zeros(100 * 64 + 3, dtype=torch.float16).as_strided((1, 1, 100, 64), (6403, 7, 64, 1))
    assert describe(single, block, layout).strides == [8, 8, 64, 1]
    empty = describe(torch.zeros(2, 3, 0, 64).half(), block, layout)
    assert empty.shape == [2, 3, 1, 64] and not empty.base.any()
    for bad in (rows.transpose(2, 3), torch.zeros(2, 3, 100, 65).half()[..., 1:], rows[:, :1].expand(2, 3, 100, 64)):
        with pytest.raises(DescriptorError, match="contiguous"):
            describe(bad, block, layout)
