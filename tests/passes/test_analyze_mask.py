"""attn-analyze-mask against brute force: what is skipped is masked, what is full is visible, and known masks are exact."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xdsl.parser import Parser

from attn_engine.dialects import attn
from attn_engine.passes.attn_analyze_mask import AttnAnalyzeMaskPass
from attn_engine.universe import make_context
from tests.support.integer_code import run

CONTEXT = make_context()
BATCH, HEADS, MOST = 2, 2, 24
# Values that captures may have: negative, beyond every length, and what users write for 'no limit'.
LENGTHS = [0, 1, 7, 13, 40, -3, 2**31, 2**63 - 1, -(2**63)]


def analysed(code):
    """The attention after the pass, for a mask of (%b, %h, %q, %kv, %lens, %table) that yields %m."""
    text = f"""
    func.func @f(%x_: tensor<?x?x?x8xf32>, %s_: f32, %lengths_: tensor<?xi64>, %t_: tensor<?xi64>) -> tensor<?x?x?x8xf32> {{
      %o_ = attn.attention %x_, %x_, %x_ scale %s_ captures %lengths_, %t_ : tensor<?x?x?x8xf32>, tensor<?x?x?x8xf32>, tensor<?x?x?x8xf32> captures tensor<?xi64>, tensor<?xi64> -> tensor<?x?x?x8xf32>
      mask {{
      ^bb0(%b: i64, %h: i64, %q: i64, %kv: i64, %lens: tensor<?xi64>, %table: tensor<?xi64>):
        {code}
        attn.yield %m : i1
      }} row {{
      ^bb0(%e_: f32, %b: i64, %h: i64, %q: i64, %kv: i64, %lens: tensor<?xi64>, %table: tensor<?xi64>):
        attn.yield %e_ : f32
      }}
      func.return %o_ : tensor<?x?x?x8xf32>
    }}"""
    module = Parser(CONTEXT, text).parse_module()
    module.verify()
    before = next(op for op in module.walk() if isinstance(op, attn.AttentionOp)).mask.block
    keep = before.parent.clone().block
    AttnAnalyzeMaskPass().apply(CONTEXT, module)
    module.verify()
    return keep, next(op for op in module.walk() if isinstance(op, attn.AttentionOp))


class Checked:
    """Runs mask and regions for one setting of lengths and captures."""

    def __init__(self, code, sq, skv, lens, table):
        self.mask, self.op = analysed(code)
        self.sq, self.skv = sq, skv
        self.lens, self.table = lens, np.array(table, np.int64)

    def captures(self):
        return [np.array(self.lens, np.int64), self.table]

    def visible(self, b, h):
        q, kv = np.arange(self.sq)[:, None], np.arange(self.skv)[None, :]
        (m,) = run(self.mask, [np.int64(b), np.int64(h), q, kv, *self.captures()])
        return np.broadcast_to(m, (self.sq, self.skv)).astype(bool)

    def ranges(self, name, lo, hi, b, h):
        """Per window of the arrays lo and hi: its ranges, as rows of four numbers."""
        lo, hi = np.atleast_1d(lo), np.atleast_1d(hi)
        sizes = [np.int64(x) for x in (b, h, self.sq, self.skv)]
        values = run(getattr(self.op, name).block, [lo, hi, *sizes, *self.captures()])
        return np.stack([np.broadcast_to(v, lo.shape) for v in values], -1).reshape(len(lo), -1, 4)

    def check(self, name, size, b, h):
        """Sound and well-formed for every window of this size; yields what is visible and what is claimed."""
        grid = self.visible(b, h) if name == "blocks" else self.visible(b, h).T
        lo = np.arange(0, len(grid), size)
        hi = np.minimum(lo + size, len(grid))
        for first, last, ranges in zip(lo, hi, self.ranges(name, lo, hi, b, h), strict=True):
            window = grid[first:last]
            some, every = np.zeros(grid.shape[1], bool), np.zeros(grid.shape[1], bool)
            end = 0
            for vlo, flo, fhi, vhi in ranges:
                assert end <= vlo <= flo <= fhi <= vhi <= grid.shape[1], "ranges are sorted, disjoint and nested"
                some[vlo:vhi], every[flo:fhi], end = True, True, vhi
            assert not (window.any(0) & ~some).any(), "a visible key is skipped"
            assert not (every & ~window.all(0)).any(), "a masked key is called full"
            yield f"{name} [{first}, {last}) of head {b}", window, some, every


SIDES = [(name, b) for name in ("blocks", "blocks_t") for b in range(BATCH)]


# --- random masks ------------------------------------------------------------------------------


class Writer:
    """SSA text of a random expression over affine atoms and some that the analysis does not understand."""

    def __init__(self, draw):
        self.draw = draw
        self.lines = []

    def op(self, text):
        name = f"%v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name

    def number(self, value):
        return self.op(f"arith.constant {value} : i64")

    def small(self):
        return self.number(self.draw(st.integers(-6, MOST)))

    def uniform(self):
        match self.draw(st.integers(0, 4)):
            case 0:
                return self.op("attn.load %lens[%b] : tensor<?xi64> -> i64")
            case 1:
                return self.draw(st.sampled_from(["%b", "%h"]))
            case _:
                return self.small()

    def integer(self, depth):
        kinds = (
            ["q", "kv", "uniform"]
            if depth == 0
            else ["q", "kv", "q-kv", "+", "-", "*", "//", "max", "min", "abs", "if"]
        )
        match self.draw(st.sampled_from(kinds)):
            case "uniform":
                return self.uniform()
            case "q-kv":
                return self.op("arith.subi %q, %kv : i64")
            case ("+" | "-" | "max" | "min") as sign:
                name = {"+": "addi", "-": "subi", "max": "maxsi", "min": "minsi"}[sign]
                return self.op(f"arith.{name} {self.integer(depth - 1)}, {self.integer(depth - 1)} : i64")
            case "*":
                factor = self.number(self.draw(st.integers(-3, 3)))
                return self.op(f"arith.muli {self.integer(depth - 1)}, {factor} : i64")
            case "//":
                divisor = self.number(self.draw(st.sampled_from([1, 2, 3, 5, 8])))
                return self.op(f"arith.floordivsi {self.integer(depth - 1)}, {divisor} : i64")
            case "abs":
                return self.op(f"math.absi {self.integer(depth - 1)} : i64")
            case "if":
                return self.op(
                    f"arith.select {self.condition()}, {self.integer(depth - 1)}, {self.integer(depth - 1)} : i64"
                )
            case name:
                return f"%{name}"

    def condition(self):
        return self.unknown() if self.draw(st.integers(0, 3)) == 0 else self.atom(0)

    def unknown(self):
        if self.draw(st.booleans()):
            position = self.draw(st.sampled_from(["%q", "%kv"]))
            looked_up = self.op(f"attn.load %table[{position}] : tensor<?xi64> -> i64")
            return self.op(f"arith.cmpi slt, {looked_up}, {self.small()} : i64")
        product = self.op("arith.muli %q, %kv : i64")
        return self.op(f"arith.cmpi sgt, {product}, {self.small()} : i64")

    def atom(self, depth):
        if depth and self.draw(st.integers(0, 9)) == 0:
            return self.unknown()
        predicate = self.draw(st.sampled_from(["slt", "sle", "sgt", "sge", "eq", "ne"]))
        return self.op(
            f"arith.cmpi {predicate}, {self.integer(depth)}, {self.integer(self.draw(st.integers(0, depth)))} : i64"
        )

    def formula(self, depth):
        if depth == 0:
            return self.atom(self.draw(st.integers(0, 2)))
        match self.draw(st.sampled_from(["and", "or", "or", "not", "xor", "select", "atom"])):
            case "and":
                return self.op(f"arith.andi {self.formula(depth - 1)}, {self.formula(depth - 1)} : i1")
            case "or":
                return self.op(f"arith.ori {self.formula(depth - 1)}, {self.formula(depth - 1)} : i1")
            case "xor":
                return self.op(f"arith.xori {self.formula(depth - 1)}, {self.formula(depth - 1)} : i1")
            case "select":
                return self.op(
                    f"arith.select {self.condition()}, {self.formula(depth - 1)}, {self.formula(depth - 1)} : i1"
                )
            case "not":
                true = self.op("arith.constant true")
                return self.op(f"arith.xori {self.formula(depth - 1)}, {true} : i1")
            case _:
                return self.atom(2)


@st.composite
def masks(draw):
    """MLIR text of a random mask."""
    w = Writer(draw)
    result = w.formula(draw(st.integers(0, 3)))
    true = w.op("arith.constant true")
    return "\n".join([*w.lines, f"%m = arith.andi {result}, {true} : i1"])


SIZES = st.integers(1, MOST)


@settings(max_examples=100, deadline=None)
@given(
    masks(),
    SIZES,
    SIZES,
    st.sampled_from([1, 3, 4, 8, MOST]),
    st.lists(st.sampled_from(LENGTHS[:-2]), min_size=2, max_size=2),
    st.lists(st.integers(0, 9), min_size=MOST, max_size=MOST),
)
def test_random_masks_are_sound(code, sq, skv, size, lens, table):
    checked = Checked(code, sq, skv, lens, table)
    if checked.op.mask is None:
        assert checked.visible(0, 0).all()
        return
    for name, b in SIDES:
        assert list(checked.check(name, size, b, b % HEADS))


# --- masks that must be exact -------------------------------------------------------------------

DIFFERENCE = "%d = arith.subi %q, %kv : i64\n"
CAUSAL = "%causal = arith.cmpi sge, %q, %kv : i64\n"
EXACT = {
    "causal": CAUSAL + "%m = arith.ori %causal, %causal : i1",
    "bottom-right causal": "%off = attn.load %lens[%b] : tensor<?xi64> -> i64\n%e = arith.addi %q, %off : i64\n"
    "%m = arith.cmpi sle, %kv, %e : i64",
    "anticausal": "%m = arith.cmpi slt, %q, %kv : i64",
    "sliding window": CAUSAL + DIFFERENCE + "%w = arith.constant 5 : i64\n%near = arith.cmpi slt, %d, %w : i64\n"
    "%m = arith.andi %causal, %near : i1",
    "two-sided window": DIFFERENCE + "%w = arith.constant 4 : i64\n%a = math.absi %d : i64\n"
    "%m = arith.cmpi sle, %a, %w : i64",
    "two-sided window by select": DIFFERENCE + "%w = arith.constant 4 : i64\n%z = arith.constant 0 : i64\n"
    "%n = arith.subi %kv, %q : i64\n%neg = arith.cmpi slt, %d, %z : i64\n%a = arith.select %neg, %n, %d : i64\n"
    "%m = arith.cmpi sle, %a, %w : i64",
    "lengths": "%l = attn.load %lens[%b] : tensor<?xi64> -> i64\n%m = arith.cmpi slt, %kv, %l : i64",
    "causal with lengths": CAUSAL + "%l = attn.load %lens[%b] : tensor<?xi64> -> i64\n"
    "%in = arith.cmpi slt, %kv, %l : i64\n%m = arith.andi %in, %causal : i1",
    "prefix": CAUSAL + "%l = attn.load %lens[%b] : tensor<?xi64> -> i64\n%in = arith.cmpi slt, %kv, %l : i64\n"
    "%m = arith.ori %in, %causal : i1",
    "sinks and window": CAUSAL + DIFFERENCE + "%w = arith.constant 5 : i64\n%near = arith.cmpi slt, %d, %w : i64\n"
    "%two = arith.constant 2 : i64\n%sink = arith.cmpi slt, %kv, %two : i64\n%some = arith.ori %near, %sink : i1\n"
    "%m = arith.andi %causal, %some : i1",
    "window and sinks of a length": DIFFERENCE + CAUSAL + "%w = arith.constant 5 : i64\n"
    "%near = arith.cmpi slt, %d, %w : i64\n%l = attn.load %lens[%b] : tensor<?xi64> -> i64\n"
    "%sink = arith.cmpi slt, %kv, %l : i64\n%some = arith.ori %near, %sink : i1\n%m = arith.andi %causal, %some : i1",
    "chunks": "%n = arith.constant 5 : i64\n%a = arith.floordivsi %q, %n : i64\n%c = arith.floordivsi %kv, %n : i64\n"
    "%m = arith.cmpi eq, %a, %c : i64",
    "not a window": CAUSAL + DIFFERENCE + "%w = arith.constant 5 : i64\n%near = arith.cmpi slt, %d, %w : i64\n"
    "%in = arith.andi %causal, %near : i1\n%true = arith.constant true\n%m = arith.xori %in, %true : i1",
    "strided keys": "%two = arith.constant 2 : i64\n%k2 = arith.muli %kv, %two : i64\n%m = arith.cmpi sle, %k2, %q : i64",
    "queries only": "%l = attn.load %lens[%b] : tensor<?xi64> -> i64\n%m = arith.cmpi slt, %q, %l : i64",
    "one head is causal": CAUSAL + "%z = arith.constant 0 : i64\n%first = arith.cmpi ne, %h, %z : i64\n"
    "%m = arith.ori %first, %causal : i1",
    "islands": "%c3 = arith.constant 3 : i64\n%c9 = arith.constant 9 : i64\n%l = attn.load %lens[%b] : tensor<?xi64> -> i64\n"
    "%c12 = arith.constant 12 : i64\n%a = arith.cmpi slt, %kv, %c3 : i64\n%g = arith.cmpi sge, %kv, %c9 : i64\n"
    "%s = arith.cmpi slt, %kv, %c12 : i64\n%mid = arith.andi %g, %s : i1\n%e = arith.cmpi sgt, %kv, %l : i64\n"
    "%x = arith.ori %a, %mid : i1\n%m = arith.ori %x, %e : i1",
}


# A window of keys may lie across several islands: every query sees all of it by a different reason for each key.
MIXED = ("islands",)
# Position plus length leaves 64 bits in the mask itself.
WRAPPING = ("bottom-right causal",)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize(("sq", "skv", "size"), [(16, 16, 4), (13, 22, 4), (22, 13, 8), (5, 24, 3), (7, 7, 1)])
def test_affine_masks_are_exact(name, sq, skv, size):
    checked = Checked(EXACT[name], sq, skv, [0, 0], [0])
    for length in range(0, len(LENGTHS) - 1, 2):
        checked.lens = LENGTHS[length : length + 2]
        for side, b in SIDES:
            if (name in MIXED and side == "blocks_t") or (name in WRAPPING and abs(checked.lens[b]) > 2**40):
                continue
            for where, window, some, every in checked.check(side, size, b, b % HEADS):
                np.testing.assert_array_equal(some, window.any(0), err_msg=f"{where}: visible")
                np.testing.assert_array_equal(every, window.all(0), err_msg=f"{where}: full")


def test_a_mask_that_is_always_true_goes():
    _, op = analysed("%m = arith.constant true")
    assert op.mask is None and op.blocks is None


def test_a_mask_that_is_never_true_has_an_empty_range():
    checked = Checked("%m = arith.constant false", 8, 8, [0, 0], [0])
    assert checked.ranges("blocks", 0, 4, 0, 0).tolist() == [[[0, 0, 0, 0]]]


UNKNOWN = (
    "%d = attn.load %table[%kv] : tensor<?xi64> -> i64\n%z = arith.constant 0 : i64\n%u = arith.cmpi eq, %d, %z : i64\n"
)


def test_an_unknown_part_leaves_the_hull_under_and():
    checked = Checked(CAUSAL + UNKNOWN + "%m = arith.andi %u, %causal : i1", 8, 8, [0, 0], [0] * 8)
    assert checked.ranges("blocks", 2, 4, 0, 0).tolist() == [[[0, 0, 0, 4]]]


def test_an_unknown_part_leaves_the_full_range_under_or():
    checked = Checked(CAUSAL + UNKNOWN + "%m = arith.ori %u, %causal : i1", 8, 8, [0, 0], [1] * 8)
    assert checked.ranges("blocks", 2, 4, 0, 0).tolist() == [[[0, 0, 3, 8]]]


def test_a_choice_that_is_not_understood_has_no_bounds():
    """The unknown condition looks at a key's table entry inside a floor division."""
    code = (
        UNKNOWN
        + "%two = arith.constant 2 : i64\n%nine = arith.constant 9 : i64\n%x = arith.select %u, %nine, %z : i64\n"
        "%half = arith.floordivsi %x, %two : i64\n%m = arith.cmpi sge, %half, %kv : i64"
    )
    checked = Checked(code, 12, 12, [0, 0], [i % 3 for i in range(12)])
    for side, b in SIDES:
        assert list(checked.check(side, 4, b, 0))


def test_more_islands_than_ranges_are_joined_without_new_full_keys():
    lines, parts = [], []
    for i in range(6):
        lines += [f"%l{i} = arith.constant {4 * i} : i64", f"%h{i} = arith.constant {4 * i + 2} : i64"]
        lines += [f"%a{i} = arith.cmpi sge, %kv, %l{i} : i64", f"%b{i} = arith.cmpi slt, %kv, %h{i} : i64"]
        lines += [f"%i{i} = arith.andi %a{i}, %b{i} : i1"]
        parts.append(f"%i{i}")
    total = parts[0]
    for i, part in enumerate(parts[1:]):
        lines.append(f"%o{i} = arith.ori {total}, {part} : i1")
        total = f"%o{i}"
    checked = Checked("\n".join([*lines, f"%m = arith.ori {total}, {total} : i1"]), 8, 24, [0, 0], [0])
    (found,) = checked.ranges("blocks", 0, 8, 0, 0)
    assert len(found) == 4
    for side, b in SIDES:
        assert list(checked.check(side, 4, b, 0))
    # Every range claims the two full keys of one island.
    assert [fhi - flo for _, flo, fhi, _ in found] == [2, 2, 2, 2]


def test_a_bound_on_queries_is_no_bound_on_the_others():
    """Queries below the length are causal, the rest see everything: no key is full by causality alone."""
    length = "%l = attn.load %lens[%b] : tensor<?xi64> -> i64\n%late = arith.cmpi sge, %q, %l : i64\n"
    for code in (
        CAUSAL + length + "%m = arith.ori %causal, %late : i1",
        CAUSAL + length + "%m = arith.andi %causal, %late : i1",
    ):
        checked = Checked(code, 16, 16, [6, 13], [0])
        for side, b in SIDES:
            for where, window, some, every in checked.check(side, 4, b, 0):
                np.testing.assert_array_equal(some, window.any(0), err_msg=where)
                np.testing.assert_array_equal(every, window.all(0), err_msg=where)


def test_the_code_of_a_causal_mask_is_short():
    _, op = analysed(EXACT["causal"])
    assert len(list(op.blocks.block.ops)) <= 6
    assert len(list(op.blocks_t.block.ops)) <= 6
