"""Scalar code of the ``attn`` dialect: what its regions hold beside ``arith`` and ``math``, and how they end."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import TensorType, f32, i1, i64
from xdsl.dialects.utils import EnumAttribute
from xdsl.ir import Attribute, Block, Operation, SSAValue
from xdsl.irdl import (
    AttrSizedOperandSegments,
    IRDLOperation,
    irdl_attr_definition,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    opt_prop_def,
    prop_def,
    result_def,
    traits_def,
    var_operand_def,
)
from xdsl.traits import IsTerminator, MemoryReadEffect, MemoryWriteEffect, Pure
from xdsl.utils.exceptions import VerifyException
from xdsl.utils.str_enum import StrEnum


class ReduceKind(StrEnum):
    """How the visible elements of a row become one number."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"
    COUNT = "count"


class TieRule(StrEnum):
    """Who receives the gradient of a maximum or minimum when several elements attain it."""

    SPLIT = "split"
    FIRST = "first"


@irdl_attr_definition
class ReduceKindAttr(EnumAttribute[ReduceKind]):
    name = "attn.reduce_kind"


@irdl_attr_definition
class TieRuleAttr(EnumAttribute[TieRule]):
    name = "attn.tie_rule"


SCALARS = (f32, i64, i1)


@irdl_op_definition
class YieldOp(IRDLOperation):
    """Ends a scalar region with its results.

    ```
    attn.yield %score : f32
    ```
    """

    name = "attn.yield"
    values = var_operand_def()
    traits = traits_def(IsTerminator(), Pure())
    assembly_format = "($values^ `:` type($values))? attr-dict"

    def __init__(self, *values: SSAValue | Operation):
        super().__init__(operands=[list(values)])


@irdl_op_definition
class LoadOp(IRDLOperation):
    """Reads one element of a capture; narrow floats and integers are promoted to f32, i64, i1.

    An index is Python's: negative values count from the end. The read happens only for
    visible, in-range elements.

    ```
    %slope = attn.load %slopes[%h] : tensor<?xf32> -> f32
    ```
    """

    name = "attn.load"
    source = operand_def(TensorType)
    indices = var_operand_def(i64)
    result = result_def()
    traits = traits_def(MemoryReadEffect())
    assembly_format = "$source `[` $indices `]` attr-dict `:` type($source) `->` type($result)"

    def __init__(self, source: SSAValue, indices: Sequence[SSAValue | Operation], result: Attribute):
        super().__init__(operands=[source, list(indices)], result_types=[result])

    def verify_(self) -> None:
        assert isinstance(self.source.type, TensorType)
        rank = self.source.type.get_num_dims()
        if len(self.indices) != rank:
            raise VerifyException(f"source has rank {rank} but {len(self.indices)} indices are given")
        if self.result.type not in SCALARS:
            raise VerifyException(f"result must be f32, i64 or i1, got {self.result.type}")


@irdl_op_definition
class RowReduceOp(IRDLOperation):
    """Reduces a value over the visible keys of the row (in a step: of the row's current block).

    In the regions of operands (`query_mod`, `key_vjp`, ...) it reduces over the channels of the operand's row.

    A row without a visible key gives the identity (0, -inf, +inf, 0). A *dead* row is one
    without a visible key, or in which a `max` gives -inf or a `min` gives +inf: its
    weights are 0 whatever the formula says.

    ```
    %m = attn.row_reduce max %s
    %n = attn.row_reduce count %s
    ```
    """

    name = "attn.row_reduce"
    kind = prop_def(ReduceKindAttr)
    ties = opt_prop_def(TieRuleAttr)
    value = operand_def(f32)
    result = result_def(f32)
    traits = traits_def(Pure())
    assembly_format = "$kind $value (`ties` $ties^)? attr-dict"

    def __init__(self, kind: ReduceKind, value: SSAValue | Operation, ties: TieRule | None = None):
        props = {"kind": ReduceKindAttr(kind), "ties": TieRuleAttr(ties) if ties else None}
        super().__init__(operands=[value], result_types=[f32], properties=props)


@irdl_op_definition
class ChannelAtOp(IRDLOperation):
    """What a value is at another channel of the row; only in the regions of operands (`query_mod`, `key_vjp`, ...).

    The index depends on the channel alone and lies in [0, channels). Rotary embeddings read their partner:

    ```
    %partner = attn.channel_at %x[%other]
    ```
    """

    name = "attn.channel_at"
    value = operand_def(f32)
    index = operand_def(i64)
    result = result_def(f32)
    traits = traits_def(Pure())
    assembly_format = "$value `[` $index `]` attr-dict"

    def __init__(self, value: SSAValue | Operation, index: SSAValue | Operation):
        super().__init__(operands=[value, index], result_types=[f32])


@irdl_op_definition
class AccumulateGradOp(IRDLOperation):
    """Adds a value to the gradient of one capture element; the index is that of the load.

    Only inside the `element`, `rows` and `..._vjp` regions of `attn.backward`. Contributions of masked
    elements do not happen.

    ```
    attn.accumulate_grad %d, %slopes[%h] : tensor<?xf32>
    ```
    """

    name = "attn.accumulate_grad"
    value = operand_def(f32)
    capture = operand_def(TensorType)
    indices = var_operand_def(i64)
    traits = traits_def(MemoryWriteEffect())
    assembly_format = "$value `,` $capture `[` $indices `]` attr-dict `:` type($capture)"

    def __init__(self, value: SSAValue | Operation, capture: SSAValue, indices: Sequence[SSAValue]):
        super().__init__(operands=[value, capture, list(indices)])


@irdl_op_definition
class StepYieldOp(IRDLOperation):
    """Ends one online step: the new states, and in the last step the rescale factor and the weight.

    ```
    attn.step_yield states(%m, %l) rescale(%alpha) weight(%e)
    ```
    """

    name = "attn.step_yield"
    states = var_operand_def(f32)
    rescale = opt_operand_def(f32)
    weight = opt_operand_def(f32)
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(IsTerminator(), Pure())
    assembly_format = "`states` `(` $states `)` (`rescale` `(` $rescale^ `)`)? (`weight` `(` $weight^ `)`)? attr-dict"

    def __init__(self, states: Sequence[SSAValue], rescale: SSAValue | None = None, weight: SSAValue | None = None):
        super().__init__(operands=[list(states), rescale, weight])


@irdl_op_definition
class CombineYieldOp(IRDLOperation):
    """Ends the combination of two partial results: their states as one, and in the last step a factor for each accumulator.

    ```
    attn.combine_yield states(%m, %l) rescale(%alpha_a, %alpha_b)
    ```
    """

    name = "attn.combine_yield"
    states = var_operand_def(f32)
    rescale = var_operand_def(f32)
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(IsTerminator(), Pure())
    assembly_format = "`states` `(` $states `)` (`rescale` `(` $rescale^ `)`)? attr-dict"

    def __init__(self, states: Sequence[SSAValue], rescale: Sequence[SSAValue] = ()):
        super().__init__(operands=[list(states), list(rescale)])


@irdl_op_definition
class EpilogueYieldOp(IRDLOperation):
    """Ends an epilogue: the row factor of the accumulator, the op's row outputs, what backward saves.

    ```
    attn.epilogue_yield scale(%g) outputs(%lse) saved(%lse)
    ```
    """

    name = "attn.epilogue_yield"
    scale = operand_def(f32)
    outputs = var_operand_def(f32)
    saved = var_operand_def(f32)
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(IsTerminator(), Pure())
    assembly_format = "`scale` `(` $scale `)` `outputs` `(` $outputs `)` `saved` `(` $saved `)` attr-dict"

    def __init__(self, scale: SSAValue, outputs: Sequence[SSAValue], saved: Sequence[SSAValue]):
        super().__init__(operands=[scale, list(outputs), list(saved)])


def check_block(name: str, block: Block, leading: Sequence[Attribute], captures: Sequence[SSAValue]) -> None:
    """Block arguments are `leading` and then one argument per capture, of the same type."""
    expected = [*leading, *(c.type for c in captures)]
    actual = [a.type for a in block.args]
    if expected != actual:
        raise VerifyException(
            f"{name}: block arguments are ({', '.join(map(str, actual))}), expected ({', '.join(map(str, expected))})"
        )


def check_yield(name: str, block: Block, expected: Sequence[Attribute]) -> None:
    """The region ends in `attn.yield` of the expected types."""
    last = block.last_op
    if not isinstance(last, YieldOp):
        raise VerifyException(f"{name}: region must end in attn.yield")
    actual = [v.type for v in last.values]
    if actual != list(expected):
        raise VerifyException(
            f"{name}: yields ({', '.join(map(str, actual))}), expected ({', '.join(map(str, expected))})"
        )
