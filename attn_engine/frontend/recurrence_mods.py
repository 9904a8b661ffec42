"""Functions on the operands of a recurrence as regions of single elements, where tracing can express them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from xdsl.ir import Attribute, Region

from attn_engine.errors import AttnEngineError, TraceError
from attn_engine.frontend.build import ELEMENT
from attn_engine.frontend.reductions import SCALAR_FUNCTIONS
from attn_engine.frontend.region import RegionTrace
from attn_engine.frontend.symbols import Symbol
from attn_engine.frontend.trace import Tracer, choose_arity

Mod = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class TracedMods:
    """Regions by operand, and the types and names of the inputs that they read, in the order of their arguments."""

    regions: Mapping[str, Region]
    names: tuple[str, ...]
    types: tuple[Attribute, ...]


class _Inputs(Mapping[str, Symbol]):
    """Custom inputs of four dimensions, each as the number that belongs to the element."""

    def __init__(self, region: RegionTrace, tensors: Mapping[str, Tensor], fixed: Mapping[str, Sequence[bool]]):
        self.region, self.tensors, self.fixed = region, tensors, fixed

    def __getitem__(self, name: str) -> Symbol:
        places = self.region.arguments[1:]
        index = [0 if alike else place for alike, place in zip(self.fixed[name], places, strict=True)]
        return self.region.load(self.tensors[name], index)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def trace_mods(
    mods: Mapping[str, Mod | None], inputs: Mapping[str, Tensor], fixed: Mapping[str, Sequence[bool]]
) -> TracedMods | TraceError | None:
    """The regions of functions (x) or (x, inputs) on whole tensors.

    None, or why not, where they are more than element by element: then they run on whole tensors.
    `inputs` have four dimensions; `fixed` says which of them hold one number for all.
    """
    tracer = Tracer(
        [(tensor, name) for name, tensor in inputs.items()],
        next(iter(inputs.values())).device if inputs else torch.device("cpu"),
    )
    try:
        regions = {name: _traced(name, mod, tracer, inputs, fixed) for name, mod in mods.items() if mod is not None}
    except TraceError as error:
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)  # frames hold the tensors of the call
    except (AttnEngineError, TypeError, AttributeError, ValueError, RuntimeError):
        return None
    if tracer.reads_values:
        return None
    for region in regions.values():
        if tracer.captures:
            region.capture_argument(len(tracer.captures) - 1)
    names = {id(tensor): name for name, tensor in inputs.items()}
    found = [names.get(id(capture.original)) for capture in tracer.captures]
    if None in found or any(c.tensor is not c.original for c in tracer.captures):
        return None
    made = {name: Region(region.block) for name, region in regions.items()}
    return TracedMods(made, tuple(n for n in found if n), tuple(c.type for c in tracer.captures))


def _traced(
    name: str, mod: Mod, tracer: Tracer, inputs: Mapping[str, Tensor], fixed: Mapping[str, Sequence[bool]]
) -> RegionTrace:
    arity = choose_arity(mod, f"{name}_mod", (1, 2), f"{name}_mod(x) or {name}_mod(x, inputs)")

    def call(region: RegionTrace) -> None:
        given = [_Inputs(region, inputs, fixed)] if arity == 2 else []
        result = region.symbol(mod(region.arguments[0], *given))
        region.finish(region.as_f32(result).value)

    return tracer.run(f"{name}_mod", ELEMENT, SCALAR_FUNCTIONS, call, mod)
