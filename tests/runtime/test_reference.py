"""`backend="reference"`: second derivatives, forward mode and float64, which kernels do not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import attn_engine
from attn_engine import errors, library, masks
from tests.support.compare import leaf, qkv, randn
from tests.support.eager import eager_attention

SIZES = {"h": 2, "hkv": 1, "sq": 4, "skv": 5, "d": 3}


def inputs() -> list[Tensor]:
    return [leaf(t, torch.float64) for t in [*qkv(**SIZES), randn(2, seed=7), randn(8, seed=8)]]


def definition(name: str, slopes: Tensor, table: Tensor) -> dict[str, Callable[..., Any]]:
    def score_mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.tanh(s) * slopes[h] + table[(q - kv) % 8]

    rows = {"softmax": None, "sigmoid": library.sigmoid, "two_pass": lambda s: torch.softmax(s, -1) - s.mean()}
    mods = {"score_mod": score_mod, "mask_mod": lambda b, h, q, kv: (q >= kv) & (q != 2)}
    return mods if rows[name] is None else mods | {"row": rows[name]}


def attend(name: str, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, table: Tensor) -> Tensor:
    return attn_engine.attention(q, k, v, **definition(name, slopes, table), backend="reference")


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "two_pass"])
def test_derivatives_of_every_kind(name: str):
    """In reverse and forward mode, twice in reverse, and forward over reverse: captures too; one row sees no key."""

    def function(*tensors: Tensor) -> Tensor:
        return attend(name, *tensors)

    assert gradcheck(function, inputs(), check_forward_ad=True)
    assert gradgradcheck(function, inputs(), check_fwd_over_rev=True)


def test_lse_has_them_too():
    def lse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attn_engine.attention(q, k, v, mask_mod=library.causal, return_lse=True, backend="reference")[1]

    tensors = [leaf(t, torch.float64) for t in qkv(sq=4, d=3)]
    assert gradcheck(lse, tensors, check_forward_ad=True)
    assert gradgradcheck(lse, tensors)


def test_a_derivative_along_a_cotangent_of_zeros():
    """The gradient is linear in the cotangent: its derivative is there at zero as elsewhere."""
    tensors = inputs()
    o = attend("softmax", *tensors)
    cotangent = torch.zeros_like(o, requires_grad=True)
    (dq,) = torch.autograd.grad(o, tensors[0], cotangent, create_graph=True)
    direction = randn(*dq.shape, seed=3).double()
    (found,) = torch.autograd.grad(dq, cotangent, direction)
    with forward_ad.dual_level():
        dual = attend(
            "softmax", forward_ad.make_dual(tensors[0].detach(), direction), *(t.detach() for t in tensors[1:])
        )
        tangent = forward_ad.unpack_dual(dual).tangent
    assert torch.allclose(found, tangent) and tangent.abs().max() > 0.01


def test_infinite_derivatives_of_masked_keys_stay_hidden():
    """sqrt at 0 has an infinite derivative, where no key is seen."""
    q, k, v = (leaf(t, torch.float64) for t in qkv(sq=4, d=3))

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attn_engine.attention(
            q, k, v, score_mod=lambda s, b, h, q, kv: torch.sqrt(torch.relu((kv - 2) * s * s)), backend="reference",
            mask_mod=lambda b, h, q, kv: kv > 2,
        )  # fmt: skip

    (dq,) = torch.autograd.grad(function(q, k, v).sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(dq.square().sum(), q)
    assert dq.isfinite().all() and second.isfinite().all()


def test_transforms_of_functions():
    tensors = [t.detach() for t in inputs()]

    def loss(q: Tensor) -> Tensor:
        return attend("softmax", q, *tensors[1:]).square().sum()

    dense = torch.func.hessian(lambda q: eager(q, tensors).square().sum())(tensors[0])
    assert torch.allclose(torch.func.hessian(loss)(tensors[0]), dense)


def eager(q: Tensor, tensors: list[Tensor]) -> Tensor:
    functions = definition("softmax", *tensors[3:])
    return eager_attention(q, tensors[1], tensors[2], functions, 3**-0.5)[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_results_are_those_of_other_backends(dtype: torch.dtype):
    """In the dtype of q, the lse in float32; captures of half precision are read as they are."""
    q, k, v = qkv(sq=20, dtype=dtype)
    slopes = randn(2, seed=7).to(dtype)

    def run(backend: str) -> tuple[Tensor, Tensor]:
        return attn_engine.attention(q, k, v, score_mod=library.alibi(slopes), return_lse=True, backend=backend)

    (o, lse), (want, want_lse) = run("reference"), run("cpu")
    assert o.dtype == dtype and lse.dtype == torch.float32
    assert torch.allclose(o.float(), want.float(), atol=2e-2) and torch.allclose(lse, want_lse, atol=1e-4)


@pytest.mark.parametrize("scale", [None, 0.1])
def test_the_scale_has_all_digits_of_a_number(scale: float | None):
    q, k, v = (randn(1, 2, 5, 3, seed=n).double() for n in range(3))
    o = attn_engine.attention(q, k, v, scale=scale, backend="reference")
    right = torch.softmax(q @ k.mT * (3**-0.5 if scale is None else scale), -1) @ v
    torch.testing.assert_close(o, right, rtol=1e-14, atol=1e-14)


def test_packed_sequences_of_float64():
    bounds = torch.tensor([0, 3, 7])
    tensors = [leaf(t, torch.float64) for t in qkv(h=2, hkv=1, sq=8, d=3)]

    def attend(*qkv: Tensor) -> Any:
        mask = masks.causal(bottom_right=True)
        return attn_engine.attention(*qkv, mask_mod=mask, backend="reference", cu_seqlens_q=bounds)

    o = attend(*tensors)
    assert o.dtype == torch.float64 and (o[:, :, 7:] == 0).all()
    for n in range(2):
        own = [t[:, :, bounds[n] : bounds[n + 1]] for t in tensors]
        want, _ = eager_attention(*own, {"mask_mod": library.causal}, 3**-0.5)
        assert torch.allclose(o[:, :, bounds[n] : bounds[n + 1]], want)
    assert gradgradcheck(attend, tensors, fast_mode=True)


def test_the_environment_may_ask_for_it(monkeypatch: pytest.MonkeyPatch):
    q, k, v = qkv(sq=8)
    monkeypatch.setenv("ATTN_ENGINE_BACKEND", "reference")
    assert attn_engine.attention(q.double(), k.double(), v.double()).dtype == torch.float64


def test_kernels_name_it():
    """For second derivatives, in forward mode, through a capture alone, in transforms, and for float64."""
    q, k, v = (leaf(t) for t in qkv(sq=8))
    slopes = leaf(randn(2, seed=7))
    o = attn_engine.attention(q, k, v, score_mod=library.alibi(slopes))
    for wanted in (q, slopes):
        (gradient,) = torch.autograd.grad(o.square().sum(), wanted, create_graph=True)
        with pytest.raises(errors.SecondDerivativeError, match='backend="reference"'):
            gradient.sum().backward()
        o = attn_engine.attention(q, k, v, score_mod=library.alibi(slopes))
    with forward_ad.dual_level(), pytest.raises(errors.ForwardModeError, match='backend="reference"'):
        attn_engine.attention(forward_ad.make_dual(q.detach(), torch.ones_like(q)), k, v)
    with forward_ad.dual_level(), pytest.raises(errors.ForwardModeError):
        dual = forward_ad.make_dual(slopes.detach(), torch.ones_like(slopes))
        attn_engine.attention(q, k, v, score_mod=library.alibi(dual))
    with pytest.raises(errors.ForwardModeError):
        torch.func.jvp(lambda x: attn_engine.attention(x, k.detach(), v.detach()), (q.detach(),), (torch.ones_like(q),))
    for transform in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(errors.FunctionTransformError, match="autograd"):
            transform(lambda x: attn_engine.attention(x, k.detach(), v.detach()).sum())(q.detach())
    with pytest.raises(errors.DtypeError, match='backend="reference"'):
        attn_engine.attention(q.double(), k.double(), v.double())


def test_hessians_name_it():
    q, k, v = qkv(sq=4, d=4)

    def loss(q: Tensor) -> Tensor:
        return attn_engine.attention(q, k, v).square().sum()

    with pytest.raises(errors.SecondDerivativeError):
        torch.autograd.functional.hessian(loss, q)
    with pytest.raises(errors.UnsupportedGradientError, match='backend="reference"'):
        torch.func.hessian(loss)(q)
