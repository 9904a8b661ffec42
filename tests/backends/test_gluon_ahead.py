"""Loops of machine code, as far as schedules are judged by them."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from attn_engine.backends.triton.gluon_ahead import Assembly

STEP = """
        /*0000*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0010*/                   LDL R3, [R1+0x4] ;
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2+URZ], R3 ;
        /*0030*/               @!P0 BRA 0x20 ;
        /*0040*/                   STL [R1+0x4], R3 ;
        /*0050*/               @P1 BRA `(.L_x_0) ;
        /*0060*/               @P1 BRA 0x0 ;
        /*0070*/                   LDL R3, [R1+0x8] ;
        /*0080*/               @P2 BRA 0x70 ;
        /*0090*/                   EXIT ;
"""


def test_a_step_may_hold_loops_without_products():
    """As that of a wait, or of a sine of a large angle: what it moves counts nevertheless."""
    assembly = Assembly(ptx="", sass=STEP, shared=0, spilled_bytes=8, warnings=())
    assert assembly.loops() == []
    ((*_, last),) = (step for step in assembly.steps())
    assert last.startswith("@P1 BRA 0x0") and sum("LDL" in t or "STL" in t for t in assembly.steps()[0]) == 2
