"""The CPU backend writes into dead temporaries, and never into a tile that is still read."""

from __future__ import annotations

import pytest
import torch

from tests.support.cpu import CPU, LOAD, STORE, XY, check, legalized, program, xy

T = "tensor<4x4xf32>"


def scaled(result: str, operand: str, factor: str = "2.0", op: str = "mulf") -> str:
    return f"""{result} = tile.map ({operand}) axes [[0, 1]] : ({T}) -> {T} {{
      ^bb0(%a: f32):
        %f = arith.constant {factor} : f32
        %m = arith.{op} %a, %f : f32
        tile.yield %m : f32
      }}"""


def added(result: str, left: str, right: str) -> str:
    return f"""{result} = tile.map ({left}, {right}) axes [[0, 1], [0, 1]] : ({T}, {T}) -> {T} {{
      ^bb0(%a: f32, %e: f32):
        %m = arith.addf %a, %e : f32
        tile.yield %m : f32
      }}"""


ZERO = f"%z = arith.constant dense<0.0> : {T}"

REUSED = {
    "chain": [scaled("%p", "%t"), scaled("%r", "%p", "3.0")],
    "dot": [scaled("%p", "%t"), f"%r = tile.dot %t, %t, %p ieee : {T}, {T}, {T} -> {T}"],
    "carry": [
        ZERO,
        f"%r = scf.for %n = %c0 to %c4 step %c1 iter_args(%acc = %z) -> ({T}) : i32 {{",
        added("%s", "%acc", "%t"),
        f"scf.yield %s : {T}\n}}",
    ],
}

KEPT = {
    "operand_is_memory": [scaled("%p", "%t"), f"{added('%r', '%t', '%p')}"],
    "read_again": [scaled("%p", "%t"), scaled("%q", "%p"), added("%r", "%p", "%q")],
    "read_in_a_loop": [
        scaled("%p", "%t"),
        ZERO,
        f"%r = scf.for %n = %c0 to %c4 step %c1 iter_args(%acc = %z) -> ({T}) : i32 {{",
        scaled("%u", "%p"),
        added("%s", "%acc", "%u"),
        f"scf.yield %s : {T}\n}}",
    ],
    "one_start_of_two_carries": [
        scaled("%p", "%t"),
        f"%v, %w = scf.for %n = %c0 to %c4 step %c1 iter_args(%a1 = %p, %a2 = %p) -> ({T}, {T}) : i32 {{",
        scaled("%s", "%a1"),
        scaled("%u", "%a2", "1.0", "addf"),
        f"scf.yield %s, %u : {T}, {T}\n}}",
        added("%r", "%v", "%w"),
    ],
    "constant_in_an_inner_loop": [
        ZERO,
        f"%r = scf.for %o = %c0 to %c4 step %c1 iter_args(%all = %z) -> ({T}) : i32 {{",
        f"%in = scf.for %n = %c0 to %c4 step %c1 iter_args(%acc = %z) -> ({T}) : i32 {{",
        added("%s", "%acc", "%t"),
        f"scf.yield %s : {T}\n}}",
        added("%u", "%all", "%in"),
        f"scf.yield %u : {T}\n}}",
    ],
    "handed_on_by_a_map": [
        scaled("%p", "%t"),
        f"""%q, %s = tile.map (%p) axes [[0, 1]] : ({T}) -> ({T}, {T}) {{
      ^bb0(%a: f32):
        %m = arith.negf %a : f32
        tile.yield %a, %m : f32, f32
      }}""",
        added("%r", "%q", "%s"),
    ],
    "transposed_view": [
        scaled("%p", "%t"),
        f"%v = tile.transpose %p : {T} -> {T}",
        scaled("%q", "%p", "5.0"),
        added("%r", "%v", "%q"),
    ],
    "masked_loop": [
        scaled("%p", "%t"),
        f"%r = scf.for %n = %c0 to %h step %c1 iter_args(%acc = %p) -> ({T}) : i32 {{",
        scaled("%s", "%acc"),
        f"scf.yield %s : {T}\n}}",
    ],
    "branch": [
        scaled("%p", "%t"),
        "%cond = arith.cmpi eq, %h, %c1 : i32",
        f"%v = scf.if %cond -> ({T}) {{\nscf.yield %p : {T}\n}} else {{\nscf.yield %t : {T}\n}}",
        scaled("%q", "%p"),
        added("%r", "%v", "%q"),
    ],
}

DOT = f"%p = tile.dot %t, %t, %z ieee : {T}, {T}, {T} -> {T}"
LOOP = f"%r = scf.for %n = %c0 to %c4 step %c1 iter_args(%acc = %z) -> ({T}) : i32 {{"

BUFFERED = {
    "product": [
        ZERO,
        LOOP,
        DOT,
        scaled("%u", "%p"),
        f"%s = tile.dot %u, %t, %acc ieee : {T}, {T}, {T} -> {T}",
        f"scf.yield %s : {T}\n}}",
    ],
    "second_reader": [
        ZERO,
        LOOP,
        DOT,
        scaled("%u", "%p"),
        scaled("%w", "%p", "3.0"),
        f"%s = tile.dot %u, %w, %acc ieee : {T}, {T}, {T} -> {T}",
        f"scf.yield %s : {T}\n}}",
    ],
}

NOT_BUFFERED = {
    "product_is_carried": [ZERO, LOOP, DOT, f"scf.yield %p : {T}\n}}"],
    "view_is_carried": [ZERO, LOOP, DOT, f"%s = tile.transpose %p : {T} -> {T}", f"scf.yield %s : {T}\n}}"],
    "sum_in_place_is_carried": [ZERO, LOOP, DOT, added("%s", "%p", "%acc"), f"scf.yield %s : {T}\n}}"],
}


@pytest.mark.parametrize("grid", [(2, 3, 2), (1, 1, 1)])
@pytest.mark.parametrize("name", [*BUFFERED, *NOT_BUFFERED])
def test_buffers_do_not_change_results(name: str, grid: tuple[int, int, int]):
    lines = {**BUFFERED, **NOT_BUFFERED}[name]
    check(program("\n".join([LOAD, *lines, STORE]), XY, grid), xy())


@pytest.mark.parametrize("name", [*BUFFERED, *NOT_BUFFERED])
def test_a_product_has_one_buffer_where_no_trip_hands_it_on(name: str):
    lines = {**BUFFERED, **NOT_BUFFERED}[name]
    source = CPU.emit(legalized(program("\n".join([LOAD, *lines, STORE]), XY)))
    assert ("= product(" in source) is (name in BUFFERED)


@pytest.mark.parametrize("grid", [(2, 3, 2), (1, 1, 1)])
@pytest.mark.parametrize("name", [*REUSED, *KEPT])
def test_reuse_does_not_change_results(name: str, grid: tuple[int, int, int]):
    lines = {**REUSED, **KEPT}[name]
    check(program("\n".join([LOAD, *lines, STORE]), XY, grid), xy())


@pytest.mark.parametrize("name", REUSED)
def test_dead_temporaries_are_reused(name: str):
    source = CPU.emit(legalized(program("\n".join([LOAD, *REUSED[name], STORE]), XY)))
    assert "programs.own(" in source


def test_inputs_are_not_written():
    x, y = xy()
    before = x.clone()
    check(program("\n".join([LOAD, scaled("%r", "%t"), STORE]), XY), [x, y])
    assert torch.equal(x, before)


def test_tile_of_one_element():
    """A constant of one element is contiguous, yet not a buffer of its own."""
    body = """%z = arith.constant dense<0.0> : tensor<1x1xf32>
      %r = scf.for %o = %c0 to %c4 step %c1 iter_args(%all = %z) -> (tensor<1x1xf32>) : i32 {
        %in = scf.for %n = %c0 to %c4 step %c1 iter_args(%acc = %z) -> (tensor<1x1xf32>) : i32 {
          %s = tile.map (%acc) axes [[0, 1]] : (tensor<1x1xf32>) -> tensor<1x1xf32> {
          ^bb0(%a: f32):
            %one = arith.constant 1.0 : f32
            %m = arith.addf %a, %one : f32
            tile.yield %m : f32
          }
          scf.yield %s : tensor<1x1xf32>
        }
        %u = tile.map (%all, %in) axes [[0, 1], [0, 1]] : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xf32> {
        ^bb0(%a: f32, %e: f32):
          %m = arith.addf %a, %e : f32
          tile.yield %m : f32
        }
        scf.yield %u : tensor<1x1xf32>
      }
      tile.store %r, %y[%b, %h, %c0, %c0] dims [2, 3] : tensor<1x1xf32>, !tile.global<4 x f32>"""
    _, y = xy()
    check(program(body, XY, (1, 1, 1)), [y.clone(), y])
    assert y[0, 0, 0, 0] == 16
