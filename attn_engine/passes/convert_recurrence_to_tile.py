"""`convert-recurrence-to-tile`: recurrences to kernels over chunks of tokens, and the plan that launches them."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import builtin, func
from xdsl.ir import Operation
from xdsl.passes import ModulePass

from attn_engine.dialects import attn
from attn_engine.passes.lowering.recurrence.function import lower_function
from attn_engine.passes.lowering.recurrence.setting import Form


@dataclass(frozen=True)
class ConvertRecurrenceToTilePass(ModulePass):
    """Lowers each function that holds `attn.recurrence` or `attn.sweep` to a `tile.plan` and its kernels.

    ```
    func.func @forward(%q, %k, %v, %scale, %decay) { %o = attn.recurrence %q, %k, %v scale %scale decay %decay ... }
    ```
    becomes
    ```
    tile.kernel @forward_decay(...)       the sums of log decays within each chunk
    tile.kernel @forward_o_sweep(...)     { ...; scf.for %c = ... iter_args(%state = ...) { ... } }
    tile.plan @forward(%q, %k, %v, %scale, %decay, %o) { ...; tile.launch @forward_o_sweep grid(%splits, %heads, %sequences) }
    ```

    An attribute `form` of an op (see `attn-schedule-recurrence`) goes before the options here.
    Arguments of the plan are those of the function, then its results, in order.
    """

    name = "convert-recurrence-to-tile"

    chunk: int = 64
    """Tokens per chunk; 1 goes token by token, which every recurrence and every sweep can."""
    value_block: int = 64
    """Value channels per program: a state of 128 x 64 takes 64 registers of each thread of four warps."""
    pieces: int = 1
    """Parts of a sequence that run side by side, their states passed on between two sweeps; 1 is one sweep."""
    num_warps: int = 4
    num_stages: int = 2
    pad: bool = True
    """Hold channels in tiles whose size is a power of two of at least 16."""
    tf32: bool = False
    """Let products of f32 operands round them to 10 bits of mantissa."""

    descriptors: bool = False
    """Copy whole blocks of tensors through descriptors, which the device must have; not those of packed sequences."""
    turned: bool = False
    """Hold states as [value channels, key channels], and compute transposed results from them."""
    chained: bool = False
    """Pieces wait for each other's states in one sweep, rather than run side by side between two."""
    split_f32: bool = False
    """Compute products of f32 operands as three products of tf32, which keep about 21 bits."""

    part: int = 64
    """Channels at a time where each has its decay: a tile of 64 tokens takes 32 registers of each thread of four warps."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        form = Form(
            self.chunk, self.value_block, self.pieces, self.num_warps, self.num_stages, self.pad, self.tf32,
            self.descriptors, self.turned, self.chained, self.split_f32, self.part,
        )  # fmt: skip
        kinds = attn.RecurrenceOp | attn.SweepOp | attn.DeltaBackwardOp
        for function in [o for o in op.body.block.ops if isinstance(o, func.FuncOp)]:
            if any(isinstance(o, kinds) for o in function.body.block.ops):
                lowered: list[Operation] = lower_function(function, form)
                op.body.block.insert_ops_before(lowered, function)
                op.body.block.erase_op(function)
