"""The operands and results of one sweep, and where its weights and its scale go."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.ir import SSAValue

from attn_engine.passes.lowering.recurrence.anchors import Anchors
from attn_engine.passes.lowering.recurrence.heads import RowSizes


@dataclass(frozen=True)
class Walk:
    """The operands of one sweep, results as values of the plan."""

    name: str
    q: SSAValue
    k: SSAValue
    v: SSAValue
    scale: SSAValue
    decay: SSAValue | None
    weight: SSAValue | None
    initial: SSAValue | None
    bounds: SSAValue | None
    dot: SSAValue | None
    reverse: bool
    o: SSAValue
    final: SSAValue | None
    anchors: Anchors | None = None
    whole: bool = False
    """In reverse, whether weights are in the products, as they are forward: then both round alike."""

    sizes: RowSizes | None = None
    """Where results are divided by the size of their row, and that is kept."""
    scaled: bool = False
    """Whether the states of the sweep that this one's sums are held against have the scale inside."""

    @property
    def weighs(self) -> bool:
        """Whether products of tokens hold the weight of the token that is written; else results are weighted."""
        return not self.reverse or self.whole

    @property
    def scale_results(self) -> bool:
        """Whether the scale may multiply the results, which costs nothing: the adjoint's states have it inside."""
        return not self.reverse or (self.initial is None and self.final is None)

    @property
    def scale_weights(self) -> bool:
        """Whether the products of tokens have the scale, as they need where states have it: both sweeps round alike."""
        return not self.scale_results or self.scaled
