"""The form of a forward kernel that the async passes take, and why others are not taken.

A block of queries, then loops over blocks of keys, each with two products: scores from the block of keys, then
weights times the block of values onto an accumulator. What lies between is anything that `tile.map` and
`tile.reduce` say. The first loop evaluates the mask and bounds its loads, so its body is right for any block.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects import arith, scf
from xdsl.dialects.builtin import DenseIntOrFPElementsAttr, FloatAttr, IntegerAttr, ModuleOp, TensorType, bf16, f16
from xdsl.ir import Block, Operation, SSAValue

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_view import RingOp
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.ir.async_schedule import AsyncSchedule
from attn_engine.ir.walks import behind
from attn_engine.passes.hopper.edit import Signature

_MATRIX_RANK = 2
_PRODUCTS = 2
_WARPS = 4


@dataclass(frozen=True)
class Step:
    """The two products of one block of keys, and the loads that feed them."""

    scores: tile.DotOp
    output: tile.DotOp
    k: tile.LoadOp
    v: tile.LoadOp

    @property
    def start(self) -> SSAValue:
        """The position of the block's first key."""
        return self.k.indices[2]


@dataclass(frozen=True)
class Forward:
    """A forward kernel, its launch, and its parts."""

    signature: Signature
    q: tile.LoadOp
    store: tile.StoreOp
    loops: tuple[scf.ForOp, ...]

    @property
    def kernel(self) -> tile.KernelOp:
        return self.signature.kernel

    @property
    def first_query(self) -> SSAValue:
        return self.store.indices[2]


def find_plan(module: ModuleOp, name: str) -> tile.PlanOp:
    """The plan of a name; raises `AsyncUnsupportedError` if there is none."""
    found = next((o for o in module.ops if isinstance(o, tile.PlanOp) and o.sym_name.data == name), None)
    if found is None:
        raise AsyncUnsupportedError(f"no plan is named @{name}")
    return found


def signature_of(module: ModuleOp, plan_name: str) -> Signature:
    """A plan's last launch, and the kernel that it launches; those in front find what blocks are visible."""
    launches = [o for o in find_plan(module, plan_name).body.block.ops if isinstance(o, tile.LaunchOp)]
    if not launches:
        raise AsyncUnsupportedError(f"plan @{plan_name} launches no kernel")
    name = launches[-1].kernel.root_reference.data
    kernel = next(o for o in module.ops if isinstance(o, tile.KernelOp) and o.sym_name.data == name)
    return Signature(kernel, launches[-1])


def consumers_of(kernel: tile.KernelOp) -> int:
    """Warpgroups among which the queries of a block are divided: a kernel's warps, in fours."""
    warps = kernel.attributes.get("num_warps")
    return max(1, warps.value.data // _WARPS) if isinstance(warps, IntegerAttr) else AsyncSchedule.consumers


def attribute(kernel: tile.KernelOp, name: str, default: int) -> int:
    """A number that the schedule left on a kernel."""
    found = kernel.attributes.get(name)
    return found.value.data if isinstance(found, IntegerAttr) else default


RingKey = tuple[SSAValue, tuple[int, ...], int]
"""A global tensor, the shape of the blocks that are loaded from it, and which of such loads of a step it is."""


def ring_key(load: tile.LoadOp) -> RingKey:
    """What tells the ring of a load apart: a step may read several blocks of one tensor."""
    assert load.parent is not None
    shape = tile.shape_of(load.result)
    loads = [op for op in load.parent.ops if isinstance(op, tile.LoadOp) and op.source is load.source]
    return load.source, shape, [op for op in loads if tile.shape_of(op.result) == shape].index(load)


def ring_bytes(kernel: tile.KernelOp) -> int:
    """Shared memory that the rings of a kernel take."""
    return sum(op.result.type.byte_size for op in kernel.body.block.ops if isinstance(op, RingOp))


def check_shared(kernel: tile.KernelOp, limit: int) -> None:
    """Raises `AsyncUnsupportedError` if the rings of a kernel take more bytes of shared memory."""
    need = ring_bytes(kernel)
    if need > limit:
        raise AsyncUnsupportedError(f"its blocks need {need} bytes of shared memory, of which there are {limit}")


def dots(block: Block) -> list[tile.DotOp]:
    return [o for o in block.ops if isinstance(o, tile.DotOp)]


def step_of(block: Block) -> Step:
    """The products of a block that holds one step."""
    found = dots(block)
    if len(found) == 1:
        raise AsyncUnsupportedError("its row function takes more than one pass over the keys")
    if len(found) != _PRODUCTS:
        raise AsyncUnsupportedError(f"a block of keys takes part in {len(found)} products instead of two")
    scores, output = found
    turned = scores.b.owner
    if not isinstance(turned, tile.TransposeOp) or not isinstance(turned.value.owner, tile.LoadOp):
        raise AsyncUnsupportedError("it modifies keys after loading them, and products read keys from shared memory")
    if not isinstance(output.b.owner, tile.LoadOp):
        raise AsyncUnsupportedError(
            "it modifies values after loading them, and products read values from shared memory"
        )
    if not is_zero(scores.acc):
        raise AsyncUnsupportedError("its scores start from another value than zero")
    return Step(scores, output, turned.value.owner, output.b.owner)


def tables_of(block: Block, step: Step) -> list[tile.LoadOp]:
    """Tiles with an element per score that a step loads beside keys and values."""
    shape = tile.shape_of(step.scores.result)
    loads = [o for o in block.ops if isinstance(o, tile.LoadOp) and tile.shape_of(o.result) == shape]
    return [o for o in loads if o is not step.k and o is not step.v and o.indices[-1] is step.start]


def is_zero(value: SSAValue) -> bool:
    """Whether a tile is a constant of zeros."""
    owner = value.owner
    if not isinstance(owner, arith.ConstantOp) or not isinstance(owner.value, DenseIntOrFPElementsAttr):
        return False
    splat = tile.splat_of(owner.value)
    return isinstance(splat, FloatAttr) and splat.value.data == 0.0


def read_forward(module: ModuleOp, plan_name: str) -> Forward:
    """The forward kernel of a plan at the value level; raises `AsyncUnsupportedError` if it has another form."""
    signature = signature_of(module, plan_name)
    block = signature.kernel.body.block
    loops = tuple(o for o in block.ops if isinstance(o, scf.ForOp))
    _check_ops(signature.kernel)
    if not loops:
        raise AsyncUnsupportedError("its kernel has no loop over keys")
    steps = [step_of(loop.body.block) for loop in loops]
    for step in steps:
        _check_operand(step.k)
        _check_operand(step.v)
        _check_registers(step, consumers_of(signature.kernel))
    if not steps[0].k.limits:
        raise AsyncUnsupportedError("its first loop is right for whole blocks of keys only")
    return Forward(signature, _query(steps[0].scores.a), _output(block), loops)


_TAKEN = (
    *(tile.LoadOp, tile.StoreOp, tile.MapOp, tile.ReduceOp, tile.DotOp, tile.TransposeOp, tile.RangeOp),
    *(tile.GatherOp, tile.DimOp, tile.ProgramIdOp, tile.EndOp, tile.MapYieldOp, scf.ForOp, scf.YieldOp),
    tile.LoadDiagonalsOp,
)


def _check_ops(kernel: tile.KernelOp) -> None:
    for op in kernel.walk():
        known = isinstance(op, _TAKEN) or op.name.startswith(("arith.", "math."))
        if op is not kernel and not known:
            raise AsyncUnsupportedError(f"its kernel holds '{op.name}'")


def _check_operand(load: tile.LoadOp) -> None:
    if tile.element_of(load.result) not in (f16, bf16):
        raise AsyncUnsupportedError(f"its operands are {tile.element_of(load.result)}, not f16 or bf16")
    if tile.ints_of(load.dims) != (2, 3):
        raise AsyncUnsupportedError("it loads operands transposed")


def _check_registers(step: Step, consumers: int) -> None:
    """Scores, output and weights of a consumer live at the same time."""
    (keys, channels), (_, columns) = tile.shape_of(step.k.result), tile.shape_of(step.v.result)
    if not AsyncSchedule.fits(consumers, keys, 0, columns):
        need, limit = AsyncSchedule.needed(keys, 0, columns), AsyncSchedule.registers_of(consumers)
        raise AsyncUnsupportedError(
            f"{keys} keys and heads of {channels} and {columns} channels need {need} of {limit} registers, and some more"
        )


def _query(value: SSAValue) -> tile.LoadOp:
    """The load behind the first operand of the scores."""
    loads = [
        op for op in _behind(value) if isinstance(op, tile.LoadOp) and len(tile.shape_of(op.result)) == _MATRIX_RANK
    ]
    if len(loads) != 1:
        raise AsyncUnsupportedError("its queries come from more than one load")
    _check_operand(loads[0])
    return loads[0]


def _behind(value: SSAValue) -> list[Operation]:
    return list(dict.fromkeys(v.owner for v in behind([value]) if isinstance(v.owner, Operation)))


def _output(block: Block) -> tile.StoreOp:
    stores = [o for o in block.ops if isinstance(o, tile.StoreOp) and isinstance(o.value.type, TensorType)]
    wide = [o for o in stores if len(tile.shape_of(o.value)) == _MATRIX_RANK]
    if len(wide) != 1 or tile.ints_of(wide[0].dims) != (2, 3) or tile.element_of(wide[0].value) not in (f16, bf16):
        raise AsyncUnsupportedError("its output is not one tile of f16 or bf16")
    return wide[0]
