"""What user functions compute of whole tensors while they are traced, and how it is computed again without a trace.

`score + slopes.exp()[h]` reads a tensor that no call finds: each call has to compute it. A trace notes the torch functions
that ran on real tensors (`Steps`); those that a captured tensor came from become recipes (`Recipes`), which `repeat` follows
with the tensors of another call. Where a function could give something else than its recipe, there is none, and the
definition is traced for each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch

from attn_engine.frontend.writes import is_write, version

_UNWRITTEN = ("empty", "new_empty")
"""How functions begin whose results somebody has to write into, perhaps where torch does not see it."""
_PLAIN = (
    *(bool, int, float, complex, str, type(None), type(Ellipsis), torch.Tensor),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


@dataclass(frozen=True)
class Derived:
    """The capture that a recipe gives: which of its results, and what the trace took that for."""

    recipe: int
    result: int
    dtype: torch.dtype
    ndim: int


Position: TypeAlias = "int | str | Derived | None"
"""Where a call finds a tensor: its place among those that the definition reaches, a custom input's name, a recipe, nowhere."""


@dataclass(frozen=True)
class _Place:
    position: int | str | Derived


@dataclass(frozen=True, eq=False)
class Recipe:
    """A torch function, and its arguments with places instead of tensors."""

    function: Callable[..., object]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Step:
    """A call that gave tensors, and how often these had been written into then."""

    function: Callable[..., object]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]


@dataclass(eq=False)
class Steps:
    """The torch functions that gave tensors during one trace, in their order."""

    ambient: tuple[object, ...] = field(default_factory=lambda: _ambient())
    repeatable: bool = True
    """Whether the same calls would give the same once more."""
    taken: list[Step] = field(default_factory=list[Step])
    _sources: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])

    def note(
        self,
        function: Callable[..., object],
        name: str,
        args: Sequence[object],
        kwargs: Mapping[str, Any],
        results: tuple[torch.Tensor, ...],
    ) -> None:
        """A call with these arguments gave these tensors."""
        if is_write(name, kwargs) or name.startswith(_UNWRITTEN) or _ambient() != self.ambient:
            self.repeatable = False
        given = (*args, *kwargs.values())
        if not all(map(_is_plain, given)):
            self.repeatable = False
        copied, named = _mapped((tuple(args), dict(kwargs)), lambda tensor: tensor)  # lists may change later
        step = Step(function, copied, named, results, tuple(map(version, results)))
        for n, result in enumerate(results):
            self._sources.setdefault(id(result), (len(self.taken), n))
        self.taken.append(step)

    def gave(self, tensor: object) -> bool:
        """Whether a tensor came out of a call."""
        return id(tensor) in self._sources

    def source(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """The call that a tensor came out of, and as which of its results; None if there is none to repeat."""
        found = self._sources.get(id(tensor))
        if found is None or not self.repeatable:
            return None
        step = self.taken[found[0]]
        return found if tuple(map(version, step.results)) == step.versions else None


@dataclass(eq=False)
class Recipes:
    """Positions of captured tensors; `reached` says where a call finds what is not computed."""

    steps: Steps
    reached: Callable[[torch.Tensor], int | str | None]
    made: list[Recipe] = field(default_factory=list[Recipe])
    _of_step: dict[int, int | None] = field(default_factory=dict[int, "int | None"])

    def position(self, tensor: torch.Tensor) -> Position:
        found = self.reached(tensor)
        if found is not None:
            return found
        source = self.steps.source(tensor)
        recipe = None if source is None else self._recipe(source[0])
        return None if source is None or recipe is None else Derived(recipe, source[1], tensor.dtype, tensor.ndim)

    def _recipe(self, step: int) -> int | None:
        if step not in self._of_step:
            self._of_step[step] = self._made(self.steps.taken[step])
        return self._of_step[step]

    def _made(self, step: Step) -> int | None:
        lost: list[torch.Tensor] = []

        def place(tensor: torch.Tensor) -> object:
            position = self.position(tensor)
            if position is None:
                lost.append(tensor)
                return None
            return _Place(position)

        args, kwargs = _mapped((step.args, step.kwargs), place)
        if lost:
            return None
        self.made.append(Recipe(step.function, args, kwargs))
        return len(self.made) - 1


def repeat(
    recipes: Sequence[Recipe], found: Callable[[int | str], torch.Tensor | None]
) -> Callable[[Position], torch.Tensor | None]:
    """Follows recipes with the tensors that a call has found; gives what stands at a position, None if nothing fits there.

    What torch raises on the way is raised: a trace would have met it too.
    """
    results: list[tuple[object, ...]] = []

    def at(position: Position) -> torch.Tensor | None:
        if not isinstance(position, Derived):
            return None if position is None else found(position)
        value = results[position.recipe][position.result]
        fits = isinstance(value, torch.Tensor) and (value.dtype, value.ndim) == (position.dtype, position.ndim)
        return cast("torch.Tensor", value) if fits else None

    for recipe in recipes:
        tensors: list[torch.Tensor | None] = []

        def filled(place: _Place, tensors: list[torch.Tensor | None] = tensors) -> torch.Tensor | None:
            tensors.append(at(place.position))
            return tensors[-1]

        args, kwargs = _mapped((recipe.args, recipe.kwargs), filled, _Place)
        if any(tensor is None for tensor in tensors):
            return lambda _: None
        result = recipe.function(*args, **kwargs)
        results.append(tuple(cast("Sequence[object]", result)) if isinstance(result, tuple | list) else (result,))
    return at


def _ambient() -> tuple[object, ...]:
    """What a context around a call may change of what it gives."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        *(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")),
    )


def _is_plain(value: object) -> bool:
    """Whether an argument is what it looks like: a function or an object may hold tensors that nobody sees."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, cast("Sequence[object]", value)))
    if isinstance(value, slice):
        bounds = cast("slice[object, object, object]", value)
        return all(map(_is_plain, (bounds.start, bounds.stop, bounds.step)))
    return isinstance(value, _PLAIN)


def _mapped(value: Any, change: Callable[[Any], object], kind: type = torch.Tensor) -> Any:
    """Arguments with everything of a kind changed, and containers copied."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple | list):
        changed = [_mapped(v, change, kind) for v in cast("Sequence[object]", value)]
        return changed if isinstance(value, list) else tuple(changed)
    if isinstance(value, dict):
        return {k: _mapped(v, change, kind) for k, v in cast("dict[object, object]", value).items()}
    if isinstance(value, slice):
        return slice(*_mapped((value.start, value.stop, value.step), change, kind))
    return value
