"""On which axes a scalar depends: the analysis behind broadcasting, hoisting and gradient reduction.

A scalar region of the ``attn`` dialect stands for one value per point of batch x head x query x key
(or per element of an operand). A value that depends on ``h`` only is one number per head; one
that does not depend on ``kv`` can leave the loop over the keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.ir import Block, Operation, Region, SSAValue

from attn_engine.dialects import attn

Axes = frozenset[str]

AXES = ("b", "h", "q", "kv", "channel")
NONE: Axes = frozenset()
ROW: Axes = frozenset({"b", "h", "q"})
SCORE: Axes = frozenset({"b", "h", "q", "kv"})
SCORE_INDICES = (frozenset({"b"}), frozenset({"h"}), frozenset({"q"}), frozenset({"kv"}))
ROW_INDICES = SCORE_INDICES[:3]

# In a recurrence queries, keys and values share the position of their token.
_POSITION = {"query": "q", "key": "kv", "value": "kv", "q": "q", "k": "q", "v": "q", "decay": "q"}
_BLOCK_POSITION = {"blocks": "q", "blocks_t": "kv"}

AnyAttention = attn.AttentionOp | attn.OnlineOp | attn.BackwardOp | attn.RecurrenceOp


def axes_of_region(block: Block, argument_axes: Sequence[Axes]) -> dict[SSAValue, Axes]:
    """The axes of every value in a scalar region, given those of its arguments."""
    if len(argument_axes) != len(block.args):
        raise ValueError(f"{len(argument_axes)} axis sets for {len(block.args)} block arguments")
    axes: dict[SSAValue, Axes] = dict(zip(block.args, argument_axes, strict=True))
    for op in block.ops:
        result = _result_axes(op, axes)
        axes.update((value, result) for value in op.results)
    return axes


def _result_axes(op: Operation, axes: dict[SSAValue, Axes]) -> Axes:
    union = NONE.union(*(axes.get(operand, NONE) for operand in op.operands))
    if not isinstance(op, attn.RowReduceOp):
        return union
    if "channel" in union:
        return union - {"channel"}
    # A count looks at the row's visibility, never at the value: it is a row's own number.
    return ROW if op.kind.data == attn.ReduceKind.COUNT else (union - {"kv"}) | ROW


def region_argument_axes(op: AnyAttention, name: str, index: int = 0) -> list[Axes]:
    """The axes of the arguments of one named region; `index` picks one of `steps` or `row_steps`.

    Captures are whole tensors, not scalars, and depend on no axis.
    """
    region = _region(op, name, index)
    leading = _leading_axes(name)
    rest = len(region.block.args) - len(leading) - len(op.captures)
    return [*leading, *[ROW] * rest, *[NONE] * len(op.captures)]


def axes_of(op: AnyAttention, name: str, index: int = 0) -> dict[SSAValue, Axes]:
    """The axes of every value in one named region of an attention."""
    return axes_of_region(_region(op, name, index).block, region_argument_axes(op, name, index))


def _region(op: AnyAttention, name: str, index: int) -> Region:
    found: Region | Sequence[Region] | None = getattr(op, name, None)
    if found is None:
        raise ValueError(f"{op.name} has no region '{name}'")
    return found if isinstance(found, Region) else found[index]


def _leading_axes(name: str) -> tuple[Axes, ...]:
    """What a region's arguments are before its row vectors, states and captures."""
    match name:
        case "score_mod" | "row" | "steps":
            return (SCORE, *SCORE_INDICES)
        case "row_steps" | "element":
            return (SCORE, SCORE, *SCORE_INDICES)
        case "mask":
            return SCORE_INDICES
        case "rows" | "epilogue":
            return ROW_INDICES
        case "blocks" | "blocks_t":
            position = frozenset({_BLOCK_POSITION[name]})
            return (position, position, frozenset({"b"}), frozenset({"h"}), NONE, NONE)
        case _:
            return _element_axes(*name.split("_"))


def _element_axes(operand: str, kind: str) -> tuple[Axes, ...]:
    indices = tuple(frozenset({axis}) for axis in ("b", "h", _POSITION[operand], "channel"))
    element = NONE.union(*indices)
    return ((element, element) if kind == "vjp" else (element,)) + indices
