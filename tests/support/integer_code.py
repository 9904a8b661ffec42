"""Integer code of the attn dialect on numpy arrays."""

import numpy as np
from xdsl.dialects import arith

from attn_engine.dialects import attn
from attn_engine.passes.simplify_constants import constant_of

COMPUTE = {
    "arith.addi": np.add,
    "arith.subi": np.subtract,
    "arith.muli": np.multiply,
    "arith.maxsi": np.maximum,
    "arith.minsi": np.minimum,
    "arith.floordivsi": np.floor_divide,
    "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or,
    "arith.xori": np.bitwise_xor,
    "arith.select": np.where,
    "arith.extui": lambda a: np.asarray(a).astype(np.int64),
    "arith.extsi": lambda a: np.asarray(a).astype(np.int64),
    "arith.trunci": lambda a: np.asarray(a).astype(np.int32),
    "math.absi": np.abs,
}
KINDS = {"i1": np.bool_, "i32": np.int32, "i64": np.int64}
COMPARE = [np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal]


def run(block, args):
    """What integer code yields; arguments may be arrays that broadcast."""
    env = dict(zip(block.args, args, strict=True))
    for op in block.ops:
        values = [env[v] for v in op.operands]
        with np.errstate(over="ignore"):
            if isinstance(op, attn.YieldOp):
                return values
            if isinstance(op, arith.ConstantOp):
                env[op.result] = KINDS[str(op.result.type)](constant_of(op.result))
            elif isinstance(op, arith.CmpiOp):
                env[op.result] = COMPARE[op.predicate.value.data](*values)
            elif isinstance(op, attn.LoadOp):
                env[op.result] = values[0][
                    tuple(np.clip(i, -n, n - 1) for i, n in zip(values[1:], values[0].shape, strict=True))
                ]
            else:
                env[op.results[0]] = COMPUTE[op.name](*values)
    raise AssertionError("no attn.yield")
