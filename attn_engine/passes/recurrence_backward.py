"""attn-derive-recurrence-backward: the gradients of a recurrence are sweeps of the same kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from xdsl.context import Context
from xdsl.dialects import func
from xdsl.dialects.builtin import DYNAMIC_INDEX, IntegerAttr, ModuleOp, TensorType, UnitAttr, f32, i64
from xdsl.ir import Attribute, Block, Region, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import attn, tile

SEGMENT = 256
"""Sums over more tokens cancel to less than products of bf16 are good for; states kept at fewer take time."""
WRT = ("q", "k", "v", "decay", "beta", "weight", "initial")


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
    per_head: dict[str, SSAValue] = field(default_factory=dict[str, SSAValue])
    segment: int = 0
    kept: SSAValue | None = None
    ends: SSAValue | None = None
    wide: bool = False
    """Whether gradients of q and k come per head and in f32: with a log decay per channel, and with the delta rule."""

    def build(self) -> func.FuncOp:
        self._arguments()
        if self.op.beta is not None:
            return self._delta()
        self.wide = self.op.decay is not None and _per_channel(self.op.decay)
        rows = "decay" in self.wrt and not self.wide
        p = self._queries(rows)
        n = self._keys(rows)
        r = self._values("weight" in self.wrt)
        if self.wide and "decay" in self.wrt:
            self._channels()
        if rows or r is not None:
            self._tokens(p, n, r)
        return self._function()

    def _function(self) -> func.FuncOp:
        """The function around what has been added, its results in the order of WRT."""
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
        for name in ("q", "k", "v", "scale", "decay", "beta", "weight", "initial", "bounds"):
            value: SSAValue | None = getattr(op, name)
            if value is not None:
                turn = name == "initial" and op.beta is None
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
        keeps: bool = False,
        meets: SSAValue | None = None,
        whole: bool = False,
    ) -> attn.SweepOp:
        """Where keys or queries stand as its values, a log decay per channel is one of columns of its state."""
        a = self.args
        like, heads = a[names[2]].type, shape_of(self.op.v.type)[1]
        batch, _, tokens, channels = shape_of(like)
        columns = self.wide and names[2] != "d_o"
        element = f32 if columns else tile.element_of(like)
        result: Attribute = TensorType(element, [batch, heads, tokens, channels])
        rows: list[Attribute] = [TensorType(f32, [batch, heads, tokens])] if dot else []
        key = shape_of(a[names[0]].type)[3]
        kept: list[Attribute] = [TensorType(element, [batch, heads, DYNAMIC_INDEX, key, channels])] if keeps else []
        sums: list[Attribute] = (
            [TensorType(f32, [batch, heads, DYNAMIC_INDEX, *([channels] if columns else [])])]
            if meets is not None
            else []
        )
        sweep = attn.SweepOp(
            operands=[
                *(a[n] for n in names), a["scale"],
                *(a.get(n) for n in ("decay", "weight", initial, "bounds")),
                a[dot] if dot else None, meets,
            ],
            result_types=[result, [final] if final else [], rows, kept, sums],
            properties={
                "segment": IntegerAttr(self.segment, i64) if kept or sums else None,
                "reverse": UnitAttr() if reverse else None,
                "columns": UnitAttr() if columns else None,
                "whole": UnitAttr() if whole else None,
            },
        )  # fmt: skip
        sweep.o.name_hint = hint
        self.block.add_op(sweep)
        return sweep

    def _queries(self, rows: bool) -> SSAValue | None:
        """dq = F(do, v, k), its states turned; q . dq on the way."""
        if "q" not in self.wrt and "decay" not in self.wrt:
            return None
        dot, keeps = "q" if rows else None, "decay" in self.wrt
        sweep = self._sweep(("d_o", "v", "k"), self._hint("q"), False, "initial_t", dot, keeps=keeps)
        self._finish("q", sweep.o)
        self.kept = sweep.kept
        for value, name in ((sweep.rows, "p"), (sweep.kept, "kept")):
            if value is not None:
                value.name_hint = name
        return sweep.rows

    def _keys(self, rows: bool) -> SSAValue | None:
        """dk = F_reverse(v, do, q), whose states are the gradients of those that dq has met; k . dk on the way."""
        if "k" not in self.wrt and "decay" not in self.wrt:
            return None
        dot = "k" if rows else None
        sweep = self._sweep(("v", "d_o", "q"), self._hint("k"), True, "d_final_t", dot, meets=self.kept, whole=rows)
        self._finish("k", sweep.o)
        self.ends = sweep.ends
        for value, name in ((sweep.rows, "n"), (sweep.ends, "ends")):
            if value is not None:
                value.name_hint = name
        return sweep.rows

    def _hint(self, name: str) -> str:
        """The gradient itself, or one per head that is summed, or only rounded, later."""
        return f"d_{name}_heads" if self.grouped or self.wide else f"d_{name}"

    def _channels(self) -> None:
        """The gradient of a decay per channel."""
        a = self.args
        states = [a["final"], a["d_final"]] if self.d_final else []
        d = self.per_head
        gradient = attn.ChannelGradientsOp(
            operands=[a["q"], d["q"], a["k"], d["k"], a["decay"], states, a.get("bounds"), self.ends],
            result_types=[a["decay"].type],
            properties={"segment": IntegerAttr(self.segment, i64)},
        )
        gradient.result.name_hint = "d_decay"
        self.block.add_op(gradient)
        self.results.append(gradient.result)

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
        self.per_head[name] = per_head
        if name not in self.wrt:
            return
        if not self.grouped and not self.wide:
            self.results.append(per_head)
            return
        like = self.args[name]
        total = attn.SumHeadsOp(operands=[per_head, like], result_types=[like.type])
        total.result.name_hint = f"d_{name}"
        self.block.add_op(total)
        self.results.append(total.result)

    def _delta(self) -> func.FuncOp:
        """The delta rule: one op for all gradients, for they share the states."""
        a, op = self.args, self.op
        batch, heads, tokens, value = shape_of(op.v.type)
        per_head = TensorType(f32, [batch, heads, tokens, shape_of(op.q.type)[3]])
        d_decay = [a["decay"].type] if "decay" in self.wrt else []
        d_initial = [a["initial"].type] if "initial" in self.wrt else []
        values = TensorType(tile.element_of(op.v), [batch, heads, tokens, value])
        delta = attn.DeltaBackwardOp(
            operands=[
                *(a[n] for n in ("q", "k", "v", "d_o", "scale", "beta")),
                *(a.get(n) for n in ("decay", "initial", "bounds", "d_final")),
            ],
            result_types=[per_head, per_head, values, a["beta"].type, d_decay, d_initial],
        )
        self.block.add_op(delta)
        named = {"v": delta.dv, "beta": delta.d_beta, "decay": delta.d_decay, "initial": delta.d_initial}
        for name, result in named.items():
            if result is not None and name in self.wrt:
                result.name_hint = f"d_{name}"
                self.results.append(result)
        self.wide = True
        for name, result in (("q", delta.dq), ("k", delta.dk)):
            result.name_hint = f"d_{name}_heads"
            self._finish(name, result)
        return self._function()

    def _tokens(self, p: SSAValue | None, n: SSAValue | None, r: SSAValue | None) -> None:
        a = self.args
        decay = None if self.wide else a.get("decay")
        names = [n for n in ("decay", "weight") if n in self.wrt and not (n == "decay" and self.wide)]
        wanted = [[TensorType(f32, shape_of(a[n].type))] if n in names else [] for n in ("decay", "weight")]
        states = [a["final"], a["d_final"]] if self.d_final and "decay" in names else []
        gradients = attn.TokenGradientsOp(
            operands=[r, p, n, decay, states, a.get("bounds"), self.ends],
            result_types=wanted,
            properties={
                "segment": None if self.ends is None else IntegerAttr(self.segment, i64),
                "fresh": None if self.ends is None or self.op.initial is not None else UnitAttr(),
            },
        )
        self.block.add_op(gradients)
        for result, name in zip(gradients.results, names, strict=True):
            result.name_hint = f"d_{name}"
            self.results.append(result)


@dataclass(frozen=True)
class AttnDeriveRecurrenceBackwardPass(ModulePass):
    """Adds `@backward` to every function that holds an `attn.recurrence`.

    The map of a recurrence is linear in each of q, k and v, and the same map with its operands in other places, once
    along the tokens and once against them, gives each gradient:

    ```
    %o = attn.recurrence %q, %k, %v scale %scale decay %g
    ```
    is followed by
    ```
    %d_q, %p, %kept = attn.sweep %d_o, %v, %k scale %scale decay %g dot %q segment 256   S_t do_t, with the states turned
    %d_k, %n, %ends = attn.sweep %v, %d_o, %q scale %scale decay %g dot %k meets %kept segment 256 reverse whole
    %d_v            = attn.sweep %k, %q, %d_o scale %scale decay %g reverse
    %d_decay        = attn.token_gradients p %p n %n decay %g ends %ends segment 256 fresh
                      sum_{s >= t} (q_s dq_s - k_s dk_s)
    ```

    The last sum cancels: of a log decay that forgets fast, later tokens would leave nothing but their rounding errors. It
    goes to the end of a segment only, and both of its parts come of products that round alike. What is beyond is the sum of
    the state there times its gradient, both of which sweeps have. That is known at both ends of a segment, and so is by how
    much errors have added up in between.

    A log decay per channel gets its gradient from `attn.channel_gradients`, channel by channel of q dq - k dk. With the
    delta rule, which is not linear in k, all gradients come from `attn.delta_backward`.
    A loss on the final state starts the reversed sweeps, the last of which ends with the gradient of the
    initial state. Arguments: those of the recurrence (the initial state turned), d_o, then final, d_final and d_final turned.
    """

    name = "attn-derive-recurrence-backward"

    wrt: tuple[str, ...] = ("q", "k", "v")
    """Which gradients: of q, k, v, decay, beta, weight, initial."""
    d_final: bool = False
    """Whether the loss depends on the final state."""
    grouped: bool = True
    """Heads of q and k may serve several heads of v: their gradients are summed over them."""
    segment: int = SEGMENT
    """Tokens between states that are kept for the gradient of a log decay; a multiple of the chunk."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for recurrence in [o for o in op.walk() if isinstance(o, attn.RecurrenceOp)]:
            function = recurrence.parent_op()
            assert function is not None
            adjoint = Adjoint(recurrence, self.wrt, self.d_final, self.grouped, segment=self.segment)
            Rewriter.insert_op(adjoint.build(), InsertPoint.after(function))


def _per_channel(decay: SSAValue) -> bool:
    return len(shape_of(decay.type)) == 4
