"""What the public API offers beside plain calls, through TileLang's programs on the CPU, with gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import attn_engine as ae
from attn_engine import errors, library
from attn_engine.frontend.definition import Definition
from attn_engine.runtime.attention import Attention
from attn_engine.runtime.kernel_options import read_kernel_options
from tests.support.compare import randn

pytest.importorskip("tilelang")


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    from tests.support import tilelang_shim

    with tilelang_shim.on_cpu():
        yield


def operands(sq: int = 40, skv: int = 40) -> list[Tensor]:
    return [
        randn(1, 2, sq, 16, seed=1).half(),
        randn(1, 1, skv, 16, seed=2).half(),
        randn(1, 1, skv, 16, seed=3).half(),
    ]


def agree(call: Callable[..., Tensor | list[Tensor]], *tensors: Tensor, tolerance: float = 1e-2) -> None:
    """All results and all gradients on both backends; `call(backend, *tensors)`."""
    found: list[list[Tensor]] = []
    for backend in ("cpu", "tilelang"):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        results = call(backend, *leaves)
        results = [results] if isinstance(results, Tensor) else list(results)
        loss = sum((r.float().sin() * 3).sum() for r in results)
        found.append([*(r.detach() for r in results), *torch.autograd.grad(loss, leaves)])
    for want, got in zip(*found, strict=True):
        assert want.abs().max() > 0
        torch.testing.assert_close(got.float(), want.float(), atol=tolerance, rtol=tolerance)


def test_packed_sequences_of_other_lengths_than_their_keys():
    """One of them without queries; a captured slope per head, and a loss that depends on lse too."""
    cu_q, cu_k = torch.tensor([0, 20, 20, 33]), torch.tensor([0, 7, 16, 40])

    def call(backend, q, k, v, slopes):
        lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "return_lse": True}
        return ae.attention(q, k, v, score_mod=library.alibi(slopes), backend=backend, **lengths)

    agree(call, *operands(sq=33), torch.tensor([0.5, 0.25]))


def test_keys_in_parts():
    """The forward has one kernel for the parts and one that combines them; gradients are as ever."""
    q, k, v = operands(sq=3, skv=300)

    def call(backend, q):
        return Attention(Definition(), backend, read_kernel_options({"SPLIT_KV": 3}))(q, k, v)

    agree(call, q)


def test_operands_by_their_whole_row():
    """A norm over the channels, another channel's element, and a gain that is captured."""

    def call(backend, q, k, v, gain):
        def query_mod(x, b, h, position, channel):
            return x * torch.rsqrt((x * x).sum() / 16 + 1e-3) * gain[channel]

        def key_mod(x, b, h, position, channel):
            return x + x[channel ^ 1] * torch.sin(position * 0.1)

        attend = ae.compile(query_mod=query_mod, key_mod=key_mod, mask_mod=library.causal, backend=backend)
        return attend(q, k, v)

    agree(call, *operands(), torch.linspace(0.5, 1.5, 16))


def test_deterministic_gradients():
    """Of operands as ever; those of captured tensors are summed in no order, and refused."""
    q, k, v = operands()

    def of_queries(backend, q):
        return ae.attention(q, k, v, deterministic=True, backend=backend)

    def call(backend, q, k, v, slopes):
        return ae.attention(q, k, v, score_mod=library.alibi(slopes), deterministic=True, backend=backend)

    agree(of_queries, q)
    with pytest.raises(errors.NondeterministicError, match="use backend 'triton' or 'cpu'"):
        agree(call, q, k, v, torch.tensor([0.5, 0.25]))


def test_exact_f32_is_refused():
    """Products of f32 operands round them to tf32, which must be allowed."""
    q, k, v = (x.float() for x in operands())
    with pytest.raises(errors.UnsupportedOpError, match="without rounding them to tf32"):
        ae.attention(q, k, v, backend="tilelang")
