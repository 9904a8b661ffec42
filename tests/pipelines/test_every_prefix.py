"""After every pass of the pipeline the IR verifies and still means what was traced, forward and backward."""

from __future__ import annotations

import pytest
import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.parser import Parser

from attn_engine import library, pipelines
from attn_engine.dialects import attn, tile
from attn_engine.frontend.build import build
from attn_engine.frontend.definition import Definition
from attn_engine.interpreters.attn import run_attention, run_online
from attn_engine.interpreters.attn_backward import run_backward
from attn_engine.interpreters.tile import run_plan
from attn_engine.runtime.driver import run_passes
from attn_engine.universe import make_context

SCALE, D, DV = 0.4, 8, 12
CONVERT = "convert-attn-to-tile{forward=16,16,4,1 rows=16,16,4,1 dq=16,16,4,1 dkdv=16,16,4,1}"


def definitions() -> dict[str, Definition]:
    torch.manual_seed(1)
    slopes = torch.rand(2, requires_grad=True)
    bias = torch.randn(2, 21, 25, requires_grad=True)
    lengths = torch.tensor([0, 13])
    return {
        "causal": Definition(mask_mod=library.causal),
        "alibi_window": Definition(score_mod=library.alibi(slopes), mask_mod=library.sliding_window(11)),
        "soft_cap_bias": Definition(score_mod=lambda s, b, h, q, kv: 3 * torch.tanh(s / 3) + bias[h, q, kv]),
        "lengths": Definition(mask_mod=lambda b, h, q, kv: kv < lengths[b]),
        "sigmoid": Definition(row=library.sigmoid, mask_mod=library.causal),
        "retention": Definition(row=library.retention),
        "two_pass": Definition(row=lambda s: torch.relu(torch.softmax(s, -1) - 0.02)),
        "mods": Definition(query_mod=lambda x: torch.tanh(x), key_mod=lambda x: 2 * x, value_mod=lambda x: x * x),
    }


class Subject:
    """One definition with inputs and, in float64, what its forward and backward must give."""

    def __init__(self, definition: Definition):
        self.traced = build(definition, dtype=torch.float32, head_dim=D, head_dim_v=DV)
        self.trained = [n for n, c in enumerate(self.traced.captures) if c.requires_grad]
        q, k, v = torch.randn(2, 2, 21, D), torch.randn(2, 1, 25, D), torch.randn(2, 1, 25, DV)
        self.inputs = [t.double().requires_grad_() for t in (q, k, v)]
        self.captures = [c.detach().double().requires_grad_() if c.requires_grad else c for c in self.traced.captures]
        self.o = run_attention(self.traced.module, *self.inputs, SCALE, self.captures)[0]
        self.d_o = torch.randn_like(self.o)
        leaves = [*self.inputs, *(self.captures[n] for n in self.trained)]
        self.gradients = torch.autograd.grad(self.o, leaves, self.d_o)

    def plain(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return [t.detach() for t in self.inputs], [c.detach() for c in self.captures]

    def check(self, module: ModuleOp) -> None:
        """Runs whatever level the module is at."""
        if any(isinstance(op, tile.PlanOp) for op in module.walk()):
            self.check_plans(module)
            return
        (q, k, v), captures = self.plain()
        run = run_online if any(isinstance(op, attn.OnlineOp) for op in module.walk()) else run_attention
        o, *saved = run(module, q, k, v, SCALE, captures)
        close(o, self.o, "o")
        if any(isinstance(op, attn.BackwardOp) for op in module.walk()):
            found = run_backward(module, q, k, v, SCALE, o, self.d_o, saved, [], captures)
            got = [found["dq"], found["dk"], found["dv"], *found["d_captures"]]
            for value, wanted in zip(got, self.gradients, strict=True):
                close(value, wanted, "gradient")

    def check_plans(self, module: ModuleOp) -> None:
        (q, k, v), captures = self.plain()
        plan = next(op for op in module.walk() if isinstance(op, tile.PlanOp) and op.sym_name.data == "forward")
        rows = sum((a.name_hint or "").startswith("saved") for a in plan.body.block.args)
        o = torch.full(self.o.shape, torch.nan, dtype=torch.float64)
        saved = [torch.full(self.o.shape[:3], torch.nan, dtype=torch.float64) for _ in range(rows)]
        run_plan(module, "forward", [q, k, v, o, *saved, *captures, SCALE], exact=True)
        close(o, self.o, "o")
        results = [torch.full(g.shape, torch.nan, dtype=torch.float64) for g in self.gradients]
        run_plan(module, "backward", [q, k, v, o, self.d_o, *saved, *captures, *results, SCALE], exact=True)
        for value, wanted in zip(results, self.gradients, strict=True):
            close(value, wanted, "gradient")


def close(value: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    error = (value.double() - wanted.detach()).abs().max().item() if value.numel() else 0.0
    assert error <= 2e-5 * max(1.0, wanted.abs().max().item()), f"{what}: error {error:.1e}"


@pytest.mark.parametrize("name", definitions())
def test_every_prefix(name: str):
    subject = Subject(definitions()[name])
    module = subject.traced.module.clone()
    wrt = ("q", "k", "v", *map(str, subject.trained))
    specs = (*pipelines.ATTN_ANALYSIS, *pipelines.derive_backward(wrt), *pipelines.ATTN_LOWERING, CONVERT)
    for spec in (*specs, *pipelines.TILE_CLEANUP):
        run_passes(module, (spec,))
        module.verify()
        printed = str(module)
        assert str(Parser(make_context(), printed).parse_module()) == printed, spec
        subject.check(module)
