"""One `Attention` through its life: captures that change, types that change, copies, threads, odd shapes."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch

import attn_engine
from attn_engine import errors
from tests.runtime.attention_support import Compilations, causal, dense, qkv, triangle


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


def test_a_parameter_that_is_trained_compiles_once(monkeypatch: pytest.MonkeyPatch):
    bias = torch.nn.Parameter(torch.randn(2, 20, 20))
    twin = bias.detach().double().requires_grad_()
    attention = attn_engine.compile(score_mod=lambda s, b, h, i, j: s + bias[h, i, j])
    steps = [torch.optim.SGD([p], lr=0.5) for p in (bias, twin)]
    inputs = qkv()
    built = Compilations(monkeypatch)
    for _ in range(3):
        mine, right = attention(*inputs), dense(*inputs, bias=twin)
        close(mine, right)
        for loss, step in ((mine, steps[0]), (right, steps[1])):
            step.zero_grad()
            loss.square().sum().backward()
            step.step()
    close(bias.detach(), twin.detach())
    assert built.count == 1


def test_a_tensor_of_the_same_kind_is_bound_anew(monkeypatch: pytest.MonkeyPatch):
    table = torch.randn(2)
    attention = attn_engine.compile(score_mod=lambda s, b, h, i, j: s + table[h] * (i - j))
    distance = torch.arange(20)[:, None] - torch.arange(20)
    built = Compilations(monkeypatch)
    q, k, v = (t.detach() for t in qkv())
    for _ in range(2):
        close(attention(q, k, v), dense(q, k, v, bias=table.double()[:, None, None] * distance))
        table = torch.randn(2)
    assert built.count == 1
    table = torch.tensor([1, 2])
    close(attention(q, k, v), dense(q, k, v, bias=table.double()[:, None, None] * distance))
    assert built.count == 2


def test_a_number_that_changes_is_a_new_definition(monkeypatch: pytest.MonkeyPatch):
    slope = 0.5
    attention = attn_engine.compile(score_mod=lambda s, b, h, i, j: s + slope * (i - j))
    distance = (torch.arange(20)[:, None] - torch.arange(20)).double()
    built = Compilations(monkeypatch)
    q, k, v = (t.detach() for t in qkv())
    for slope in (0.5, -2.0, 0.5):
        close(attention(q, k, v), dense(q, k, v, bias=slope * distance), 1e-4)
    assert built.count == 2


def test_requires_grad_is_read_at_each_call():
    slopes = torch.rand(2)
    attention = attn_engine.compile(score_mod=lambda s, b, h, i, j: s * slopes[h])
    q, k, v = (t.detach() for t in qkv())
    for wanted in (False, True, False):
        slopes.requires_grad_(wanted)
        assert attention(q, k, v).requires_grad is wanted


def test_new_dtypes_and_head_dims(monkeypatch: pytest.MonkeyPatch):
    attention = attn_engine.compile(mask_mod=causal)
    built = Compilations(monkeypatch)
    counts = []
    for _ in range(2):
        for dtype, d in ((torch.float32, 8), (torch.bfloat16, 8), (torch.float32, 24), (torch.float16, 24)):
            inputs = qkv(d=d, dtype=dtype)
            o = attention(*inputs)
            assert o.dtype == dtype
            close(o, dense(*inputs, mask=triangle(20, 20)), 1e-5 if dtype == torch.float32 else 2e-2)
        counts.append(built.count)
    assert counts[0] == counts[1]
    assert len(attention._memory.compiled) == 4


@pytest.mark.parametrize(
    "sizes", [[(1, 1, 1, 1), (3, 4, 7, 64), (2, 2, 33, 5)], [(1, 2, 65, 65), (3, 4, 7, 300), (2, 2, 300, 5)]]
)
def test_new_sizes_of_a_class_of_lengths_compile_nothing(sizes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch):
    attention = attn_engine.compile(mask_mod=causal)
    attention(*qkv(*sizes[0]))
    built = Compilations(monkeypatch)
    for size in sizes:
        inputs = qkv(*size)
        close(attention(*inputs), dense(*inputs, mask=triangle(*size[2:])))
    assert built.count == 0


def test_integer_and_bool_captures():
    lengths, hidden = torch.tensor([3, 20]), torch.rand(2, 20) < 0.3
    q, k, v = qkv()
    o = attn_engine.attention(q, k, v, mask_mod=lambda b, h, i, j: (j < lengths[b]) & (hidden[h, j] ^ True))
    j = torch.arange(20)
    close(o, dense(q, k, v, mask=(j < lengths[:, None])[:, None, None] & ~hidden[:, None]))


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("query head", lambda table: {"score_mod": lambda s, b, h, i, j: s * table[h]}),
        ("batch entry", lambda table: {"mask_mod": lambda b, h, i, j: j < table[b]}),
    ],
)
def test_a_capture_shorter_than_batch_or_heads_is_an_error(name: str, make: Any, monkeypatch: pytest.MonkeyPatch):
    q, k, v = (t.detach() for t in qkv(3, 3))
    built = Compilations(monkeypatch)
    with pytest.raises(errors.CaptureSizeError, match=f"'table' has 2 entries along axis 0.*{name}.* 3"):
        attn_engine.attention(q, k, v, **make(torch.rand(2) + 5))
    assert built.count == 0
    attn_engine.attention(q[:2, :2], k[:2, :2], v[:2, :2], **make(torch.rand(2) + 5))


def test_a_capture_for_key_heads_need_not_cover_query_heads():
    scales = torch.rand(2)
    q, k, v = (t.detach() for t in qkv())
    q = torch.cat([q, q], 1)
    attn_engine.compile(key_mod=lambda x, b, h, i, c: x * scales[h])(q, k, v)
    with pytest.raises(errors.CaptureSizeError, match="query head, of which there are 4"):
        attn_engine.compile(query_mod=lambda x, b, h, i, c: x * scales[h])(q, k, v)


def test_a_short_table_of_keys_is_fine_where_masked():
    table = torch.randn(5)
    q, k, v = qkv()
    o = attn_engine.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[j], mask_mod=lambda b, h, i, j: j < 5)
    close(o, dense(q, k[:, :, :5], v[:, :, :5], bias=table.double()))


def test_gradient_of_a_mask_is_an_error():
    limit = torch.rand(2, requires_grad=True)
    attention = attn_engine.compile(mask_mod=lambda b, h, i, j: i * limit[h] > j)
    q, k, v = (t.detach() for t in qkv())
    with pytest.raises(errors.NoGradientError, match="'limit' requires a gradient, but only the mask reads it"):
        attention(q, k, v)
    with torch.no_grad():
        attention(q, k, v)


def test_wrong_arguments_build_nothing(monkeypatch: pytest.MonkeyPatch):
    built = Compilations(monkeypatch)
    attention = attn_engine.compile(mask_mod=causal)
    q, k, v = qkv()
    wrong = [
        (errors.ScaleError, (q, k, v), {"scale": float("nan")}),
        (errors.DtypeError, (q.double(), k.double(), v.double()), {}),
        (errors.DtypeError, (q.to(torch.float8_e4m3fn),) * 3, {}),
        (errors.KeyLengthError, (q, k[:, :, 1:], v), {}),
    ]
    for error, inputs, options in wrong:
        with pytest.raises(error):
            attention(*inputs, **options)
    assert built.count == 0


@pytest.mark.parametrize(("batch", "sq", "skv"), [(0, 4, 4), (2, 0, 4), (2, 4, 0), (0, 0, 0)])
def test_nothing_to_attend(batch: int, sq: int, skv: int):
    slopes = torch.rand(2, requires_grad=True)
    inputs = qkv(batch, 2, sq, skv)
    o, lse = attn_engine.attention(
        *inputs, score_mod=lambda s, b, h, i, j: s * slopes[h], mask_mod=causal, return_lse=True
    )
    assert o.shape == inputs[0].shape
    assert (o == 0).all()
    assert (lse == float("-inf")).all()
    o.sum().backward()
    for t in (*inputs, slopes):
        assert (t.grad == 0).all()


def strided(kind: str, t: torch.Tensor) -> torch.Tensor:
    """The same values in another memory layout."""
    match kind:
        case "bshd":
            return t.transpose(1, 2).contiguous().transpose(1, 2)
        case "steps":
            return torch.stack([t, t * 9], -1).flatten(-2)[..., ::2]
        case "channels first":
            return t.mT.contiguous().mT
        case "slice":
            return torch.nn.functional.pad(t, (3, 2, 1, 4))[:, :, 1:-4, 3:-2]
        case _:
            return t


@pytest.mark.parametrize("kind", ["bshd", "steps", "channels first", "slice"])
def test_any_strides(kind: str):
    inputs = qkv(2, 3, 40, 30)
    turned = [strided(kind, t.detach()).requires_grad_() for t in inputs]
    assert not turned[0].is_contiguous()
    d_o = torch.randn(2, 3, 40, 8)
    for leaves, gradient in ((inputs, d_o), (turned, strided(kind, d_o))):
        attn_engine.attention(*leaves, mask_mod=causal).backward(gradient)
    close(attn_engine.attention(*turned, mask_mod=causal), dense(*inputs, mask=triangle(40, 30)))
    for a, b in zip(inputs, turned, strict=True):
        close(b.grad, a.grad)


def test_an_expanded_input_gets_its_summed_gradient():
    q, k, v = qkv(2, 3, 10, 10)
    shared = k[:1, :1].detach().requires_grad_()
    attn_engine.attention(q, shared.expand(2, 3, 10, 8), v).square().sum().backward()
    twin = shared.detach().double().requires_grad_()
    dense(q, twin.expand(2, 3, 10, 8), v).square().sum().backward()
    close(shared.grad, twin.grad, 1e-4)


def test_the_output_has_the_layout_of_the_query():
    q, k, v = (t.detach() for t in qkv(2, 3, 10, 10))
    assert attn_engine.attention(q, k, v).is_contiguous()
    q = strided("bshd", q)
    assert attn_engine.attention(q, k, v).transpose(1, 2).is_contiguous()


class Layer(torch.nn.Module):
    """A model that holds a compiled attention."""

    def __init__(self):
        super().__init__()
        self.attention = attn_engine.compile(mask_mod=causal)
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.attention(q * self.weight, k, v)


@pytest.mark.parametrize("copier", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_models(copier: Any):
    model, inputs = Layer(), qkv()
    expected = model(*inputs)
    again = copier(model)
    assert torch.equal(again(*inputs), expected)
    again(*inputs).sum().backward()
    assert again.weight.grad is not None


def test_threads_that_compile_at_once():
    inputs = [t.detach() for t in qkv()]
    found: dict[int, torch.Tensor] = {}

    def work(n: int) -> None:
        found[n] = attn_engine.attention(*inputs, score_mod=lambda s, b, h, i, j: s * (n // 2), mask_mod=causal)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(4):
        q, k, v = inputs
        close(found[n], dense(q * (n // 2), k, v, mask=triangle(20, 20)))


def test_captured_tensors_are_not_kept_alive():
    table = torch.rand(2, 20)
    seen = weakref.ref(table)

    def call(bias: torch.Tensor) -> None:
        attn_engine.attention(*(t.detach() for t in qkv()), score_mod=lambda s, b, h, i, j: s + bias[h, j])

    call(table)
    del table
    gc.collect()
    assert seen() is None
