"""A trace must not do what only calls may: writes into tensors of others, and into what was read, are refused at their line."""

import inspect

import pytest
import torch
import torch.nn.functional as F

import attn_engine
from attn_engine import LinearAttentionEngine, OnlineFunc, SymbolScalar, Var, errors, meta_tensor
from attn_engine.flex import flex_attention
from attn_engine.frontend import CustomIO, Definition, rebind
from tests.support.frontend_tracing import trace


class Holder:
    """Hides a tensor from walks, for its class can do anything on a look at it."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __getattr__(self, name):
        return getattr(self.tensor, name)


def element(t):
    t[0].add_(1)  # here


def reshaped(t):
    t.view(-1).mul_(2)  # here


def slice_of_it(t):
    part = t[1:]
    part[0] = 3  # here


def another_name(t):
    x = t
    x += 1  # here


def power_of_another_name(t):
    x = t
    x **= 2  # here


def bits(t):
    x = t.view(torch.int32)
    x ^= 1  # here


def view_of_a_view(t):
    t.view(2, 2).t()[0].zero_()  # here


def result_in_it(t):
    torch.exp(torch.ones(4), out=t)  # here


def results_in_it(t):
    torch.sort(torch.ones(4), out=(t, torch.zeros(4, dtype=torch.int64)))  # here


def function_in_place(t):
    F.relu(t, inplace=True)  # here


def data_of_it(t):
    t.data.add_(1)  # here


def detached(t):
    t.detach().mul_(2)  # here


def many(t):
    torch._foreach_add_([torch.ones(4), t], 1)  # here


def operator(t):
    torch.ops.aten.add_.Tensor(t, torch.ones(4))  # here


def attribute(t):
    t.requires_grad = False  # here


def through_an_object(t):
    Holder(t).add_(1)  # here


REFUSED = [
    *(element, reshaped, slice_of_it, another_name, power_of_another_name, bits, view_of_a_view, result_in_it),
    *(results_in_it, function_in_place, data_of_it, detached, many, operator, attribute, through_an_object),
]


def line_of(function):
    lines, first = inspect.getsourcelines(function)
    offset = next(i for i, line in enumerate(lines) if "# here" in line)
    return f"{__file__}:{first + offset}\n    {lines[offset].strip()}"


def refused(write, tensor, definition, **options):
    """Tracing is refused at the line of the write, before it has happened."""
    before = tensor.clone()
    with pytest.raises(errors.InPlaceWriteError) as caught:
        trace(definition, **options)
    assert line_of(write) in str(caught.value)
    assert "while the function is traced" in str(caught.value)
    assert "outside of the function" in str(caught.value)
    assert torch.equal(tensor, before)
    return str(caught.value)


@pytest.mark.parametrize("inference", [False, True], ids=["counted", "inference mode"])
@pytest.mark.parametrize("write", REFUSED)
def test_writes_into_tensors_from_outside_are_refused_before_they_happen(write, inference):
    with torch.inference_mode(inference):
        table = torch.rand(4)

        def score_mod(s, b, h, q, kv):
            write(table)
            return s * table[h]

        assert "'table'" in refused(write, table, Definition(score_mod=score_mod))


@pytest.mark.parametrize("write", [element, another_name])
def test_in_each_kind_of_function(write):
    table = torch.rand(4)

    def mask_mod(b, h, q, kv):
        write(table)
        return q >= kv

    def row(s):
        write(table)
        return torch.softmax(s, -1)

    def mod(x, b, h, position, channel):
        write(table)
        return x

    class Written(OnlineFunc):
        def __init__(self):
            super().__init__({"r": SymbolScalar("r", Var(0.0))}, {})

        @staticmethod
        def online_fwd(scores, rows, b, h, q_idx):
            write(table)
            return scores, {"r": rows["r"] + scores.get_reduce("sum")}, 1.0

        @staticmethod
        def online_fwd_epilogue(o, rows, b, h, q_idx):
            return o / rows["r"], {}

    definitions = {"mask_mod": mask_mod, "row": row, "query_mod": mod, "key_mod": mod, "value_mod": mod}
    for name, function in [*definitions.items(), ("row", Written())]:
        refused(write, table, Definition(**{name: function}))


@pytest.mark.parametrize("write", [element, another_name])
def test_custom_inputs_and_tensors_that_nobody_reaches(write):
    table = torch.rand(4)

    def custom(s, inputs, b, h, q, kv):
        write(table)
        return s * inputs["table"]

    definition = Definition(score_mod=custom, custom_io=CustomIO({"table": ("heads",)}))
    assert "'table'" in refused(write, table, definition, custom={"table": table})
    hidden = Holder(table)

    def score_mod(s, b, h, q, kv):
        write(hidden.tensor)
        return s

    refused(write, table, Definition(score_mod=score_mod))


def test_through_both_ways_in():
    x, table = torch.randn(1, 4, 6, 8), torch.rand(4)

    def score_mod(s, b, h, q, kv):
        table[0].add_(1)
        return s * table[h]

    for call in (attn_engine.attention, flex_attention):
        before = table.clone()
        with pytest.raises(errors.InPlaceWriteError, match=r"table\[0\]\.add_\(1\)"):
            call(x, x, x, score_mod=score_mod)
        assert torch.equal(table, before)


def test_a_write_that_no_name_tells_is_refused_at_its_line():
    table = torch.rand(4, 3) + 1

    def score_mod(s, b, h, q, kv):
        F.embedding(torch.tensor([0]), table, max_norm=1.0)  # here
        return s * table[h, 0]

    with pytest.raises(errors.InPlaceWriteError, match="embedding has written into tensor 'table'") as caught:
        trace(Definition(score_mod=score_mod))
    assert line_of(score_mod) in str(caught.value)


def test_a_write_that_no_function_was_seen_to_make_is_refused_with_the_function():
    table = torch.rand(4)

    def score_mod(s, b, h, q, kv):  # here
        with torch._C.DisableTorchFunction():
            table[1:].add_(1)
        return s * table[h]

    with pytest.raises(errors.InPlaceWriteError, match="'table' was written into while score_mod") as caught:
        trace(Definition(score_mod=score_mod))
    assert line_of(score_mod) in str(caught.value)


def test_an_error_of_the_user_tells_of_writes_before_it():
    table = torch.rand(4)

    def broken(s, b, h, q, kv):
        with torch._C.DisableTorchFunction():
            table[1:].add_(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        trace(Definition(score_mod=broken))
    assert caught.value.__notes__ == ["tensor 'table' was written into while score_mod was traced, before this error"]

    def plain(s, b, h, q, kv):
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        trace(Definition(score_mod=plain))
    assert not hasattr(caught.value, "__notes__")


def whole(y):
    y.add_(1)


def part(y):
    y.view(2, 2)[0, 0] = 5


def unseen(y):
    with torch._C.DisableTorchFunction():
        y.add_(1)


@pytest.mark.parametrize("inference", [False, True], ids=["counted", "inference mode"])
@pytest.mark.parametrize("write", [whole, part])
def test_what_was_read_by_index_stays_as_it_is(write, inference):
    """Kernels read tensors as they are at the end, so the first read would give what the write put there."""
    with torch.inference_mode(inference):
        table = torch.rand(4)

        def score_mod(s, b, h, q, kv):
            y = table.exp()
            before = y[h]
            write(y)
            return s * before + y[h]

        with pytest.raises(errors.InPlaceWriteError, match="has read by index before"):
            trace(Definition(score_mod=score_mod))


def test_what_was_read_by_index_stays_as_it_is_where_no_function_is_seen():
    table = torch.rand(4)

    def score_mod(s, b, h, q, kv):
        y = table.exp()
        before = y[h]
        unseen(y)
        return s * before

    with pytest.raises(errors.InPlaceWriteError, match="was written into while score_mod"):
        trace(Definition(score_mod=score_mod))


def added(z):
    z.add_(1)
    return z


def added_by_operator(z):
    z += 1
    return z


def from_elsewhere(z):
    with torch._C.DisableTorchFunction():
        z.add_(1)
    return z


@pytest.mark.parametrize("inference", [False, True], ids=["counted", "inference mode"])
@pytest.mark.parametrize("change", [added, added_by_operator])
def test_numbers_made_tensors_may_change(change, inference):
    with torch.inference_mode(inference):
        x = torch.randn(1, 4, 6, 8)
        o = attn_engine.attention(x, x, x, score_mod=lambda s, b, h, q, kv: s * change(torch.tensor(3.0)))
        expected = attn_engine.attention(x, x, x, score_mod=lambda s, b, h, q, kv: s * 4.0)
        torch.testing.assert_close(o, expected)


def test_numbers_made_tensors_may_change_unseen():
    traced = trace(Definition(score_mod=lambda s, b, h, q, kv: s * from_elsewhere(torch.tensor(3.0))))
    assert [c.item() for c in traced.captures] == [4.0]


@pytest.mark.parametrize("inference", [False, True], ids=["counted", "inference mode"])
def test_a_function_may_write_into_its_own(inference):
    def compute(t):
        y = t.exp()
        y += 1
        F.relu(y, inplace=True)
        y.view(2, 2)[0] *= 2
        return torch.exp(y, out=torch.empty(4))

    with torch.inference_mode(inference):
        table = torch.rand(4)
        definition = Definition(score_mod=lambda s, b, h, q, kv: s * compute(table)[h])
        for _ in range(2):
            traced = trace(definition)
            torch.testing.assert_close(traced.captures[0], compute(table), rtol=0, atol=0)
            table = table + 1
        assert rebind(definition, traced) is None


@pytest.mark.parametrize("change", [lambda y: F.relu(y, inplace=True), lambda y: y.__iadd__(1)])
@torch.inference_mode()
def test_writes_into_its_own_that_nothing_counts_are_made_anew(change):
    table = torch.rand(4) - 0.5

    def score_mod(s, b, h, q, kv):
        y = table * 2
        change(y)
        return s * y[h]

    definition = Definition(score_mod=score_mod)
    assert rebind(definition, trace(definition)) is None


def test_traced_values_are_not_written_in_place_by_an_option():
    def score_mod(s, b, h, q, kv):
        F.relu(s, inplace=True)  # here
        return s

    with pytest.raises(errors.InPlaceWriteError, match="use what it returns") as caught:
        trace(Definition(score_mod=score_mod))
    assert line_of(score_mod) in str(caught.value)


@pytest.mark.parametrize("write", [element, lambda t: t.add_(1)])
def test_recurrences_run_functions_that_write_at_each_call(write):
    table, x = torch.zeros(4), torch.randn(1, 2, 8, 4)

    def q_mod(x):
        write(table)
        return x * 2

    meta = tuple(meta_tensor(1, 2, 8, 4, dtype=torch.float32) for _ in "qkv")
    engine = LinearAttentionEngine(meta, q_mod=q_mod, layout="bhsd")
    for _ in range(3):
        engine(x, x, x)
    assert table[0] == 3
