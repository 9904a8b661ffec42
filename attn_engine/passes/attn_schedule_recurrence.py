"""attn-schedule-recurrence: how each recurrence and sweep is cut for a device and a number of heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import ceil

from xdsl.context import Context
from xdsl.dialects.builtin import DictionaryAttr, IntegerAttr, ModuleOp, TensorType, i64
from xdsl.passes import ModulePass
from xdsl.utils.str_enum import StrEnum

from attn_engine.arch import Arch, get_arch
from attn_engine.dialects import attn, tile
from attn_engine.ir.schedule import padded

WARPS, THREADS = 4, 128
STATE = 64 * THREADS
"""Numbers of a state per program: 64 registers of each thread leave enough for the products."""
COLUMNS = 128
LARGEST_KEY = 256
"""Key channels whose queries the registers of four warps hold; eight do the rest."""
WIDE = 4
"""Times as many numbers of a state do eight warps hold, 128 registers of each thread: narrower tiles cost more."""
PAIRED_KEY = 128
"""More key channels than these, and at most the largest, are for turned states of eight warps where blocks are copied."""
WARPGROUP_ROWS = 64
"""Rows of a product of four warps: of a state with as many value channels each thread holds one part as left operand."""
PARTS = 2
"""Operands of products that hold what is computed: what a half type holds of it, and what of the rest."""
RESERVED = 1024
"""Bytes of shared memory that each block of threads costs beside its own."""
FULL, HALF = 0.8, 0.5
"""Programs per place from which on, and up to which, cutting sequences into pieces that run side by side is no use, pays."""
SHORTEST = 256
"""Tokens of a piece below which passing its state on is not worth it."""
AHEAD = 3
"""Stages with which values and what is one number per token are copied two chunks ahead; `bytes` counts two places of
values anyway, and queries and keys, which products read until the end of a chunk, have two with any number."""
CHAINING = 0.03
"""What each further piece in a chain costs, as a part of the time."""


@dataclass(frozen=True)
class OpForm:
    """Of one op: value channels per program, orientation, pieces and how they are joined, warps and stages, care."""

    value_block: int
    turned: bool
    pieces: int
    chained: bool
    num_warps: int
    num_stages: int
    careful: bool = False

    def attribute(self) -> DictionaryAttr:
        told = {name: int(value) for name, value in asdict(self).items() if name != "careful" or value}
        return DictionaryAttr({name: IntegerAttr(value, i64) for name, value in told.items()})


def form_of(attributes: Mapping[str, object]) -> dict[str, int]:
    """The numbers of an op's `form` attribute, if it has one."""
    form = attributes.get("form")
    if not isinstance(form, DictionaryAttr):
        return {}
    return {name: value.value.data for name, value in form.data.items() if isinstance(value, IntegerAttr)}


class Kind(StrEnum):
    """What a chunk does: its state decays as a whole, by rows, by columns, or the delta rule writes it, by rows or not."""

    SCALAR = "scalar"
    ROWS = "rows"
    COLUMNS = "columns"
    DELTA = "delta"
    DELTA_ROWS = "delta rows"

    @property
    def delta(self) -> bool:
        return self in (Kind.DELTA, Kind.DELTA_ROWS)


@dataclass(frozen=True)
class Work:
    """What matters of an op: padded channels, bytes of an element, what its chunks do."""

    key: int
    value: int
    size: int
    kind: Kind
    packed: bool
    summed: bool = False
    """Whether sums over the channels of results are wanted: turned, they cross warps."""
    weighted: bool = False
    crowded: bool = False
    """Whether operands of products lie in registers beside the state."""

    @classmethod
    def of(cls, op: attn.RecurrenceOp | attn.SweepOp | attn.DeltaBackwardOp, arch: Arch) -> Work:
        size = 4 if str(tile.element_of(op.v)) == "f32" else 2
        summed = isinstance(op, attn.SweepOp) and op.dot is not None
        weighted = not isinstance(op, attn.DeltaBackwardOp) and op.weight is not None
        key, value = (padded(_shape(x.type)[3]) for x in (op.q, op.v))
        return cls(
            key, value, size, _kind(op), op.bounds is not None, summed, weighted, crowded=arch.operands_in_registers
        )

    def block(self) -> int:
        """A sweep whose rows decay has no weights to make: its state may take more registers."""
        numbers = 2 * STATE if self.kind is Kind.ROWS and not self.weighted else STATE
        if self.key > LARGEST_KEY:
            numbers *= WIDE if self.kind is Kind.SCALAR and self.size == 2 else 2
        numbers = numbers * 2 // self.size // (2 if self.crowded else 1)
        return max(16, min(COLUMNS, self.value, numbers // self.key))

    def paired(self, blocks: bool) -> bool:
        """Whether two warpgroups hold a state that is turned: fewer programs read queries and keys."""
        fits = PAIRED_KEY < self.key <= LARGEST_KEY and self.value >= WARPGROUP_ROWS
        return blocks and fits and self.kind is Kind.SCALAR and self.size == 2

    def columns(self, blocks: bool) -> int:
        """Value channels per program. Sums over them need registers beside those of the state."""
        if not self.paired(blocks):
            return self.block()
        return WARPGROUP_ROWS if self.summed else min(2 * WARPGROUP_ROWS, self.value)

    def bytes(self, chunk: int, stages: int, blocks: bool = False) -> int:
        """Shared memory: the tiles that loads bring, `stages` times, and operands of products."""
        columns = self.columns(blocks)
        tiles = chunk * (2 * self.key + columns) * self.size
        if self.kind is Kind.DELTA:
            tiles += chunk * (self.key * self.size + columns * 4)
        elif self.kind is Kind.DELTA_ROWS:
            tiles += chunk * (self.key + PARTS * chunk) * self.size
        elif self.kind is Kind.ROWS:
            tiles += PARTS * chunk * chunk * self.size
        elif self.kind is Kind.COLUMNS:
            tiles += chunk * columns * 4
        in_registers = self.paired(blocks) and columns == 2 * WARPGROUP_ROWS
        state = 0 if in_registers else self.key * columns
        if self.kind in (Kind.COLUMNS, Kind.DELTA, Kind.DELTA_ROWS):
            state *= PARTS
        elif self.kind is Kind.ROWS:
            state += chunk * (self.key + chunk)  # of what is turned, or on its way to memory
        return stages * tiles + (chunk * chunk + state) * self.size


def _kind(op: attn.RecurrenceOp | attn.SweepOp | attn.DeltaBackwardOp) -> Kind:
    delta = not isinstance(op, attn.SweepOp) and op.beta is not None
    if op.decay is None or len(_shape(op.decay.type)) == 3:
        return Kind.DELTA if delta else Kind.SCALAR
    if delta:
        return Kind.DELTA_ROWS
    return Kind.COLUMNS if isinstance(op, attn.SweepOp) and op.columns is not None else Kind.ROWS


def _shape(type_: object) -> tuple[int, ...]:
    assert isinstance(type_, TensorType)
    return type_.get_shape()


def choose(
    work: Work,
    arch: Arch,
    chunk: int,
    heads: int,
    tokens: int,
    blocks: bool,
    chains: bool = True,
    careful: bool = False,
) -> OpForm:
    """`heads` are those of all sequences; `blocks` says that blocks of tensors are copied whole, `chains` that programs
    may wait for each other."""
    stages = 2 if work.bytes(chunk, 2, blocks) <= arch.shared_per_block else 1
    columns, paired = work.columns(blocks), work.paired(blocks)
    turned = blocks and work.kind is Kind.SCALAR and columns == WARPGROUP_ROWS and not work.summed
    turned = paired or (turned and work.key <= LARGEST_KEY)
    programs = heads * ceil(work.value / columns)
    resident = max(1, min(2, arch.shared_per_multiprocessor // (work.bytes(chunk, stages, blocks) + RESERVED)))
    pieces, chained = _pieces(work, arch.multiprocessors * resident, programs, tokens)
    if chained and not chains:
        pieces, chained = 1, False
    if turned and not paired and stages == 2 and (pieces == 1 or chained):
        stages = AHEAD
    warps = WARPS if work.key <= LARGEST_KEY and not paired else 2 * WARPS
    narrow = columns < WARPGROUP_ROWS and (work.kind.delta or work.key > LARGEST_KEY)
    return OpForm(columns, turned, pieces, chained, warps, stages, careful and narrow)


def _pieces(work: Work, places: int, programs: int, tokens: int) -> tuple[int, bool]:
    """(pieces, whether they wait for each other) of a sequence."""
    if not programs:
        return 1, False
    if programs <= HALF * places:
        if work.kind.delta:
            return 1, False
        pieces = 1
        while programs * pieces * 2 <= places and tokens >= pieces * 2 * SHORTEST:
            pieces *= 2
        return pieces, False
    if programs <= places or work.packed:
        return 1, False
    best = min((1, 2, 4), key=lambda n: _time(n, places, programs, tokens))
    return best, best > 1


def _time(pieces: int, places: int, programs: int, tokens: int) -> float:
    """Of a chain, in the time of a whole sequence: rounds of shorter programs leave a shorter rest."""
    if pieces > 1 and tokens < pieces * 2 * SHORTEST:
        return float("inf")
    return ceil(programs * pieces / places) / pieces * (1 + CHAINING * (pieces - 1))


@dataclass(frozen=True)
class AttnScheduleRecurrencePass(ModulePass):
    """Writes to each `attn.recurrence`, `attn.sweep` and `attn.delta_backward` in which form `convert-recurrence-to-tile` shall lower it.

    ```
    %o = attn.recurrence %q, %k, %v scale %scale decay %g ...
    ```
    becomes, for few heads and many tokens,
    ```
    %o = attn.recurrence %q, %k, %v scale %scale decay %g attributes {form = {value_block = 64, pieces = 16, ...}} ...
    ```

    One sweep over whole sequences is best where programs just fill the device. Where they fill less than half of it,
    sequences are cut in pieces that run side by side between two passes over keys and values. Where they overfill it by
    a little, pieces form a chain: no work twice, and a shorter last round.
    """

    name = "attn-schedule-recurrence"

    arch: str = "sm_90"
    chunk: int = 64
    heads: int = 0
    """Of all sequences together; 0 is unknown."""
    tokens: int = 0
    """Of a sequence."""
    blocks: bool = False
    """Blocks of tensors are copied whole."""
    chains: bool = True
    """Programs may wait for each other: the target has `tile.await` and `tile.signal`."""

    careful: bool = False
    """The assembler is one that gets kernels of many products of narrow tiles wrong (ptxas 12.8 for Hopper: other results
    from call to call, or an illegal address; 13.0, and 12.8 that does not optimise, are right)."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        arch = get_arch(self.arch)
        for inner in op.walk():
            if isinstance(inner, attn.RecurrenceOp | attn.SweepOp | attn.DeltaBackwardOp):
                form = choose(
                    Work.of(inner, arch),
                    arch,
                    self.chunk,
                    self.heads,
                    self.tokens,
                    self.blocks,
                    self.chains,
                    self.careful,
                )
                inner.attributes["form"] = form.attribute()
