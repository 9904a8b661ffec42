"""Named inputs of a score function, given at call time after q, k and v; and shapes without data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from xdsl.ir import SSAValue

from attn_engine.errors import CustomInputError
from attn_engine.frontend.region import RegionTrace
from attn_engine.frontend.source import refuse
from attn_engine.frontend.symbols import Symbol

TOKENS: dict[str, str] = {"batch": "b", "heads": "h", "seq_len": "q", "seq_len_kv": "kv"}


@dataclass(frozen=True)
class CustomIO:
    """The named inputs of a definition: `CustomIO({"bias": ("batch", "heads", "seq_len", "seq_len_kv")})`.

    A dimension is "batch", "heads", "seq_len", "seq_len_kv", or a size; one of size 1 is broadcast.
    """

    shapes: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict[str, tuple[int | str, ...]])

    def __post_init__(self) -> None:
        shapes = {name: tuple(shape) for name, shape in self.shapes.items()}
        object.__setattr__(self, "shapes", shapes)
        for name, shape in shapes.items():
            for token in shape:
                if isinstance(token, str) and token not in TOKENS:
                    refuse(
                        CustomInputError,
                        f"input '{name}' has a dimension '{token}'",
                        f"a dimension is a size or one of {', '.join(TOKENS)}",
                    )

    def __hash__(self) -> int:
        return hash(tuple(self.shapes.items()))

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class CustomSymbol(Symbol):
    """A named input in a score function: the element that belongs to this score, or any by index."""

    def __init__(self, region: RegionTrace, tensor: torch.Tensor, name: str, shape: tuple[int | str, ...]):
        self.region, self.tensor, self.name, self.declared = region, tensor, name, shape
        self._element: Any = None

    @property
    def value(self) -> SSAValue:
        if self._element is None:
            arguments = {
                hint: Symbol(self.region, a)
                for (hint, _), a in zip(self.region.leading, self.region.block.args, strict=False)
            }
            self._element = self.region.load(self.tensor, [self._index(d, arguments) for d in self.declared])
        return self._element.value

    def _index(self, dimension: int | str, arguments: Mapping[str, Symbol]) -> int | Symbol:
        if dimension == 1:
            return 0
        if isinstance(dimension, int):
            refuse(
                CustomInputError,
                f"input '{self.name}' of shape {self.declared} is used as one number",
                f"index it: inputs['{self.name}'][...] with {len(self.declared)} indices",
            )
        return arguments[{"seq_len": "q_idx", "seq_len_kv": "kv_idx"}.get(dimension, TOKENS[dimension])]

    def __getitem__(self, index: object) -> object:
        return self.region.load(self.tensor, index if isinstance(index, tuple) else (index,))  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"<input '{self.name}' {self.declared}>"


class CustomInputs(Mapping[str, CustomSymbol]):
    """What a score function gets as `custom_fwd_inputs`."""

    def __init__(self, region: RegionTrace, custom_io: CustomIO, tensors: Mapping[str, torch.Tensor]):
        self._region, self._custom_io, self._tensors = region, custom_io, tensors

    def __getitem__(self, name: str) -> CustomSymbol:
        if name not in self._custom_io.shapes:
            declared = ", ".join(self._custom_io) or "none"
            refuse(
                CustomInputError,
                f"input '{name}' is not declared (declared: {declared})",
                f'declare it: CustomIO({{"{name}": ("batch", "heads", "seq_len", "seq_len_kv")}})',
            )
        return CustomSymbol(self._region, self._tensors[name], name, self._custom_io.shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._custom_io)

    def __len__(self) -> int:
        return len(self._custom_io)


def check_custom(custom_io: CustomIO, tensors: Mapping[str, torch.Tensor]) -> None:
    """Every declared input is given, with the declared rank and fixed sizes, and no other."""
    if missing := [name for name in custom_io if name not in tensors]:
        refuse(CustomInputError, f"input '{missing[0]}' is not given", "pass it after v, in the order of its CustomIO")
    if extra := [name for name in tensors if name not in custom_io.shapes]:
        refuse(CustomInputError, f"input '{extra[0]}' is not declared", "declare it in CustomIO with its dimensions")
    for name, shape in custom_io.shapes.items():
        actual = tuple(tensors[name].shape)
        if len(actual) != len(shape) or any(isinstance(d, int) and d != n for d, n in zip(shape, actual, strict=True)):
            refuse(
                CustomInputError,
                f"input '{name}' has shape {actual}, declared is {shape}",
                "pass a tensor of the declared shape, or declare the dimensions that it has",
            )


@dataclass(frozen=True)
class MetaTensor:
    """A shape (batch, heads, positions, channels) and a dtype without data; a name is a dimension that varies."""

    shape: tuple[int | str, ...]
    dtype: torch.dtype


def meta_tensor(*shape: int | str, dtype: torch.dtype = torch.float16) -> MetaTensor:
    """`meta_tensor(B, H, S, D, dtype=torch.float16)`: what an engine is told of a tensor."""
    return MetaTensor(shape, dtype)
