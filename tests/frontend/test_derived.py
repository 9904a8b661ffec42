"""What functions compute of whole tensors is computed for each call, without a trace where that gives the same."""

import pytest
import torch
import torch.nn.functional as F

import attn_engine
from attn_engine.frontend import CustomIO, Definition, rebind
from attn_engine.runtime import attention
from tests.frontend.test_identity import trace

Q, K, V = (torch.randn(1, 4, 6, 8) for _ in range(3))


def scored(score_mod):
    return Definition(score_mod=score_mod)


def of_slopes(compute):
    """(definition, its tensor): a score times what is computed of four slopes."""
    slopes = torch.rand(4) + 0.5
    return scored(lambda s, b, h, q, kv: s * compute(slopes)[h]), slopes


@pytest.fixture
def traces(monkeypatch):
    """Counts the traces of calls."""
    counted = []
    build = attention.build

    def counting(*args, **kwargs):
        counted.append(args)
        return build(*args, **kwargs)

    monkeypatch.setattr(attention, "build", counting)
    return counted


def chunks(x):
    first, second = torch.chunk(x.exp(), 2)
    return torch.cat([second * 2, first])


def kept(x):
    parts = [x.exp(), -x]
    together = torch.stack(parts)
    parts[0] = torch.zeros(4)  # lists of arguments may change behind a call
    return together.sum(0)


COMPUTED = {
    "one function": torch.exp,
    "a chain": lambda x: F.softplus(x * 2).sqrt() + 1,
    "several results": chunks,
    "a changed list": kept,
    "a view": lambda x: x.view(2, 2).t().reshape(4),
    "an index": lambda x: x[[3, 2, 1, 0]],
    "a slice": lambda x: torch.cat([x[1:], x[:1]]),
    "a number made a tensor": lambda x: x.exp() + torch.tensor(0.5),
    "two tensors": lambda x: torch.maximum(x, torch.ones(4)),
    "a named tuple": lambda x: torch.stack(torch.max(x.view(4, 1).exp(), 1)).sum(0),
    "keywords": lambda x: torch.softmax(input=x, dim=0),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_computed_inside_is_computed_anew(name):
    definition, slopes = of_slopes(COMPUTED[name])
    traced = trace(definition)
    slopes.add_(torch.rand(4))
    (found,) = rebind(definition, traced)
    torch.testing.assert_close(found, COMPUTED[name](slopes), rtol=0, atol=0)
    again = trace(definition)
    torch.testing.assert_close(found, again.captures[0], rtol=0, atol=0)
    assert str(again.module) == str(traced.module)


def test_it_is_computed_with_the_tensors_of_another_definition():
    def make():
        slopes, table = torch.rand(4), torch.rand(6)
        return scored(lambda s, b, h, q, kv: s * slopes.exp()[h] + table.cumsum(0)[kv] + table[q]), slopes, table

    (first, *_), (second, slopes, table) = make(), make()
    found = rebind(second, trace(first))
    expected = [slopes.exp(), table.cumsum(0), table]
    assert all(any(torch.equal(a, b) for b in expected) for a in found)
    assert found[-1] is table
    assert len(found) == 3


def test_custom_inputs_are_computed_with():
    slopes = torch.rand(2)
    definition = Definition(
        score_mod=lambda s, inputs, b, h, q, kv: s + inputs["bias"][h] * slopes.exp()[h],
        custom_io=CustomIO({"bias": ("heads",)}),
    )
    other = torch.rand(2)
    found = rebind(definition, trace(definition, custom={"bias": torch.rand(2)}), {"bias": other})
    assert any(tensor is other for tensor in found)
    assert any(torch.equal(tensor, slopes.exp()) for tensor in found)


def test_calls_trace_once_and_give_what_the_tensors_say_now(traces):
    slopes = torch.rand(4, requires_grad=True)
    attend = attn_engine.compile(score_mod=lambda s, b, h, q, kv: s * torch.tanh(slopes)[h])
    for _ in range(3):
        with torch.no_grad():
            slopes.add_(0.3)
        o = attend(Q, K, V)
        (found,) = torch.autograd.grad(o.square().sum(), slopes)
        known = slopes.detach().double().requires_grad_()
        scores = (Q.double() @ K.double().mT) * 8**-0.5 * torch.tanh(known)[:, None, None]
        expected = torch.softmax(scores, -1) @ V.double()
        (wanted,) = torch.autograd.grad(expected.square().sum(), known)
        torch.testing.assert_close(o.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)
    assert len(traces) == 1


def test_a_trace_without_gradients_serves_calls_with_them(traces):
    slopes = torch.rand(4, requires_grad=True)
    attend = attn_engine.compile(score_mod=lambda s, b, h, q, kv: s * slopes.exp()[h])
    with torch.no_grad():
        assert not attend(Q, K, V).requires_grad
    attend(Q, K, V).sum().backward()
    assert slopes.grad is not None
    assert len(traces) == 1


def test_random_numbers_are_drawn_for_each_call():
    definition, _ = of_slopes(torch.rand_like)
    traced = trace(definition)
    assert not torch.equal(rebind(definition, traced)[0], rebind(definition, traced)[0])


def without_gradient(x):
    with torch.no_grad():
        return x.exp()


def in_inference_mode(x):
    with torch.inference_mode():
        return x.exp()


def in_bf16(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x[None] @ torch.eye(4))[0]


def written(x):
    y = x.exp()
    y[0] = 0.5
    return y


def written_through_a_view(x):
    y = x.exp()
    y.view(2, 2).mul_(2)
    return y


def written_where_nothing_sees_it(x):
    y = x.exp()
    with torch._C.DisableTorchFunction():
        y.mul_(2)
    return y


def given_a_place(x):
    y = torch.zeros(4)
    torch.exp(x, out=y)
    return y


def not_filled(x):
    return torch.empty_like(x)


def from_elsewhere(x):
    with torch._C.DisableTorchFunction():
        y = x * 2
    return y.exp()


def by_kind_of_what_is_computed(x):
    y = x.squeeze()
    return y if y.ndim == 1 else y[None]


def by_value(x):
    y = x.exp()
    return y if y.sum().item() > 1 else -y


@pytest.mark.parametrize(
    "compute",
    [
        without_gradient,
        in_inference_mode,
        in_bf16,
        written,
        written_through_a_view,
        written_where_nothing_sees_it,
        given_a_place,
        not_filled,
        from_elsewhere,
        by_kind_of_what_is_computed,
        by_value,
    ],
)
def test_what_could_differ_is_traced_again(compute):
    definition, _ = of_slopes(compute)
    assert rebind(definition, trace(definition)) is None


@pytest.mark.parametrize("compute", [written, written_through_a_view, given_a_place])
@torch.inference_mode()
def test_writes_that_nothing_counts_are_seen(compute):
    definition, _ = of_slopes(compute)
    assert rebind(definition, trace(definition)) is None


class Wrapped:
    """Torch functions take it for the tensor that it holds."""

    def __init__(self, tensor):
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func(*(a.tensor if isinstance(a, cls) else a for a in args), **(kwargs or {}))


def test_tensors_in_other_objects_are_not_those_of_the_trace():
    def make():
        slopes = Wrapped(torch.rand(4))
        return scored(lambda s, b, h, q, kv: s * torch.exp(slopes)[h]), slopes.tensor

    (first, _), (second, slopes) = make(), make()
    found = rebind(second, trace(first))
    assert found is None or torch.equal(found[0], slopes.exp())


def test_a_result_of_another_kind_is_traced_again():
    def make(rows):
        table = torch.rand(rows, 4)
        return scored(lambda s, b, h, q, kv: s * table.squeeze(0)[h])

    traced = trace(make(1))
    assert rebind(make(1), traced) is not None
    assert rebind(make(2), traced) is None


def test_results_have_the_sizes_of_the_trace():
    def make(columns):
        table = torch.rand(6, columns)
        return scored(lambda s, b, h, q, kv: s + table.exp()[q].sum())

    traced = trace(make(3))
    assert rebind(make(3), traced) is not None
    assert rebind(make(2), traced) is None


def test_an_error_of_torch_is_told():
    tables = {"now": torch.rand(4, 4)}
    attend = attn_engine.compile(score_mod=lambda s, b, h, q, kv: s * (tables["now"] @ torch.ones(4))[h])
    attend(Q, K, V)
    tables["now"] = torch.rand(4, 5)
    with pytest.raises(RuntimeError, match="size"):
        attend(Q, K, V)
