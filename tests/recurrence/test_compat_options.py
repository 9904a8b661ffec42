"""Arguments of the field's functions: their order, and what the less common of them say."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F

from attn_engine.compat import fla, fla_run, mamba_ssm
from attn_engine.errors import StateShapeError, UnsupportedOptionError
from tests.recurrence.support import assert_near, inputs, reference

STATE = "scale initial_state output_final_state"
SIGNATURES = {
    fla.chunk_simple_gla: f"q k v g g_gamma {STATE} state_v_first cu_seqlens cu_seqlens_cpu",
    fla.fused_recurrent_simple_gla: f"q k v g g_gamma {STATE} reverse state_v_first cu_seqlens",
    fla.chunk_retention: f"q k v {STATE} cu_seqlens",
    fla.fused_recurrent_retention: f"q k v {STATE} reverse state_v_first cu_seqlens",
    fla.chunk_gla: f"q k v g {STATE} state_v_first cu_seqlens cu_seqlens_cpu",
    fla.fused_recurrent_gla: f"q k v gk gv {STATE} reverse state_v_first cu_seqlens",
    fla.chunk_delta_rule: f"q k v beta {STATE} use_qk_l2norm_in_kernel cu_seqlens cu_seqlens_cpu",
    fla.fused_recurrent_delta_rule: f"q k v beta {STATE} use_qk_l2norm_in_kernel cu_seqlens",
    fla.chunk_gated_delta_rule: f"q k v g beta {STATE} use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel"
    " allow_neg_eigval state_v_first cu_seqlens cu_seqlens_cpu chunk_indices cp_context",
    fla.fused_recurrent_gated_delta_rule: f"q k v g gk gv beta {STATE} use_qk_l2norm_in_kernel use_gate_in_kernel A_log"
    " dt_bias use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens",
    fla.chunk_kda: f"q k v g beta {STATE} use_qk_l2norm_in_kernel use_gate_in_kernel use_beta_sigmoid_in_kernel"
    " allow_neg_eigval safe_gate lower_bound disable_recompute return_intermediate_states state_v_first cu_seqlens"
    " cu_seqlens_cpu cp_context use_graph max_num_seqs",
    fla.fused_recurrent_kda: f"q k v g beta A_log dt_bias {STATE} use_qk_l2norm_in_kernel use_gate_in_kernel"
    " use_beta_sigmoid_in_kernel allow_neg_eigval lower_bound state_v_first cu_seqlens",
    fla.chunk_linear_attn: f"q k v {STATE} normalize cu_seqlens",
    fla.fused_recurrent_linear_attn: f"q k v {STATE} reverse normalize cu_seqlens",
    fla.chunk_lightning_attn: f"q k v layer_idx num_layers {STATE} cu_seqlens",
    fla.fused_recurrent_lightning_attn: f"q k v layer_idx num_layers {STATE} reverse cu_seqlens",
    fla.fused_chunk_simple_gla: f"q k v g g_gamma {STATE} cu_seqlens",
    fla.fused_chunk_retention: f"q k v {STATE} cu_seqlens",
    fla.parallel_simple_gla: "q k v g scale output_attentions cu_seqlens cu_seqlens_cpu",
    fla.parallel_retention: "q k v scale output_attentions cu_seqlens",
    mamba_ssm.mamba_chunk_scan_combined: "x dt A B C chunk_size D z dt_bias initial_states seq_idx cu_seqlens dt_softplus"
    " dt_limit return_final_states return_varlen_states state_dtype",
    mamba_ssm.selective_state_update: "state x dt A B C D z dt_bias dt_softplus state_batch_indices",
}
"""Of fla 0.6.0 and mamba_ssm 2.3.2; those that fla takes by name alone are left out."""


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_arguments_stand_where_models_pass_them(function):
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
    found = [name for name, p in inspect.signature(function).parameters.items() if p.kind in plain]
    assert found == SIGNATURES[function].split()


def qkv(tokens=70):
    x = inputs(tokens, heads=2, shared=2)
    return x["q"], x["k"], x["v"], x["decay"], x["initial_state"]


def wide(*tensors):
    return [t.double() for t in tensors]


@pytest.mark.parametrize("function", [fla.chunk_kda, fla.fused_recurrent_kda], ids=lambda f: f.__name__)
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_kimi_delta_attention(function, lower_bound):
    """Gates, betas and norms by its options, against the recurrence of what they mean."""
    q, k, v, _, state = qkv()
    generator = torch.Generator().manual_seed(3)
    gate = torch.randn(*k.shape, generator=generator)
    beta, a_log = (torch.randn(*shape, generator=generator) for shape in (k.shape[:3], k.shape[2:3]))
    bias = torch.randn(k.shape[2] * k.shape[3], generator=generator)
    step = gate.double() + bias.double().view(*k.shape[2:])
    rate = a_log.double().exp()[:, None]
    decay = -rate * F.softplus(step) if lower_bound is None else lower_bound * torch.sigmoid(rate * step)
    unit = [F.normalize(x.double(), dim=-1) for x in (q, k)]
    right, final = reference(
        *unit, v.double(), decay=decay, beta=2 * beta.double().sigmoid(), initial_state=state.double()
    )
    o, got = function(
        *(q, k, v, gate, beta), A_log=a_log.view(1, 1, -1, 1), dt_bias=bias, initial_state=state, output_final_state=True,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True,
        lower_bound=lower_bound,
    )  # fmt: skip
    assert_near("o", o, right)
    assert_near("final", got, final)
    plain, _ = function(q, k, v, decay.float(), beta.sigmoid())
    assert_near("given", plain, reference(*wide(q, k, v), decay=decay, beta=beta.double().sigmoid())[0])


def test_states_may_have_values_first():
    q, k, v, g, state = qkv()
    right, final = reference(*wide(q, k, v), decay=g.double(), initial_state=state.double())
    channel = g[..., None].expand(-1, -1, -1, 16)
    for function, decay in (
        (fla.chunk_simple_gla, {"g": g}),
        (fla.fused_recurrent_simple_gla, {"g": g}),
        (fla.chunk_gla, {"g": channel}),
        (fla.fused_recurrent_gla, {"gk": channel}),
    ):
        old = {"transpose_state_layout": True} if function.__name__.startswith("fused") else {"state_v_first": True}
        for name in ({"state_v_first": True}, old):
            o, turned = function(q, k, v, **decay, initial_state=state.mT, output_final_state=True, **name)
            assert_near("o", o, right)
            assert_near("final", turned.mT, final)


@pytest.mark.parametrize("function", [fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule])
def test_gates_made_inside(function):
    q, k, v, g, state = qkv()
    A_log, bias, beta = torch.tensor([0.1, -0.4]), torch.tensor([0.2, -1.0]), torch.randn(2, 70, 2)
    options = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    o, final = function(
        q, k, v, g=g, beta=beta, use_gate_in_kernel=True, A_log=A_log, dt_bias=bias, **options,
        initial_state=state.mT, output_final_state=True, state_v_first=True,
    )  # fmt: skip
    unit = [F.normalize(x.double(), dim=-1) for x in (q, k)]
    decay = -A_log.double().exp() * F.softplus(g.double() + bias.double())
    right, right_final = reference(
        *unit, v.double(), decay=decay, beta=2 * beta.double().sigmoid(), initial_state=state.double()
    )
    assert_near("o", o, right)
    assert_near("final", final.mT, right_final)


def test_a_delta_rule_with_both_decays():
    q, k, v, g, _ = qkv(12)
    gk = -torch.rand(2, 12, 2, 16)
    o, _ = fla.fused_recurrent_gated_delta_rule(q, k, v, g=g, gk=gk, use_qk_l2norm_in_kernel=True)
    unit = [F.normalize(x.double(), dim=-1) for x in (q, k)]
    decay = g.double()[..., None] + gk.double()
    assert_near("o", o, reference(*unit, v.double(), decay=decay, beta=torch.ones(2, 12, 2).double())[0])


def test_what_is_not_there_is_refused():
    q, k, v, g, _ = qkv(3)
    for call, name in (
        (lambda: fla.chunk_simple_gla(q, k, v, g, head_first=True), "head_first"),
        (lambda: fla.chunk_gated_delta_rule(q, k, v, g, cp_context=object()), "cp_context"),
        (lambda: fla.chunk_kda(q, k, v, k, g, cp_context=object()), "cp_context"),
        (lambda: fla.chunk_kda(q, k, v, k, g, return_intermediate_states=True), "return_intermediate_states"),
        (lambda: fla.chunk_gated_delta_rule(q, k, v, g, use_gate_in_kernel=True), "use_gate_in_kernel"),
        (lambda: fla.fused_recurrent_gla(q, k, v, gv=v), "gv"),
        (lambda: fla.chunk_gated_delta_rule(q, k, v, g, g, allow_neg_eigval=True), "allow_neg_eigval"),
        (lambda: fla.fused_recurrent_kda(q, k, v, k, g, allow_neg_eigval=True), "allow_neg_eigval"),
        (lambda: fla.fused_recurrent_gdn(q, k, v, g, use_beta_sigmoid_in_kernel=True), "use_beta_sigmoid_in_kernel"),
        (lambda: fla.chunk_kda(q, k, v, k, g, use_gate_in_kernel=True, A_log=g, safe_gate=True), "safe_gate"),
        (lambda: fla.chunk_kda(q, k, v, k, g, use_gate_in_kernel=True, lower_bound=5.0), "lower_bound"),
        (lambda: fla.chunk_simple_gla(q, k, v, g, transpose_state_layout=True), "transpose_state_layout"),
        (lambda: fla.parallel_retention(q, k, v, output_attentions=True), "output_attentions"),
        (
            lambda: fla.chunk_gdn(q, k, v, g, g, state_v_first=True, transpose_state_layout=True),
            "transpose_state_layout",
        ),
    ):
        with pytest.raises(UnsupportedOptionError, match=f"{name} is not supported"):
            call()
    fla.chunk_simple_gla(q, k, v, g, chunk_size=32)


def test_states_of_packed_sequences():
    generator = torch.Generator().manual_seed(3)
    x, B, C = (torch.randn(1, 60, *s, generator=generator) for s in ((4, 8), (1, 16), (1, 16)))
    dt, A = torch.rand(1, 60, 4, generator=generator), -torch.rand(4, generator=generator)
    bounds, ids = torch.tensor([0, 25, 60]), torch.tensor([[0] * 25 + [1] * 35])
    y, last, each = mamba_ssm.mamba_chunk_scan_combined(
        x, dt, A, B, C, 64, seq_idx=ids, cu_seqlens=bounds, return_final_states=True, return_varlen_states=True
    )
    for n, part in enumerate((slice(0, 25), slice(25, 60))):
        right, final = reference(
            *(t[:, part].double() for t in (C, B, x)), decay=(dt * A)[:, part].double(), weight=dt[:, part].double(), scale=1.0
        )  # fmt: skip
        assert_near("y", y[:, part], right)
        assert_near("state", each[n : n + 1], final.mT)
    assert_near("last", last, each[1:].double())
    with pytest.raises(UnsupportedOptionError, match="return_varlen_states"):
        mamba_ssm.mamba_chunk_scan_combined(x, dt, A, B, C, 64, return_varlen_states=True)


def updated(state, x, dt, A, B, C, D, z, bias):
    """The recurrence of one token as it is written: every channel of a head with its own step size."""
    step = F.softplus(dt + bias)
    heads = x.shape[1] // B.shape[1]
    B, C = (t.repeat_interleave(heads, 1)[:, :, None] for t in (B, C))
    after = state * torch.exp(step[..., None] * A) + (step * x)[..., None] * B
    return ((after * C).sum(-1) + D * x) * F.silu(z), after


@pytest.mark.parametrize("heads", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_state_update_of_mamba_1(heads, dtype):
    generator = torch.Generator().manual_seed(5)
    H = 4 if heads else 1
    shapes = ((3, H, 8, 16), (3, H, 8), (3, H, 8), (H, 8, 16), (3, 1, 16), (3, 1, 16), (H, 8), (3, H, 8), (H, 8))
    given = [torch.randn(s, generator=generator) for s in shapes]
    given[0], given[3] = given[0].to(dtype), -given[3].exp()
    right, after = updated(*(t.double() for t in given))
    state, x, dt, A, B, C, D, z, bias = given if heads else [t.squeeze(0) if len(t) == 1 else t[:, 0] for t in given]
    pool = torch.zeros(5, *state.shape[1:], dtype=dtype)
    pool[[4, 0, 2]] = state
    for target, options in ((state, {}), (pool, {"state_batch_indices": torch.tensor([4, 0, 2])})):
        y = mamba_ssm.selective_state_update(target, x, dt, A, B, C, D, z, bias, dt_softplus=True, **options)
        found = target if target is state else pool[[4, 0, 2]]
        assert_near("y", y, right if heads else right[:, 0])
        assert_near("state", found.float(), after if heads else after[:, 0], 3e-5 if dtype == torch.float32 else 1e-3)


FUSED = [f for f in SIGNATURES if f.__name__.startswith("fused_recurrent_")]


@pytest.mark.parametrize(("tokens", "wide"), [(70, torch.float32), (2, torch.bfloat16)])
@pytest.mark.parametrize("function", FUSED, ids=lambda f: f.__name__)
def test_what_goes_token_by_token_there_computes_in_float32(function, tokens, wide, monkeypatch):
    """Chunks of halves multiply what is rounded; a few tokens are computed with in float32 as they come."""
    seen = []
    run = fla_run.recurrence
    monkeypatch.setattr(fla_run, "recurrence", lambda q, k, v, **given: seen.extend((q, k, v)) or run(q, k, v, **given))
    x = inputs(tokens, heads=2, shared=2)
    made = {"k": x["k"].bfloat16(), "layer_idx": 0, "num_layers": 2, "g": x["decay"], "beta": x["weight"].sigmoid()}
    if function in (fla.fused_recurrent_gla, fla.fused_recurrent_kda):
        made["gk" if function is fla.fused_recurrent_gla else "g"] = x["decay"][..., None].expand(*x["k"].shape)
    named = {n: t for n, t in made.items() if n in inspect.signature(function).parameters}
    o, _ = function(x["q"].bfloat16(), v=x["v"].bfloat16(), **named)
    assert o.dtype == torch.bfloat16
    assert {t.dtype for t in seen} == {wide}
    seen.clear()
    named["k"].requires_grad_()
    function(x["q"].bfloat16(), v=x["v"].bfloat16(), **named)[0].sum().backward()
    assert {t.dtype for t in seen} == {torch.float32}
    assert named["k"].grad.dtype == torch.bfloat16


@pytest.mark.parametrize("function", [fla.fused_recurrent_delta_rule, fla.chunk_delta_rule], ids=lambda f: f.__name__)
def test_normed_queries_and_keys_are_rounded_in_chunks_of_halves_alone(function, monkeypatch):
    seen = []
    run = fla_run.recurrence
    monkeypatch.setattr(fla_run, "recurrence", lambda q, k, v, **given: seen.extend((q, k, v)) or run(q, k, v, **given))
    x = inputs(2, heads=2, shared=2)
    q, k, v = (x[n].bfloat16() for n in "qkv")
    function(q, k, v, x["weight"].sigmoid(), use_qk_l2norm_in_kernel=True)
    assert {t.dtype for t in seen} == {torch.float32 if function is fla.fused_recurrent_delta_rule else torch.bfloat16}


@pytest.mark.parametrize("indices", [[4, -1, 0, -1], [-1, -1, 1, 4], [-1, -1, -1, -1], []])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_negative_state_indices_are_padding(indices, dtype):
    generator = torch.Generator().manual_seed(5)
    B, H = len(indices), 2
    shapes = ((5, H, 8, 16), (B, H, 8), (B, H, 8), (H, 8, 16), (B, 1, 16), (B, 1, 16), (H, 8), (B, H, 8), (H, 8))
    pool, *given = [torch.randn(s, generator=generator) for s in shapes]
    given[2] = -given[2].exp()
    pool, before = pool.to(dtype), pool.to(dtype).clone()
    y = mamba_ssm.selective_state_update(
        pool, *given, dt_softplus=True, state_batch_indices=torch.tensor(indices).int()
    )
    untouched = [i for i in range(5) if i not in indices]
    assert torch.equal(pool[untouched], before[untouched])
    for n, i in enumerate(indices):
        if i < 0:
            assert not y[n].any()
        else:
            one = [t if t.shape[0] == H and t is not given[0] else t[n : n + 1] for t in given]
            one[0], one[1] = given[0][n : n + 1], given[1][n : n + 1]
            right, after = updated(before[i : i + 1].double(), *(t.double() for t in one))
            assert_near("y", y[n : n + 1], right)
            assert_near("state", pool[i : i + 1].float(), after, 3e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("indices", [None, [2, -1, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_updates_in_a_graph(indices, dtype):
    """Of a state as it lies, and of one whose rows are apart."""
    generator = torch.Generator().manual_seed(8)
    shapes = ((3, 2, 8), (3, 2, 8), (2, 8, 16), (3, 1, 16), (3, 1, 16))
    x, dt, A, B, C = (torch.rand(s, generator=generator) for s in shapes)
    whole = torch.rand(3 if indices is None else 5, 2, 8, 32, generator=generator).to(dtype)

    def update(states, *given):
        results = []
        for state in (states[..., :16].clone(), states.clone()[..., ::2]):
            y = mamba_ssm.selective_state_update(
                state, *given, state_batch_indices=None if indices is None else torch.tensor(indices)
            )
            results += [y, state]
        return results

    given = (whole, x, dt, -A, B, C)
    compiled = torch.compile(update, backend="aot_eager", fullgraph=True)(*given)
    for got, want in zip(compiled, update(*given), strict=True):
        assert torch.equal(got, want)


def test_a_state_update_rounds_once():
    """B and C may be wider than x, and y is rounded behind D and z alone."""
    generator = torch.Generator().manual_seed(6)
    shapes = ((2, 4, 8, 16), (2, 4, 8), (2, 4, 8), (4, 8, 16), (2, 1, 16), (2, 1, 16), (4, 8), (2, 4, 8), (4, 8))
    state, x, dt, A, B, C, D, z, bias = [torch.randn(s, generator=generator) for s in shapes]
    x, z, A = x.bfloat16(), z.bfloat16(), -A.exp()
    right, after = updated(*(t.double() for t in (state, x, dt, A, B, C, D, z, bias)))
    y = mamba_ssm.selective_state_update(state, x, dt, A, B, C, D, z, bias, dt_softplus=True)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, right.bfloat16())
    assert_near("state", state, after)


def test_step_sizes_are_limited_as_there():
    """Negative ones are 0 unless a limit says otherwise."""
    generator = torch.Generator().manual_seed(7)
    x, B, C, dt = (torch.randn(1, 70, *s, generator=generator) for s in ((4, 8), (1, 16), (1, 16), (4,)))
    A, bias = -torch.rand(4, generator=generator), torch.randn(4, generator=generator)
    for options, step in (
        ({}, (dt + bias).clamp(min=0)),
        ({"dt_limit": (0.25, 0.5)}, (dt + bias).clamp(0.25, 0.5)),
        ({"dt_softplus": True}, F.softplus(dt + bias)),
        ({"dt_softplus": True, "dt_limit": [0.5, 1.0]}, F.softplus(dt + bias).clamp(0.5, 1.0)),
    ):
        y = mamba_ssm.mamba_chunk_scan_combined(x, dt, A, B, C, 64, dt_bias=bias, **options)
        right, _ = reference(*wide(C, B, x), decay=(step * A).double(), weight=step.double(), scale=1.0)
        assert_near("y", y, right)


def test_shapes_that_would_broadcast_to_something_else_are_refused():
    x, B, dt = torch.randn(1, 4, 4, 8), torch.randn(1, 4, 1, 16), torch.rand(1, 4, 4)
    given = {"x": x, "dt": dt, "A": -torch.rand(4), "B": B, "C": B, "chunk_size": 64}
    mamba_ssm.mamba_chunk_scan_combined(**given)
    for name, wrong in (
        ("A", -torch.rand(4, 1)), ("dt", dt[..., :1]), ("D", torch.rand(4, 1)), ("z", x[:, :1]),
        ("dt_bias", torch.rand(4, 4)), ("seq_idx", torch.zeros(4, dtype=torch.int32)),
    ):  # fmt: skip
        with pytest.raises(StateShapeError, match=f"^{name} has shape .* expected"):
            mamba_ssm.mamba_chunk_scan_combined(**given | {name: wrong})
    given = {"state": torch.zeros(1, 4, 8, 16), "x": x[:, 0], "dt": x[:, 0], "A": -torch.rand(4, 8, 16)}
    given |= {"B": B[:, 0], "C": B[:, 0]}
    for name, wrong in (
        ("A", -torch.rand(4, 1, 16)), ("dt", dt[:, 0, :, None]), ("D", torch.rand(8)), ("z", x[:, 0, :1]),
        ("dt_bias", torch.rand(4)), ("B", B[:, 0, :, :1]), ("C", B[:, 0, :, :1]), ("x", x[:, 0, :1]), ("state_batch_indices", torch.zeros(2)),
    ):  # fmt: skip
        with pytest.raises(StateShapeError, match=f"^{name} has shape .* expected"):
            mamba_ssm.selective_state_update(**given | {name: wrong})
