"""Kinds of blocks of masks that read captures, against brute force: empty is all false, full is all true."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from xdsl.dialects import arith

from attn_engine.dialects import attn
from attn_engine.frontend.build import build
from attn_engine.frontend.definition import Definition
from attn_engine.passes.attn_analyze_mask import AttnAnalyzeMaskPass
from attn_engine.passes.attn_narrow_integers import AttnNarrowIntegersPass
from attn_engine.passes.mask_intervals import Interval, IntervalWriter, Truth
from attn_engine.passes.mask_kinds import KindsWriter
from attn_engine.universe import make_context
from tests.support.integer_code import run

CONTEXT = make_context()
S = 48
EXTREME = [0, 3, -5, 2**31, 2**62, 2**63 - 1, -(2**63)]


def tensors(seed=0):
    """Captures that random masks read; values of `perm`, `first` and `doc` are places in one another."""
    g = torch.Generator().manual_seed(seed)
    doc = torch.randint(0, 4, (S,), generator=g).sort().values
    return {
        "doc": doc,
        "other": torch.randint(-2, 3, (S,), generator=g),
        "perm": torch.randperm(S, generator=g),
        "first": torch.searchsorted(doc, torch.arange(4)),
        "lab": torch.randint(0, 3, (2, S), generator=g),
        "wild": torch.tensor(EXTREME)[torch.randint(0, len(EXTREME), (S,), generator=g)],
        "lens": torch.tensor([30, 7]),
        "flag": torch.rand(S, generator=g) < 0.7,
        "tiles": torch.rand(3, 3, generator=g) < 0.5,
        "steps": torch.randint(0, 9, (3, 3), generator=g),
    }


class Checked:
    """A mask as Python text, its truth on all positions, and its analysed attention."""

    def __init__(self, text, captures):
        def mask_mod(b, h, q, kv):
            return eval(text, {"torch": torch}, {**captures, "b": b, "h": h, "q": q, "kv": kv})

        q, kv = torch.arange(S)[:, None], torch.arange(S)[None]
        self.truth = [mask_mod(torch.tensor(b), torch.tensor(0), q, kv).expand(S, S).numpy() for b in (0, 1)]
        traced = build(Definition(None, mask_mod, None), dtype=torch.float32, head_dim=8, head_dim_v=8)
        AttnAnalyzeMaskPass().apply(CONTEXT, traced.module)
        traced.module.verify()
        AttnNarrowIntegersPass().apply(CONTEXT, traced.module)
        traced.module.verify()
        self.op = next(o for o in traced.module.walk() if isinstance(o, attn.AttentionOp))
        self.captures = [np.asarray(c) for c in traced.captures]

    def _ends(self, region, b, size):
        """Per block, smallest and largest value of each term."""
        at = np.arange(S)
        found = run(region.block, [np.int64(b), np.int64(0), at, *self.captures])
        blocks = [np.broadcast_to(f, (S,)).reshape(-1, size) for f in found]
        return [end for f in blocks for end in (f.min(1), f.max(1))]

    def kinds(self, b, m, n):
        """Which pairs of blocks may hold a visible element, and which hold no other."""
        lo_q, lo_k = np.arange(0, S, m)[:, None], np.arange(0, S, n)[None]
        q_ends = [e[:, None] for e in self._ends(self.op.query_terms, b, m)]
        k_ends = [e[None] for e in self._ends(self.op.key_terms, b, n)]
        index = [lo_q, lo_q + m, lo_k, lo_k + n, np.int64(b), np.int64(0)]
        some, every = run(self.op.kinds.block, [*index, *q_ends, *k_ends, *self.captures])
        shape = (S // m, S // n)
        return np.broadcast_to(some, shape).astype(bool), np.broadcast_to(every, shape).astype(bool)

    def check(self, exact=False, sizes=((8, 4), (4, 16), (16, 16), (24, 24))):
        """Empty means all false, full all true; with `exact` the other way round too."""
        for b in (0, 1):
            for m, n in sizes:
                some, every = self.kinds(b, m, n)
                pairs = self.truth[b].reshape(S // m, m, S // n, n)
                any_, all_ = pairs.any((1, 3)), pairs.all((1, 3))
                assert not (any_ & ~some).any(), "a block with a visible key is called empty"
                assert not (every & ~all_).any(), "a block with a masked key is called full"
                if exact:
                    assert (some == any_).all() and (every == all_).all(), "imprecise"


# --- random masks ------------------------------------------------------------------------------


LEAVES = (
    *("q", "kv", "doc[q]", "doc[kv]", "other[q]", "other[kv]", "lab[b, q]", "lab[b, kv]", "doc[perm[q]]"),
    *("wild[q]", "wild[kv]", "(q - first[doc[q]])", "(kv - first[doc[kv]])", "lens[b]", "3", "(-2)"),
    *("steps[q // 16, kv // 16]", "first[other[kv]]"),
)


@st.composite
def masks(draw):
    def integer(depth):
        if depth == 0:
            return draw(st.sampled_from(LEAVES))
        a, b = integer(depth - 1), integer(draw(st.integers(0, depth - 1)))
        match draw(st.sampled_from(["+", "-", "*", "//", "max", "min", "abs", "where"])):
            case "//":
                return f"({a} // {draw(st.integers(1, 5))})"
            case ("max" | "min") as name:
                return f"torch.{name}imum(torch.as_tensor({a}) if isinstance({a}, int) else {a}, q * 0 + {b})"
            case "abs":
                return f"abs({a})"
            case "where":
                return f"torch.where({condition(depth - 1)}, q * 0 + {a}, q * 0 + {b})"
            case sign:
                return f"({a} {sign} {b})"

    def condition(depth):
        if depth <= 0:
            kind = draw(st.integers(0, 9))
            if kind == 0:
                return draw(st.sampled_from(["flag[q]", "flag[kv]", "tiles[q // 16, kv // 16]"]))
            sign = draw(st.sampled_from(["==", "!=", "<", "<=", ">", ">="]))
            return f"(q * 0 + {integer(draw(st.integers(0, 2)))} {sign} {integer(draw(st.integers(0, 1)))})"
        match draw(st.sampled_from(["&", "|", "^", "~", "atom"])):
            case "~":
                return f"(~{condition(depth - 1)})"
            case "atom":
                return condition(0)
            case sign:
                return f"({condition(depth - 1)} {sign} {condition(depth - 1)})"

    return f"(doc[q] == doc[kv]) {draw(st.sampled_from('&|^'))} {condition(draw(st.integers(0, 3)))}"


@settings(max_examples=60, deadline=None)
@given(masks(), st.integers(0, 5))
def test_random_masks_are_sound(text, seed):
    checked = Checked(text, tensors(seed))
    if checked.op.kinds is not None:
        checked.check()


# --- masks that must be exact ------------------------------------------------------------------

EXACT = {
    "documents": "doc[q] == doc[kv]",
    "causal documents": "(q >= kv) & (doc[q] == doc[kv])",
    "places within documents": "(q - first[doc[q]] >= 0) & (doc[kv] != doc[q])",
    "documents of a batch": "lab.sort(1).values[b, q] == lab.sort(1).values[b, kv]",
    "padding": "(other[kv] >= 0) & (q >= kv)",
    "negated": "~((doc[q] != doc[kv]) | (q < kv))",
    "a flag": "flag[kv] & (q * 0 == 0)",
    "large values": "wild[q] * 0 + wild[kv] < 5",
    "tiles": "tiles[q // 16, kv // 16] & (q >= 0)",
    "steps of tiles": "steps[q // 16, kv // 16] > 3",
    "lengths": "(other[q] >= 0) & (kv < lens[b])",
    "thirds": "((q + 1) // 3 - kv // 3 >= 0) & (doc[q] == 1)",
    "difference of ids": "doc[q] - doc[kv] >= 1",
}


@pytest.mark.parametrize("name", EXACT)
def test_exact(name):
    captures = tensors()
    text = EXACT[name]
    if "sort" in text:
        captures["lab"] = captures["lab"].sort(1).values
        text = text.replace("lab.sort(1).values", "lab")
    size = ((16, 16),) if "tiles" in text or "steps" in text else ((8, 4), (4, 16), (16, 16))
    if name in ("thirds", "places within documents", "difference of ids"):
        return Checked(text, captures).check(sizes=size)
    return Checked(text, captures).check(exact=True, sizes=size)


def test_closed_forms_need_no_kinds():
    assert Checked("(q >= kv) & (kv < lens[b])", tensors()).op.kinds is None
    assert Checked("other[q * 0 + kv * 0] + q > kv", tensors()).op.kinds is None


# --- mutants ------------------------------------------------------------------------------------


def _strict(self, predicate, a, b):
    return ORIGINAL(self, {"sle": "slt", "slt": "sle"}.get(predicate, predicate), a, b)


def _keys_as_queries(self):
    POSITIONS_OF(self)
    q, kv = self.mask.args[2], self.mask.args[3]
    self.integers[q], self.integers[kv] = self.integers[kv], self.integers[q]


def _one_too_far(self):
    for n, arg in enumerate(self.mask.args[2:4]):
        self.integers[arg] = Interval(self.block.args[2 * n + 1], self.block.args[2 * n + 1], 31)


def _truncated(self, a, by):
    divisor = self.number(by)
    return Interval(*(self.add(arith.DivSIOp(end, divisor)) for end in (a.lo, a.hi)))


ORIGINAL, POSITIONS_OF = IntervalWriter.compared, KindsWriter._positions
MUTANTS = {
    "comparison off by one": (IntervalWriter, "compared", _strict),
    "positions swapped": (KindsWriter, "_positions", _keys_as_queries),
    "position one too far": (KindsWriter, "_positions", _one_too_far),
    "truncating division": (IntervalWriter, "divided", _truncated),
    "difference of the wrong ends": (
        IntervalWriter,
        "minus",
        lambda self, a, b: Interval(self.add(arith.SubiOp(a.lo, b.lo)), self.add(arith.SubiOp(a.hi, b.hi)), 32),
    ),
    "not that keeps its sides": (
        IntervalWriter,
        "negated",
        lambda self, x: Truth(self.opposite(x.some), self.opposite(x.every)),
    ),
    "or taken for and": (IntervalWriter, "conjunction", IntervalWriter.disjunction),
    "sums that wrap": (IntervalWriter, "checked", lambda self, operands, found: found),
    "tables read at one end": (
        KindsWriter,
        "_read",
        lambda self, op: (
            self.write.add(
                attn.LoadOp(self._uniform(op.source), [self.integer(i).lo for i in op.indices], op.result.type)
            ),
            self.write.flag(True),
        ),
    ),
}
KILLERS = [
    "(q >= kv) & (doc[q] == doc[kv])",
    "~((doc[q] != doc[kv]) | (q < kv))",
    "(doc[q] - doc[kv] > 0) | (q == kv)",
    "((doc[q] - doc[kv] - 3) // 4 >= 0) & (kv < q)",
    "wild[q] + kv > 5",
    "tiles[q // 16, kv // 16] & (doc[q] <= doc[kv])",
]


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_die(name):
    from tests.support import integer_code

    owner, attribute, mutant = MUTANTS[name]
    truncate = {"arith.divsi": lambda a, b: np.trunc(a / b).astype(np.int64)}
    with mock.patch.object(owner, attribute, mutant), mock.patch.dict(integer_code.COMPUTE, truncate):
        killed = 0
        for text in KILLERS:
            try:
                Checked(text, tensors()).check(exact="//" not in text and "-" not in text and "wild" not in text)
            except AssertionError:
                killed += 1
    assert killed, "no mask tells the mutant from the analysis"


def test_killers_pass_without_a_mutant():
    for text in KILLERS:
        Checked(text, tensors()).check(exact="//" not in text and "-" not in text and "wild" not in text)
