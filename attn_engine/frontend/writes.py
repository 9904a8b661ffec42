"""Writes of user functions into tensors: what is not theirs, or was read already, must not change while they are traced.

A trace runs a function once, in place of calls for every score. What it writes into a tensor from outside would happen at
the trace and never again; what it writes into one that it has read by index would be seen by that read too, for kernels read
tensors as they are at the end. Writes are known by the name of the function, and refused before they happen; those that no
name tells are found in the counts of writes that torch keeps (tensors of inference mode have none).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

from attn_engine.errors import InPlaceWriteError
from attn_engine.frontend.operators import untraced
from attn_engine.frontend.source import refuse

if TYPE_CHECKING:
    from attn_engine.frontend.derived import Steps

_IN_PLACE = frozenset({"setitem", "iand", "ior", "ixor", "ilshift", "irshift", "set", "delete"})
"""Functions that write into their first argument, beside those whose names end in `_`; the last two are of attributes."""
_FIX = "write into it outside of the function, or into a copy made inside of it: y = t.clone()"


def is_write(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a torch function of this name, called with these, writes into what it is given."""
    in_place = name in _IN_PLACE or name.split(".")[0].endswith("_") or bool(kwargs.get("inplace"))
    return in_place or kwargs.get("out") is not None


def _targets(name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[torch.Tensor]:
    """What a torch function of this name writes into."""
    if is_write(name, {k: v for k, v in kwargs.items() if k != "out"}):
        yield from tensors_in(args[:1])
    yield from tensors_in((kwargs.get("out"),))


def version(tensor: torch.Tensor) -> int:
    """Counts writes into a tensor, and into what shares its memory; those of inference mode do not count."""
    with untraced():
        return 0 if tensor.is_inference() else tensor._version


def tensors_in(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """The tensors among arguments, and in lists and tuples of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors_in(cast("Sequence[object]", value))


def memory(tensor: torch.Tensor) -> int:
    """What tensors that share memory have in common."""
    with untraced():
        try:
            return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
        except (NotImplementedError, RuntimeError):
            return id(tensor if tensor._base is None else tensor._base)


@dataclass(eq=False)
class Writes:
    """What must not be written into during one trace: tensors from outside, and those that were read."""

    known: Sequence[tuple[torch.Tensor, str]]
    """Tensors from outside that are looked at even if no function gets them, with their names."""
    steps: Steps
    watched: list[tuple[torch.Tensor, int]] = field(default_factory=list[tuple[torch.Tensor, int]])
    read: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    changed: set[int] = field(default_factory=set[int])
    """Memory that functions have written into."""

    def __post_init__(self) -> None:
        self.watched += [(tensor, version(tensor)) for tensor, _ in self.known]

    def watch(self, tensor: torch.Tensor) -> None:
        """A tensor is read by index: from now on it stays as it is."""
        self.read.append(tensor)
        self.watched.append((tensor, version(tensor)))

    def run(
        self, function: Callable[..., object], name: str, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        """The result of a torch function, unless it writes where it must not."""
        for tensor in _targets(name, args, kwargs):
            self._write(name, tensor, "writes")
        before = [(tensor, version(tensor)) for tensor in tensors_in((*args, *kwargs.values()))]
        result = function(*args, **kwargs)
        for tensor, count in before:
            if version(tensor) != count:
                self._write(name, tensor, "has written")
        return result

    def _write(self, name: str, tensor: torch.Tensor, writes: str) -> None:
        place = memory(tensor)
        if not self._is_made(place):
            refuse(
                InPlaceWriteError,
                f"{name} {writes} into {self._spelled(tensor)} while the function is traced, which happens once",
                _FIX,
            )
        if any(memory(read) == place for read in self.read):
            refuse(
                InPlaceWriteError,
                f"{name} {writes} into a tensor that the function has read by index before",
                "write into it before it is read, or make another: y = x.add(1)",
            )
        self.changed.add(place)

    def _is_made(self, place: int) -> bool:
        """Whether this memory came out of a call of a traced function."""
        if any(memory(tensor) == place for tensor, _ in self.known):
            return False
        for step in self.steps.taken:
            looks_up = getattr(step.function, "__name__", "") == "__get__"  # of an attribute: what was there before
            if not looks_up and any(memory(result) == place for result in step.results):
                return all(memory(given) != place for given in tensors_in((*step.args, *step.kwargs.values())))
        return False

    def _spelled(self, tensor: torch.Tensor) -> str:
        name = next((n for known, n in self.known if known is tensor), None)
        of = next((n for known, n in self.known if memory(known) == memory(tensor)), None)
        if name is not None:
            return f"tensor '{name}'"
        return f"a tensor of shape {tuple(tensor.shape)} from outside" if of is None else f"a view of tensor '{of}'"

    def found(self) -> str | None:
        """What has happened to a tensor that must stay as it is."""
        tensor = next((tensor for tensor, count in self.watched if version(tensor) != count), None)
        return None if tensor is None else f"{self._spelled(tensor)} was written into"

    def check(self, name: str, function: Callable[..., object]) -> None:
        """Refuses writes that no function was seen to make, after a user function has returned."""
        found = self.found()
        if found is not None:
            refuse(InPlaceWriteError, f"{found} while {name} was traced, which happens once", _FIX, function)
