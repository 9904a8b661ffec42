"""Plans that are run as text when a kind of call is new, and replayed when it is known.

What a plan does follows from shapes, strides, types and numbers: of the memory of its tensors, it depends only on whether
that starts at a multiple of 16 bytes. The second call of a kind therefore runs the text and notes what it allocates, fills
and launches. Those after it hand that to Triton's C launchers, with the pointers of their own tensors: nothing is bound,
specialised or described anew. Where hooks want to see launches, or Triton's launchers are called in another way than the
one known here, calls run the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from math import prod
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attn_engine.backends.backend import Plan

ALIGNMENT = 256
"""Bytes, of scratch tensors in their common buffer; Triton and descriptors count on 16."""
MOST_RECORDS, MOST_MAPS = 1024, 64
"""Kept of a plan, and of one described argument: lengths that grow with every call must not fill the memory."""
_CALLED = "iiiKKppOOOOOO"
"""How Triton's C launchers read what comes before a kernel's own arguments, in the version that this module is for."""


def _driver() -> Any:
    return import_module("triton.backends.nvidia.driver")


def _knobs() -> Any:
    return import_module("triton.knobs")


# --- what is noted -----------------------------------------------------------------------------


@dataclass(eq=False)
class Maps:
    """The descriptors of an argument, by where its tensor starts; they refer to addresses, and keep no memory alive."""

    make: Callable[[int], Any]
    made: dict[int, Any] = field(default_factory=dict[int, Any])

    def at(self, pointer: int) -> Any:
        found = self.made.get(pointer)
        if found is None:
            if len(self.made) >= MOST_MAPS:
                self.made.clear()
            found = self.made[pointer] = self.make(pointer)
        return found


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch; `values` are the arguments but for pointers and descriptors, which have their place and slot."""

    start: Callable[..., None]
    grid: tuple[int, ...]
    head: tuple[Any, ...]
    values: list[Any]
    pointers: list[tuple[int, int]]
    maps: list[tuple[int, int, Maps]]
    kernel: Any
    compiled: Any
    """Held, so that its function stays loaded."""

    @property
    def slots(self) -> set[int]:
        return {slot for _, slot, *_ in (*self.pointers, *self.maps)}

    def run(self, stream: int, starts: Sequence[int]) -> None:
        values = self.values.copy()
        for place, slot in self.pointers:
            values[place] = starts[slot]
        for place, slot, maps in self.maps:
            values[place] = maps.at(starts[slot])
        self.start(*self.grid, stream, *self.head, *values)


@dataclass(frozen=True)
class Fill:
    """A tensor of a slot is filled with a number."""

    slot: int
    value: float

    @property
    def slots(self) -> set[int]:
        return {self.slot}


@dataclass(eq=False)
class Record:
    """What a plan does for one kind of call. Slots are its tensors in order, then those that it allocates."""

    tensors: list[int]
    """Places of tensors among the arguments."""
    scratch: list[tuple[tuple[int, ...], torch.dtype]] = field(
        default_factory=list[tuple[tuple[int, ...], torch.dtype]]
    )
    steps: list[Launch | Fill] = field(default_factory=list[Launch | Fill])
    replayable: bool = True

    def settle(self) -> None:
        """Tensors that are filled get memory of their own, all others lie in one buffer. Zeros are there from the start."""
        first, seen, again = len(self.tensors), set[int](), set[int]()
        fills = [step for step in self.steps if isinstance(step, Fill)]
        for step in self.steps:
            if isinstance(step, Fill) and step.slot in seen:
                again.add(step.slot)
            seen |= step.slots
        filled = {step.slot for step in fills}
        self.zeros = {fill.slot for fill in fills if fill.value == 0 and fill.slot >= first} - again
        self.steps = [step for step in self.steps if isinstance(step, Launch) or step.slot not in self.zeros]
        driver: Any = import_module("triton").runtime.driver.active
        self.stream_of: Callable[[int], int] = driver.get_current_stream
        self.kernels = [step.kernel for step in self.steps if isinstance(step, Launch)]
        self.own: list[int] = []
        self.offsets: list[int] = []
        self.bytes = 0
        for number, (sizes, dtype) in enumerate(self.scratch):
            self.offsets.append(self.bytes)
            if first + number in filled:
                self.own.append(number)
            else:
                self.bytes += -(-prod(sizes) * dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def idle(self) -> bool:
        """Whether nothing but the device sees the launches."""
        return not [kernel for kernel in self.kernels if kernel.pre_run_hooks]

    def replay(self, arguments: tuple[Any, ...]) -> None:
        first: Tensor = arguments[self.tensors[0]]
        device = first.device
        starts = [arguments[place].data_ptr() for place in self.tensors]
        held: dict[int, Tensor] = {}
        start, count = 0, len(starts)
        if self.bytes:
            held[-1] = buffer = torch.empty(self.bytes, dtype=torch.uint8, device=device)
            start = buffer.data_ptr()
        starts += [start + offset for offset in self.offsets]
        for number in self.own:
            sizes, dtype = self.scratch[number]
            make = torch.zeros if count + number in self.zeros else torch.empty
            held[count + number] = own = make(sizes, dtype=dtype, device=device)
            starts[count + number] = own.data_ptr()
        stream = self.stream_of(first.get_device())
        for step in self.steps:
            if isinstance(step, Launch):
                step.run(stream, starts)
            else:
                target = held.get(step.slot)
                (arguments[self.tensors[step.slot]] if target is None else target).fill_(step.value)


# --- noting it ---------------------------------------------------------------------------------


class Slot:
    """A tensor while a plan is recorded, told from others that are equal; it has what texts of plans ask of tensors."""

    def __init__(self, record: Record, number: int, tensor: Tensor):
        self.record, self.number, self.tensor = record, number, tensor
        self.shape, self.device, self.stride = tensor.shape, tensor.device, tensor.stride

    def fill_(self, value: float) -> None:
        self.tensor.fill_(value)
        self.record.steps.append(Fill(self.number, value))


@dataclass(frozen=True, eq=False)
class Described:
    """A descriptor, and the slot of its tensor."""

    slot: Slot
    descriptor: Any


class _Torch:
    """The module, with allocations that are noted."""

    def __init__(self, record: Record):
        self._record = record

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, sizes: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Slot:
        record = self._record
        record.scratch.append((sizes, dtype))
        number = len(record.tensors) + len(record.scratch) - 1
        return Slot(record, number, torch.empty(sizes, dtype=dtype, device=device))


class _Kernel:
    """A kernel whose launches are made and noted."""

    def __init__(self, record: Record, kernel: Any):
        self.record, self.kernel = record, kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            compiled = self.kernel[grid](*map(_plain, arguments), **options)
            # A hook of Triton may leave a launch out: then there is no compiled kernel.
            step = None if compiled is None else _launch(self.kernel, compiled, grid, arguments)
            if step is None:
                self.record.replayable = False
            else:
                self.record.steps.append(step)

        return launch


def _plain(argument: Any) -> Any:
    if isinstance(argument, Slot):
        return argument.tensor
    return argument.descriptor if isinstance(argument, Described) else argument


def _launch(kernel: Any, compiled: Any, grid: tuple[int, ...], arguments: Sequence[Any]) -> Launch | None:
    """A launch for the C launcher of a compiled kernel; None if that is not called in the known way."""
    start = _c_launcher(compiled)
    described = [a for a in arguments if isinstance(a, Described)]
    metadata = list(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    # An empty tensor has a descriptor of other memory; without metadata, there is no descriptor on the device.
    if start is None or len(metadata) != len(described) or any(d.slot.tensor.numel() == 0 for d in described):
        return None
    values: list[Any] = []
    pointers: list[tuple[int, int]] = []
    maps: list[tuple[int, int, Maps]] = []
    for argument in arguments:
        if isinstance(argument, Slot):
            pointers.append((len(values), argument.number))
            values.append(None)
        elif isinstance(argument, Described):
            making = _map_maker(argument.descriptor, metadata[len(maps)])
            maps.append((len(values), argument.slot.number, Maps(making)))
            values += [None, *argument.descriptor.shape, *argument.descriptor.strides]
        else:
            values.append(argument)
    own = compiled.run
    head = (compiled.function, own.launch_cooperative_grid, own.launch_pdl, None, None, compiled.packed_metadata)
    padded = (*grid, *(1,) * (3 - len(grid)))
    return Launch(start, padded, (*head, None, None, None), values, pointers, maps, kernel, compiled)


def _map_maker(descriptor: Any, metadata: Any) -> Callable[[int], Any]:
    shape, strides, padding = list(descriptor.shape), list(descriptor.strides), descriptor.padding
    expand = _driver().make_tensordesc_arg

    def make(pointer: int) -> Any:
        base = SimpleNamespace(data_ptr=lambda: pointer)
        return expand(SimpleNamespace(base=base, shape=shape, strides=strides, padding=padding), metadata)[0]

    return make


def _c_launcher(compiled: Any) -> Callable[..., None] | None:
    """What Triton generated to launch kernels of this signature, without its wrapper that makes descriptors."""
    driver, own = _driver(), compiled.run
    if getattr(driver, "_BASE_ARGS_FORMAT", None) != _CALLED or type(own) is not driver.CudaLauncher:
        return None
    if own.global_scratch_size or own.profile_scratch_size:
        return None
    launch = own.launch
    if isinstance(launch, FunctionType):
        cells = dict(zip(launch.__code__.co_freevars, launch.__closure__ or (), strict=True))
        launch = cells["launcher"].cell_contents if "launcher" in cells else None
    return launch if isinstance(launch, BuiltinFunctionType) else None


def record(plan: FunctionType, arguments: tuple[Any, ...]) -> Record:
    """Runs a plan of a generated module, and notes what it does."""
    found = Record([place for place, argument in enumerate(arguments) if isinstance(argument, Tensor)])
    namespace = {**plan.__globals__, "torch": _Torch(found)}
    kind: Any = import_module("triton").JITFunction
    namespace |= {name: _Kernel(found, value) for name, value in namespace.items() if isinstance(value, kind)}
    describe: Callable[..., Any] | None = plan.__globals__.get("describe")

    def noted(slot: Slot, *rest: Any) -> Described:
        assert describe is not None
        return Described(slot, describe(slot.tensor, *rest))

    namespace["describe"] = noted
    numbers = {place: number for number, place in enumerate(found.tensors)}
    slots = [Slot(found, numbers[n], a) if n in numbers else a for n, a in enumerate(arguments)]
    FunctionType(plan.__code__, namespace, plan.__name__)(*slots)
    found.settle()
    return found


# --- plans -------------------------------------------------------------------------------------


def kind_of(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a plan's work depends on, but for the addresses of its tensors."""
    return tuple(
        [
            (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16)
            if isinstance(x, Tensor)
            else (x.hex() if isinstance(x, float) else x)
            for x in arguments
        ]
    )


def _idle(hook: Any) -> bool:
    """Whether a hook, or chain of hooks, of Triton calls nothing."""
    return hook is None or not getattr(hook, "calls", True)


class Replayed:
    """A plan of a generated module, called as its text is."""

    def __init__(self, plan: FunctionType):
        self.plan = plan
        self.records: dict[tuple[Any, ...], Record | None] = {}
        """None after the first call of a kind."""
        self._runtime, self._compilation = _knobs().runtime, _knobs().compilation

    def __call__(self, *arguments: Any) -> None:
        runtime = self._runtime
        if not (_idle(runtime.launch_enter_hook) and _idle(runtime.launch_exit_hook)):
            self.plan(*arguments)
            return
        key = (*kind_of(arguments), runtime.debug, self._compilation.instrumentation_mode)
        known = self.records.get(key)
        if known is not None and known.replayable and known.idle():
            known.replay(arguments)
        elif known is None and key in self.records:
            self.records[key] = record(self.plan, arguments)
        else:
            self.plan(*arguments)
            if known is None:
                self._notice(key)

    def _notice(self, key: tuple[Any, ...]) -> None:
        if len(self.records) >= MOST_RECORDS:
            self.records.clear()
        self.records[key] = None


def replayed(plans: dict[str, Plan]) -> dict[str, Plan]:
    """The plans of a module, replayed where they can be."""
    return {name: Replayed(plan) if isinstance(plan, FunctionType) else plan for name, plan in plans.items()}
