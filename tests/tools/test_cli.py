"""`attn-engine`: what it prints of a definition, and that mistakes are messages with exit code 1."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from attn_engine.backends.backend import BACKENDS
from attn_engine.runtime import inspect
from attn_engine.tools import cli

ROOT = Path(__file__).parents[2]
ALIBI = f"{ROOT}/examples/alibi.py:alibi"
DEFINITIONS = """
import torch
import attn_engine
from attn_engine.library import causal

plain = attn_engine.compile(mask_mod=causal)
bad = attn_engine.compile(score_mod=lambda score, b, h, q, kv: score if score > 0 else -score)
meta = [attn_engine.meta_tensor(1, 2, 64, 32, dtype=torch.float32)] * 3
engine = attn_engine.AttentionEngine(meta, mask_mod=causal)
decaying = attn_engine.LinearAttentionEngine(meta, q_mod=torch.exp)
biased = attn_engine.AttentionEngine(
    meta,
    attn_engine.CustomIO({"bias": (1, "heads", "seq_len", "seq_len_kv")}),
    score_mod=lambda score, inputs, b, h, q, kv: score + inputs["bias"],
)


def waits(s):
    low = s.amin()
    return torch.relu((s - low) / (s.amax() - low) - 0.5)


two_loops = attn_engine.compile(row=waits)
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the command line; (exit code, stdout, stderr)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["attn-engine", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        return (code if isinstance(code, int) else 0, *capsys.readouterr())

    return call


@pytest.fixture
def definitions(tmp_path: Path) -> str:
    file = tmp_path / "definitions.py"
    file.write_text(DEFINITIONS)
    return str(file)


@pytest.mark.parametrize(
    ("emit", "forward", "backward"),
    [
        ("traced", "attn.row_reduce max", None),
        ("attn", "attn.step_yield", "attn.accumulate_grad"),
        ("tile", "tile.kernel @forward_kernel", "tile.plan @backward"),
        ("triton", "def forward_kernel(", "def backward_dkdv("),
        ("cpu", "def forward(", "def backward("),
    ],
)
def test_emits_every_stage(run, emit: str, forward: str, backward: str | None):
    code, out, err = run("compile", ALIBI, "--emit", emit, "--head-dim", "32")
    assert (code, err) == (0, "")
    assert forward in out
    code, with_backward, _ = run("compile", ALIBI, "--emit", emit, "--head-dim", "32", "--backward")
    assert code == 0
    if backward is None:
        assert with_backward == out
    else:
        assert backward in with_backward
        assert backward not in out


def test_stages_are_those_of_the_runtime():
    assert cli.STAGES == inspect.STAGES


def test_dtype_head_dims_and_lse(run, definitions: str):
    target = f"{definitions}:plain"
    _, out, _ = run("compile", target, "--dtype", "fp16", "--head-dim", "32", "--head-dim-v", "64", "--return-lse")
    assert "%q: tensor<?x?x?x32xf16>" in out
    assert "%v: tensor<?x?x?x64xf16>" in out
    assert "outputs tensor<?x?x?xf32>" in out


def test_schedules_follow_the_architecture(run, definitions: str):
    texts = [
        run("compile", f"{definitions}:plain", "--emit", "tile", "--arch", a)[1] for a in ("sm_90", "sm_86", "sm_90a")
    ]
    assert texts[0] != texts[1]
    assert texts[0] == texts[2]


def test_an_engine_is_a_definition(run, definitions: str):
    code, out, _ = run("compile", f"{definitions}:engine", "--emit", "traced", "--head-dim", "32")
    assert code == 0
    assert "attn.attention" in out


def test_named_inputs_are_stood_in_for(run, definitions: str):
    code, out, _ = run("compile", f"{definitions}:biased", "--emit", "traced", "--head-dim", "32")
    assert code == 0
    assert "captures %bias" in out
    assert "attn.load %bias" in out


def test_neighbours_can_be_imported(run, tmp_path: Path):
    (tmp_path / "neighbour_of_a_definition.py").write_text("from attn_engine.library import causal\n")
    (tmp_path / "one.py").write_text(
        "import attn_engine\nfrom neighbour_of_a_definition import causal\nx = attn_engine.compile(mask_mod=causal)\n"
    )
    assert run("compile", f"{tmp_path}/one.py:x", "--emit", "traced")[0] == 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("absent", (), "DefinitionNotFoundError: 'absent' in {file} is no compiled definition; there are: plain, bad"),
        ("plain", ("--arch", "sm_1"), "ScheduleError: unknown architecture 'sm_1'; known are sm_80"),
        ("plain", ("--emit", "ptx"), "StageError: stage 'ptx' is unknown; there are traced, attn, tile, "),
        ("bad", (), "ControlFlowError: "),
    ],
)
def test_mistakes_are_messages(run, definitions: str, name: str, options: tuple[str, ...], message: str):
    code, out, err = run("compile", f"{definitions}:{name}", *options)
    assert (code, out) == (1, "")
    assert err.startswith(message.format(file=definitions))
    assert "Traceback" not in err
    assert all(line.startswith("  ") for line in err.splitlines()[1:])


def test_mistakes_in_traced_functions_show_their_line(run, definitions: str):
    _, _, err = run("compile", f"{definitions}:bad")
    assert "if score > 0 else" in err


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        (None, "nowhere.py:x", "is no Python file"),
        (None, "nowhere", "names no definition; write FILE.py:NAME"),
        ("x = [", "file.py:x", "cannot be imported: SyntaxError"),
        ("x = {}[1, 2]", "file.py:x", "cannot be imported: KeyError: (1, 2)"),
        ("x = '[bold]'", "file.py:x", "is no compiled definition; there are: none"),
    ],
)
def test_files_that_hold_no_definition(run, tmp_path: Path, monkeypatch, text: str | None, target: str, message: str):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "file.py").write_text(text)
    code, _, err = run("compile", target)
    assert code == 1
    assert err.startswith("DefinitionNotFoundError: ")
    assert message in err
    assert len(err.splitlines()) == 1


def test_options_out_of_range_are_refused(run, definitions: str):
    assert run("compile", f"{definitions}:plain", "--head-dim", "257")[0] == 2


def test_explains_softmax(run):
    code, out, _ = run("explain", ALIBI, "--head-dim", "32")
    assert code == 0
    for line in (
        "  sum = sum exp(s + -1 * max)   (reads max)",
        "1 loop over the keys:",
        "rescaled in the loop by: exp(-(1) * max)",
        "epilogue: o = accumulator * sum^-1",
        "parts combine: max: the max of both",
        "parts combine: sum: both added, each times exp((1) * (max of the part - of both))",
        "backward saves, per row: saved0 = max + log(sum)",
        "gradients of captures: slopes",
    ):
        assert line in out.splitlines()


def test_explains_what_waits(run, definitions: str):
    _, out, _ = run("explain", f"{definitions}:two_loops")
    assert "2 loops over the keys:" in out
    assert "  loop 1: weight: waits: " in out


def test_explains_what_an_assembler_makes_of_schedules(run):
    pytest.importorskip("triton")
    code, out, _ = run("explain", ALIBI, "--head-dim", "64", "--backend", "gluon")
    assert code == 0
    _, schedules = out.split("schedules for gluon on sm_90, in order:")
    assert "forward in blocks of 128 queries" in schedules and "forward_kernel: 72 products" in schedules


def test_doctor_names_every_backend(run):
    code, out, _ = run("doctor")
    assert code == 0
    for name in (*BACKENDS, "torch ", "xdsl "):
        assert name in out
    cpu = next(line for line in out.splitlines() if " cpu " in line)
    assert " yes " in cpu


def test_looks_into_a_recurrence(run, definitions: str):
    code, out, _ = run("explain", f"{definitions}:decaying")
    assert code == 0 and "S_t = exp(decay_t) S_{t-1} + k_t v_t^T" in out and "of B1 H2 T64 D32 on sm_90" in out
    assert "attn.recurrence" in run("compile", f"{definitions}:decaying", "--emit", "traced")[1]
    assert "d_decay" in run("compile", f"{definitions}:decaying", "--emit", "triton", "--backward")[1]
