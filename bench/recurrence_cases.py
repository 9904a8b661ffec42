"""The recurrences that `bench.recurrence` times: shapes, inputs, the bytes that they must move, a reference in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, softplus
from xdsl.dialects.builtin import ModuleOp

from attn_engine.frontend.recurrence import Kind
from attn_engine.runtime.devices import Target
from attn_engine.runtime.recurrence_compile import Compiled, Request, default_schedule, scheduled

BYTES_PER_MS = 3.02e9
"""What a copy reaches on an H100 with HBM3."""
TOKENS = 256
"""Of the first batch, that are held against fp64."""
Inputs = dict[str, Tensor]
Run = Callable[[Inputs], Tensor]


@dataclass(frozen=True)
class Case:
    """One shape: batch, tokens, heads of q and k and of v, key and value channels."""

    name: str
    b: int
    t: int
    shared: int
    h: int
    k: int
    v: int
    kind: str = "token"
    """Log decays per token or per channel, "mamba" (with a weight), "delta" and "channel delta" (with a decay) or "head"."""
    drafts: tuple[float | None, float | None] = (None, None)
    """Milliseconds forward and backward that drafts of this project's ancestors report, on an H100."""
    judge: str = ""
    """The case whose peer the backward is held against, where that of its own refuses."""

    def floor(self, backward: bool) -> float:
        """Milliseconds for the bytes of all operands and results, once each."""
        keys = 2 * self.b * self.t * self.shared * self.k * 2
        values = self.b * self.t * self.h * self.v * 2
        rows = self.b * self.t * self.h * 4 * (self.k if self.kind.startswith("channel") else 1)
        once = keys + 2 * values + rows
        return (once + (keys + values + rows if backward else 0)) / BYTES_PER_MS

    @property
    def scale(self) -> float:
        """Mamba-2 has none."""
        return 1.0 if self.kind == "mamba" else self.k**-0.5

    def rates(self) -> Tensor:
        """What the step sizes of Mamba-2 are multiplied with: fast and slow heads."""
        return -(1.0 + torch.arange(self.h, device="cuda") % 16)

    def inputs(self) -> Inputs:
        """With weak decays in half of the heads, so that old states count; the same in every process."""
        generator = torch.Generator("cuda").manual_seed(0)

        def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda").to(dtype)

        rate = torch.where(torch.arange(self.h, device="cuda") % 2 == 0, 1.0, 0.01)
        made = {
            "q": randn(self.b, self.t, self.shared, self.k),
            "k": randn(self.b, self.t, self.shared, self.k),
            "v": randn(self.b, self.t, self.h, self.v),
            "decay": rate * logsigmoid(randn(self.b, self.t, self.h, dtype=torch.float32)),
        }
        strength = randn(self.b, self.t, self.h, dtype=torch.float32)
        if self.kind == "mamba":
            made["weight"] = softplus(strength - 4)
            made["decay"] = made["weight"] * self.rates()
        elif self.kind.endswith("delta"):
            made["k"] = normalize(made["k"].float(), dim=-1).to(torch.bfloat16)
            made["beta"] = strength.sigmoid()
        if self.kind.startswith("channel"):
            made["decay"] = made["decay"][..., None] * torch.rand(self.k, generator=generator, device="cuda")
        elif self.kind == "head":
            made["decay"] = torch.log1p(-torch.exp2(-5.0 - torch.arange(self.h, device="cuda")))
        return leaves(made, self)

    def scheduled(self) -> ModuleOp:
        """Its backward as it is cut for Hopper: equal for cases whose kernels are."""
        beta, weight = self.kind.endswith("delta"), self.kind == "mamba"
        decay = "channel" if self.kind.startswith("channel") else "token"
        kind = Kind(torch.bfloat16, self.k, self.v, decay, beta=beta, weight=weight)
        heads = self.b * self.h
        schedule, place = default_schedule(Target("triton", "sm_90"), kind, heads, self.t, False, False, True)
        wrt = ("q", "k", "v", *(() if self.kind == "head" else ("decay",)))
        request = Request(kind, "triton", schedule, wrt, self.shared != self.h, place)
        return scheduled(Compiled(request).adjoint(False), request)

    def sample(self, x: Inputs, dtype: torch.dtype | None = None) -> Inputs:
        """The first tokens of the first batch."""
        cut = {name: (t[:1, :TOKENS] if t.ndim > 1 else t).detach() for name, t in x.items()}
        return leaves({name: t if dtype is None else t.to(dtype) for name, t in cut.items()}, self)


def leaves(made: Inputs, case: Case) -> Inputs:
    return {name: x.contiguous().requires_grad_(case.kind != "head" or name != "decay") for name, x in made.items()}


def reference(case: Case, x: Inputs) -> Tensor:
    """o token by token."""
    q, k = (x[n].repeat_interleave(case.h // case.shared, 2) for n in ("q", "k"))
    tokens = x["v"].shape[1]
    decay = x["decay"].expand(1, tokens, -1) if x["decay"].ndim == 1 else x["decay"]
    state = q.new_zeros(1, case.h, case.k, case.v)
    outputs: list[Tensor] = []
    for t in range(tokens):
        kept = decay[:, t].exp()
        state = state * (kept[..., None] if kept.ndim == 3 else kept[..., None, None])
        written = x["v"][:, t] * (x["weight"][:, t, :, None] if "weight" in x else 1)
        if "beta" in x:
            written = x["beta"][:, t, :, None] * (written - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + k[:, t, ..., None] * written[:, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * case.scale)
    return torch.stack(outputs, 1)


def mamba(b: int, t: int, drafts: tuple[float | None, float | None]) -> Case:
    return Case(f"Mamba-2 2.7B B{b} S{t}", b, t, 1, 80, 128, 64, "mamba", drafts)


CASES = [
    Case("retention B4 S4096 H32 128/128", 4, 4096, 32, 32, 128, 128, "head"),
    Case("simple GLA B4 S4096 H32 128/128", 4, 4096, 32, 32, 128, 128, judge="retention B4 S4096 H32 128/128"),
    Case("Mamba-2 B8 S4096 H80 P64 N128", 8, 4096, 1, 80, 128, 64, "mamba"),
    Case("few heads B1 S32768 H8 128/128", 1, 32768, 8, 8, 128, 128),
    Case("GLA B4 S4096 H32 128/128", 4, 4096, 32, 32, 128, 128, "channel"),
    Case("gated delta rule B4 S4096 H32 128/128", 4, 4096, 32, 32, 128, 128, "delta"),
    Case("delta rule, decay per channel B4 S4096 H32 128/128", 4, 4096, 32, 32, 128, 128, "channel delta"),
]
OTHER_SHAPES = [
    mamba(1, 2048, (0.32, 1.07)),
    mamba(1, 4096, (0.33, None)),
    mamba(1, 8192, (0.30, None)),
    mamba(8, 2048, (0.48, None)),
    mamba(8, 4096, (0.94, None)),
    mamba(8, 8192, (1.87, 11.5)),
    *(
        Case(f"gated retention B64 S{t} H16 64/64", 64, t, 16, 16, 64, 64, drafts=drafts)
        for t, drafts in ((1024, (0.38, 1.59)), (2048, (0.74, 3.11)), (4096, (1.47, 6.16)))
    ),
    *(
        Case(f"gated retention B8 S{t} H40 256/256", 8, t, 40, 40, 256, 256, drafts=drafts)
        for t, drafts in ((1024, (0.59, 2.3)), (2048, (1.16, 4.5)), (4096, (2.31, 9.0)))
    ),
    *(
        Case(f"RetNet B{b} S{t} H32 256/512", b, t, 32, 32, 256, 512, "head", drafts)
        for b, t, drafts in (
            (1, 2048, (0.28, 1.05)),
            (1, 4096, (0.42, None)),
            (8, 2048, (1.59, None)),
            (8, 4096, (3.16, 10.9)),
        )
    ),
]
"""Those that this project's ancestors report."""
