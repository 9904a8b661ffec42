"""README's lines are read from the recorded tables, with the fastest peer of the run, and its picture is of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from docs.front_page import Line, Timed, attention, custom, forward, lines_of, picture, recurrence, table

CAUSAL = Line("causal", "B1", Timed(2.0, "FA4", 1.9), Timed(4.0, "cuDNN", 4.8))
ATTENTION = """\
A card.

| mask | shape | ours | deterministic | cuDNN | FA4 | backward aims |
|---|---|---|---|---|---|---|
| causal | B1 | 2.0, 600 / 4.0, 500 | 2.0, 600 / 1.0, 900 | 2.5, 500 / 4.8, 450 | 1.9, 620 / 5.0, 400 | 0.9x (>= 1) |
| full | B2 | 2.0, 600 / 4.0, 500 | 2.0, 600 / 4.4, 480 | | | |

| another | table |
|---|---|
| of | words |
"""


def test_the_fastest_peer_is_named_for_each_way():
    assert list(attention(ATTENTION)) == [CAUSAL, Line("full", "B2", None, None)]


def test_columns_of_forward_alone():
    text = "| definition | shape | ours | cuDNN | FA4 | aims |\n|---|---|---|---|---|---|\n| causal | B1 | 2.0, 6 | 3.0, 4 | | |"
    assert list(forward(text)) == [Line("causal", "B1", Timed(2.0, "cuDNN", 3.0), None)]


def test_notes_in_a_definition_and_beside_a_time_are_left_out():
    cells = "0.5 (0.4 untrained) | 400 | 1.0 | 2.0 | 3.0 | 300 | 1.5 | 0.5 | missed"
    text = f"| head |\n|---|\n| T5 (in two stages) | B1 | {cells} |\n| relu | B1 | {cells} |\n| long | B1 | 1 | 2 | | | 3 | 4 | | | |"
    first, second = custom(text)
    assert first == Line("T5", "B1", Timed(0.5, "FlexAttention", 1.0), Timed(3.0, "FlexAttention", 1.5))
    assert second.forward == Timed(0.5, "dense formula", 1.0)


def test_contenders_in_lines():
    text = (
        "| head |\n|---|\n| GLA B4 S8 | attn_engine | 1.0 | 3 of 4 | 0.5 of 2.0 | 3.0 | 4 of 5 | | 1e-3 | 2e-3 |\n"
        "| GLA B4 S8 | fla | 2.0 | 2 of 4 |  | refused | |  | 2.6e-03 |  |"
    )
    assert list(recurrence(text)) == [Line("GLA", "B4 S8", Timed(1.0, "fla", 2.0), None)]


def test_one_definition_of_two_pages_is_one_line_with_the_closest_peer(tmp_path: Path):
    (tmp_path / "attention_h200.md").write_text(ATTENTION)
    (tmp_path / "hopper_forward_h200.md").write_text(
        "| definition | shape | ours | FA4 | aims |\n|---|---|---|---|---|\n| causal | B1 | 2.0, 6 | 1.8, 7 | |"
    )
    assert lines_of(tmp_path)[0] == replace(CAUSAL, forward=Timed(2.0, "FA4", 1.8))


def test_slower_than_the_peer_is_bold():
    assert (
        table([CAUSAL]).splitlines()[-1] == "| causal | B1 | 2.00 | FA4 1.90 | **0.95x** | 4.00 | cuDNN 4.80 | 1.20x |"
    )


def test_the_picture_is_drawn_anew_where_a_figure_changed():
    pytest.importorskip("matplotlib")
    before = picture([CAUSAL], "")
    assert "causal, B1" in before
    assert picture([CAUSAL], before) is before
    changed = picture([replace(CAUSAL, backward=Timed(4.0, "cuDNN", 5.0))], before)
    assert changed.startswith("<?xml")
    assert changed != before
