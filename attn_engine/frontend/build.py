"""From a definition to a module with `func.func @attention` in the attn dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from xdsl.dialects import func, math
from xdsl.dialects.builtin import DYNAMIC_INDEX, ModuleOp, TensorType, f32, i1, i64
from xdsl.ir import Attribute, Block, Region, SSAValue

from attn_engine import library
from attn_engine.dialects import attn
from attn_engine.errors import LseError, ReturnValueError
from attn_engine.frontend.custom_io import CustomInputs, check_custom
from attn_engine.frontend.definition import Definition, UserFunction
from attn_engine.frontend.derived import Position, Recipe, Recipes, repeat
from attn_engine.frontend.identity import reachable_tensors
from attn_engine.frontend.online_func import FOLDING_FUNCTIONS, OnlineFunc, trace_online_func
from attn_engine.frontend.operators import untraced
from attn_engine.frontend.reductions import ROW_FUNCTIONS, SCALAR_FUNCTIONS
from attn_engine.frontend.region import Level, RegionTrace
from attn_engine.frontend.softmax_like import is_softmax_like
from attn_engine.frontend.source import refuse
from attn_engine.frontend.symbols import Symbol
from attn_engine.frontend.trace import ELEMENT_TYPES, Tracer, as_operand, choose_arity
from attn_engine.frontend.vectors import Vector

Arguments: TypeAlias = Sequence[tuple[str, Attribute]]

INDICES: Arguments = (("b", i64), ("h", i64), ("q_idx", i64), ("kv_idx", i64))
SCORE: Arguments = (("score", f32), *INDICES)
ROW: Arguments = (("s", f32), *INDICES)
ELEMENT: Arguments = (("x", f32), ("b", i64), ("h", i64), ("pos", i64), ("channel", i64))


@dataclass(frozen=True, eq=False)
class Traced:
    """A traced definition: the module, and the tensors it reads in the order of its operands.

    `positions` say for each capture where `rebind` finds it; `recipes` compute those that functions compute themselves.
    """

    module: ModuleOp
    captures: list[torch.Tensor]
    capture_names: list[str]
    has_lse: bool
    final_rowscales: tuple[str, ...]
    positions: tuple[Position, ...]
    recipes: tuple[Recipe, ...]
    reads_values: bool
    fixed_sizes: dict[tuple[int, int], int]
    """By (capture, axis) the sizes that the trace holds for."""


def build(
    definition: Definition,
    *,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    return_lse: bool = False,
    return_max: bool = False,
    custom: Mapping[str, torch.Tensor] | None = None,
    device: torch.device | None = None,
    exact: bool = False,
) -> Traced:
    """Trace a definition for tensors of one dtype and head dims; row outputs are the lse, then the largest score.

    With `exact` captures of float64 stay so: of use to the reference alone.
    """
    custom = custom or {}
    check_custom(definition.custom_io, custom)
    tensors, names, complete = reachable_tensors(definition)
    custom = _made_distinct(custom, tensors)
    known = [*((t, name) for name, t in custom.items()), *zip(tensors, names, strict=True)]
    tracer = Tracer(known, device=device or torch.device("cpu"), exact=exact)
    rows = tuple(name for name, wanted in (("lse", return_lse), ("max_scores", return_max)) if wanted)
    channels = {"query_mod": head_dim, "key_mod": head_dim, "value_mod": head_dim_v}
    regions, final = _trace_all(definition, tracer, custom, rows, channels)
    used = _drop_unread_captures(tracer, regions)
    recipes = Recipes(tracer.steps, partial(_reached, tensors=tensors if complete else [], custom=custom))
    positions = tuple(recipes.position(tracer.captures[i].original) for i in used)
    return Traced(
        module=_module([tracer.captures[i] for i in used], regions, ELEMENT_TYPES[dtype], head_dim, head_dim_v, rows),
        captures=[tracer.captures[i].tensor for i in used],
        capture_names=[tracer.captures[i].name for i in used],
        has_lse=return_lse,
        final_rowscales=final,
        positions=positions,
        recipes=tuple(recipes.made),
        reads_values=tracer.reads_values,
        fixed_sizes={(used.index(i), axis): size for (i, axis), size in tracer.fixed_sizes.items() if i in used},
    )


def rebind(
    definition: Definition,
    traced: Traced,
    custom: Mapping[str, torch.Tensor] | None = None,
    reached: Sequence[torch.Tensor] | None = None,
    exact: bool = False,
) -> list[torch.Tensor] | None:
    """The tensors that a definition with the same key reads now, in operand order.

    None where one cannot be located or has another size, or where the trace looked at values: then trace again.
    `reached` are the tensors that `identify` gave just now, if it was asked.
    """
    if traced.reads_values or None in traced.positions:
        return None
    needs_walk = reached is None and (traced.recipes or any(isinstance(position, int) for position in traced.positions))
    tensors = reachable_tensors(definition)[0] if needs_walk else reached or ()

    def located(position: int | str) -> torch.Tensor | None:
        if isinstance(position, str):
            return (custom or {}).get(position)
        return tensors[position] if position < len(tensors) else None

    at = repeat(traced.recipes, located)
    found: list[torch.Tensor] = []
    for position in traced.positions:
        tensor = at(position)
        if tensor is None:
            return None
        found.append(as_operand(tensor, exact))
    fits = all(found[n].shape[axis] == size for (n, axis), size in traced.fixed_sizes.items())
    return found if fits else None


def _made_distinct(custom: Mapping[str, torch.Tensor], others: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Custom inputs as objects of their own: another call may pass others, though in this one they coincide."""
    seen = {id(tensor) for tensor in others}
    distinct: dict[str, torch.Tensor] = {}
    for name, tensor in custom.items():
        distinct[name] = tensor.view_as(tensor) if id(tensor) in seen else tensor
        seen.add(id(tensor))
    return distinct


def _reached(
    tensor: torch.Tensor, tensors: Sequence[torch.Tensor], custom: Mapping[str, torch.Tensor]
) -> int | str | None:
    for name, given in custom.items():
        if given is tensor:
            return name
    return next((i for i, reached in enumerate(tensors) if reached is tensor), None)


# Tracing
def _trace_all(
    definition: Definition,
    tracer: Tracer,
    custom: Mapping[str, torch.Tensor],
    rows: Sequence[str],
    channels: Mapping[str, int],
) -> tuple[dict[str, RegionTrace], tuple[str, ...]]:
    regions: dict[str, RegionTrace] = {}
    if definition.score_mod is not None:
        regions["score_mod"] = _trace_score(definition.score_mod, definition, tracer, custom)
    if definition.mask_mod is not None:
        regions["mask"] = _trace_mask(definition.mask_mod, definition, tracer, custom)
    regions["row"], final = _trace_row(definition.row or library.softmax, tracer, rows)
    for name, count in channels.items():
        function = getattr(definition, name)
        if function is not None:
            regions[name] = _trace_element(name, function, tracer, count)
    return regions, final


def _trace_score(
    function: UserFunction, definition: Definition, tracer: Tracer, custom: Mapping[str, torch.Tensor]
) -> RegionTrace:
    arity = choose_arity(
        function,
        "score_mod",
        (5, 6),
        "score_mod(score, b, h, q_idx, kv_idx) or score_mod(score, inputs, b, h, q_idx, kv_idx)",
    )

    def call(region: RegionTrace) -> None:
        score, *indices = region.arguments
        inputs = [CustomInputs(region, definition.custom_io, custom)] if arity == 6 else []
        region.finish(_number(region, function, function(score, *inputs, *indices)).value)

    return tracer.run("score_mod", SCORE, SCALAR_FUNCTIONS, call, function)


def _trace_mask(
    function: UserFunction, definition: Definition, tracer: Tracer, custom: Mapping[str, torch.Tensor]
) -> RegionTrace:
    arity = choose_arity(function, "mask_mod", (4, 5), "mask_mod(b, h, q_idx, kv_idx)")

    def call(region: RegionTrace) -> None:
        inputs = [CustomInputs(region, definition.custom_io, custom)] if arity == 5 else []
        result = _returned(region, function, function(*inputs, *region.arguments))
        if result.scalar_type != i1:
            refuse(
                ReturnValueError,
                f"mask_mod returns {result.scalar_type}, not a condition",
                "return a comparison such as q_idx >= kv_idx; for a table of integers, table[q_idx, kv_idx] != 0",
                function,
            )
        region.finish(result.value)

    return tracer.run("mask_mod", INDICES, SCALAR_FUNCTIONS, call, function)


def _trace_row(
    function: UserFunction | OnlineFunc, tracer: Tracer, rows: Sequence[str]
) -> tuple[RegionTrace, tuple[str, ...]]:
    final: list[str] = []

    def call(region: RegionTrace) -> None:
        s = region.arguments[0]
        for argument in (region.block.args[0], region.block.args[4]):
            region.levels[argument] = Level.ELEMENT
        if isinstance(function, OnlineFunc):
            weight, names = trace_online_func(region, function)
            final.extend(names)
        else:
            weight = _row_weight(region, function)
        p = weight.value
        region.finish(p, *(_lse(region, s, p) if name == "lse" else _largest(region, s).value for name in rows))

    table = FOLDING_FUNCTIONS if isinstance(function, OnlineFunc) else ROW_FUNCTIONS
    written = function.online_fwd if isinstance(function, OnlineFunc) else function
    return tracer.run("row", ROW, table, call, written), tuple(final)


def _row_weight(region: RegionTrace, function: UserFunction) -> Symbol:
    arity = choose_arity(function, "row", (1, 4, 5), "row(s) or row(s, b, h, q_idx)")
    weight = _number(region, function, function(*region.arguments[:arity]))
    if region.level(weight) is Level.ROW:
        refuse(
            ReturnValueError,
            "row returns one number per row, not one per key",
            "return the weight of the element: torch.exp(s - s.amax()) / ...",
            function,
        )
    return weight


def _lse(region: RegionTrace, s: Symbol, p: SSAValue) -> SSAValue:
    """m + log(sum(exp(s - m))), with the maximum that the function takes itself, if it takes one."""
    if not is_softmax_like(region.block, p):
        refuse(
            LseError,
            "return_lse for a row function that is no softmax: its weight is not exp(s - a) times a value of the row",
            "leave return_lse out, or use a softmax-like row function",
        )
    m = _largest(region, s)
    total: Symbol = region.apply("sum", (region.emit(math.ExpOp((s - m).value)),), {})
    return (m + region.emit(math.LogOp(total.value))).value


def _largest(region: RegionTrace, s: Symbol) -> Symbol:
    """The largest score: the maximum that the function takes itself, if it takes one."""
    maxima = [
        op.result
        for op in region.block.ops
        if isinstance(op, attn.RowReduceOp) and op.kind.data is attn.ReduceKind.MAX and op.value is s.value
    ]
    return Symbol(region, maxima[0]) if maxima else region.apply("amax", (s,), {})


def _trace_element(name: str, function: UserFunction, tracer: Tracer, channels: int) -> RegionTrace:
    arity = choose_arity(function, name, (1, 5), f"{name}(x) or {name}(x, b, h, pos, channel)")

    def call(region: RegionTrace) -> None:
        region.channels = channels
        for argument in (region.block.args[0], region.block.args[4]):
            region.levels[argument] = Level.ELEMENT
        region.finish(_number(region, function, function(*region.arguments[:arity])).value)

    return tracer.run(name, ELEMENT, ROW_FUNCTIONS, call, function)


def _returned(region: RegionTrace, function: UserFunction, result: Any) -> Symbol:
    if isinstance(result, Vector):
        result.refuse_whole()
    if not isinstance(result, Symbol | torch.Tensor | bool | int | float):
        kind = "None" if result is None else f"a {type(result).__name__}"
        refuse(
            ReturnValueError,
            f"{region.name} returns {kind}",
            "return one traced value; every path of the function needs a return",
            function,
        )
    if isinstance(result, torch.Tensor) and _elements(result) != 1:
        refuse(
            ReturnValueError,
            f"{region.name} returns a tensor of shape {tuple(result.shape)}",
            "return one element of it: table[b, h, q_idx, kv_idx]",
            function,
        )
    return region.symbol(result)


def _elements(tensor: torch.Tensor) -> int:
    with untraced():
        return tensor.numel()


def _number(region: RegionTrace, function: UserFunction, result: Any) -> Symbol:
    """The returned value as f32."""
    symbol = _returned(region, function, result)
    if symbol.scalar_type == i1:
        refuse(
            ReturnValueError,
            f"{region.name} returns a condition, not a number",
            "use mask_mod to hide keys, or torch.where(condition, a, b) for two numbers",
            function,
        )
    return region.as_f32(symbol)


# Assembly
def _drop_unread_captures(tracer: Tracer, regions: Mapping[str, RegionTrace]) -> list[int]:
    """Give every region an argument per capture that is read at all, and return these captures."""
    for region in regions.values():
        if tracer.captures:
            region.capture_argument(len(tracer.captures) - 1)
    used = [
        i
        for i in range(len(tracer.captures))
        if any(region.block.args[len(region.leading) + i].uses for region in regions.values())
    ]
    for region in regions.values():
        for i in reversed(range(len(tracer.captures))):
            if i not in used:
                region.block.erase_arg(region.block.args[len(region.leading) + i])
    return used


def _module(
    captures: Sequence[Any],
    regions: Mapping[str, RegionTrace],
    element: Any,
    head_dim: int,
    head_dim_v: int,
    rows: Sequence[str],
) -> ModuleOp:
    def tensor(channels: int) -> TensorType[Any]:
        return TensorType(element, [DYNAMIC_INDEX] * 3 + [channels])

    arguments = {"q": tensor(head_dim), "k": tensor(head_dim), "v": tensor(head_dim_v), "scale": f32}
    arguments |= {capture.name: capture.type for capture in captures}
    block = Block(arg_types=list(arguments.values()))
    for argument, name in zip(block.args, arguments, strict=True):
        argument.name_hint = name
    q, k, v, scale, *rest = block.args
    outputs = [TensorType(f32, [DYNAMIC_INDEX] * 3) for _ in rows]
    attention = attn.AttentionOp(
        operands=[q, k, v, scale, rest],
        result_types=[tensor(head_dim_v), outputs, []],
        regions=[
            _region(regions.get(name)) for name in ("query_mod", "key_mod", "value_mod", "score_mod", "mask", "row")
        ]
        + [[] for _ in ("blocks", "blocks_t", *attn.KIND_REGIONS)],
    )
    for result, name in zip(attention.results, ("o", *rows), strict=True):
        result.name_hint = name
    block.add_ops([attention, func.ReturnOp(*attention.results)])
    types = [r.type for r in attention.results]
    return ModuleOp([func.FuncOp("attention", (list(arguments.values()), types), Region(block))])


def _region(trace: RegionTrace | None) -> Any:
    return [] if trace is None else Region(trace.block)
