"""`convert-attn-to-tile`: whole-tensor attention to kernels over blocks, and the plan that launches them."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import builtin, func
from xdsl.ir import Operation
from xdsl.passes import ModulePass

from attn_engine.dialects import attn
from attn_engine.passes.lowering.backward import BackwardLowering
from attn_engine.passes.lowering.forward import ForwardLowering
from attn_engine.passes.lowering.kernel import Blocks
from attn_engine.passes.lowering.split_keys import Split, SplitForwardLowering


@dataclass(frozen=True)
class ConvertAttnToTilePass(ModulePass):
    """Lowers each function that holds one `attn.online` or `attn.backward` to a `tile.plan` and its kernels.

    ```
    func.func @attention(%q, %k, %v, %scale) { %o = attn.online %q, %k, %v scale %scale ... }
    ```
    becomes
    ```
    tile.kernel @forward_kernel(%q, %k, %v, %o, ...) { ...; scf.for %n0 = ... }
    tile.plan @forward(%q, %k, %v, %o, %scale) { ...; tile.launch @forward_kernel grid(%q_blocks, %heads, %batch) ... }
    ```

    A schedule is four numbers: queries per block, keys per block, warps, pipeline stages.
    """

    name = "convert-attn-to-tile"

    forward: tuple[int, ...] = (64, 64, 4, 2)
    """Schedule of the forward kernel."""
    rows: tuple[int, ...] = (64, 64, 4, 1)
    """Schedule of the kernel of row vectors (delta)."""
    dq: tuple[int, ...] = (64, 64, 4, 2)
    """Schedule of the dq kernel."""
    dkdv: tuple[int, ...] = (64, 64, 4, 2)
    """Schedule of the dk/dv kernel."""
    pad: bool = True
    """Hold head dims in tiles whose size is a power of two of at least 16."""
    channels: int = 0
    """Instead, of the forward pass: in tiles whose size is a multiple of this."""
    tf32: bool = False
    """Let products of f32 operands round them to 10 bits of mantissa."""
    covered: bool = False
    """Captures are at least as long as the tensors wherever b, h, q or kv index them directly: no guard is needed."""
    whole: bool = False
    """Both lengths are multiples of every block: no block goes beyond its tensor, and none is loaded or masked as if."""
    tables: bool = True
    """Launch kernels that find the ranges of blocks of masks that read captures at positions."""
    table_tile: int = 1
    """Rows and columns of the tiles of these kernels, at least."""
    descriptors: bool = False
    """Copy blocks of q, k, v, o and d_o through descriptors, which the device must have."""
    one_loop: bool = False
    """Walk blocks that need no mask in the same loop as those that do, for targets that pipeline one loop of a kernel."""
    fused: bool = False
    """Find dq in the dk/dv kernel, by atomic additions in memory: fewer products, sums in no particular order."""
    alike: bool = False
    """There, every program takes the same steps, for passes that put what programs add into an order."""
    apart: bool = False
    """Find dk and dv in kernels of their own, for heads so wide that registers do not hold the sums of both."""
    exact: bool = False
    """Captures are exactly as long as the tensors wherever b, h, q or kv index them directly."""
    single: bool = False
    """Add to memory element by element, so that the additions of each place can be put in a fixed order."""
    by_batch: bool = False
    """Store gradients of tables of scores that all batches share once for each batch, for a kernel to add up."""
    masks_once: bool = True
    """Mask weights alone where what is multiplied with them vanishes too, not gradients of scores once more."""
    rounded: bool = False
    """Where kernels are fused, add these up in the type of the table instead, in no particular order."""
    diagonals: bool = False
    """Sum gradients of what is read by the distance of two positions along diagonals, in front of adding them to memory."""
    distances: str = ""
    """Compute once for each distance of two positions what scores compute, or read, by it alone; these numbers are then
    "loaded" in blocks, or "gathered" score by score."""
    positive_scale: bool = False
    """The scale is known to be above 0: a maximum of scaled scores is then the scaled maximum."""
    parts: int = 1
    """Fold the keys of the forward pass in so many parts, which one more kernel combines."""
    programs: int = 0
    """In place of `parts`: as many parts as it takes for about so many programs to run."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for function in [o for o in op.body.block.ops if isinstance(o, func.FuncOp)]:
            inner = next((o for o in function.body.block.ops if isinstance(o, attn.OnlineOp | attn.BackwardOp)), None)
            if inner is None:
                continue
            op.body.block.insert_ops_before(self._lower(inner), function)
            op.body.block.erase_op(function)

    def _lower(self, op: attn.OnlineOp | attn.BackwardOp) -> list[Operation]:
        table_tile = self.table_tile if self.tables else 0
        shared = (self.covered, self.whole, table_tile, self.descriptors, self.one_loop)
        if isinstance(op, attn.OnlineOp):
            options = (op, "forward", Blocks(*self.forward), self.pad, self.tf32, self.positive_scale, *shared)
            split = Split(self.parts, self.programs)
            if split.is_wanted:
                return SplitForwardLowering(*options, split=split).run()
            return ForwardLowering(*options, distances=self.distances, unit=self.channels).run()
        kernels = (Blocks(*self.rows), Blocks(*self.dq), Blocks(*self.dkdv))
        return BackwardLowering(
            op,
            "backward",
            *kernels,
            self.pad,
            self.tf32,
            *shared,
            self.fused,
            self.diagonals,
            self.apart,
            self.exact,
            self.single,
            self.by_batch,
            self.masks_once,
            self.distances,
            self.rounded,
            self.alike,
        ).run()
