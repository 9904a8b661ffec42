"""Tile IR (async level) to Gluon source: one op, one rule; a function for each role, then kernels, then host plans.

Nothing is decided here: roles, rings, waits and fences are ops, and layouts follow from products (`gluon_layout`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xdsl.dialects import scf
from xdsl.dialects.builtin import IntegerAttr, ModuleOp
from xdsl.ir import Block, Operation, SSAValue

from attn_engine.backends.code_writer import CodeWriter, find_rule
from attn_engine.backends.plan_python import PLAN_RULES, PlanPrinter, print_plan
from attn_engine.backends.triton import diagonals
from attn_engine.backends.triton import gluon_types as types
from attn_engine.backends.triton.gluon_async import ASYNC_RULES
from attn_engine.backends.triton.gluon_map import MAP_RULES
from attn_engine.backends.triton.gluon_prelude import PRELUDE
from attn_engine.backends.triton.gluon_printer import RESERVED, FunctionPrinter, Functions
from attn_engine.dialects import tile
from attn_engine.dialects.tile_async import RolesOp
from attn_engine.dialects.tile_async_memory import DescribeOp, ProcessorCountOp
from attn_engine.dialects.tile_async_view import RingOp
from attn_engine.dialects.tile_types import BufferType, DescriptorType
from attn_engine.errors import UnsupportedTileShapeError

# --- control -----------------------------------------------------------------------------------


def _print_ops(printer: FunctionPrinter, ops: Sequence[Operation]) -> None:
    for op in ops:
        find_rule(RULES, op, types.BACKEND_NAME)(printer, op)


def _assign_all(printer: FunctionPrinter, targets: Sequence[SSAValue], values: Sequence[SSAValue]) -> None:
    """One statement: carries may be swapped."""
    if targets:
        texts = [printer.value(value, target) for target, value in zip(targets, values, strict=True)]
        printer.writer.line(f"{', '.join(printer.texts(targets))} = {', '.join(texts)}")


def _ops_of(block: Block) -> tuple[list[Operation], Operation]:
    *ops, end = block.ops
    return ops, end


def _for(printer: FunctionPrinter, op: scf.ForOp) -> None:
    index, *carried = op.body.block.args
    _assign_all(printer, carried, op.iter_args)
    ops, end = _ops_of(op.body.block)
    bounds = ", ".join(printer.texts([op.lb, op.ub, op.step]))
    with printer.writer.block(f"for {printer.text(index)} in range({bounds}):"):
        _print_ops(printer, ops)
        _assign_all(printer, carried, end.operands)
        if not ops and not carried:
            printer.writer.line("pass")
    for result, name in zip(op.results, printer.texts(carried), strict=True):
        printer.names.bind(result, name)


def _while(printer: FunctionPrinter, op: scf.WhileOp) -> None:
    """The condition is printed twice: before the loop, and at the end of its body."""
    before, after = op.before_region.block, op.after_region.block
    ops, condition = _ops_of(before)
    body, end = _ops_of(after)
    _assign_all(printer, before.args, op.arguments)
    _print_ops(printer, ops)
    _assign_all(printer, after.args, condition.operands[1:])
    with printer.writer.block(f"while {printer.text(condition.operands[0])}:"):
        _print_ops(printer, body)
        _assign_all(printer, before.args, end.operands)
        _print_ops(printer, ops)
        _assign_all(printer, after.args, condition.operands[1:])
    for result, name in zip(op.results, printer.texts(after.args), strict=True):
        printer.names.bind(result, name)


def _if(printer: FunctionPrinter, op: scf.IfOp) -> None:
    headers = (f"if {printer.text(op.cond)}:", "else:")
    for header, region in zip(headers, op.regions, strict=True):
        if not region.blocks:
            continue
        ops, end = _ops_of(region.block)
        with printer.writer.block(header):
            _print_ops(printer, ops)
            _assign_all(printer, op.results, end.operands)
            if not ops and not op.results:
                printer.writer.line("pass")


def _program_id(printer: FunctionPrinter, op: tile.ProgramIdOp) -> None:
    printer.assign(op, f"gl.program_id({op.axis.value.data})")


def _end(printer: FunctionPrinter, op: tile.EndOp) -> None:
    """The function ends by itself."""


# --- roles -------------------------------------------------------------------------------------


def _roles(printer: FunctionPrinter, op: RolesOp) -> None:
    """A function for each role; its instances are the partitions, the first of them the kernel's own warps."""
    calls: list[str] = []
    warps: list[int] = []
    registers: list[int] = []
    for number, (region, count, role_warps, role_registers) in enumerate(op.roles):
        name, used = _print_role(printer, number, region.block, role_warps)
        arguments = [text for place in used for text in printer.passed(op.captures[place])]
        calls += [f"({name}, ({', '.join(map(str, [n, *arguments]))},))" for n in range(count)]
        warps += [role_warps] * count
        registers += [role_registers] * count
    printer.writer.line("fence_async_shared()")
    with printer.writer.block("gl.warp_specialize([", f"], {warps[1:]}, {registers[1:]})"):
        for call in calls:
            printer.writer.line(f"{call},")


def _print_role(kernel: FunctionPrinter, number: int, block: Block, warps: int) -> tuple[str, list[int]]:
    """Prints one role's function; its name, and which captures it takes: those that it uses."""
    name = kernel.functions.names.fresh(f"{kernel.name}_role_{number}")
    printer = FunctionPrinter(kernel.functions, name, block, warps)
    index, *captures = block.args
    used = [n for n, capture in enumerate(captures) if capture.uses]
    constant = printer.instance = printer.names.fresh("instance")
    parameters = [text for n in used for text in printer.argument(captures[n])]
    printer.writer.line()
    printer.writer.line()
    printer.writer.line("@gluon.jit")
    with printer.writer.block(f"def {printer.name}({', '.join([f'{constant}: gl.constexpr', *parameters])}):"):
        printer.writer.line(f"{printer.text(index)} = gl.cast({constant}, gl.int32)")
        _print_ops(printer, list(block.ops))
    kernel.functions.texts.append(printer.writer.text())
    return printer.name, used


RULES: dict[type[Operation], Callable[..., None]] = {
    **MAP_RULES,
    **ASYNC_RULES,
    scf.ForOp: _for,
    scf.WhileOp: _while,
    scf.IfOp: _if,
    tile.ProgramIdOp: _program_id,
    tile.EndOp: _end,
    RolesOp: _roles,
    tile.AddDiagonalsOp: diagonals.print_gluon,
    tile.LoadDiagonalsOp: diagonals.load_gluon,
}


# --- plans -------------------------------------------------------------------------------------


def _describe(printer: PlanPrinter, op: DescribeOp) -> None:
    type_ = op.result.type
    assert isinstance(type_, DescriptorType)
    source, block = printer.names.of(op.source), list(type_.get_shape())
    printer.assign(op, f"describe({source}, {block}, layout_of({tuple(block)}, {types.dtype(type_.element_type)}))")


def _processor_count(printer: PlanPrinter, op: ProcessorCountOp) -> None:
    printer.assign(op, f"processor_count({printer.device})")


_PLAN_RULES: dict[type[Operation], Callable[..., None]] = {
    **PLAN_RULES,
    DescribeOp: _describe,
    ProcessorCountOp: _processor_count,
}


# --- module ------------------------------------------------------------------------------------


class _Kernel:
    """One kernel's function, and what its launches need to know of it."""

    def __init__(self, functions: Functions, op: tile.KernelOp):
        self.op = op
        self.name = functions.names.fresh(op.sym_name.data)
        warps = op.attributes.get("num_warps")
        self.warps = warps.value.data if isinstance(warps, IntegerAttr) else 4
        self.signature: dict[str, str] = {}
        _check_shapes(op)
        self.printer = FunctionPrinter(functions, self.name, op.body.block, self.warps)

    def print(self) -> str:
        printer, block = self.printer, self.op.body.block
        for argument in block.args:
            name, *strides = printer.argument(argument)
            self.signature |= {name: types.signature(argument.type)} | dict.fromkeys(strides, "stride")
        scalars = [printer.text(a) for a in block.args if not isinstance(a.type, tile.GlobalType | DescriptorType)]
        printer.writer.line()
        printer.writer.line()
        printer.writer.line(f"@gluon.jit(do_not_specialize={scalars})")
        with printer.writer.block(f"def {self.name}({', '.join(self.signature)}):"):
            _print_ops(printer, list(block.ops))
        return printer.writer.text()


def _check_shapes(kernel: tile.KernelOp) -> None:
    """Tiles and slots have sizes that are powers of two; a ring may have any number of stages."""
    for op in kernel.walk():
        for result in op.results:
            shape = tile.shape_of(result)
            if isinstance(result.type, BufferType):
                shape = result.type.get_shape()[isinstance(op, RingOp) :]
            if any(size & (size - 1) for size in shape):
                raise UnsupportedTileShapeError(op.name, str(result.type), types.BACKEND_NAME)


def _print_table(writer: CodeWriter, kernels: Sequence[_Kernel]) -> None:
    """What a compiler without a device needs to know of each kernel."""
    writer.line()
    writer.line()
    with writer.block("KERNELS = {", "}"):
        for kernel in kernels:
            with writer.block(f'"{kernel.op.sym_name.data}": {{', "},"):
                writer.line(f'"function": {kernel.name},')
                writer.line(f'"signature": {kernel.signature},')
                writer.line(f'"options": {{"num_warps": {kernel.warps}}},')


def _launch(kernels: dict[str, _Kernel]):
    def launch(writer: CodeWriter, kernel: str, grid: Sequence[str], arguments: Sequence[str]) -> None:
        callee = kernels[kernel]
        texts: list[str] = []
        for text, argument in zip(arguments, callee.op.body.block.args, strict=True):
            texts += [text, f"*{text}.stride()"] if isinstance(argument.type, tile.GlobalType) else [text]
        writer.line(f"{callee.name}[({', '.join(grid)})]({', '.join(texts)}, num_warps={callee.warps})")

    return launch


def emit(module: ModuleOp) -> str:
    """Gluon source of a module of kernels and plans; nothing but the module decides it."""
    functions = Functions()
    kernels: dict[str, _Kernel] = {}
    for op in module.ops:
        if isinstance(op, tile.KernelOp):
            kernel = kernels[op.sym_name.data] = _Kernel(functions, op)
            functions.texts.append(kernel.print())
        elif not isinstance(op, tile.PlanOp):
            find_rule(RULES, op, types.BACKEND_NAME)
    writer = CodeWriter()
    writer.lines(PRELUDE)
    for name, definition in functions.constants.items():
        writer.line(f"{name} = gl.constexpr({definition})")
    for text in functions.texts:
        for line in text.rstrip("\n").split("\n"):
            writer.line(line)
    _print_table(writer, list(kernels.values()))
    plans = [op for op in module.ops if isinstance(op, tile.PlanOp)]
    writer.line(f"PLANS = {[plan.sym_name.data for plan in plans]}")
    for op in plans:
        writer.line()
        writer.line()
        reserved = (*RESERVED, *(kernel.name for kernel in kernels.values()))
        print_plan(writer, op, _launch(kernels), types.BACKEND_NAME, reserved, _PLAN_RULES)
    return writer.text()
