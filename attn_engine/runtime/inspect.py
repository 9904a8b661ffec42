"""Looking into a definition: its IR at each stage and its kernels' text, on any machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from xdsl.dialects.builtin import ModuleOp

from attn_engine.backends.backend import Examination, get_backend
from attn_engine.errors import StageError
from attn_engine.frontend.build import Traced, build
from attn_engine.frontend.definition import Definition
from attn_engine.frontend.mask_algebra import Mask, of_call
from attn_engine.ir.schedule import Schedule
from attn_engine.runtime import driver
from attn_engine.runtime.devices import Target
from attn_engine.runtime.driver import Facts, Part, Request
from attn_engine.runtime.schedules import candidate_schedules, default_schedule
from attn_engine.runtime.selection import REFUSALS, Way

STAGES = ("traced", "attn", "tile")
_USUAL = Facts(positive_scale=True, covered=True)
"""Of a call with the default scale and captures as long as its tensors."""


@dataclass(frozen=True)
class View:
    """For which tensors and device a definition is looked at."""

    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 128
    head_dim_v: int | None = None
    backward: bool = False
    return_lse: bool = False
    arch: str = "sm_90"
    backend: str = "triton"


class Inspection:
    """The inspecting half of an `Attention`."""

    definition: Definition
    deterministic: bool = False

    def ir(self, stage: str = "attn", view: View | None = None) -> str:
        """IR text: "traced" (as the functions were written), "attn" (analysed, in loops), "tile" (kernels and plans)."""
        view = view or View()
        if stage not in STAGES:
            raise StageError(stage, STAGES)
        if stage == "traced":
            return str(self._traced(view))
        lowered = driver.to_attn(self._traced(view), self._wrt(view))
        if stage == "attn":
            return str(lowered)
        return "\n".join(str(part.tiles) for part in self._parts(lowered, view, view.backend))

    def source(self, backend: str = "triton", view: View | None = None) -> str:
        """The text of the kernels and host functions for a backend."""
        view = view or View()
        lowered = driver.to_attn(self._traced(view), self._wrt(view))
        return "\n".join(part.source for part in self._parts(lowered, view, backend))

    def kernels(self, view: View | None = None) -> list[str]:
        """What the assembler makes of each schedule that would be tried for a view, as far as the backend can tell."""
        view = view or View()
        target, backend = Target(view.backend, view.arch), get_backend(view.backend)
        lines: list[str] = []
        for schedule in candidate_schedules(target, self._traced(view)):
            way = Way(target, schedule)
            try:
                lowered = driver.to_attn(self._traced(view), self._wrt(view))
                parts = driver.to_parts(lowered, self._request(view, schedule, view.backend))
            except REFUSALS as error:
                lines.append(f"{way}: refused: {error}")
                continue
            own = [part.source for part in parts if part.backend is backend]
            lines += [f"{way}: {_told(backend.examine(text) if backend.examine else None)}" for text in own]
            rest = [part for part in parts if part.reason is not None]
            lines += [f"{way}: the backward goes to {part.backend.name}: {part.reason}" for part in rest]
        return lines

    def _traced(self, view: View) -> ModuleOp:
        return self._trace_for(view).module

    def _trace_for(self, view: View) -> Traced:
        """The trace for a view; named inputs, which only a call brings, are stood in for."""
        shapes, definition = self.definition.custom_io.shapes, self.definition
        if isinstance(mask := definition.mask_mod, Mask):
            definition = replace(definition, mask_mod=of_call(mask, 0, 0, torch.device("cpu")))
        return build(
            definition,
            dtype=view.dtype,
            head_dim=view.head_dim,
            head_dim_v=view.head_dim_v or view.head_dim,
            return_lse=view.return_lse,
            custom={name: _stand_in(shape) for name, shape in shapes.items()},
        )

    def _wrt(self, view: View) -> tuple[str, ...]:
        """q, k, v and every captured tensor that requires a gradient."""
        if not view.backward:
            return ()
        captures = self._trace_for(view).captures
        return ("q", "k", "v", *(str(n) for n, c in enumerate(captures) if c.requires_grad))

    def _parts(self, lowered: ModuleOp, view: View, backend: str) -> list[Part]:
        schedule = default_schedule(Target(backend, view.arch), lowered)
        return driver.to_parts(lowered, self._request(view, schedule, backend))

    def _request(self, view: View, schedule: Schedule, backend: str) -> Request:
        return Request(self._wrt(view), backend, schedule, _USUAL, deterministic=self.deterministic)


def _told(found: Examination | None) -> str:
    if found is None:
        return "not examined"
    return "; ".join([*found.lines, *([f"refused: {found.reason}"] if found.reason else [])])


def _stand_in(shape: tuple[int | str, ...]) -> torch.Tensor:
    """A tensor of the rank of a named input."""
    return torch.empty([size if isinstance(size, int) else 2 for size in shape])
