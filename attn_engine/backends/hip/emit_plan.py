"""Prints a `tile.plan` as a C function that launches its kernels; Python is not needed to call it.

```
tile.plan @forward(%q: !tile.global<4 x f16>, %scale: f32) {...}
```
becomes
```
extern "C" int forward(const attn_tensor *q_argument, float scale, void *stream) {
  attn::Host host(stream);
  const auto q = attn::global_of<attn::half, 4>(q_argument);
  ...
  return host.status();
}
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from xdsl.ir import Operation

from attn_engine.backends.code_writer import CodeWriter, find_rule
from attn_engine.backends.hip import types
from attn_engine.backends.hip.emit_scalar import SCALAR_RULES
from attn_engine.backends.hip.printer import FunctionPrinter
from attn_engine.dialects import tile
from attn_engine.errors import UnsupportedOpError


class PlanPrinter(FunctionPrinter):
    """A plan, with what it must know of the kernels: their names in the text and their threads."""

    def __init__(self, writer: CodeWriter, kernels: Mapping[str, tuple[str, int]]):
        super().__init__(writer, ("host", "stream", *(name for name, _ in kernels.values())))
        self.kernels = kernels


def signature(plan: tile.PlanOp) -> str:
    """`forward(tensor, tensor, f32)`: what a caller of the library must pass."""
    kinds: list[str] = []
    for argument in plan.body.block.args:
        if isinstance(argument.type, tile.GlobalType):
            kinds.append("tensor")
            continue
        if str(argument.type) not in types.SIGNATURES:
            raise UnsupportedOpError(f"a plan's argument of type {argument.type}", types.BACKEND_NAME)
        kinds.append(types.SIGNATURES[str(argument.type)])
    return f"{plan.sym_name.data}({', '.join(kinds)})"


def print_plan(printer: PlanPrinter, plan: tile.PlanOp) -> None:
    tensors: list[str] = []
    parameters: list[str] = []
    for argument in plan.body.block.args:
        name = printer.text(argument)
        if isinstance(argument.type, tile.GlobalType):
            raw = printer.names.fresh(f"{name}_argument")
            element, rank = types.element(argument.type.element_type), argument.type.rank.data
            tensors.append(f"const auto {name} = attn::global_of<{element}, {rank}>({raw});")
            parameters.append(f"const attn_tensor *{raw}")
        else:
            parameters.append(f"{types.element(argument.type)} {name}")
    header = f'extern "C" int {plan.sym_name.data}({", ".join([*parameters, "void *stream"])}) {{'
    with printer.writer.block(header, "}"):
        printer.writer.line("attn::Host host(stream);")
        for line in tensors:
            printer.writer.line(line)
        for op in plan.body.block.ops:
            find_rule(PLAN_RULES, op, types.BACKEND_NAME)(printer, op)
        printer.writer.line("return host.status();")


def _alloc(printer: PlanPrinter, op: tile.AllocOp) -> None:
    element = types.element(tile.element_of(op.result))
    sizes = ", ".join(printer.texts(op.sizes))
    printer.writer.line(f"const auto {printer.text(op.result)} = host.temporary<{element}>({sizes});")


def _fill(printer: PlanPrinter, op: tile.FillOp) -> None:
    printer.writer.line(f"host.fill({', '.join(printer.texts([op.target, op.value]))});")


def _launch(printer: PlanPrinter, op: tile.LaunchOp) -> None:
    kernel, threads = printer.kernels[op.kernel.root_reference.data]
    grid = [*printer.texts(op.grid), "1", "1"][:3]
    arguments = [f"&{kernel}", *grid, str(threads), *printer.texts(op.arguments)]
    printer.writer.line(f"host.launch({', '.join(arguments)});")


def _end(printer: PlanPrinter, op: tile.EndOp) -> None:
    """The status is returned by itself."""


PLAN_RULES: dict[type[Operation], Callable[..., None]] = {
    **SCALAR_RULES,
    tile.AllocOp: _alloc,
    tile.FillOp: _fill,
    tile.LaunchOp: _launch,
    tile.EndOp: _end,
}
