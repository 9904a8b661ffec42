"""Keys of definitions: equal only where the traces are, and the tensors found anew without tracing."""

from __future__ import annotations

import functools
import math
import random
import types

import pytest
import torch

from attn_engine import library
from attn_engine.frontend import CustomIO, Definition, OnlineFunc, SymbolScalar, Var, definition_key, rebind
from tests.support.frontend_tracing import trace

WINDOW = 8
TABLE = torch.rand(4)
SETTINGS = types.SimpleNamespace(cap=2.0)
MODULE = types.ModuleType("user_module")
MODULE.WIDTH = 3
MODULE.OTHER = object()


class Config:
    width = 5


class Holder:
    """A user's object: a method that reads itself through a helper."""

    def __init__(self, slopes, power):
        self.slopes, self.power, self.unread = slopes, power, object()

    def _weight(self, h):
        return self.slopes[h] ** self.power

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score * self._weight(h)


class Learned(torch.nn.Module):
    def __init__(self, slopes):
        super().__init__()
        self.slopes = torch.nn.Parameter(slopes)

    def forward(self, score, b, h, q_idx, kv_idx):
        return score * self.slopes[h]


class Relearned(Learned):
    def forward(self, score, b, h, q_idx, kv_idx):
        return score / self.slopes[h]


def key(score_mod=None, **others):
    return definition_key(Definition(score_mod=score_mod, **others))


def scaled(factor):
    return lambda score, b, h, q_idx, kv_idx: score * factor


def helper(score, h):
    return score * TABLE[h]


def twice(inner):
    def score_mod(score, b, h, q_idx, kv_idx):
        return inner(inner(score, h), h)

    return score_mod


SAME = {
    "alibi": lambda: key(library.alibi(torch.rand(4))),
    "causal": lambda: key(mask_mod=library.causal),
    "window": lambda: key(mask_mod=library.and_masks(library.causal, library.sliding_window(4))),
    "document": lambda: key(mask_mod=library.document(torch.arange(8))),
    "float": lambda: key(scaled(0.5)),
    "nan": lambda: key(scaled(math.nan)),
    "nested": lambda: key(twice(helper)),
    "method": lambda: key(Holder(torch.rand(4), 2).score_mod),
    "nn.Module": lambda: key(Learned(torch.rand(4))),
    "partial": lambda: key(functools.partial(library.soft_cap(2.0))),
    "activation": lambda: key(scaled(torch.nn.GELU())) and key(lambda s, b, h, q, kv: torch.nn.functional.gelu(s)),
    "row": lambda: key(row=library.retention),
    "custom": lambda: key(custom_io=CustomIO({"bias": ("heads",)})),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_definition_has_the_same_key(name):
    first, second = SAME[name](), SAME[name]()
    assert first is not None
    assert first == second
    assert hash(first) == hash(second)


def test_differences_change_the_key():
    keys = [
        key(),
        key(bare_score=True),
        key(scaled(1)),
        key(scaled(1.0)),
        key(scaled(True)),
        key(scaled(0.0)),
        key(scaled(-0.0)),
        key(scaled(torch.rand(()))),
        key(scaled(torch.rand((), dtype=torch.float64))),
        key(scaled(torch.rand(1))),
        key(library.soft_cap(2.0)),
        key(library.soft_cap(3.0)),
        key(mask_mod=library.sliding_window(3)),
        key(mask_mod=library.sliding_window(4)),
        key(mask_mod=library.causal),
        key(mask_mod=library.and_masks(library.causal)),
        key(mask_mod=library.or_masks(library.causal)),
        key(Holder(torch.rand(4), 2).score_mod),
        key(Holder(torch.rand(4), 3).score_mod),
        key(library.bias(torch.rand(2, 4, 8, 8))),
        key(library.bias(torch.rand(1, 4, 8, 8))),
        key(custom_io=CustomIO({"bias": ("heads",)})),
        key(custom_io=CustomIO({"bias": ("batch",)})),
        key(lambda s, b, h, q, kv, w=1: s * w),
        key(lambda s, b, h, q, kv, w=2: s * w),
        key(row=library.softmax),
        key(row=library.softmax1),
        key(scaled(torch.nn.GELU())),
        key(scaled(torch.nn.GELU(approximate="tanh"))),
        key(scaled(torch.nn.Softplus(beta=2))),
        key(Learned(torch.rand(4))),
        key(Learned(torch.rand(4, 4))),
        key(Relearned(torch.rand(4))),
        key(functools.partial(lambda f, s, b, h, q, kv: s * f, 2.0)),
        key(functools.partial(lambda f, s, b, h, q, kv: s * f, 3.0)),
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_two_tensors_differ_from_one_taken_twice():
    def both(first, second):
        return lambda s, b, h, q, kv: s + first[h] * second[q]

    a, b = torch.rand(4), torch.rand(4)
    assert key(both(a, a)) != key(both(a, b))
    assert key(both(a, b)) == key(both(b, a))


@pytest.mark.parametrize(
    ("function", "owner", "name", "new"),
    [
        (lambda s, b, h, q, kv: s * WINDOW, globals(), "WINDOW", 9),
        (lambda s, b, h, q, kv: helper(s, h), globals(), "TABLE", torch.rand(4, 4)),
        (lambda s, b, h, q, kv: s * SETTINGS.cap, SETTINGS, "cap", 3.0),
        (lambda s, b, h, q, kv: s * MODULE.WIDTH, MODULE, "WIDTH", 4),
        (lambda s, b, h, q, kv: s * Config.width, Config, "width", 6),
        (lambda s, b, h, q, kv: (lambda x: x * WINDOW)(s), globals(), "WINDOW", 10),
    ],
)
def test_changed_globals_and_attributes_change_the_key(monkeypatch, function, owner, name, new):
    before = key(function)
    assert before is not None
    if isinstance(owner, dict):
        monkeypatch.setitem(owner, name, new)
    else:
        monkeypatch.setattr(owner, name, new)
    assert key(function) not in (None, before)


def test_what_an_object_does_not_show_is_not_decided():
    class Computed:
        @property
        def slope(self):
            return random.random()

    computed, values = Computed(), {1, 2}
    assert key(lambda s, b, h, q, kv: s * computed.slope) is None
    assert key(lambda s, b, h, q, kv: s * random.random()) is None
    assert key(lambda s, b, h, q, kv: s * getattr(SETTINGS, "cap")) is None  # noqa: B009
    assert key(lambda s, b, h, q, kv: s * len(values)) is None
    hooked = Learned(torch.rand(4))
    hooked.register_forward_hook(lambda *_: None)
    assert key(hooked) is None


def test_attributes_read_by_other_functions_count():
    def read(config, score):
        return score * config.cap

    settings = types.SimpleNamespace(cap=2.0)
    function = lambda s, b, h, q, kv: read(settings, s)  # noqa: E731
    before = key(function)
    settings.cap = 5.0
    assert key(function) not in (None, before)


class Shifted(OnlineFunc):
    def __init__(self, start):
        super().__init__({"m": SymbolScalar("m", Var(start))}, {})
        self.power = 2

    def online_fwd(self, scores, rows, b, h, q_idx):
        return scores**self.power, {"m": rows["m"].max(scores.get_reduce("max"))}, 1.0

    def online_fwd_epilogue(self, o, rows, b, h, q_idx):
        return o * rows["m"], {}


def test_online_functions_have_keys():
    assert key(row=Shifted("-inf")) == key(row=Shifted("-inf"))
    assert key(row=Shifted("-inf")) != key(row=Shifted("0.0"))
    changed = Shifted("-inf")
    changed.power = 3
    assert key(row=changed) not in (None, key(row=Shifted("-inf")))


def constant(value):
    return lambda b, h, q_idx, kv_idx: value


def with_default(table):
    return lambda s, b, h, q, kv, t=table: s * t[h] + t[0]


def _check_rebind(make, count: int) -> None:
    first, second = make(), make()
    assert definition_key(first) == definition_key(second) != None  # noqa: E711
    traced, other = trace(first), trace(second)
    found = rebind(second, traced)
    assert found is not None
    assert len(found) == count
    assert all(a is b for a, b in zip(found, other.captures, strict=True))
    assert str(traced.module) == str(other.module)


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: Definition(score_mod=library.alibi(torch.rand(4))), 1),
        (
            lambda: Definition(
                score_mod=Holder(torch.rand(4), 2).score_mod, mask_mod=library.document(torch.arange(4))
            ),
            2,
        ),
        (lambda: Definition(score_mod=Learned(torch.rand(4))), 1),
        (lambda: Definition(score_mod=twice(helper)), 1),
        (lambda: Definition(score_mod=with_default(torch.rand(4))), 1),
        (lambda: Definition(score_mod=scaled(torch.rand(()))), 1),
        (lambda: Definition(score_mod=scaled(torch.rand(()).bfloat16()), row=Shifted("-inf")), 1),
        (lambda: Definition(mask_mod=constant(torch.tensor(True))), 1),
        (lambda: Definition(), 0),
    ],
)
def test_tensors_are_found_again(make, count):
    _check_rebind(make, count)


def test_a_replaced_tensor_is_found():
    holder = Holder(torch.rand(4), 2)
    definition = Definition(score_mod=holder.score_mod)
    traced = trace(definition)
    holder.slopes = torch.rand(4)
    assert rebind(definition, traced)[0] is holder.slopes


def test_converted_and_custom_tensors_are_bound_anew():
    custom_io = CustomIO({"bias": ("heads",)})
    counts = torch.tensor([1, 2], dtype=torch.uint8)
    definition = Definition(
        score_mod=lambda s, inputs, b, h, q, kv: s + inputs["bias"] * counts[h], custom_io=custom_io
    )
    traced = trace(definition, custom={"bias": torch.rand(2)})
    other = torch.rand(2)
    converted, bias = rebind(definition, traced, {"bias": other})
    assert bias is other
    assert converted.dtype == torch.int16
    assert rebind(definition, traced) is None


def test_what_depends_on_values_is_traced_again():
    slopes = torch.rand(4)
    by_value = Definition(score_mod=lambda s, b, h, q, kv: s * float(slopes[0]))
    by_size = Definition(score_mod=lambda s, b, h, q, kv: s * slopes.shape[0])
    by_one = torch.rand(1)
    by_count = Definition(score_mod=lambda s, b, h, q, kv: s * by_one)
    assert rebind(by_count, trace(by_count)) is None
    by_dtype = Definition(score_mod=lambda s, b, h, q, kv: s * slopes[h] if slopes.ndim == 1 else s)
    for definition in (by_value, by_size):
        assert rebind(definition, trace(definition)) is None
    assert rebind(by_dtype, trace(by_dtype)) is not None
