"""Which form of a recurrence fits a device, a number of heads and a length."""

from __future__ import annotations

from dataclasses import replace

import pytest
from xdsl.dialects.builtin import IntegerAttr

from attn_engine.arch import get_arch
from attn_engine.dialects import attn
from attn_engine.passes.attn_schedule_recurrence import Kind, Work, choose
from attn_engine.universe import PASSES, make_context
from tests.support.attn_cases import parse

H100 = get_arch("sm_90")
WORK = Work(128, 128, 2, Kind.SCALAR, packed=False)


def form(work=WORK, heads=128, tokens=4096, blocks=True, arch=H100, careful=False):
    return choose(work, arch, 64, heads, tokens, blocks, careful=careful)


def test_one_sweep_where_programs_fill_the_device():
    assert (form().pieces, form().chained) == (1, False)


@pytest.mark.parametrize(("heads", "tokens", "pieces"), [(8, 32768, 16), (8, 256, 1), (8, 2048, 8), (1, 262144, 128)])
def test_pieces_side_by_side_for_few_heads(heads, tokens, pieces):
    assert form(heads=heads, tokens=tokens).pieces == pieces
    assert not form(heads=heads, tokens=tokens).chained


def test_a_chain_where_the_last_round_would_be_short_of_programs():
    mamba = replace(WORK, value=64)
    assert (form(mamba, heads=640).pieces, form(mamba, heads=640).chained) == (2, True)
    assert form(mamba, heads=640, tokens=512).pieces == 1
    assert form(mamba, heads=528).pieces == 1
    assert form(replace(mamba, packed=True), heads=640).pieces == 1


def test_states_fit_registers_and_tiles_shared_memory():
    wide = replace(WORK, key=256, value=256)
    assert form(wide, blocks=False).value_block == 32
    assert not form(wide, blocks=False).turned
    wider = form(replace(WORK, key=512), careful=True)
    assert (wider.value_block, wider.num_warps, wider.num_stages) == (64, 8, 1)
    assert not wider.turned and not wider.careful
    assert form(replace(WORK, key=512, size=4)).value_block == 16
    assert form(replace(wide, size=4)).num_stages == 1
    assert form(arch=get_arch("sm_86")).num_stages == 1
    assert [form(replace(WORK, crowded=crowded), blocks=False).value_block for crowded in (False, True)] == [64, 32]


def test_care_where_an_assembler_needs_it():
    delta = replace(WORK, key=256, value=256, kind=Kind.DELTA)
    assert form(delta, careful=True).careful
    assert form(replace(delta, kind=Kind.DELTA_ROWS), careful=True).careful
    assert form(replace(WORK, key=512, size=4), careful=True).careful
    assert not form(delta).careful
    assert not form(replace(delta, kind=Kind.SCALAR), careful=True).careful


def test_states_are_turned_unless_results_are_summed():
    assert form().turned
    assert not form(replace(WORK, summed=True)).turned
    assert not form(blocks=False).turned


def test_values_are_copied_two_chunks_ahead_where_programs_of_a_turned_state_go_through_whole_sequences_or_chains():
    assert form().num_stages == form(replace(WORK, value=64), heads=640).num_stages == 3
    assert form(heads=8, tokens=32768).num_stages == 2, "pieces side by side"
    assert form(replace(WORK, summed=True)).num_stages == form(blocks=False).num_stages == 2, "not turned"


def test_eight_warps_hold_wide_states_that_are_turned():
    """Products of 128 value channels have the state in registers: two stages of tiles fit beside nothing of it."""
    wide = replace(WORK, key=256, value=256)
    assert form(wide) == replace(form(), value_block=128, num_warps=8, num_stages=2, pieces=form(wide).pieces)
    assert (form(replace(wide, summed=True)).value_block, form(replace(wide, summed=True)).turned) == (64, True)
    assert form(replace(wide, value=32)).num_warps == 4
    assert wide.bytes(64, 2, blocks=True) < 181300 < H100.shared_per_block < wide.bytes(64, 3, blocks=True)


def test_narrow_keys_leave_room_for_all_value_channels():
    queries = replace(WORK, key=64, summed=True)
    others = replace(form(), turned=False, num_stages=2)
    assert form(queries, heads=640) == replace(others, value_block=128, pieces=2, chained=True)
    assert form(replace(WORK, kind=Kind.ROWS)).value_block == 128
    assert form(replace(WORK, kind=Kind.COLUMNS)).value_block == 64


@pytest.mark.parametrize("kind", [Kind.DELTA, Kind.DELTA_ROWS])
def test_the_delta_rule_has_no_pieces_side_by_side(kind):
    assert form(replace(WORK, kind=kind), heads=8, tokens=32768).pieces == 1


def test_weights_of_tokens_that_are_read_need_room():
    """As compiled for an H100: tiles of 128 channels twice, and of 256 once."""
    work = replace(WORK, kind=Kind.DELTA_ROWS)
    assert work.bytes(64, 2) == 188416
    assert form(work).num_stages == 2
    assert form(replace(work, key=256, value=256)).num_stages == 1


def test_what_is_turned_on_its_way_needs_room():
    """As compiled for an H100: a state whose rows decay takes 192 KiB with 128 channels; with 256 tiles come once."""
    work = replace(WORK, kind=Kind.ROWS)
    assert work.bytes(64, 2) == 196608
    assert form(replace(work, key=256, value=256)).num_stages == 1


def test_each_op_gets_its_own_form():
    keys, values, row = "tensor<?x?x?x256xbf16>", "tensor<?x?x?x64xbf16>", "tensor<?x?x?xf32>"
    module = parse(f"""
func.func @f(%q: {keys}, %k: {keys}, %v: {values}, %scale: f32, %g: {row}) -> ({values}, {keys}) {{
  %o = attn.recurrence %q, %k, %v scale %scale decay %g : {keys}, {keys}, {values} decay {row} -> {values}
  %d = attn.sweep %v, %v, %q scale %scale decay %g : {values}, {values}, {keys} decay {row} -> {keys}
  func.return %o, %d : {values}, {keys}
}}""")
    scheduling = PASSES["attn-schedule-recurrence"]()(heads=128, tokens=4096, blocks=True)
    scheduling.apply(make_context(), module)
    module.verify()
    found = [o.attributes["form"].data for o in module.walk() if isinstance(o, attn.RecurrenceOp | attn.SweepOp)]
    blocks = [f["value_block"] for f in found]
    assert all(isinstance(b, IntegerAttr) for b in blocks)
    assert [b.value.data for b in blocks] == [64, 128]
