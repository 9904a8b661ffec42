"""Prints a `tile.plan` as a Python host function: straight-line code, sizes as Python ints.

```
tile.plan @forward(%q: !tile.global<4 x f16>, %scale: f32) {...}
```
becomes
```
def forward(q, scale):
    n = q.shape[2]
    tmp = torch.empty((n,), dtype=torch.float32, device=q.device)
    if n > 0:
        <what the backend prints for a launch>
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from xdsl.dialects import arith
from xdsl.dialects.builtin import i1
from xdsl.ir import Operation, SSAValue

from attn_engine.backends.code_writer import CodeWriter, Names, find_rule, python_literal
from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_memory import ProcessorCountOp
from attn_engine.errors import UnsupportedOpError

TORCH_DTYPES = {
    "f64": "torch.float64",
    "f32": "torch.float32",
    "f16": "torch.float16",
    "bf16": "torch.bfloat16",
    "i64": "torch.int64",
    "i32": "torch.int32",
    "i16": "torch.int16",
    "i8": "torch.int8",
    "i1": "torch.bool",
}

Launch = Callable[[CodeWriter, str, Sequence[str], Sequence[str]], None]
"""Prints one launch: writer, kernel name, grid (three texts, padded with "1"), arguments."""
Rules = Mapping[type[Operation], Callable[..., None]]

_DIV = "({0} // {1} if ({0} < 0) == ({1} < 0) else -(-{0} // {1}))"
_COMPARE = ("==", "!=", "<", "<=", ">", ">=", "<", "<=", ">", ">=")

_EXPRESSIONS: dict[type[Operation], str] = {
    arith.AddiOp: "{0} + {1}",
    arith.SubiOp: "{0} - {1}",
    arith.MuliOp: "{0} * {1}",
    arith.DivSIOp: _DIV,
    arith.RemSIOp: f"{{0}} - {{1}} * {_DIV}",
    arith.FloorDivSIOp: "{0} // {1}",
    arith.CeilDivSIOp: "-(-{0} // {1})",
    arith.MinSIOp: "({0} if {0} < {1} else {1})",
    arith.MaxSIOp: "({0} if {0} > {1} else {1})",
    arith.AndIOp: "{0} & {1}",
    arith.OrIOp: "{0} | {1}",
    arith.XOrIOp: "{0} ^ {1}",
    arith.SelectOp: "({1} if {0} else {2})",
    arith.ExtSIOp: "{0}",
    arith.TruncIOp: "{0}",
    arith.SIToFPOp: "float({0})",
    arith.AddfOp: "{0} + {1}",
    arith.SubfOp: "{0} - {1}",
    arith.MulfOp: "{0} * {1}",
    arith.DivfOp: "{0} / {1}",
    arith.NegfOp: "-{0}",
}


class PlanPrinter:
    """Prints the ops of one plan; `launch` prints what differs between backends."""

    def __init__(
        self, writer: CodeWriter, launch: Launch, backend: str, reserved: Sequence[str] = (), rules: Rules | None = None
    ):
        self.writer = writer
        self.launch = launch
        self.backend = backend
        self.rules = PLAN_RULES if rules is None else rules
        self.names = Names(("torch", *reserved))

    def print_plan(self, plan: tile.PlanOp) -> None:
        arguments = plan.body.block.args
        names = [self.names.of(argument) for argument in arguments]
        with self.writer.block(f"def {plan.sym_name.data}({', '.join(names)}):"):
            self._print_device(plan, arguments)
            for op in plan.body.block.ops:
                find_rule(self.rules, op, self.backend)(self, op)
            self.writer.line("return None")

    def _print_device(self, plan: tile.PlanOp, arguments: Sequence[SSAValue]) -> None:
        if not any(isinstance(op, tile.AllocOp | ProcessorCountOp) for op in plan.body.block.ops):
            return
        tensors = [a for a in arguments if isinstance(a.type, tile.GlobalType)]
        if not tensors:
            raise UnsupportedOpError("tile.alloc or tile.processor_count in a plan without tensors", self.backend)
        self.device = self.names.fresh("device")
        self.writer.line(f"{self.device} = {self.names.of(tensors[0])}.device")

    def texts(self, values: Sequence[SSAValue]) -> list[str]:
        return [self.names.of(value) for value in values]

    def assign(self, op: Operation, expression: str) -> None:
        self.writer.line(f"{self.names.of(op.results[0])} = {expression}")


def _constant(printer: PlanPrinter, op: arith.ConstantOp) -> None:
    printer.names.bind(op.result, python_literal(op.value))


def _expression(printer: PlanPrinter, op: Operation) -> None:
    printer.assign(op, _EXPRESSIONS[type(op)].format(*map(_atom, printer.texts(op.operands))))


def _atom(text: str) -> str:
    return f"({text})" if text.startswith("-") else text


def _compare(printer: PlanPrinter, op: arith.CmpiOp) -> None:
    predicate = op.predicate.value.data
    if predicate >= 6 and op.lhs.type != i1:
        raise UnsupportedOpError(f"arith.cmpi unsigned ({predicate})", printer.backend)
    lhs, rhs = map(_atom, printer.texts(op.operands))
    printer.assign(op, f"{lhs} {_COMPARE[predicate]} {rhs}")


def _dim(printer: PlanPrinter, op: tile.DimOp) -> None:
    printer.assign(op, f"{printer.names.of(op.source)}.shape[{op.axis.value.data}]")


def _alloc(printer: PlanPrinter, op: tile.AllocOp) -> None:
    sizes = "".join(f"{size}, " for size in printer.texts(op.sizes))
    dtype = TORCH_DTYPES[str(tile.element_of(op.result))]
    printer.assign(op, f"torch.empty(({sizes}), dtype={dtype}, device={printer.device})")


def _fill(printer: PlanPrinter, op: tile.FillOp) -> None:
    printer.writer.line(f"{printer.names.of(op.target)}.fill_({printer.names.of(op.value)})")


def _launch(printer: PlanPrinter, op: tile.LaunchOp) -> None:
    grid = printer.texts(op.grid)
    arguments = printer.texts(op.arguments)
    kernel = op.kernel.root_reference.data
    conditions = [f"{size} > 0" for size in grid if not size.isdigit()]
    padded = [*grid, *["1"] * (3 - len(grid))]
    if "0" in grid:
        return
    if not conditions:
        printer.launch(printer.writer, kernel, padded, arguments)
        return
    with printer.writer.block(f"if {' and '.join(conditions)}:"):
        printer.launch(printer.writer, kernel, padded, arguments)


def _end(printer: PlanPrinter, op: tile.EndOp) -> None:
    """The function returns None by itself."""


PLAN_RULES: dict[type[Operation], Callable[..., None]] = {
    **dict.fromkeys(_EXPRESSIONS, _expression),
    arith.ConstantOp: _constant,
    arith.CmpiOp: _compare,
    tile.DimOp: _dim,
    tile.AllocOp: _alloc,
    tile.FillOp: _fill,
    tile.LaunchOp: _launch,
    tile.EndOp: _end,
}


def print_plan(
    writer: CodeWriter,
    plan: tile.PlanOp,
    launch: Launch,
    backend: str,
    reserved: Sequence[str] = (),
    rules: Rules | None = None,
) -> None:
    """Prints `plan` as a Python function of the same name.

    `reserved` are global names of the generated module; `rules` are `PLAN_RULES` and what a backend adds to them.
    """
    PlanPrinter(writer, launch, backend, reserved, rules).print_plan(plan)
