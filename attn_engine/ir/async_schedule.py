"""The schedule of a kernel of roles: blocks, rings, registers, and what is in flight. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from attn_engine.ir.schedule import BYTES, F32_BYTES, SMALLEST_TILE, Heads, KernelSchedule, Kind, padded

_MIB = 1 << 20
WARPGROUP_ROWS = 64
"""Rows of a product of one warpgroup."""
WARPGROUP_THREADS = 128
PRODUCTS_PER_CYCLE = 2048
"""Of numbers of 16 bits, on the tensor cores of a multiprocessor: 64 x N x 16 takes N / 2 cycles."""
_WARPS = 4
_WIDE = 128
_HALF_BYTES = 2
_CHANNELS = 32
"""Tiles round heads up to a multiple of it."""
_VECTOR_BYTES = 8
"""Of a position, besides the heads: numbers per row of scores."""
_REGISTERS = {1: 240, 2: 240, 3: 160}
_MOST_CONSUMERS = max(_REGISTERS)


@dataclass(frozen=True)
class AsyncSchedule:
    """What the passes towards the async level take as options, with the values that were best on an H100."""

    block_n: int = 128
    """Keys of a block; fewer where heads of more than 128 channels leave too few registers or too little shared memory."""
    stages: int = 2
    """Blocks of keys, and of values, that a ring holds."""
    gradient_block: int = 64
    """Keys of a step of dq, queries of a step of dk and dv."""
    dq_stages: int = 4
    dkdv_stages: int = 3
    fused_stages: int = 3
    """At most, of dk and dv where their kernel finds dq too, whose operand and result also pass through shared memory.
    On an H200 three were 0.5 to 4 % faster than two, with 128 channels; gradients of captures leave less room."""
    least_stages: int = 2
    """Of steps of that kernel, or they are not as long as they could be."""
    deferred_registers: int = 256
    """Of a consumer's thread, for results and operands of the products of a step whose sums are a step late. With 288, 64 channels
    and 128 queries, the assembler spills."""
    table_stages: int = 2
    """Blocks of a table of scores that a ring holds."""
    consumers: int = 2
    """Warpgroups that compute, 64 queries each."""
    consumer_registers: int = _REGISTERS[2]
    """Of two consumers."""
    producer_registers: int = 24
    other_registers: int = 40
    """Of a consumer's, those that hold no block if its queries are in registers too."""
    least_other_registers: int = 24
    """Of a consumer's, those that hold no block: with fewer the assembler serialises products."""
    l2_bytes: int = 8 * _MIB
    """Keys and values of the heads that run at the same time."""
    shared_bytes: int = 226 * 1024
    """What a program may have, but for barriers and cells."""
    apart_arrivals: bool = False
    """Whether the threads of a consumer release slots each for itself: else its warps meet at every release."""
    held_cycles: int = 512
    """Products of a step up to which slots are released under the next ones. On an H200, held beside released at once:
    512 cycles (64 channels, 128 keys) up to 5 % faster; 640 (192 and 128, 64 keys) 1 % slower, 1024 with two stages 2 to 10 %."""
    pin: bool = True
    """Whether to keep the assembler from hoisting the wait for a product above the exponentials."""

    @property
    def block_m(self) -> int:
        """Queries of a program."""
        return WARPGROUP_ROWS * self.consumers

    @staticmethod
    def registers_of(consumers: int) -> int:
        """Of a thread of a consumer: what a multiprocessor has, shared among the consumers, up to what code can name."""
        return _REGISTERS.get(consumers, _REGISTERS[_MOST_CONSUMERS])

    @classmethod
    def holds(cls, cycles: int) -> bool:
        """Whether slots are released under the products of the next step, where those of one step take so many cycles."""
        return cycles <= cls.held_cycles

    @staticmethod
    def needed(keys: int, channels: int, columns: int) -> int:
        """Of a consumer's thread: scores and output in f32, weights in 16 bits; `channels` of queries, or 0, in 16 bits."""
        words = 2 * (keys + columns) + channels + keys  # halves of a row's registers
        return words * WARPGROUP_ROWS // (2 * WARPGROUP_THREADS)

    @classmethod
    def fits(cls, consumers: int, keys: int, channels: int, columns: int) -> bool:
        """Whether a consumer's registers hold what a step needs and leave those that hold no block."""
        spare = cls.other_registers if channels else cls.least_other_registers
        return cls.needed(keys, channels, columns) + spare <= cls.registers_of(consumers)

    def candidates(self, heads: Heads, narrow: bool = False, whole: bool = False) -> tuple[KernelSchedule, ...]:
        """Blocks, warps and stages of the forward at the value level, for the passes to start from; the best one first.

        `narrow` says that few keys are visible to a query, or that scores need registers of their own, `whole` that no
        block is masked and that weights are exponentials: then narrow heads leave registers for a third consumer.
        """
        size = max(padded(heads.qk), padded(heads.v))
        keys = self.block_n if size <= _WIDE else self._keys_held(heads, size)
        small = size <= _WIDE // 2
        warps = _WARPS * self.consumers
        wide = KernelSchedule(
            self.block_m, keys, warps, self._blocks_held(heads, keys, 2 * self.stages if small else 3)
        )
        less = KernelSchedule(self.block_m, max(SMALLEST_TILE, keys // 2), warps, self.stages + 1)
        if narrow or heads.gathered > _HALF_BYTES:
            return (less, wide)
        three = KernelSchedule(3 * WARPGROUP_ROWS, keys, 3 * _WARPS, self.stages)
        return (three, wide, less) if small and whole and not heads.gathered else (wide, less)

    @staticmethod
    def first_part(channels: int) -> int:
        """Heads whose size is no power of two are held in parts whose sizes are: the largest one, which comes first."""
        return 1 << (channels.bit_length() - 1)

    def _keys_held(self, heads: Heads, size: int) -> int:
        """Of a block of keys of wide heads, of which two fit beside queries that products read from shared memory."""
        qk, v = (-(-head // _CHANNELS) * _CHANNELS for head in (heads.qk, heads.v))
        output = 0 if v in (qk, self.first_part(qk)) else v  # else it leaves through the queries' slot
        own = self.block_m * (qk + output) * _HALF_BYTES
        block = self.stages * (qk + v) * _HALF_BYTES + self.table_stages * self.block_m * heads.gathered
        fits = self.fits(self.consumers, self.block_n, 0, v) and own + self.block_n * block <= self.shared_bytes
        return self.block_n if fits else self.block_n * _WIDE // size

    def _blocks_held(self, heads: Heads, keys: int, most: int) -> int:
        """Stages that fit beside queries, output and tables of scores, up to `most`: with two, copies are waited for."""
        size = sum(-(-head // _CHANNELS) * _CHANNELS for head in (heads.qk, heads.v)) * _HALF_BYTES
        tables = self.table_stages * self.block_m * keys * heads.gathered
        return max(self.stages, min(most, (self.shared_bytes - self.block_m * size - tables) // (keys * size)))

    def gradients(
        self, heads: Heads, kind: Kind, fused: bool = False, leaving: int = F32_BYTES
    ) -> KernelSchedule | None:
        """The same for the kernel of dq, or of dk and dv, or of all three; None for heads that it has no blocks for.

        `leaving` are the bytes per score of gradients of tables, which leave in every step of dq if tables are read.
        """
        if BYTES[heads.dtype] != BYTES["bf16"]:
            return None
        if self.apart(heads):
            return None if fused else self._wide_gradients(heads, kind)
        step, warps = self._fused_step(heads) if fused else self.gradient_block, _WARPS * self.consumers
        if kind is Kind.DQ:
            size = self.block_m * step * leaving if heads.gathered else 0
            return KernelSchedule(self.block_m, step, warps, min(self.dq_stages, self._steps_held(heads, step, size)))
        passing = self._passing(heads, step) if fused else 0
        most = self.fused_stages if fused else self.dkdv_stages
        return KernelSchedule(step, self.block_m, warps, min(most, self._steps_held(heads, step, passing)))

    def _passing(self, heads: Heads, step: int) -> int:
        """Two operands of dq, of which consumers may be a step apart, and a result."""
        return step * (2 * self.block_m * _HALF_BYTES + padded(heads.qk) * F32_BYTES)

    def _fused_step(self, heads: Heads) -> int:
        """Queries of a step that also finds dq: as many as consumers have keys, if registers and shared memory hold them.

        Barriers and the products' smallest widths cost less then: on an H200 64 channels were 5 to 10 % faster so.
        """
        whole = AsyncSchedule.gradient_block
        results = (2 * self.block_m + padded(heads.qk) + padded(heads.v)) * WARPGROUP_ROWS // WARPGROUP_THREADS
        held = self._steps_held(heads, self.block_m, self._passing(heads, self.block_m))
        if results + self.other_registers <= self.consumer_registers and held >= self.least_stages:
            whole = self.block_m
        return whole * self.gradient_block // AsyncSchedule.gradient_block

    @staticmethod
    def apart(heads: Heads) -> bool:
        """Whether dk and dv have kernels of their own: the registers of a consumer do not hold both sums."""
        return max(padded(heads.qk), padded(heads.v)) > _WIDE

    def _wide_gradients(self, heads: Heads, kind: Kind) -> KernelSchedule | None:
        """As many positions a step, up to `gradient_block`, as leave room for two steps beside the owned blocks."""
        for step in (self.gradient_block, self.gradient_block // 2):
            stages = self._steps_held(heads, step)
            if stages > 1 and max(padded(heads.qk), padded(heads.v)) <= 2 * _WIDE:
                blocks = (self.block_m, step) if kind is Kind.DQ else (step, self.block_m)
                return KernelSchedule(*blocks, _WARPS * self.consumers, stages)
        return None

    def _steps_held(self, heads: Heads, step: int, leaving: int = 0) -> int:
        """How many steps of so many positions fit into shared memory beside the blocks that a program owns; at least 1."""
        size = heads.bytes_per_position
        moving = step * (size + _VECTOR_BYTES + heads.gathered * self.block_m)
        return max(1, (self.shared_bytes - self.block_m * size - leaving) // moving)
