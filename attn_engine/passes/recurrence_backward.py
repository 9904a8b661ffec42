"""attn-derive-recurrence-backward: the gradients of a recurrence are sweeps of the same kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from xdsl.context import Context
from xdsl.dialects import func
from xdsl.dialects.builtin import ModuleOp, TensorType, UnitAttr, f32
from xdsl.ir import Attribute, Block, Region, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import attn, tile
from attn_engine.errors import RecurrenceFormError

WRT = ("q", "k", "v", "decay", "weight", "initial")


def shape_of(type_: Attribute) -> list[int]:
    assert isinstance(type_, TensorType)
    return list(type_.get_shape())


def turned(state: Attribute) -> Attribute:
    """The type of a state with key and value channels exchanged."""
    n, h, k, v = shape_of(state)
    return TensorType(tile.element_of(state), [n, h, v, k])


@dataclass
class Adjoint:
    """The backward function of one recurrence under construction."""

    op: attn.RecurrenceOp
    wrt: Sequence[str]
    d_final: bool
    grouped: bool
    block: Block = field(default_factory=Block)
    args: dict[str, SSAValue] = field(default_factory=dict[str, SSAValue])
    results: list[SSAValue] = field(default_factory=list[SSAValue])

    def build(self) -> func.FuncOp:
        self._arguments()
        per_token = any(name in self.wrt for name in ("decay", "weight"))
        p = self._queries()
        self._keys()
        r = self._values(per_token)
        if r is not None:
            self._tokens(p, r)
        order = {f"d_{name}": n for n, name in enumerate(WRT)}
        self.results.sort(key=lambda value: order[value.name_hint or ""])
        self.block.add_op(func.ReturnOp(*self.results))
        types = [a.type for a in self.block.args]
        return func.FuncOp("backward", (types, [r.type for r in self.results]), Region(self.block))

    def _argument(self, name: str, type_: Attribute) -> None:
        argument = self.block.insert_arg(type_, len(self.block.args))
        argument.name_hint = name
        self.args[name] = argument

    def _arguments(self) -> None:
        op = self.op
        for name in ("q", "k", "v", "scale", "decay", "weight", "initial", "bounds"):
            value: SSAValue | None = getattr(op, name)
            if value is not None:
                turn = name == "initial"
                self._argument("initial_t" if turn else name, turned(value.type) if turn else value.type)
        self._argument("d_o", op.o.type)
        if self.d_final:
            assert op.final is not None
            self._argument("final", op.final.type)
            self._argument("d_final", op.final.type)
            self._argument("d_final_t", turned(op.final.type))

    def _sweep(
        self,
        names: Sequence[str],
        hint: str,
        reverse: bool,
        initial: str,
        dot: str | None,
        final: Attribute | None = None,
    ) -> attn.SweepOp:
        a = self.args
        like, heads = a[names[2]].type, shape_of(self.op.v.type)[1]
        batch, _, tokens, channels = shape_of(like)
        result: Attribute = TensorType(tile.element_of(like), [batch, heads, tokens, channels])
        rows: list[Attribute] = [TensorType(f32, [batch, heads, tokens])] if dot else []
        sweep = attn.SweepOp(
            operands=[
                *(a[n] for n in names), a["scale"],
                *(a.get(n) for n in ("decay", "weight", initial, "bounds")),
                a[dot] if dot else None,
            ],
            result_types=[result, [final] if final else [], rows],
            properties={"reverse": UnitAttr() if reverse else None},
        )  # fmt: skip
        sweep.o.name_hint = hint
        self.block.add_op(sweep)
        return sweep

    def _queries(self) -> SSAValue | None:
        """dq = F(do, v, k), its states turned; q . dq on the way."""
        if "q" not in self.wrt and "decay" not in self.wrt:
            return None
        sweep = self._sweep(("d_o", "v", "k"), "d_q", False, "initial_t", "q" if "decay" in self.wrt else None)
        self._finish("q", sweep.o)
        if sweep.rows is not None:
            sweep.rows.name_hint = "p"
        return sweep.rows

    def _keys(self) -> None:
        """dk = F_reverse(v, do, q)."""
        if "k" in self.wrt:
            self._finish("k", self._sweep(("v", "d_o", "q"), "d_k", True, "d_final_t", None).o)

    def _values(self, per_token: bool) -> SSAValue | None:
        """dv = F_reverse(k, q, do); the gradient of the first state is what the state ends as."""
        wanted = [name for name in ("v", "initial") if name in self.wrt]
        if not wanted and not per_token:
            return None
        initial = self.op.initial
        final = initial.type if initial is not None and "initial" in self.wrt else None
        sweep = self._sweep(("k", "q", "d_o"), "d_v", True, "d_final", "v" if per_token else None, final)
        if "v" in self.wrt:
            self.results.append(sweep.o)
        if sweep.final is not None:
            sweep.final.name_hint = "d_initial"
            self.results.append(sweep.final)
        if sweep.rows is not None:
            sweep.rows.name_hint = "r"
        return sweep.rows

    def _finish(self, name: str, per_head: SSAValue) -> None:
        """The gradient of a tensor whose heads may each serve several."""
        if name not in self.wrt:
            return
        if not self.grouped:
            self.results.append(per_head)
            return
        per_head.name_hint = f"d_{name}_heads"
        like = self.args[name]
        total = attn.SumHeadsOp(operands=[per_head, like], result_types=[like.type])
        total.result.name_hint = f"d_{name}"
        self.block.add_op(total)
        self.results.append(total.result)

    def _tokens(self, p: SSAValue | None, r: SSAValue) -> None:
        a = self.args
        wanted = [[TensorType(f32, shape_of(a[n].type))] if n in self.wrt else [] for n in ("decay", "weight")]
        states = [a["final"], a["d_final"]] if self.d_final and "decay" in self.wrt else []
        gradients = attn.TokenGradientsOp(
            operands=[r, p, a.get("decay"), a.get("weight"), states, a.get("bounds")], result_types=wanted
        )
        self.block.add_op(gradients)
        for result, name in ((gradients.d_decay, "d_decay"), (gradients.d_weight, "d_weight")):
            if result is not None:
                result.name_hint = name
                self.results.append(result)


@dataclass(frozen=True)
class AttnDeriveRecurrenceBackwardPass(ModulePass):
    """Adds `@backward` to every function that holds an `attn.recurrence` with one log decay per token.

    The map of a recurrence is linear in each of q, k and v, and the same map with its operands in other places, once
    along the tokens and once against them, gives each gradient:

    ```
    %o = attn.recurrence %q, %k, %v scale %scale decay %g
    ```
    is followed by
    ```
    %d_q, %p = attn.sweep %d_o, %v, %k scale %scale decay %g dot %q            S_t do_t, with the states turned
    %d_k     = attn.sweep %v, %d_o, %q scale %scale decay %g reverse
    %d_v, %r = attn.sweep %k, %q, %d_o scale %scale decay %g dot %v reverse
    %d_decay = attn.token_gradients %r p %p decay %g                              sum_{s >= t} (q_s dq_s - k_s dk_s)
    ```

    A loss on the final state starts the reversed sweeps, the last of which ends with the gradient of the
    initial state. Arguments: those of the recurrence (the initial state turned), d_o, then final, d_final and d_final turned.
    """

    name = "attn-derive-recurrence-backward"

    wrt: tuple[str, ...] = ("q", "k", "v")
    """Which gradients: of q, k, v, decay, weight, initial."""
    d_final: bool = False
    """Whether the loss depends on the final state."""
    grouped: bool = True
    """Heads of q and k may serve several heads of v: their gradients are summed over them."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for recurrence in [o for o in op.walk() if isinstance(o, attn.RecurrenceOp)]:
            if recurrence.beta is not None or (recurrence.decay is not None and _per_channel(recurrence.decay)):
                raise RecurrenceFormError("the gradient of a decay per channel or of the delta rule", "chunked")
            function = recurrence.parent_op()
            assert function is not None
            adjoint = Adjoint(recurrence, self.wrt, self.d_final, self.grouped)
            Rewriter.insert_op(adjoint.build(), InsertPoint.after(function))


def _per_channel(decay: SSAValue) -> bool:
    return len(shape_of(decay.type)) == 4
