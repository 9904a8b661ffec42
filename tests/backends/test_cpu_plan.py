"""What backends share: manifests, names, and host plans as Python."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from xdsl.dialects.builtin import FloatAttr, IntegerAttr, f32, i1, i32
from xdsl.dialects.test import TestOp

from attn_engine.backends.backend import BACKENDS, Level, get_backend
from attn_engine.backends.code_writer import CodeWriter, Names, python_literal
from attn_engine.errors import BackendError
from tests.support.cpu import CPU, check, emit, parse


def test_manifests_load():
    for name in BACKENDS:
        backend = get_backend(name)
        assert backend.name == name
        assert backend.check().ok or backend.check().reason
    assert CPU.level == Level.VALUE


def test_unknown_backend_lists_those_there_are():
    with pytest.raises(BackendError, match="no backend is named 'gpu'; there are cpu"):
        get_backend("gpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "c p u"}, "is not an identifier"),
        ({"level": "register"}, "level 'register' is none of value, buffered, async"),
        ({"pipeline": ("no-such-pass",)}, "no pass is named 'no-such-pass'"),
        ({"pipeline": ("cpu-legalize{",)}, "cannot parse pass"),
        ({"emit": "text"}, "emit is not callable"),
    ],
)
def test_manifests_are_validated(change: dict[str, object], message: str):
    with pytest.raises(BackendError, match=message):
        dataclasses.replace(CPU, **change)  # type: ignore[arg-type]


def test_names_are_unique_and_never_reserved():
    names = Names(("torch",))
    values = TestOp(result_types=[i32] * 6).results
    for value, hint in zip(values, ("x", "x", "lambda", "torch", None, "a.b"), strict=True):
        value.name_hint = hint
    assert [names.of(v) for v in values] == ["x", "x_1", "lambda_1", "torch_1", "v", "a_b"]
    assert names.of(values[1]) == "x_1"
    assert names.bind(values[0], "0") == names.of(values[0]) == "0"


def test_code_writer_indents():
    writer = CodeWriter("  ")
    with writer.block("if (x) {", "}"):
        writer.lines("a;\nb;")
        writer.line()
    assert writer.text() == "if (x) {\n  a;\n  b;\n\n}\n"


@pytest.mark.parametrize(
    ("attribute", "text"),
    [
        (IntegerAttr(-3, i32), "-3"),
        (IntegerAttr(1, i1), "True"),
        (FloatAttr(0.1, f32), "0.10000000149011612"),
        (FloatAttr(float("-inf"), f32), "float('-inf')"),
        (FloatAttr(float("nan"), f32), "float('nan')"),
    ],
)
def test_python_literal(attribute: IntegerAttr | FloatAttr, text: str):
    assert python_literal(attribute) == text


OPERATIONS = [
    "addi",
    "subi",
    "muli",
    "divsi",
    "remsi",
    "floordivsi",
    "ceildivsi",
    "minsi",
    "maxsi",
    "andi",
    "ori",
    "xori",
]


@pytest.mark.parametrize("sizes", [(7, 3), (3, 7), (8, 2)])
def test_plan_arithmetic(sizes: tuple[int, int]):
    """Every integer op and comparison on sizes and on their negatives, written out by a kernel."""
    lines, values = [], []
    for n, op in enumerate(OPERATIONS):
        for left in ("a", "na"):
            values.append(f"%v{n}{left}")
            lines.append(f"%v{n}{left} = arith.{op} %{left}, %b : i32")
    for n, predicate in enumerate(["eq", "ne", "slt", "sle", "sgt", "sge"]):
        values.append(f"%s{n}")
        lines.append(f"%p{n} = arith.cmpi {predicate}, %a, %b : i32\n%s{n} = arith.select %p{n}, %a, %minus : i32")
    arguments = ", ".join(f"%v{n}: i32" for n in range(len(values)))
    stores = "\n".join(
        f"%c{n} = arith.constant {n} : i32\ntile.store %v{n}, %y[%c{n}] dims [] : i32, !tile.global<1 x i32>"
        for n in range(len(values))
    )
    text = f"""
    tile.kernel @kernel(%y: !tile.global<1 x i32>, {arguments}) {{
      {stores}
      tile.end
    }}
    tile.plan @plan(%x: !tile.global<2 x f32>, %y: !tile.global<1 x i32>) {{
      %a = tile.dim %x, 0 : !tile.global<2 x f32>
      %b = tile.dim %x, 1 : !tile.global<2 x f32>
      %minus = arith.constant -1 : i32
      %na = arith.muli %a, %minus : i32
      %one = arith.constant 1 : i32
      {chr(10).join(lines)}
      tile.launch @kernel grid(%one) args(%y, {", ".join(values)}) : !tile.global<1 x i32>, {", ".join(["i32"] * len(values))}
      tile.end
    }}"""
    check(text, [torch.zeros(sizes), torch.zeros(len(values), dtype=torch.int32)])


TEMPORARY = """
tile.kernel @copy(%x: !tile.global<1 x f32>, %y: !tile.global<1 x f32>, %s: f32) {
  %i = tile.program_id 0
  %v = tile.load %x[%i] dims [] : !tile.global<1 x f32> -> f32
  %r = arith.mulf %v, %s : f32
  tile.store %r, %y[%i] dims [] : f32, !tile.global<1 x f32>
  tile.end
}
tile.plan @plan(%y: !tile.global<1 x f32>, %s: f32) {
  %n = tile.dim %y, 0 : !tile.global<1 x f32>
  %value = arith.constant 1.5 : f32
  %tmp = tile.alloc(%n) : !tile.global<1 x f32>
  tile.fill %tmp, %value : !tile.global<1 x f32>, f32
  %twice = arith.addf %s, %s : f32
  tile.launch @copy grid(%n) args(%tmp, %y, %twice) : !tile.global<1 x f32>, !tile.global<1 x f32>, f32
  tile.end
}
"""


@pytest.mark.parametrize("size", [0, 3])
def test_temporaries_fills_and_scalars(size: int):
    check(TEMPORARY, [torch.zeros(size), 2.0])


def test_plan_text():
    source = emit(parse(TEMPORARY))
    assert source.split("def plan")[1].splitlines()[1:6] == [
        "    device = y.device",
        "    n = y.shape[0]",
        "    tmp = torch.empty((n, ), dtype=torch.float32, device=device)",
        "    tmp.fill_(1.5)",
        "    twice = s + s",
    ]
