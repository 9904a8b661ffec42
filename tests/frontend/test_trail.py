"""A walk that is remembered is taken for another only while that would find the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_engine import library, masks
from attn_engine.frontend import Definition, identity, trail
from attn_engine.frontend.identity import identify

NUMBER = 3
TABLE = torch.rand(4)
ITEMS = [1, 2]


@pytest.fixture(autouse=True)
def nothing_remembered():
    trail._WALKS.clear()
    yield
    trail._WALKS.clear()


class Case:
    """A mask function with much that can change, and the changes."""

    def __init__(self):
        number, tensor, second = 2, torch.rand(4), torch.rand(4)

        def inner(x: Any) -> Any:
            return x * number + NUMBER

        def mask(b: Any, h: Any, q: Any, kv: Any, step: int = 1) -> Any:
            given = inner.number + second.note if b is None else 0  # pyright: ignore
            return (inner(q) + abs(step) >= kv + given) & (tensor[h] + TABLE[h] + second[h] > 0)

        def to_number(value: Any) -> None:
            nonlocal number
            number = value

        def to_tensor(value: Any) -> None:
            nonlocal tensor
            tensor = value

        self.mask, self.inner, self.second = mask, inner, second
        self.to_number, self.to_tensor = to_number, to_tensor

    def other_code(self) -> None:
        def mask(b: Any, h: Any, q: Any, kv: Any, step: int = 1) -> Any:
            return (inner(q) + step <= kv) & (tensor[h] + second[h] > 0)

        inner, tensor, second = self.inner, self.second, self.second
        self.mask.__code__ = mask.__code__.replace(co_freevars=self.mask.__code__.co_freevars)


CHANGES: dict[str, Callable[[Case, pytest.MonkeyPatch], Any]] = {
    "a number in a closure": lambda case, patch: case.to_number(5),
    "a type in a closure": lambda case, patch: case.to_number(2.0),
    "a list in a closure": lambda case, patch: case.to_number([2]),
    "another tensor": lambda case, patch: case.to_tensor(torch.rand(4)),
    "a tensor of another rank": lambda case, patch: case.to_tensor(torch.rand(4, 1)),
    "a tensor of another type": lambda case, patch: case.to_tensor(torch.rand(4).double()),
    "two tensors that are one": lambda case, patch: case.to_tensor(case.second),
    "a tensor that trains": lambda case, patch: case.second.requires_grad_(),
    "numbers of a tensor": lambda case, patch: setattr(case.second, "data", torch.rand(4, 2)),
    "an attribute of a tensor": lambda case, patch: setattr(case.second, "note", 1),
    "a global number": lambda case, patch: patch.setitem(globals(), "NUMBER", 4),
    "a global tensor": lambda case, patch: patch.setitem(globals(), "TABLE", torch.rand(4, 1)),
    "a global before one of Python": lambda case, patch: patch.setitem(globals(), "abs", int),
    "defaults": lambda case, patch: setattr(case.mask, "__defaults__", (2,)),
    "named defaults": lambda case, patch: setattr(case.mask, "__kwdefaults__", {"step": 2}),
    "code": lambda case, patch: case.other_code(),
    "code of a function inside": lambda case, patch: setattr(
        case.inner, "__code__", case.inner.__code__.replace(co_consts=(None, 7))
    ),
    "an attribute of a function": lambda case, patch: setattr(case.inner, "number", 2),
    "nothing": lambda case, patch: None,
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_is_found(monkeypatch: pytest.MonkeyPatch, name: str):
    case = Case()
    definition = Definition(mask_mod=case.mask)
    first = identify(definition)
    assert trail._WALKS and identify(definition) == first
    CHANGES[name](case, monkeypatch)
    wanted, walk = identity._walk(definition)
    for _ in range(2):
        key, tensors = identify(definition)
        assert key == wanted
        assert len(tensors) == len(walk.tensors) and all(a is b for a, b in zip(tensors, walk.tensors, strict=True))
    if name == "nothing":
        assert first[0] == wanted


HELD: dict[str, Any] = {
    "a list": ITEMS,
    "a dict": {"a": 1},
    "an object": SimpleNamespace(a=1),
    "a tuple of tensors": (torch.rand(4), torch.rand(4)),
    "a tensor with attributes": torch.rand(4),
}


@pytest.mark.parametrize("name", HELD)
def test_what_may_change_unseen_is_walked_every_time(name: str):
    held = HELD[name]
    if name == "a tensor with attributes":
        held.note = 1

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q >= kv + 0 * len(held)

    identify(Definition(mask_mod=mask))
    assert not trail._WALKS


def test_named_defaults_are_walked_every_time():
    def mask(b: Any, h: Any, q: Any, kv: Any, *, step: int = 1) -> Any:
        return q >= kv + step

    identify(Definition(mask_mod=mask))
    assert not trail._WALKS


def test_other_places_and_scores_are_other_walks():
    def function(x: Any, b: Any = 0, h: Any = 0, q: Any = 0, kv: Any = 0) -> Any:
        return x

    definitions = [
        Definition(score_mod=function),
        Definition(mask_mod=function),
        Definition(score_mod=function, bare_score=True),
        Definition(query_mod=function),
    ]
    keys = [identify(d)[0] for d in definitions]
    assert len(set(keys)) == len(keys)
    assert [identify(d)[0] for d in definitions] == keys


def test_nothing_is_kept_alive():
    case = Case()
    identify(Definition(mask_mod=case.mask))
    assert trail._WALKS
    watched = [weakref.ref(x) for x in (case.mask, case.inner, case.second)]
    del case
    gc.collect()
    assert [r() for r in watched] == [None] * 3


def test_a_function_in_the_place_of_another_is_told_from_it():
    """Memory is used again: an address alone names no function."""

    def made(number: int) -> Callable[..., Any]:
        return lambda b, h, q, kv: q + number >= kv

    keys = [identify(Definition(mask_mod=made(n)))[0] for n in range(50)]
    assert len(set(keys)) == 50


def test_few_walks_are_remembered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trail, "MOST_WALKS", 4)

    def made(number: int) -> Callable[..., Any]:
        return lambda b, h, q, kv: q + number >= kv

    functions = [made(n) for n in range(20)]
    keys = [identify(Definition(mask_mod=f))[0] for f in functions]
    assert len(trail._WALKS) <= 4
    assert [identify(Definition(mask_mod=f))[0] for f in functions] == keys


@pytest.mark.parametrize("make", [lambda: library.causal, lambda: masks.causal() & (lambda b, h, q, kv: q < 9)])
def test_masks_of_the_library_are_walked_once(make: Callable[[], Any]):
    mask = make()
    first = identify(Definition(mask_mod=mask))
    found = len(trail._WALKS)
    assert found == 1
    assert identify(Definition(mask_mod=mask)) == first
    assert len(trail._WALKS) == 1
