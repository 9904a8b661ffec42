"""What a function reads in roundabout ways: a change of it changes the key, or there is no key."""

from __future__ import annotations

import functools
import operator
from collections import namedtuple

import pytest
import torch

from attn_engine.frontend import Definition, definition_key

VALUES = {"a": 1.0}


class Base:
    width = 1.0

    @staticmethod
    def times(x):
        return x * VALUES["a"]

    @classmethod
    def widened(cls, x):
        return x * cls.width

    def method(self, x):
        return x * VALUES["a"]


class Derived(Base):
    def method(self, x):
        return super().method(x)


class Meta(type):
    @property
    def width(cls):
        return VALUES["a"]


class OfMeta(metaclass=Meta):
    pass


class Numbers(list):
    pass


class Table(dict):
    def __getitem__(self, name):
        return VALUES["a"]


class Pair(tuple):
    __slots__ = ()

    def __getitem__(self, place):
        return VALUES["a"]


class Degrees(float):
    pass


def own(score, b, h, q_idx, kv_idx):
    return score * own.factor


own.factor = 1.0
marked, tensor, numbers, degrees = (lambda: None), torch.ones(2), Numbers([1.0]), Degrees(2.0)
for carrier in (marked, tensor, numbers, degrees):
    carrier.factor = 1.0
table, pair, derived = Table(x=1.0), Pair((1.0,)), Derived()


def replace_value(monkeypatch):
    monkeypatch.setitem(VALUES, "a", 2.0)


def replace_width(monkeypatch):
    monkeypatch.setattr(Base, "width", 2.0)


def replace_factor(carrier):
    return lambda monkeypatch: monkeypatch.setattr(carrier, "factor", 2.0)


READS = {
    "a function's own attribute": (own, replace_factor(own)),
    "another function's attribute": (lambda s, b, h, i, j: s * marked.factor, replace_factor(marked)),
    "a tensor's attribute": (lambda s, b, h, i, j: s * tensor.factor, replace_factor(tensor)),
    "an attribute of a list": (lambda s, b, h, i, j: s * numbers.factor, replace_factor(numbers)),
    "an attribute of a number": (lambda s, b, h, i, j: s * degrees.factor, replace_factor(degrees)),
    "an inherited attribute": (lambda s, b, h, i, j: s * Derived.width, replace_width),
    "an inherited static method": (lambda s, b, h, i, j: Derived.times(s), replace_value),
    "an inherited class method": (lambda s, b, h, i, j: Derived.widened(s), replace_width),
    "a method of the base class": (lambda s, b, h, i, j: derived.method(s), replace_value),
    "a property of a metaclass": (lambda s, b, h, i, j: s * OfMeta.width, replace_value),
    "a dict with an operator of its own": (lambda s, b, h, i, j: s * table["x"], replace_value),
    "a tuple with an operator of its own": (lambda s, b, h, i, j: s * pair[0], replace_value),
    "a getter": (lambda s, b, h, i, j: s * operator.attrgetter("width")(Derived), replace_width),
    "whether gradients are on": (
        lambda s, b, h, i, j: s * 2 if torch.is_grad_enabled() else s,
        lambda monkeypatch: monkeypatch.setattr(torch, "is_grad_enabled", lambda: False),
    ),
}


@pytest.mark.parametrize("what", READS)
def test_what_is_read_in_a_roundabout_way_is_in_the_key(monkeypatch, what):
    function, replace = READS[what]
    before = definition_key(Definition(score_mod=function))
    replace(monkeypatch)
    after = definition_key(Definition(score_mod=function))
    assert before is None or before != after


Sizes = namedtuple("Sizes", "width depth")


class Lazy:
    @functools.cached_property
    def width(self):
        return 3.0


def test_named_tuples_and_cached_values_are_known():
    sizes, lazy = Sizes(1.0, 2.0), Lazy()
    assert lazy.width == 3.0

    def function(score, b, h, q_idx, kv_idx):
        return score * sizes.width + lazy.width

    first = definition_key(Definition(score_mod=function))
    sizes = Sizes(4.0, 2.0)
    assert None not in (first, second := definition_key(Definition(score_mod=function)))
    assert first != second
