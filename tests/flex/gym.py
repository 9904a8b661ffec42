"""The definitions of attn-gym with sizes, and dense attention with them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_engine.errors import UnsupportedFunctionError

B, H = 2, 4


@dataclass
class Case:
    """One definition: what to run, at which lengths, and what else it trains."""

    generator: str
    mask_mod: Callable[..., Any] | None = None
    score_mod: Callable[..., Any] | None = None
    lengths: tuple[int, int] = (48, 48)
    parameters: list[Tensor] = field(default_factory=list)
    dense_scores: Callable[[Tensor], Tensor] | None = None
    """The score function on whole tensors, where torch.vmap has no gradient for it."""


def seeded(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


OFFSETS = torch.tensor([0, 7, 20, 33, 48], dtype=torch.int32)
INTERVALS = torch.tensor([[0, 20], [5, 48], [30, 40]], dtype=torch.int32)
PARENTS = [-1, 0, 1, 1, 3, 3, 0, 2, 2, 5, 6, 6]


def masks() -> Any:
    import attn_gym.masks

    return attn_gym.masks


def mods() -> Any:
    import attn_gym.mods

    return attn_gym.mods


def masked(generator: str, *args: Any, lengths: tuple[int, int] = (48, 48), **options: Any) -> Callable[[], Case]:
    return lambda: Case(generator, getattr(masks(), generator)(*args, **options), lengths=lengths)


def batchified() -> Case:
    return Case("batchify_mask_mod", masks().batchify_mask_mod(masks().causal_mask, 12))


def documents() -> Case:
    return Case("generate_doc_mask_mod", masks().generate_doc_mask_mod(masks().causal_mask, OFFSETS))


def jetspec_tree() -> Case:
    tree = masks().build_tree_ancestor_matrix(PARENTS, device="cpu")
    mask = masks().generate_jetspec_tree_causal_mask_mod(20, tree)
    return Case("generate_jetspec_tree_causal_mask_mod", mask, lengths=(12, 32))


def global_window() -> Case:
    is_global = torch.zeros(48, dtype=torch.bool)
    is_global[[0, 20]] = True
    return Case("generate_global_sliding_window", masks().generate_global_sliding_window(5, is_global))


def shared_prefix() -> Case:
    mask = masks().generate_shared_prefix_mask_mod(OFFSETS, torch.tensor([0, 0, 2, 2], dtype=torch.int32))
    return Case("generate_shared_prefix_mask_mod", mask)


def vsa() -> Case:
    generator = torch.Generator().manual_seed(5)
    selected = torch.rand((B, H, 6, 6), generator=generator).argsort(-1)[..., :3].to(torch.int32)
    return Case("generate_vsa_mask_mod", masks().generate_vsa_mask_mod(selected, 8, torch.tensor([8, 8, 5, 8, 8, 3])))


def alibi() -> Case:
    return Case("generate_alibi_bias", masks().causal_mask, mods().generate_alibi_bias(H))


def sandwich() -> Case:
    return Case("generate_sandwich_bias", masks().causal_mask, mods().generate_sandwich_bias(H, 48, 32))


def soft_cap() -> Case:
    return Case("generate_tanh_softcap", score_mod=mods().generate_tanh_softcap(2))


def activation(function: Callable[..., Any]) -> Callable[[], Case]:
    make = "generate_activation_score_mod"
    return lambda: Case(make, masks().causal_mask, getattr(mods(), make)(function))


def spatial_bias() -> Case:
    adjacency = torch.rand((B, 20, 20), generator=torch.Generator().manual_seed(6)) < 0.15
    distances, table = mods().shortest_path_distances(adjacency, 4), seeded(H, 6).requires_grad_()
    mod = mods().generate_graphormer_spatial_bias(table, distances)
    return Case("generate_graphormer_spatial_bias", None, mod, (20, 20), [table])


def edge_bias() -> Case:
    generator = torch.Generator().manual_seed(6)
    adjacency = torch.rand((B, 20, 20), generator=generator) < 0.15
    kinds = torch.randint(0, 3, (B, 20, 20), generator=generator)
    types, lengths = mods().shortest_path_edge_types(adjacency, kinds, 3)
    table = seeded(H, 3, 3).requires_grad_()
    mod = mods().generate_graphormer_edge_bias(table, types, lengths)
    return Case("generate_graphormer_edge_bias", None, mod, (20, 20), [table])


def latent() -> Case:
    query, key = seeded(B, H, 48, 8).requires_grad_(), seeded(B, 1, 48, 8, seed=2).requires_grad_()
    mod = mods().generate_mla_rope_score_mod(query, key, H, 0.3)
    return Case(
        "generate_mla_rope_score_mod",
        masks().causal_mask,
        mod,
        parameters=[query, key],
        dense_scores=lambda scores: scores + 0.3 * (query @ key.mT),
    )


GYM: dict[str, Callable[[], Case]] = {
    "causal": lambda: Case("causal_mask", masks().causal_mask),
    "sliding window": masked("generate_sliding_window", 9),
    "global and sliding window": global_window,
    "dilated sliding window": masked("generate_dilated_sliding_window", 9, 3),
    "prefix-lm": masked("generate_prefix_lm_mask", 11),
    "documents, causal": documents,
    "packed causal documents": masked("generate_packed_causal_doc_mask_mod", OFFSETS),
    "shared prefix": shared_prefix,
    "batches in one sequence": batchified,
    "block diffusion": masked("generate_block_diffusion_mask", 24, 4),
    "flamingo cross attention": masked("generate_vision_cross_attention_mask_mod", INTERVALS, 8, lengths=(48, 24)),
    "jetspec tree": jetspec_tree,
    "jetspec training": masked("generate_jetspec_training_mask_mod", 16, 8, lengths=(24, 40)),
    "natten": masked("generate_natten", 8, 6, 3, 3),
    "tiled natten": masked("generate_tiled_natten", 8, 8, 3, 3, 2, 4, lengths=(64, 64)),
    "morton natten": masked("generate_morton_natten", 8, 8, 3, 5, lengths=(64, 64)),
    "sliding tile, 2d": masked("generate_sta_mask_mod_2d", (8, 6), (4, 6), (2, 2), 4, lengths=(52, 52)),
    "sliding tile, 3d": masked("generate_sta_mask_mod_3d", (4, 4, 4), (2, 4, 2), (2, 2, 2), 3, lengths=(67, 67)),
    "sparse videogen, spatial": masked("generate_spatial_head_mask_mod", 6, 3, 14, 1, True, 8),
    "sparse videogen, temporal": masked("generate_temporal_head_mask_mod", 6, 3, 14, 1),
    "video sparse attention": vsa,
    "alibi": alibi,
    "sandwich": sandwich,
    "tanh soft-cap": soft_cap,
    "activation, gelu": activation(F.gelu),
    "activation, relu": activation(F.relu),
    "graphormer spatial bias": spatial_bias,
    "graphormer edge bias": edge_bias,
    "latent attention, rotary part": latent,
}

UNMASKED = ("tanh soft-cap", "graphormer spatial bias", "graphormer edge bias")

Exceptional = tuple[Callable[[], Callable[..., Any]], type[Exception], str]
EXCEPTIONS: dict[str, Exceptional] = {
    "tanh soft-cap, approx=True": (
        lambda: mods().generate_tanh_softcap(2, approx=True),
        UnsupportedFunctionError,
        "autograd.Function",
    ),
}
REASONS = {
    "tanh soft-cap, approx=True": "a custom autograd.Function around one PTX instruction: use approx=False",
}


def generators() -> set[str]:
    """Every function of the package that makes a mask or a score function, by its name."""
    names: set[str] = set()
    for module in (masks(), mods()):
        for name, value in vars(module).items():
            made = inspect.isfunction(value) and (
                name.startswith("generate_") or name in ("causal_mask", "batchify_mask_mod")
            )
            names |= {name} if made else set()
    return names


def covered() -> set[str]:
    return {make().generator for make in GYM.values()}


def dense(q: Tensor, k: Tensor, v: Tensor, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """(o, lse, largest score) in float64, the functions called on 0-d indices through torch.vmap."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    scores = q @ k.mT / q.shape[-1] ** 0.5
    indices = [torch.arange(n) for n in scores.shape]
    visible = torch.ones(scores.shape, dtype=torch.bool)
    with TransformGetItemToIndex():
        if case.dense_scores is not None:
            scores = case.dense_scores(scores)
        elif case.score_mod is not None:
            scores = mapped(case.score_mod, True)(scores, *indices).double()
        if case.mask_mod is not None:
            visible = mapped(case.mask_mod, False)(*indices).expand(scores.shape)
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    dead = (lse == -torch.inf).unsqueeze(-1)
    weights = torch.where(visible & ~dead, (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp(), 0.0)
    return weights @ v, lse, scores.amax(-1)


def mapped(function: Callable[..., Any], scored: bool) -> Callable[..., Tensor]:
    """A function of indices over all of them."""
    first = (0,) if scored else ()
    for axis in (3, 2, 1, 0):
        axes = [None] * 4
        axes[axis] = 0
        function = torch.vmap(function, in_dims=(*first, *axes))
    return function


PAGE = Path(__file__).resolve().parents[2] / "docs" / "attn_gym.md"
HEADER = """\
# attn-gym

Every mask and score function of the attn-gym package (0.0.17) runs unchanged with `attn_engine.flex.flex_attention`;
forward and all gradients equal dense attention in float64. Generated from the test: `python -m tests.flex.gym`.

| definition | function | mask | score | trains, beside q, k, v | lengths |
|---|---|---|---|---|---|
"""


def page() -> str:
    """docs/attn_gym.md."""
    rows = []
    for name, make in GYM.items():
        case = make()
        marks = ["yes" if f is not None else "" for f in (case.mask_mod, case.score_mod)]
        trained = str(len(case.parameters) or "")
        rows.append(
            f"| {name} | `{case.generator}` | {marks[0]} | {marks[1]} | {trained} | {case.lengths[0]} x {case.lengths[1]} |"
        )
    exceptions = "\n".join(f"- {name}: {reason}" for name, reason in REASONS.items())
    text = HEADER + "\n".join(rows) + f"\n\nExceptions, refused with an error that says so:\n\n{exceptions}\n"
    return text.replace("|  |", "| |").replace("|  |", "| |")


if __name__ == "__main__":
    PAGE.write_text(page())
