"""Running user functions on symbols: captured tensors are found on the way, by identity."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode
from xdsl.dialects.builtin import DYNAMIC_INDEX, TensorType, bf16, f16, f32, i1, i8, i16, i32, i64
from xdsl.ir import Attribute

from attn_engine.errors import CaptureTypeError, InPlaceWriteError, SignatureError
from attn_engine.frontend.derived import Steps
from attn_engine.frontend.foreign import explained
from attn_engine.frontend.operators import contains_traced
from attn_engine.frontend.region import RegionTrace
from attn_engine.frontend.source import refusal, refuse
from attn_engine.frontend.writes import Writes, memory, tensors_in, version

ELEMENT_TYPES: dict[torch.dtype, Attribute] = {
    torch.float32: f32,
    torch.float16: f16,
    torch.bfloat16: bf16,
    torch.int64: i64,
    torch.int32: i32,
    torch.int16: i16,
    torch.int8: i8,
    torch.bool: i1,
}

# Dtypes that kernels do not read are captured in one that holds all of their values (float64 is promoted to f32 anyway).
_CONVERTED: dict[torch.dtype, torch.dtype] = {
    torch.float64: torch.float32,
    torch.float8_e4m3fn: torch.float16,
    torch.float8_e5m2: torch.float16,
    torch.uint8: torch.int16,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}

RESERVED_NAMES = frozenset(
    {"q", "k", "v", "o", "scale", "lse", "d_o", "dq", "dk", "dv", "b", "h", "q_idx", "kv_idx", "s"}
)

_FACTORIES = frozenset({"tensor", "as_tensor", "scalar_tensor", "zeros", "ones", "full"})
_STATIC_FACTS = frozenset({"dtype", "ndim", "dim", "is_floating_point", "requires_grad", "is_complex"})


@dataclass(frozen=True, eq=False)
class Capture:
    """A tensor that a user function reads, as the kernel gets it."""

    original: torch.Tensor
    name: str
    tensor: torch.Tensor
    type: Attribute


def as_operand(tensor: torch.Tensor, exact: bool = False) -> torch.Tensor:
    """The tensor in a dtype that kernels read; gradients flow through the conversion. `exact` leaves float64 as it is."""
    converted = None if exact and tensor.dtype == torch.float64 else _CONVERTED.get(tensor.dtype)
    return tensor if converted is None else tensor.to(converted)


@dataclass(eq=False)
class Tracer:
    """One trace of a whole definition.

    `known` are the tensors that the definition can reach, each with a name that it is found under; the first one counts.
    `reads_values` tells that the functions looked at a tensor's values or sizes,
    so that the trace holds for these very tensors only.
    """

    known: Sequence[tuple[torch.Tensor, str]] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    exact: bool = False
    """Captures of float64 stay so; to functions they are f32."""
    captures: list[Capture] = field(default_factory=list[Capture])
    reads_values: bool = False
    fixed_sizes: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """By (capture, axis) the sizes that vectors were unrolled to."""
    steps: Steps = field(default_factory=Steps)
    """What was computed of whole tensors."""
    writes: Writes = field(init=False)
    _numbers: dict[int, tuple[torch.Tensor, bool | int | float, int]] = field(
        default_factory=dict[int, tuple[torch.Tensor, bool | int | float, int]]
    )
    """Tensors made from numbers, the numbers, and how often the tensors had been written into then."""
    _elements: dict[int, tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]] = field(
        default_factory=dict[int, tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]]
    )

    def __post_init__(self) -> None:
        self.writes = Writes(self.known, self.steps)

    def run(
        self,
        name: str,
        leading: Sequence[tuple[str, Attribute]],
        functions: Mapping[str, Callable[..., object]],
        call: Callable[[RegionTrace], None],
        function: Callable[..., object],
    ) -> RegionTrace:
        """Trace one function: `call` runs it on the region's arguments and finishes the region.

        Raises:
            InPlaceWriteError: if the function has written into what it must not; errors of its own say so in a note.
            TraceError: for what cannot be traced.
        """
        region = RegionTrace(name, self, leading, functions)
        try:
            with _TracingMode(region):
                call(region)
        except Exception as error:
            told = explained(error) or error
            written = None if isinstance(error, InPlaceWriteError) else self.writes.found()
            if written is not None:
                told.add_note(f"{written} while {name} was traced, before this error")
            if told is error:
                raise
            raise told from error
        self.writes.check(name, function)
        return region

    def name_of(self, tensor: torch.Tensor) -> str:
        return next((name for known, name in self.known if known is tensor), "capture")

    def capture(self, tensor: torch.Tensor) -> int:
        """The position of a tensor among the captures; a new one is added."""
        for position, capture in enumerate(self.captures):
            if capture.original is tensor:
                return position
        operand = as_operand(tensor, self.exact)
        dtype = _CONVERTED.get(operand.dtype, operand.dtype)
        if dtype not in ELEMENT_TYPES:
            refuse(
                CaptureTypeError,
                f"tensor '{self.name_of(tensor)}' is {tensor.dtype}",
                "capture a real tensor: float32, float16, bfloat16, an integer dtype or bool",
            )
        type_ = TensorType(ELEMENT_TYPES[dtype], [DYNAMIC_INDEX] * operand.ndim)
        self.writes.watch(tensor)
        self.captures.append(Capture(tensor, self._unique_name(self.name_of(tensor)), operand, type_))
        return len(self.captures) - 1

    def _unique_name(self, wanted: str) -> str:
        # A trailing _<number> would be taken for the printer's own suffix.
        base = re.sub(r"_(\d+)$", r"\1", re.sub(r"\W", "", wanted, flags=re.ASCII)) or "capture"
        taken = {capture.name for capture in self.captures}
        if base in RESERVED_NAMES or keyword.iskeyword(base) or base[0].isdigit() or base.startswith("d_"):
            base = f"capture_{base}"
        name, number = base, 2
        while name in taken:
            name, number = f"{base}{number}", number + 1
        return name

    def fix_size(self, tensor: torch.Tensor, axis: int) -> None:
        """The trace holds for tensors of this size along an axis only."""
        self.fixed_sizes[self.capture(tensor), axis] = tensor.shape[axis]

    def element_of(self, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]] | None:
        """The tensor, and the indices into it, that a tensor was read from by constant indices."""
        entry = self._elements.get(id(tensor))
        return None if entry is None else entry[1:]

    def known_number(self, tensor: torch.Tensor) -> bool | int | float | None:
        """The number that a tensor made inside of the user's function from a Python number holds."""
        entry = self._numbers.get(id(tensor))
        if entry is None or version(tensor) != entry[2] or memory(tensor) in self.writes.changed:
            return None
        return entry[1]

    def note(
        self, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, Any], result: object
    ) -> None:
        """Remember numbers turned into tensors, and that values or sizes of a tensor were read."""
        name = _name_of(function)
        if isinstance(result, torch.Tensor) or _is_tensors(result):
            results = (result,) if isinstance(result, torch.Tensor) else tuple(cast("Sequence[torch.Tensor]", result))
            self.steps.note(function, name, args, kwargs, results)
        if isinstance(result, torch.Tensor):
            of_tensors = next(tensors_in([*args, *kwargs.values()]), None) is not None
            if name in _FACTORIES and result.numel() == 1 and not result.requires_grad and not of_tensors:
                self._numbers[id(result)] = (result, result.item(), version(result))
            if name == "getitem" and isinstance(args[0], torch.Tensor):
                self._note_element(result, args[0], args[1])
        elif not _is_tensors(result) and (name not in _STATIC_FACTS or self.steps.gave(args[0])):
            self.reads_values = True

    def _note_element(self, result: torch.Tensor, base: torch.Tensor, index: object) -> None:
        indices = cast("tuple[object, ...]", index if isinstance(index, tuple) else (index,))
        if all(type(i) is int for i in indices):
            base, earlier = self.element_of(base) or (base, ())
            self._elements[id(result)] = (result, base, (*earlier, *cast("tuple[int, ...]", indices)))


class _TracingMode(TorchFunctionMode):
    """Sends every torch function with a traced argument to the region; the others run as they are."""

    def __init__(self, region: RegionTrace):
        super().__init__()
        self.region = region

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), _name_of(func)
        if not contains_traced([*args, *kwargs.values()]):
            result = self.region.tracer.writes.run(func, name, args, kwargs)
            self.region.tracer.note(func, args, kwargs, result)
            return result
        if name == "getitem" and isinstance(args[0], torch.Tensor):
            indices = cast("tuple[object, ...]", args[1] if isinstance(args[1], tuple) else (args[1],))
            return self.region.load(args[0], indices)
        if name in ("max", "min") and len(args) > 1 and isinstance(args[1], int):
            # torch.max(x, 0) reduces over a dim, unlike x.max(0), which has always meant the larger of both here.
            args, kwargs["dim"] = args[:1], args[1]
        if func is torch.Tensor.where:
            args = (*args[1:2], *args[:1], *args[2:])
        if kwargs.get("inplace"):
            refuse(InPlaceWriteError, f"{name} writes in place", "leave inplace=True out, and use what it returns")
        ignored = ("_stacklevel", "inplace")
        return self.region.apply(
            name, args, {k: v for k, v in kwargs.items() if k not in ignored and (k != "out" or v is not None)}
        )


def _name_of(function: Callable[..., object]) -> str:
    """`exp` for torch.exp, `and` for Tensor.__and__, `shape` for the getter of Tensor.shape."""
    name = getattr(function, "__name__", repr(function))
    if name == "__get__":
        name = getattr(getattr(function, "__self__", None), "__name__", name)
    return re.sub(
        r"^(special_|linalg_)", "", name.removeprefix("__").removesuffix("__") if name.startswith("__") else name
    )


def _is_tensors(result: object) -> bool:
    return isinstance(result, tuple | list) and len(result) > 0 and all(isinstance(v, torch.Tensor) for v in result)  # type: ignore[arg-type]


def choose_arity(function: Callable[..., object], name: str, accepted: Sequence[int], signature: str) -> int:
    """How many arguments, of the accepted numbers, a user function takes."""
    if not callable(function):
        other = _instead(function, name)
        refuse(
            SignatureError, f"{name} is a {type(function).__name__}, no function", f"pass a function {signature}{other}"
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return accepted[0]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in positional)
    most = float("inf") if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(positional)
    for count in accepted:
        if required <= count <= most:
            return count
    raise refusal(SignatureError, f"{name} takes {required} arguments", f"write it as {signature}", function)


def _instead(given: object, name: str) -> str:
    """Where what was given in place of a function has its own way in."""
    if isinstance(given, torch.Tensor) and name in ("score_mod", "mask_mod"):
        reads = "library.bias(tensor)" if name == "score_mod" else "masks.from_tensor(tensor)"
        return f", as attn_engine.{reads} makes one of a tensor"
    if hasattr(given, "mask_mod"):
        return "; a block mask goes to attn_engine.flex.flex_attention, its mask_mod goes here"
    return ""
