"""`Definition`: one attention, as its user wrote it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from attn_engine.frontend.custom_io import CustomIO
from attn_engine.frontend.mask_algebra import Mask
from attn_engine.frontend.online_func import OnlineFunc

UserFunction = Callable[..., Any]


@dataclass(frozen=True)
class Definition:
    """The user's functions and what they need; a function that is None is the identity, sees all, or is softmax.

    With `bare_score` the score is the plain product of query and key and the default scale is 1: the
    user multiplies by a scale. Otherwise the default scale is 1 / sqrt(head dim).
    """

    score_mod: UserFunction | None = None
    mask_mod: UserFunction | None = None
    row: UserFunction | OnlineFunc | None = None
    query_mod: UserFunction | None = None
    key_mod: UserFunction | None = None
    value_mod: UserFunction | None = None
    custom_io: CustomIO = field(default_factory=CustomIO)
    bare_score: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.row, OnlineFunc):
            self.row.check()
        if isinstance(self.mask_mod, Mask) and not self.mask_mod.uses_lengths:
            object.__setattr__(self, "mask_mod", self.mask_mod.function)

    def functions(self) -> Iterator[tuple[str, UserFunction]]:
        """Every user function under the name of its place, those of an OnlineFunc one by one."""
        for name in ("score_mod", "mask_mod", "row", "query_mod", "key_mod", "value_mod"):
            function = getattr(self, name)
            if isinstance(function, OnlineFunc):
                yield "online_fwd", function.online_fwd
                yield "online_fwd_epilogue", function.online_fwd_epilogue
            elif function is not None:
                yield name, function

    def default_scale(self, head_dim: int) -> float:
        return 1.0 if self.bare_score else float(head_dim) ** -0.5
