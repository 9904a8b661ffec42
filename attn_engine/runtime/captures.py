"""What a call must know of captured tensors: which have no gradient, and how long their axes must be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, BlockArgument

from attn_engine.dialects import attn
from attn_engine.errors import CaptureSizeError, NoGradientError
from attn_engine.frontend.checks import Sizes
from attn_engine.passes.simplify_constants import constant_of
from attn_engine.pipelines import ATTN_ANALYSIS
from attn_engine.runtime.driver import run_passes

# Region, the place of b among its arguments (h follows), and what h counts there.
_PLACES = (
    ("score_mod", 1, "heads"),
    ("mask", 0, "heads"),
    ("row", 1, "heads"),
    ("query_mod", 1, "heads"),
    ("key_mod", 1, "kv_heads"),
    ("value_mod", 1, "kv_heads"),
)


@dataclass(frozen=True)
class Needed:
    """Axis `axis` of capture `capture` is read at every index below `size`, a field of `Sizes`."""

    capture: int
    axis: int
    size: str


@dataclass(frozen=True)
class CaptureRules:
    """What holds for the captures of a traced attention, whatever tensors they are."""

    names: tuple[str, ...]
    needed: tuple[Needed, ...]
    wanted: tuple[Needed, ...]
    """As `needed`, for queries and keys, where a shorter table is legal if the mask hides what lies beyond it."""
    mask_only: tuple[int, ...]
    """Captures that only the mask reads, so that they have no gradient."""
    numbers: tuple[Needed, ...] = ()
    """Axes of tables of scores that are read at a number, which `size` spells: gradients leave there unguarded."""

    def covered(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> bool:
        """Whether every table is as long as the queries or keys that index it directly."""
        return all(tensors[r.capture].shape[r.axis] >= getattr(sizes, r.size) for r in self.wanted)

    def tables(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those that are read at queries and keys: blocks of them may be copied."""
        queries, keys = ({r.capture for r in self.wanted if r.size == size} for size in ("q_len", "kv_len"))
        return [tensors[n] for n in sorted(queries & keys) if tensors[n].is_floating_point()]

    def exact(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> bool:
        """Whether some tables train, and are just as long as what indexes them directly."""
        trained = [n for n, tensor in enumerate(tensors) if tensor.requires_grad]
        rules = [r for r in (*self.needed, *self.wanted) if r.capture in trained]
        return bool(trained) and all(tensors[r.capture].shape[r.axis] == getattr(sizes, r.size) for r in rules)

    def check(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> None:
        """Errors that kernels cannot report: a table too short for the batch or the heads, a gradient of a mask."""
        for rule in self.needed:
            have, want = tensors[rule.capture].shape[rule.axis], getattr(sizes, rule.size)
            if have < want:
                raise CaptureSizeError(self.names[rule.capture], rule.axis, have, want, rule.size)
        if not torch.is_grad_enabled():
            return
        for rule in self.numbers:
            have, want = tensors[rule.capture].shape[rule.axis], int(rule.size) + 1
            if have < want and tensors[rule.capture].requires_grad:
                raise CaptureSizeError(self.names[rule.capture], rule.axis, have, want, rule.size)
        for n in self.mask_only:
            if tensors[n].requires_grad:
                name = self.names[n]
                raise NoGradientError(
                    f"captured tensor '{name}' requires a gradient, but only the mask reads it, and a mask has none:"
                    f" capture {name}.detach()"
                )


def capture_rules(module: ModuleOp, names: Sequence[str]) -> CaptureRules:
    """The rules for the captures of a traced module."""
    as_lowered = module.clone()
    run_passes(as_lowered, ATTN_ANALYSIS[:1])
    needed, wanted, mask_only = _rules(module, names)
    # Kernels take an index as direct once q + 0 is q.
    more_needed, more_wanted, _ = _rules(as_lowered, names)
    needed, wanted = dict.fromkeys((*needed, *more_needed)), dict.fromkeys((*wanted, *more_wanted))
    return CaptureRules(tuple(names), tuple(needed), tuple(wanted), mask_only, tuple(_numbers(as_lowered, names)))


def _numbers(module: ModuleOp, names: Sequence[str]) -> Iterator[Needed]:
    """One rule per index of a load at [.., query, key] that is a number, and not one that counts from the end."""
    region = next(op for op in module.walk() if isinstance(op, attn.AttentionOp)).score_mod
    loads = [op for op in region.block.ops if isinstance(op, attn.LoadOp)] if region is not None else []
    for op in loads:
        assert region is not None and isinstance(op.source, BlockArgument)
        if [*op.indices][-2:] == [*region.block.args[3:5]]:
            for axis, index in enumerate(op.indices):
                number = constant_of(index)
                if isinstance(number, int) and number >= 0:
                    capture = op.source.index - (len(region.block.args) - len(names))
                    yield Needed(capture, axis, str(number))


def _rules(module: ModuleOp, names: Sequence[str]) -> tuple[list[Needed], list[Needed], tuple[int, ...]]:
    """What must be long enough, what had better be, and the captures that only the mask reads."""
    attention = next(op for op in module.walk() if isinstance(op, attn.AttentionOp))
    needed: list[Needed] = []
    wanted: list[Needed] = []
    smooth = set[int]()
    for name, first, heads in _PLACES:
        region = getattr(attention, name)
        if region is None:
            continue
        block: Block = region.block
        offset = len(block.args) - len(names)
        needed += _needed(block, offset, {first: "batch", first + 1: heads})
        if name in ("score_mod", "mask", "row"):
            wanted += _needed(block, offset, {first + 2: "q_len", first + 3: "kv_len"})
        if name != "mask":
            smooth |= {n for n in range(len(names)) if block.args[offset + n].uses}
    return needed, wanted, tuple(n for n in range(len(names)) if n not in smooth)


def _needed(block: Block, offset: int, sizes: dict[int, str]) -> list[Needed]:
    """One rule per index of a load that is the batch or the head itself."""
    found: list[Needed] = []
    for op in block.walk():
        if not isinstance(op, attn.LoadOp) or not isinstance(op.source, BlockArgument):
            continue
        for axis, index in enumerate(op.indices):
            if isinstance(index, BlockArgument) and index.block is block and index.index in sizes:
                found.append(Needed(op.source.index - offset, axis, sizes[index.index]))
    return found
