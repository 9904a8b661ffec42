"""`compile` and `attention`: a definition without shapes, called with tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attn_engine.backends.backend import get_backend
from attn_engine.errors import SequenceBoundsError
from attn_engine.frontend.build import Traced, build, rebind
from attn_engine.frontend.checks import Sizes, check_captures, check_qkv, check_scale
from attn_engine.frontend.definition import Definition
from attn_engine.frontend.identity import definition_key, identify
from attn_engine.frontend.mask_algebra import Mask, of_call, of_packed
from attn_engine.frontend.online_func import OnlineFunc
from attn_engine.frontend.packed import Tokens, check_bounds, check_offsets, packed
from attn_engine.ir.schedule import Length, Schedule
from attn_engine.runtime import driver, op, reference
from attn_engine.runtime.captures import CaptureRules, capture_rules
from attn_engine.runtime.choice import choose, gradients_of
from attn_engine.runtime.decoding import Decoding, adapted, decoding, pack, packed_module, unpack
from attn_engine.runtime.devices import Target, target_of
from attn_engine.runtime.driver import Compiled, Request
from attn_engine.runtime.eager import Kind, is_plain, kind_of, not_compiled
from attn_engine.runtime.eager import keep as keep_kind
from attn_engine.runtime.env import named_backend
from attn_engine.runtime.evaluator import check_definition
from attn_engine.runtime.inspect import Inspection
from attn_engine.runtime.kept_choice import choice_key, keep, kept_way, told
from attn_engine.runtime.kernel_options import KernelOptions
from attn_engine.runtime.known import Known, Settled, checked_sizes, known_of, wrt_of
from attn_engine.runtime.layouts import NARROWEST
from attn_engine.runtime.reference import is_reference
from attn_engine.runtime.schedules import arch_for, candidate_schedules, heads_of
from attn_engine.runtime.selection import Chosen, Way, examine_launched, fastest, first_that_runs
from attn_engine.runtime.tune import Tuner, seconds_of, tune_key

UserFunction = Callable[..., Any]
Inputs: TypeAlias = op.Call


@dataclass(frozen=True, eq=False)
class Trace:
    """A traced definition without the tensors of the call that traced it; its text names it for the compiler."""

    traced: Traced
    text: str
    rules: CaptureRules


@dataclass(eq=False)
class Memory:
    """What was traced and compiled; it holds neither tensors nor definitions, so that none is kept alive."""

    traces: dict[object, Trace] = field(default_factory=dict[object, Trace])
    compiled: dict[object, Compiled] = field(default_factory=dict[object, Compiled])
    chosen: list[Chosen] = field(default_factory=list[Chosen])
    settled: dict[object, Settled] = field(default_factory=dict[object, Settled])


@dataclass(eq=False)
class Attention(Inspection):
    """A compiled attention: call it with q, k and v; inspect it with `ir` and `source`.

    Kernels are built when first needed for a dtype, head dims and a set of tensors that need
    gradients, and kept in memory. New lengths, batches and numbers of heads build nothing, but that
    up to 64 positions other block sizes may be taken, and that lengths which are multiples of
    the blocks get kernels without remainders. Copies and pickles carry no kernels.
    """

    definition: Definition
    backend: str | None = None
    options: KernelOptions = field(default_factory=KernelOptions)
    tuner: Tuner | None = None
    deterministic: bool = False
    _memory: Memory = field(default_factory=Memory, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memory": Memory()}

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        return_lse: bool = False,
        custom: Mapping[str, Tensor] | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
    ) -> Any:
        """o [B, H, Sq, Dv] in the dtype of q; with `return_lse` (o, lse [B, H, Sq] float32).

        q is [B, H, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv], H a multiple of Hkv; all float16, bfloat16 or
        float32, any strides. lse is the natural log-sum-exp of the visible scores. Differentiable with
        respect to q, k, v and captured float tensors, o and lse both.

        With `cu_seqlens_q` (and `cu_seqlens_k`, if keys are packed in another way), int32 or int64 offsets [N + 1] on
        the device of q, the N sequences of a batch of 1 stand one behind the other on the axis of positions: queries
        see keys of their own sequence, and to every function b is the number of the sequence and positions count
        from its start. Tokens past the last offset give 0 and get gradients 0; what stands there must be finite. Offsets that are
        none are a SequenceBoundsError on a CPU; on a GPU their values are not looked at.

        Raises:
            AttnEngineError: one subclass per mistake, before anything is built (see `attn_engine.errors`).
        """
        own = self if cu_seqlens_q is None else self._packed(q, k, cu_seqlens_q, cu_seqlens_k)
        if cu_seqlens_q is None and cu_seqlens_k is not None:
            raise SequenceBoundsError("cu_seqlens_k is given without cu_seqlens_q")
        results = own.rows(q, k, v, scale=scale, return_lse=return_lse, custom=custom)
        return (results[0], results[1]) if return_lse else results[0]

    @not_compiled
    def _packed(self, q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None) -> Attention:
        """The same attention for packed sequences; it shares what is compiled."""
        check_qkv(q, k, k, is_reference(self.backend))
        keys = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        for name, bounds in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", keys)):
            check_bounds(name, bounds, q.shape[0], q.device)
        if len(keys) != len(cu_seqlens_q):
            raise SequenceBoundsError(f"there are {len(cu_seqlens_q)} offsets of queries and {len(keys)} of keys")
        if q.device.type == "cpu" and is_plain((q, cu_seqlens_q, keys)):
            check_offsets("cu_seqlens_q", cu_seqlens_q)
            check_offsets("cu_seqlens_k", keys)
        tokens = (Tokens.of(cu_seqlens_q, q.shape[2], 1), Tokens.of(keys, k.shape[2], 0))
        mask = self.definition.mask_mod
        ends = cu_seqlens_q.clamp(max=q.shape[2]), keys.clamp(max=k.shape[2])
        own = self._with_mask(of_packed(mask, *ends)) if isinstance(mask, Mask) else self
        return replace(own, definition=packed(own.definition, *tokens))

    def _with_mask(self, mask_mod: UserFunction) -> Attention:
        """The same with a mask function that knows the lengths of a call; it shares what is compiled."""
        return replace(self, definition=replace(self.definition, mask_mod=mask_mod))

    def choices(self) -> list[str]:
        """Of what was built so far: which schedule was taken, and why those before it were not."""
        return [line for chosen in self._memory.chosen for line in chosen.lines()]

    @not_compiled
    def rows(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        return_lse: bool = False,
        return_max: bool = False,
        custom: Mapping[str, Tensor] | None = None,
    ) -> list[Tensor]:
        """[o, then of lse and largest score, each [B, H, Sq], those asked for]; as in a plain call otherwise."""
        by_reference, kind = is_reference(self.backend), kind_of((q, k, v)) if is_plain((q, k, v)) else None
        sizes = checked_sizes(q, k, v, by_reference, kind)
        if isinstance(mask := self.definition.mask_mod, Mask):
            own = self._with_mask(of_call(mask, sizes.q_len, sizes.kv_len, q.device))
            return own.rows(q, k, v, scale=scale, return_lse=return_lse, return_max=return_max, custom=custom)
        factor = check_scale(self.definition.default_scale(sizes.head_dim) if scale is None else scale)
        trace, captures = self._trace(q, sizes, (return_lse, return_max), custom or {})
        inputs = (q, k, v, captures, factor)
        if by_reference:
            check_captures(trace.rules.names, captures, q.device)
            trace.rules.check(captures, sizes)
            return reference.rows(trace.traced.module, *inputs)
        kind = kind if is_plain(captures) else None
        compiled, group = self._settled(trace, inputs, sizes, kind)
        if group > 1:
            q = pack(q, group)
        attend = op.forward_op if kind is None else op.forward_plainly
        results = attend(q, k, v, captures, factor, compiled.key)[: 1 + return_lse + return_max]
        return [unpack(x, group) for x in results] if group > 1 else results

    def _settled(self, trace: Trace, inputs: Inputs, sizes: Sizes, kind: Kind | None) -> Settled:
        """What runs a call; decided once for plain tensors, of which q, k and v are of a `kind`."""
        if kind is None:
            return self._settle(trace, inputs, sizes)
        *_, captures, scale = inputs
        around = torch.is_grad_enabled(), torch.get_float32_matmul_precision(), torch.get_num_threads()
        key = (trace.text, kind, kind_of(captures), scale > 0, named_backend(self.backend), around)
        found = self._memory.settled.get(key)
        return found or keep_kind(self._memory.settled, key, self._settle(trace, inputs, sizes))

    def _settle(self, trace: Trace, inputs: Inputs, sizes: Sizes) -> Settled:
        q, k, v, captures, scale = inputs
        check_captures(trace.rules.names, captures, q.device)
        trace.rules.check(captures, sizes)
        reference.refuse_transforms((q, k, v, *captures))
        wrt = wrt_of(q, k, v, captures)
        few = decoding(sizes, target_of(q.device, self.backend), bool(wrt))
        if few.group > 1:
            q, trace = pack(q, few.group), self._packed_trace(trace, few)
        inputs = (q, k, v, captures, scale)
        known = known_of(trace.rules, inputs, sizes, few)
        return Settled(self._compile(trace, wrt, inputs, known), few.group)

    def _trace(
        self, q: Tensor, sizes: Sizes, rows: tuple[bool, bool], custom: Mapping[str, Tensor]
    ) -> tuple[Trace, list[Tensor]]:
        """The trace for these types and the tensors that the definition reads now; traced again only if need be."""
        identity, reached = identify(self.definition)
        exact = is_reference(self.backend)
        kinds = tuple((name, tensor.dtype, tensor.ndim) for name, tensor in custom.items())
        key = (identity, q.dtype, q.device, sizes.head_dim, sizes.head_dim_v, rows, kinds, exact)
        known = self._memory.traces.get(key) if identity is not None else None
        captures = rebind(self.definition, known.traced, custom, reached, exact) if known is not None else None
        if known is not None and captures is not None:
            return known, captures
        traced = build(
            self.definition,
            dtype=torch.float32 if q.dtype == torch.float64 else q.dtype,
            head_dim=sizes.head_dim,
            head_dim_v=sizes.head_dim_v,
            return_lse=rows[0],
            return_max=rows[1],
            custom=custom,
            device=q.device,
            exact=exact,
        )
        check_definition(self.definition)
        rules = capture_rules(traced.module, traced.capture_names)
        trace = Trace(replace(traced, captures=[]), str(traced.module), rules)
        if identity is not None:
            self._memory.traces[key] = trace
        return trace, traced.captures

    def _packed_trace(self, trace: Trace, known: Decoding) -> Trace:
        """The same with heads of a group as rows; made once."""
        key = (trace.text, known.group, known.single)
        found = self._memory.traces.get(key)
        if found is None:
            module = packed_module(trace.traced.module, known)
            found = Trace(replace(trace.traced, module=module), str(module), trace.rules)
            self._memory.traces[key] = found
        return found

    def _compile(self, trace: Trace, wrt: tuple[str, ...], inputs: Inputs, known: Known) -> Compiled:
        q = inputs[0]
        target: Target = target_of(q.device, self.backend)
        tf32 = q.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
        key = (trace.text, target, wrt, tf32, known)
        found = self._memory.compiled.get(key)
        if found is None:
            targets = choose(self.backend, target, trace.traced.module, known.in_blocks and known.tables_in_blocks)
            chosen = self._first(trace, targets, wrt, inputs, known, tf32)
            self._memory.chosen.append(chosen)
            found = self._memory.compiled[key] = chosen.compiled
        return found

    def _first(
        self,
        trace: Trace,
        targets: tuple[Target, ...],
        wrt: tuple[str, ...],
        inputs: Inputs,
        known: Known,
        tf32: bool,
    ) -> Chosen:
        """Built in the first way that takes this attention and runs as it means."""
        module = trace.traced.module
        plain = known.decoding.few or self.options.parts is not None
        found = [
            (target, adapted(schedule, known.decoding, target, module))
            for target in (targets[-1:] if plain else targets)
            for schedule in candidate_schedules(target, module, tf32, known.length)
        ]
        plain_backend = targets[-1].backend
        tuner = self.tuner if len(targets) > 1 and not inputs[0].is_meta else None
        others = plain_backend if wrt and (tuner is None or not tuner.measure) else ""
        ways = list(
            dict.fromkeys(
                Way(target, self.options.apply(schedule), gradients_of(target, others)) for target, schedule in found
            )
        )

        def build(way: Way) -> Compiled:
            return self._build(trace, way, wrt, inputs, known)

        def examine(way: Way, built: Compiled) -> str | None:
            return examine_launched(way, built, inputs)

        def measure(built: Compiled) -> dict[str, float]:
            device = inputs[0].device
            return {name: seconds_of(call, device) for name, call in op.calls(built, inputs).items()}

        if tuner is None:
            return first_that_runs(ways, build, examine)
        what = wrt, known, self.options, self.deterministic, tf32
        name = choice_key(trace.text, ways, what, inputs[0].device)
        kept = kept_way(tuner, name, ways)
        if kept is not None:
            return told(tuner, kept, first_that_runs([kept, *ways], build, examine))
        if not tuner.measure:
            return first_that_runs(ways, build, examine)
        return keep(tuner, name, fastest(ways, build, examine, measure))

    def _build(self, trace: Trace, way: Way, wrt: tuple[str, ...], inputs: Inputs, known: Known) -> Compiled:
        target = way.target
        backend = get_backend(target.backend)
        backends = [backend, *([get_backend(backend.rest)] if backend.rest else [])]
        facts = known.facts if any(b.knows_whole for b in backends) else replace(known.facts, multiple=1)
        # Making descriptors costs time on the host, which few positions do not hide.
        pays = known.in_blocks and known.length is not Length.SHORT and not known.decoding.few
        pays = pays and heads_of(trace.traced.module).narrowest >= NARROWEST
        descriptors = pays and any(b.copies_blocks for b in backends) and arch_for(target).copies_blocks
        request = Request(wrt, target.backend, way.schedule, facts, descriptors, self.deterministic, way.gradients)
        if self.tuner is not None and not inputs[0].is_meta:
            request = replace(request, schedule=self._tuned(trace, target, request, inputs))
        return driver.compile_traced(trace.traced.module, trace.text, request)

    def _tuned(self, trace: Trace, target: Target, request: Request, inputs: Inputs) -> Schedule:
        """The schedule that the tuner finds for a request, measured on the tensors of this call."""
        assert self.tuner is not None
        module, device = trace.traced.module, inputs[0].device

        def measure(schedule: Schedule) -> float:
            built = driver.compile_traced(module, trace.text, replace(request, schedule=schedule))
            return seconds_of(lambda: op.run_once(built, inputs), device)

        key = tune_key(trace.text, target, request, device)
        return self.tuner.best(key, request.schedule, target, heads_of(module), measure)


def compile(
    *,
    score_mod: UserFunction | None = None,
    mask_mod: UserFunction | None = None,
    row: UserFunction | OnlineFunc | None = None,
    query_mod: UserFunction | None = None,
    key_mod: UserFunction | None = None,
    value_mod: UserFunction | None = None,
    backend: str | None = None,
    deterministic: bool = False,
) -> Attention:
    """An attention from its functions, without shapes.

    Args:
        score_mod: (score, b, h, q_idx, kv_idx) -> score; the score is scale * q.k.
        mask_mod: (b, h, q_idx, kv_idx) -> whether the key is visible.
        row: weights from a row of scores, as in `attn_engine.library`; softmax if absent.
        query_mod, key_mod, value_mod: (x) or (x, b, h, position, channel), elementwise; they may reduce over the
            channels of the row, and read x[i] at another channel i.
        backend: by default ("auto") cpu on a CPU and triton on a GPU; on Hopper the one whose forward should be fastest.
            "reference" computes densely in torch operations, for second derivatives, forward mode and float64.
        deterministic: results and gradients, those of captured tensors too, are the same in every run, bit for bit.
    """
    definition = Definition(score_mod, mask_mod, row, query_mod, key_mod, value_mod)
    return Attention(definition, backend=backend, deterministic=deterministic)


@not_compiled
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score_mod: UserFunction | None = None,
    mask_mod: UserFunction | None = None,
    row: UserFunction | OnlineFunc | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool = False,
) -> Any:
    """o = row(score_mod(scale * q k^T), over the keys that mask_mod shows) v, in one call.

    Shapes, dtypes, packed sequences, results and errors as in `Attention.__call__`; functions as in `compile`. `scale` is
    1 / sqrt(head dim) by default. What was compiled is found again by what the functions are.
    """
    definition = Definition(score_mod, mask_mod, row)
    shared = shared_attention(definition, backend, deterministic=deterministic)
    return shared(q, k, v, scale=scale, return_lse=return_lse, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)


_SHARED: dict[object, Memory] = {}
_OPTIONS = KernelOptions()


def shared_attention(
    definition: Definition, backend: str | None, options: KernelOptions | None = None, deterministic: bool = False
) -> Attention:
    """An `Attention` that shares its compilations with all that have the same definition, if that can be told."""
    identity, options = definition_key(definition), options or _OPTIONS
    key = (identity, backend, options, deterministic)
    memory = None if identity is None else _SHARED.get(key) or _SHARED.setdefault(key, Memory())
    return Attention(definition, backend, options, deterministic=deterministic, _memory=memory or Memory())
