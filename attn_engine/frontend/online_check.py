"""Checks of an OnlineFunc by numbers: its step on blocks of a row, and given methods against derived results.

A check on rows proves nothing right, but what it refuses is wrong, and it shows the row. Kernels never use the
given methods: their results are derived from the step on the whole row as one block.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from xdsl.dialects.builtin import f32, i64
from xdsl.ir import Attribute, Block

from attn_engine.errors import OnlineFuncError, OnlineFuncWarning
from attn_engine.frontend.online_func import OnlineFunc, RowVectorSymbol
from attn_engine.frontend.reductions import ONLINE_FUNCTIONS
from attn_engine.frontend.region import Level, RegionTrace
from attn_engine.frontend.source import definition_line
from attn_engine.frontend.symbols import Symbol
from attn_engine.frontend.trace import Tracer

Evaluate: TypeAlias = Callable[[Block, Sequence[Tensor], tuple[int, int]], list[Tensor]]
"""The results of a region for elements of that shape, [rows, keys]; reductions are over the keys, and keep their axis."""
Numbers: TypeAlias = dict[str, Tensor]

KEYS, CHANNELS = 12, 3
BLOCKS = ((KEYS,), (5, 7), (4, 4, 4), (1,) * KEYS)
PARTS = (5, 1, 6)
TOLERANCE = 1e-5
INDICES = (("b", i64), ("h", i64), ("q_idx", i64))


def hard_rows() -> dict[str, Tensor]:
    """Scores that show what random ones hide; each row begins with a finite score."""
    generator = torch.Generator().manual_seed(11)
    normal = 2 * torch.randn(4, KEYS, generator=generator, dtype=torch.float64)
    late, holes = normal[2].clone(), normal[3].clone()
    late[-1] += 30.0
    holes[[1, 2, 6, 9, 10]] = -torch.inf
    return {
        "ascending": normal[0].sort().values,
        "descending": normal[1].sort(descending=True).values,
        "constant": torch.full((KEYS,), 0.7, dtype=torch.float64),
        "dominant at the end": late,
        "small": normal[0] / 50,
        "with -inf": holes,
    }


def check_online_func(online: OnlineFunc, evaluate: Evaluate) -> None:
    """Refuses a step that gives another result on other blocks, and given methods that disagree with the derived.

    Raises:
        OnlineFuncError: with the row, and both results.
    """
    with torch.inference_mode(False), torch.enable_grad():
        _check(_Probe(online, evaluate))


def _check(probe: _Probe) -> None:
    probe.check_step()
    for name, check in (("forward", probe.forward), ("backward", probe.backward), ("combine", probe.combine)):
        given = getattr(probe.online, name, None)
        if callable(given):
            _check_given(name, given, check)


def _check_given(name: str, given: Callable[..., Any], check: Callable[[], None]) -> None:
    """A method that cannot even run is not used, and so no error."""
    try:
        check()
    except OnlineFuncError:
        raise
    except Exception as error:
        warnings.warn(
            f"{name} could not be compared with the derived one, which is what runs: {type(error).__name__}: {error}\n"
            f"{definition_line(given)}",
            OnlineFuncWarning,
            stacklevel=2,
        )


@dataclass(frozen=True)
class _Region:
    """A traced method: its block, and the tensors that it captures."""

    block: Block
    captures: list[Tensor]


class _Probe:
    """The methods of one OnlineFunc as regions, and what they give on the hard rows."""

    def __init__(self, online: OnlineFunc, evaluate: Evaluate):
        self.online, self.run = online, evaluate
        self.states, self.finals = list(online.online_rowscales), list(online.final_rowscales)
        rows = hard_rows()
        self.names, self.scores = list(rows), torch.stack(list(rows.values()))
        generator = torch.Generator().manual_seed(12)
        self.values = torch.randn(KEYS, CHANNELS, generator=generator, dtype=torch.float64)
        self.dp = torch.randn(len(self.names), KEYS, generator=generator, dtype=torch.float64)
        self.step = self._trace("online_fwd", ("scores",), self.states, self._step)
        self.epilogue = self._trace("online_fwd_epilogue", (), self.states, self._epilogue)

    # Tracing
    def _trace(
        self, name: str, elements: Sequence[str], rows: Sequence[str], call: Callable[[RegionTrace], Sequence[object]]
    ) -> _Region:
        """A method on `elements`, indices and numbers of the row; `call` gives its results."""
        tracer = Tracer()
        leading: list[tuple[str, Attribute]] = [(n, f32) for n in elements]
        leading += [*INDICES, ("kv_idx", i64), *((n, f32) for n in rows)]

        def traced(region: RegionTrace) -> None:
            for n, argument in enumerate(region.block.args):
                region.levels[argument] = Level.ELEMENT if n < len(elements) or n == len(elements) + 3 else Level.ROW
            region.finish(*(region.as_f32(v).value for v in call(region)))

        block = tracer.run(name, leading, ONLINE_FUNCTIONS, traced, getattr(self.online, name)).block
        return _Region(block, [c.tensor for c in tracer.captures])

    def _step(self, region: RegionTrace) -> Sequence[object]:
        scores, b, h, q_idx, _, *rows = region.arguments
        p, new, o_scale = self.online.online_fwd(scores, dict(zip(self.states, rows, strict=True)), b, h, q_idx)
        return [p, *(new[name] for name in self.states), o_scale]

    def _epilogue(self, region: RegionTrace) -> Sequence[object]:
        b, h, q_idx, _, *rows = region.arguments
        o, final = self.online.online_fwd_epilogue(
            RowVectorSymbol(region), dict(zip(self.states, rows, strict=True)), b, h, q_idx
        )
        factor: Any = region.symbol(1.0)
        for operation, by in cast("RowVectorSymbol", o).factors:
            factor = factor * by if operation == "mul" else factor / cast("Any", by)
        return [factor, *(final[name] for name in self.finals)]

    def _forward(self, region: RegionTrace) -> Sequence[object]:
        scores, b, h, q_idx, kv_idx, *rows = region.arguments
        return [cast("Any", self.online).forward(scores, self._finals(rows), b, h, q_idx, kv_idx)]

    def _backward(self, region: RegionTrace) -> Sequence[object]:
        dp, p, b, h, q_idx, kv_idx, *rows, doosum = region.arguments
        return [cast("Any", self.online).backward(dp, p, self._finals(rows), doosum, b, h, q_idx, kv_idx)]

    def _finals(self, rows: Sequence[Symbol]) -> dict[str, Symbol]:
        return dict(zip(self.finals, rows, strict=True))

    # Evaluation
    def _evaluate(
        self, region: _Region, elements: Sequence[Tensor], keys: slice, rows: Sequence[Tensor]
    ) -> list[Tensor]:
        zero = torch.zeros((), dtype=torch.int64)
        kv = torch.arange(KEYS)[keys]
        shape = (len(self.names), len(kv))
        arguments = [*(e[:, keys] for e in elements), zero, zero, zero, kv, *rows, *region.captures]
        results = self.run(region.block, arguments, shape)
        return [
            r.to(torch.float64).expand(shape) if r.shape[-1:] == kv.shape else r.expand(shape[0], 1) for r in results
        ]

    def _fold(self, blocks: Sequence[slice], scores: Tensor) -> tuple[Tensor, Numbers, Tensor]:
        """(o, final numbers, weights of the last block) after some blocks."""
        one = (len(self.names), 1)
        states = [torch.full(one, s.var.number, dtype=torch.float64) for s in self.online.online_rowscales.values()]
        o = torch.zeros(len(self.names), CHANNELS, dtype=torch.float64)
        p = scores[:, :0]
        for keys in blocks:
            p, *states, o_scale = self._evaluate(self.step, [scores], keys, states)
            p = p.expand(-1, keys.stop - keys.start)
            o = o * o_scale[:, :1] + p @ self.values[keys]
            states = [s[:, :1] for s in states]
        factor, *finals = (r[:, :1] for r in self._evaluate(self.epilogue, [], slice(0, 1), states))
        return o * factor, dict(zip(self.finals, finals, strict=True)), p * factor

    def check_step(self) -> None:
        """One, two and many blocks give the same."""
        whole, finals, _ = self._fold(_slices(BLOCKS[0]), self.scores)
        for sizes in BLOCKS[1:]:
            o, other, _ = self._fold(_slices(sizes), self.scores)
            what = f"online_fwd on blocks of {', '.join(map(str, sizes))} keys"
            self._compare(self.online.online_fwd, f"{what}: o", o, whole, "on the whole row")
            for name in self.finals:
                self._compare(
                    self.online.online_fwd, f"{what}: '{name}'", other[name], finals[name], "on the whole row"
                )

    def forward(self) -> None:
        _, finals, p = self._fold(_slices(BLOCKS[0]), self.scores)
        region = self._trace("forward", ("scores",), self.finals, self._forward)
        (given,) = self._evaluate(region, [self.scores], slice(0, KEYS), list(finals.values()))
        self._compare(cast("Any", self.online).forward, "forward", given, p, "from online_fwd")

    def backward(self) -> None:
        scores = self.scores.clone().requires_grad_()
        _, finals, p = self._fold(_slices(BLOCKS[0]), scores)
        (derived,) = torch.autograd.grad((p * self.dp).sum(), scores)
        p, rows = p.detach(), [f.detach() for f in finals.values()]
        doosum = (p * self.dp).sum(-1, keepdim=True)
        region = self._trace("backward", ("dp", "scores"), [*self.finals, "doosum"], self._backward)
        (given,) = self._evaluate(region, [self.dp, p], slice(0, KEYS), [*rows, doosum])
        self._compare(cast("Any", self.online).backward, "backward", given, derived, "by differentiation")

    def combine(self) -> None:
        """Parts of the keys as one row each; in combine a reduction is over the parts."""
        whole, _, _ = self._fold(_slices(BLOCKS[0]), self.scores)
        parts = [self._fold([keys], self.scores) for keys in _slices(PARTS)]
        tracer, given = Tracer(), cast("Any", self.online).combine

        def traced(region: RegionTrace) -> None:
            region.levels.update(dict.fromkeys(region.block.args, Level.ELEMENT))
            result = given(self._finals(region.arguments))
            region.finish(region.as_f32(result).value)

        block = tracer.run("combine", [(n, f32) for n in self.finals], ONLINE_FUNCTIONS, traced, given).block
        rows = [torch.cat([finals[name] for _, finals, _ in parts], dim=1) for name in self.finals]
        shape = (len(self.names), len(parts))
        (factors,) = self.run(block, [*rows, *(c.tensor for c in tracer.captures)], shape)
        factors = factors.expand(shape)
        combined = sum((o * factors[:, n : n + 1] for n, (o, _, _) in enumerate(parts)), torch.zeros(()))
        what = f"combine of parts of {', '.join(map(str, PARTS))} keys"
        self._compare(cast("Any", self.online).combine, what, combined, whole, "on the whole row")

    def _compare(self, function: Callable[..., Any], what: str, given: Tensor, derived: Tensor, how: str) -> None:
        """Where both are finite they agree, up to rounding of the largest value of the row."""
        given, derived = given.detach().expand(derived.shape), derived.detach()
        known = derived.isfinite() & given.isfinite()
        size = derived.nan_to_num(0.0, 0.0, 0.0).abs().amax(-1, keepdim=True).clamp(min=1e-3)
        wrong = known & ((given - derived).abs() > TOLERANCE * size)
        for n in cast("list[int]", wrong.any(-1).nonzero().flatten().tolist()):
            raise OnlineFuncError(
                f"{what} gives {_spelled(given[n])}, {how} it is {_spelled(derived[n])}; the row is {self.names[n]}:"
                f" {_spelled(self.scores[n])}",
                "online_fwd must give for every cut of a row what it gives for the row as one block, and forward,"
                " backward and combine must agree with it; leave these three out, they are derived",
                definition_line(function),
            )


def _slices(sizes: Sequence[int]) -> list[slice]:
    return [slice(low, high) for low, high in pairwise(accumulate(sizes, initial=0))]


def _spelled(numbers: Tensor) -> str:
    values = cast("list[float]", numbers.flatten().tolist())
    return "[" + ", ".join(f"{x:.4g}" for x in values) + "]"
