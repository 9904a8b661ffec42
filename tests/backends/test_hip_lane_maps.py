"""Lane maps of matrix instructions, as the dialect and the emulation have them, against Triton's own tables."""

from __future__ import annotations

import re

import pytest

from attn_engine.dialects.tile_buffer_layout import WAVE, MfmaAttr, Part

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler import compile as triton_compile
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.amd import AMDMFMALayout

Bases = tuple[tuple[int, ...], ...]


@gluon.jit
def tables(p, SIZE: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr, VERSION: gl.constexpr):
    mfma: gl.constexpr = AMDMFMALayout(
        version=VERSION, instr_shape=[SIZE, SIZE, DEPTH], transposed=False, warps_per_cta=[1, 1]
    )
    gl.static_print("acc", gl.to_linear_layout(mfma, [SIZE, SIZE]))
    gl.static_print("a", gl.to_linear_layout(gl.DotOperandLayout(0, mfma, WIDTH), [SIZE, DEPTH]))
    gl.static_print("b", gl.to_linear_layout(gl.DotOperandLayout(1, mfma, WIDTH), [DEPTH, SIZE]))


def bases(text: str, name: str) -> Bases:
    """`reg_bases=[[1, 0], [2, 0]]` of a printed layout."""
    found = re.search(rf"{name}_bases=\[((?:\[[^\]]*\](?:, )?)*)\]", text)
    assert found is not None, text
    return tuple(tuple(map(int, pair.split(", "))) for pair in re.findall(r"\[([^\]]*)\]", found.group(1)))


def place(number: int, vectors: Bases) -> tuple[int, int]:
    """Layouts are linear over bits: the sum (exclusive or) of the bases of the bits that are set."""
    row = column = 0
    for bit, (r, c) in enumerate(vectors):
        if number >> bit & 1:
            row, column = row ^ r, column ^ c
    return row, column


def triton_places(text: str) -> list[list[tuple[int, int]]]:
    """Row and column of each register of each lane."""
    registers, lanes = bases(text, "reg"), bases(text, "lane")
    found: list[list[tuple[int, int]]] = []
    for lane in range(WAVE):
        row, column = place(lane, lanes)
        held = [place(register, registers) for register in range(1 << len(registers))]
        found.append([(row ^ r, column ^ c) for r, c in held])
    return found


@pytest.mark.parametrize(
    ("size", "depth", "width", "arch"),
    [
        (32, 8, 4, "gfx942"),
        (16, 16, 4, "gfx942"),
        (32, 8, 4, "gfx90a"),
        (32, 16, 8, "gfx950"),
        (16, 32, 8, "gfx950"),
        (32, 16, 8, "gfx942"),
        (16, 32, 8, "gfx942"),
    ],
)
def test_lane_maps(
    size: int, depth: int, width: int, arch: str, capfd: pytest.CaptureFixture[str], monkeypatch, tmp_path
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    version = {"gfx90a": 2, "gfx942": 3, "gfx950": 4}[arch]
    constants = {"SIZE": size, "DEPTH": depth, "WIDTH": width, "VERSION": version}
    signature = {"p": "*fp16", **dict.fromkeys(constants, "constexpr")}
    triton_compile(
        GluonASTSource(tables, signature, constants), target=GPUTarget("hip", arch, WAVE), options={"num_warps": 1}
    )
    printed = dict(
        line.split(" ", 1) for line in capfd.readouterr().out.splitlines() if line[:3] in ("acc", "a D", "b D")
    )
    for part in Part:
        layout = MfmaAttr((size, size, depth), part, (1, 1))
        mine = [[layout.place(lane, register) for register in range(layout.registers)] for lane in range(WAVE)]
        assert regrouped(mine, part, depth, width) == triton_places(printed[part.value]), part


def regrouped(places: list[list[tuple[int, int]]], part: Part, depth: int, width: int) -> list[list[tuple[int, int]]]:
    """Operands of the deepest instructions (of 16 bits on gfx950, of 8 on gfx942 too): runs of 4 here, of 8 there. k in
    another order, the same for both of them."""
    if part is Part.ACC or width == 4:
        return places
    groups = depth // 8

    def renamed(k: int) -> int:
        run = k // 4
        return (run % groups * 2 + run // groups) * 4 + k % 4

    return [[(r, renamed(c)) if part is Part.A else (renamed(r), c) for r, c in lane] for lane in places]
