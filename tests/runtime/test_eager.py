"""Calls without the torch ops, and what is decided once for a kind of call: nothing else may differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import attn_engine
from attn_engine import errors, library, recurrence, recurrence_step
from attn_engine.runtime import eager, op, recurrence_op

SHAPE = (2, 2, 24, 16)


def qkv(seed: int = 0, shape: tuple[int, ...] = SHAPE, **options: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).requires_grad_(options.get("trains", False)) for _ in range(3)]


def attend_of(**functions: Any) -> Any:
    return attn_engine.compile(backend="cpu", **functions)


def through_ops(call: Callable[[], Any]) -> Any:
    """A call that a mode looks at."""
    with Seen():
        return call()


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


# --- which calls ---------------------------------------------------------------------------------


def test_modes_and_transforms_see_the_ops():
    x = torch.randn(3)
    assert eager.is_plain([x, None, torch.nn.Parameter(x)])
    with torch.inference_mode():
        assert eager.is_plain([x, torch.randn(3)])
    with torch.device("meta"):
        assert not eager.is_plain([x])
    with Seen():
        assert not eager.is_plain([x])
    seen: list[bool] = []

    def look(y: Tensor) -> Tensor:
        seen.append(eager.is_plain([x]))
        return y.sum()

    torch.vmap(look)(x)
    torch.func.grad(look)(x)
    with forward_ad.dual_level():
        look(x)
    traced: Any = torch.jit.trace
    traced(look, x, check_trace=False)
    assert seen == [False] * 4


def test_tensors_that_the_dispatcher_must_look_at_are_not_plain():
    class Own(Tensor):
        pass

    x = torch.randn(3)
    make_zeros: Any = torch.__dict__["_efficientzerotensor"]
    zeros: Tensor = make_zeros(3)
    negated = torch.randn(3, dtype=torch.complex64).conj().imag
    for other in (x.as_subclass(Own), negated, x.to("meta"), torch.eye(3).to_sparse(), zeros):
        assert not eager.is_plain([x, other])


def test_plain_tensors_are_met_on_their_own_device_only(monkeypatch: pytest.MonkeyPatch):
    """A call on the CPU must not start a GPU: its process may be forked later."""
    devices: list[str] = []
    empty = torch.empty

    def noted(*arguments: Any, **options: Any) -> Tensor:
        devices.append(str(options["device"]))
        return empty(*arguments, **options)

    x = torch.randn(3)
    monkeypatch.setattr(eager, "_PLAIN", set())
    monkeypatch.setattr(torch, "empty", noted)
    assert eager.is_plain([x]) and eager.is_plain([x])
    assert devices == ["cpu"]


def test_a_negated_view_is_read_as_what_it_says():
    q, k, v = qkv()
    attend = attend_of()
    turned = torch.complex(k, q).conj().imag
    assert turned.is_neg()
    torch.testing.assert_close(attend(turned, k, v), attend(-q, k, v))
    tokens = [x.transpose(1, 2) for x in (turned, k, v)]
    found, _ = recurrence(*tokens, backend="cpu")
    torch.testing.assert_close(found, recurrence(-q.transpose(1, 2), *tokens[1:], backend="cpu")[0])


def test_a_dispatch_mode_is_told_of_the_ops():
    q, k, v = qkv(trains=True)
    attend = attend_of()
    attend(q, k, v)
    with Seen() as seen:
        o = attend(q, k, v)
        torch.autograd.grad(o.sum(), (q, k, v))
        recurrence(q, k, v, backend="cpu")
    for name in ("attn_engine.forward.default", "attn_engine.backward.default", "attn_engine.recurrence.default"):
        assert name in seen.names


# --- autograd ------------------------------------------------------------------------------------


def test_results_and_gradients_are_those_of_the_ops():
    slopes = torch.rand(2, requires_grad=True)
    attend = attend_of(score_mod=library.alibi(slopes), mask_mod=library.causal)
    q, k, v = qkv(trains=True)
    leaves = (q, k, v, slopes)

    def call() -> tuple[Tensor, ...]:
        o, lse = attend(q, k, v, return_lse=True)
        return (o.detach(), lse.detach(), *torch.autograd.grad(o.square().sum() + lse.sum(), leaves))

    for _ in range(2):
        torch.testing.assert_close(call(), through_ops(call))
    only_lse = torch.autograd.grad(attend(q, k, v, return_lse=True)[1].sum(), leaves)
    wanted = through_ops(lambda: torch.autograd.grad(attend(q, k, v, return_lse=True)[1].sum(), leaves))
    torch.testing.assert_close(only_lse, wanted)


def test_recurrences_are_those_of_the_ops():
    x = [t.requires_grad_() for t in qkv(shape=(2, 24, 2, 16))]
    decay = torch.nn.functional.logsigmoid(torch.randn(2, 24, 2)).requires_grad_()

    def call() -> tuple[Tensor, ...]:
        o, state = recurrence(*x, decay=decay, output_final_state=True, backend="cpu")
        assert state is not None
        return (o.detach(), *torch.autograd.grad(o.square().sum() + state.sum(), (*x, decay)))

    for _ in range(2):
        torch.testing.assert_close(call(), through_ops(call))


@pytest.mark.parametrize("call", ["attention", "recurrence"])
def test_second_derivatives_are_refused(call: str):
    q, k, v = qkv(trains=True)
    o = attend_of()(q, k, v) if call == "attention" else recurrence(q, k, v, backend="cpu")[0]
    (first,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(errors.SecondDerivativeError):
        torch.autograd.grad(first.sum(), k)


@pytest.mark.parametrize("call", ["attention", "recurrence"])
def test_what_is_saved_must_not_change(call: str):
    q, k, v = qkv()
    q.requires_grad_()
    o = attend_of()(q, k, v) if call == "attention" else recurrence(q, k, v, backend="cpu")[0]
    k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_a_step_changes_its_state_for_autograd_too(monkeypatch: pytest.MonkeyPatch):
    q, k, v = qkv(shape=(2, 1, 2, 16))
    monkeypatch.setattr(recurrence_op, "launch", lambda *_: None)  # kernels count no versions
    state = torch.randn(2, 2, 16, 16)
    trained = torch.randn(2, 2, 16, 16, requires_grad=True)
    product = trained * state
    recurrence_step(q, k, v, state=state, backend="cpu")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


# --- what is decided once ------------------------------------------------------------------------


def test_mistakes_are_told_after_good_calls():
    slopes = torch.rand(2)

    def scaled(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score * slopes[h]

    attend = attend_of(score_mod=scaled, mask_mod=library.causal)
    q, k, v = qkv()
    for _ in range(3):
        attend(q, k, v)
    mistakes: list[tuple[type[Exception], Callable[[], Any]]] = [
        (errors.DtypeError, lambda: attend(q, k.half(), v)),
        (errors.KeyLengthError, lambda: attend(q, k, v[:, :, :20])),
        (errors.BatchError, lambda: attend(q, k[:1], v[:1])),
        (errors.DeviceError, lambda: attend(q, k.to("meta"), v)),
        (errors.RankError, lambda: attend(q, k[0], v)),
        (errors.NotATensorError, lambda: attend(q, None, v)),
        (errors.NotATensorError, lambda: attend(q, k.to_sparse(), v)),
        (errors.ScaleError, lambda: attend(q, k, v, scale=float("nan"))),
        (errors.CaptureSizeError, lambda: attend(*[x.repeat(1, 2, 1, 1) for x in (q, k, v)])),
    ]
    for _ in range(2):
        for error, call in mistakes:
            with pytest.raises(error):
                call()
        attend(q, k, v)
    slopes = torch.rand(1)
    with pytest.raises(errors.CaptureSizeError):
        attend(q, k, v)


def test_mistakes_of_recurrences_are_told_after_good_calls():
    x = qkv(shape=(2, 24, 2, 16))
    decay = -torch.rand(2, 24, 2)
    for _ in range(3):
        recurrence(*x, decay=decay, backend="cpu")
    for _ in range(2):
        with pytest.raises(errors.DtypeError):
            recurrence(x[0], x[1].half(), x[2], decay=decay, backend="cpu")
        with pytest.raises(errors.StateShapeError):
            recurrence(*x, decay=decay[:, :20], backend="cpu")
        with pytest.raises(errors.UnsupportedOptionError):
            recurrence(*x, beta=decay, weight=decay, backend="cpu")
        with pytest.raises(errors.DtypeError):
            recurrence(*x, decay=decay, backend="cpu", output_dtype=torch.float16)


def test_a_gradient_that_a_mask_has_not_is_told_after_good_calls():
    limits = torch.tensor([9.0, 9.0])

    def near(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return kv < limits[h]

    attend = attend_of(mask_mod=near)
    q, k, v = qkv()
    for _ in range(3):
        attend(q, k, v)
    limits.requires_grad_()
    with pytest.raises(errors.NoGradientError):
        attend(q, k, v)
    with torch.no_grad():
        attend(q, k, v)


def test_another_backend_of_the_environment_is_taken(monkeypatch: pytest.MonkeyPatch):
    attend = attn_engine.compile()
    q, k, v = qkv()
    for _ in range(3):
        attend(q, k, v)
        recurrence(q, k, v)
    monkeypatch.setenv("ATTN_ENGINE_BACKEND", "hip")
    with pytest.raises(errors.BackendUnavailableError):
        attend(q, k, v)
    with pytest.raises(errors.BackendUnavailableError):
        recurrence(q, k, v)


def test_forward_mode_is_refused_after_good_calls():
    attend = attend_of()
    q, k, v = qkv()
    for _ in range(3):
        attend(q, k, v)
    with forward_ad.dual_level(), pytest.raises(errors.ForwardModeError):
        attend(forward_ad.make_dual(q, k), k, v)


def test_captures_are_those_of_now():
    slopes = torch.rand(2)

    def by_distance(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + slopes[h] * (q - kv)

    attend = attend_of(score_mod=by_distance)
    q, k, v = qkv()
    first = attend(q, k, v)
    slopes.mul_(2)
    second = attend(q, k, v)
    slopes = slopes / 2
    assert not torch.equal(first, second)
    torch.testing.assert_close(attend(q, k, v), first)


def test_numbers_and_results_are_those_of_now():
    q, k, v = qkv()
    reach = 3

    def near(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q - kv) ** 2 < reach**2

    attend = attend_of(mask_mod=near)
    first = attend(q, k, v)
    reach = 5
    second, lse = attend(q, k, v, return_lse=True)
    torch.testing.assert_close(attend(q, k, v), second)
    assert not torch.equal(first, second) and lse.shape == SHAPE[:3]
    reach = 3
    torch.testing.assert_close(attend(q, k, v), first)


def test_scales_of_both_signs_and_zero():
    q, k, v = qkv()
    attend = attend_of(mask_mod=library.causal)
    hidden = torch.ones(SHAPE[2], SHAPE[2], dtype=torch.bool).triu(1)
    for scale in (1.0, -1.0, 0.0, -0.0, 1.0):
        scores = (scale * q @ k.mT).masked_fill(hidden, float("-inf"))
        wanted = scores.softmax(-1) @ v
        torch.testing.assert_close(attend(q, k, v, scale=scale), wanted)


def test_gradients_are_there_when_they_are_first_wanted():
    attend = attend_of()
    q, k, v = qkv()
    for _ in range(3):
        assert not attend(q, k, v).requires_grad
    for _ in range(2):
        for leaf in (q, k, v):
            leaf.requires_grad_()
            with torch.no_grad():
                assert not attend(q, k, v).requires_grad
            assert torch.autograd.grad(attend(q, k, v).sum(), leaf)[0].shape == leaf.shape
            with torch.no_grad():
                assert not attend(q, k, v).requires_grad
            leaf.requires_grad_(False)


def test_tables_of_kinds_do_not_grow_without_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(eager, "MOST_KINDS", 4)
    attend = attend_of()
    for length in range(8, 32):
        x = qkv(shape=(1, 2, length, 16))
        attend(*x)
        recurrence(*x, backend="cpu")
    assert len(attend._memory.settled) <= 4
    assert len(recurrence_op._DECIDED) <= 4


def test_the_ops_stay_what_others_call():
    q, k, v = qkv()
    attend = attend_of()
    attend(q, k, v)
    (built,) = attend._memory.compiled.values()
    found = torch.ops.attn_engine.forward(q, k, v, [], 0.25, built.key)[0]
    torch.testing.assert_close(found, op.forward(q, k, v, [], 0.25, built.key)[0])
