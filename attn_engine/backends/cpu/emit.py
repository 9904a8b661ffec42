"""Tile IR (value level) to a Python module on torch: one op, one rule.

A kernel becomes a function of a batch of programs and its arguments (see `support`); a plan becomes a
host function. `%s = tile.map (%x, %m) axes [[0, 1], [0]]` with a subtraction and an exp2 becomes
```
d = x - m[..., None]
s = torch.exp2(d)
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

from xdsl.dialects import arith, scf
from xdsl.dialects.builtin import DenseIntOrFPElementsAttr, FloatAttr, ModuleOp
from xdsl.ir import Block, Operation, SSAValue

from attn_engine.backends.code_writer import CodeWriter, Names, find_rule
from attn_engine.backends.cpu.emit_scalar import SCALAR_RULES
from attn_engine.backends.cpu.ownership import local
from attn_engine.backends.cpu.printer import BACKEND, KernelPrinter, shape_text, tuple_of
from attn_engine.backends.cpu.types import dtype_of
from attn_engine.backends.plan_python import Launch, print_plan
from attn_engine.dialects import tile

SUPPORT = (
    "at", "cast", "concat", "divsi", "dot", "extsi", "extui", "floordivsi", "full", "iota", "launch", "maxsi", "minsi",
    "product", "remsi", "select", "shrui", "sitofp", "tensor", "trunci", "unsigned", "wrap",
)  # fmt: skip
MEMORY = ("atomic_add", "atomic_max", "load", "store")
GATHER = ("gather", "scatter_add")
DIAGONALS = ("add_diagonals", "load_diagonals")
BUILTINS = ("abs", "float", "range", "torch")


def emit(module: ModuleOp) -> str:
    """The source text of a Python module with one function per kernel and per plan."""
    writer = CodeWriter()
    writer.line("import torch")
    writer.line(f"from attn_engine.backends.cpu.diagonals import {', '.join(DIAGONALS)}")
    writer.line(f"from attn_engine.backends.cpu.gather import {', '.join(GATHER)}")
    writer.line(f"from attn_engine.backends.cpu.memory import {', '.join(MEMORY)}")
    writer.line(f"from attn_engine.backends.cpu.support import {', '.join(SUPPORT)}")
    functions = [op.sym_name.data for op in module.ops if isinstance(op, tile.KernelOp | tile.PlanOp)]
    ordered = {op.sym_name.data for op in module.ops if isinstance(op, tile.KernelOp) and _adds_to_memory(op)}
    reserved = (*SUPPORT, *DIAGONALS, *GATHER, *MEMORY, *BUILTINS, *functions)
    for op in module.ops:
        writer.line()
        writer.line()
        if isinstance(op, tile.PlanOp):
            print_plan(writer, op, _launch_printer(ordered), BACKEND, reserved)
        else:
            find_rule(_MODULE_RULES, op, BACKEND)(writer, op, reserved)
    return writer.text()


def _adds_to_memory(kernel: tile.KernelOp) -> bool:
    """Whether programs may meet in one element: threads would lose what others write, and order shows in the rounding."""
    adds = (tile.AtomicAddOp, tile.AtomicMaxOp, tile.ScatterAddOp, tile.AddDiagonalsOp)
    return any(isinstance(op, adds) for op in kernel.walk())


def _launch_printer(ordered: Set[str]) -> Launch:
    def print_launch(writer: CodeWriter, kernel: str, grid: Sequence[str], arguments: Sequence[str]) -> None:
        order = ", in_order=True" if kernel in ordered else ""
        writer.line(f"launch({kernel}, ({', '.join(grid)}), {tuple_of(arguments)}{order})")

    return print_launch


def _print_kernel(writer: CodeWriter, kernel: tile.KernelOp, reserved: Sequence[str]) -> None:
    names = Names((*reserved, "programs"))
    arguments = ", ".join(["programs", *(names.of(a) for a in kernel.body.block.args)])
    with writer.block(f"def {kernel.sym_name.data}({arguments}):"):
        printer = KernelPrinter(writer, names, kernel, _RULES)
        printer.print_block(kernel.body.block)
        writer.line("return None")


_MODULE_RULES: dict[type[Operation], Callable[..., None]] = {tile.KernelOp: _print_kernel}


def _program_id(printer: KernelPrinter, op: tile.ProgramIdOp) -> None:
    printer.assign(op, f"programs.id({op.axis.value.data})")
    if op.axis.value.data == 0:
        printer.uniform.add(op.result)


def _dim(printer: KernelPrinter, op: tile.DimOp) -> None:
    printer.assign(op, f"{printer.names.of(op.source)}.shape[{op.axis.value.data}]")
    printer.uniform.add(op.result)


# --- control -----------------------------------------------------------------------------------


def _for(printer: KernelPrinter, op: scf.ForOp) -> None:
    """A plain range where all programs take the same trips, else a loop under a mask."""
    induction, *carries = op.body.block.args
    last = op.body.block.last_op
    assert last is not None
    names = printer.texts(carries)
    if names:
        printer.writer.line(f"{', '.join(names)} = {', '.join(printer.texts(op.iter_args))}")
    bounds = [op.lb, op.ub, op.step]
    plain = all(bound in printer.uniform for bound in bounds)
    if plain:
        printer.uniform.add(induction)
    loop = "range" if plain else "programs.loop"
    buffers = printer.buffers
    with printer.writer.block(f"for {printer.names.of(induction)} in {loop}({', '.join(printer.texts(bounds))}):"):
        printer.print_block(op.body.block)
        new = printer.texts(last.operands)
        if not plain:
            new = [f"programs.keep({n}, {old})" for n, old in zip(new, names, strict=True)]
        printer.writer.line(f"{', '.join(names)} = {', '.join(new)}" if names else "pass")
    printer.buffers = buffers
    for result, name in zip(op.results, names, strict=True):
        printer.names.bind(result, name)


def _if(printer: KernelPrinter, op: scf.IfOp) -> None:
    """A plain branch where all programs agree, else each side under a mask and a choice of results."""
    results = printer.texts(op.results)
    condition = printer.names.of(op.cond)
    sides = [[printer.names.fresh(f"{result}_{side}") for result in results] for side in ("then", "else")]
    plain = op.cond in printer.uniform
    if plain:
        sides = [results, results]
    else:
        for name in (*sides[0], *sides[1]):
            printer.writer.line(f"{name} = None")
    side_name = printer.names.fresh("side")
    header = f"if {condition}:" if plain else f"for {side_name} in programs.branch({condition}):"
    if plain:
        with printer.writer.block(header):
            _side(printer, op.true_region.blocks, sides[0])
        with printer.writer.block("else:"):
            _side(printer, op.false_region.blocks, sides[1])
        return
    with printer.writer.block(header):
        with printer.writer.block(f"if {side_name}:"):
            _side(printer, op.true_region.blocks, sides[0])
        with printer.writer.block("else:"):
            _side(printer, op.false_region.blocks, sides[1])
    for result, then, otherwise in zip(results, *sides, strict=True):
        printer.writer.line(f"{result} = programs.join({condition}, {then}, {otherwise})")


def _side(printer: KernelPrinter, blocks: Sequence[Block], targets: Sequence[str]) -> None:
    for block in blocks:
        printer.print_block(block)
        last = block.last_op
        if targets and last is not None:
            printer.writer.line(f"{', '.join(targets)} = {', '.join(printer.texts(last.operands))}")
    if not blocks or not targets:
        printer.writer.line("pass")


# --- memory ------------------------------------------------------------------------------------


def _access(printer: KernelPrinter, op: tile.LoadOp | tile.WriteAccess, shape: str) -> str:
    bounded = zip(tile.ints_of(op.bounded), printer.texts(op.limits), strict=True)
    limits = ", ".join(f"{axis}: {limit}" for axis, limit in bounded)
    dims = tuple_of([str(dim) for dim in tile.ints_of(op.dims)])
    return f"{shape}, {printer.tuple(op.indices)}, {dims}, {{{limits}}}"


def _load(printer: KernelPrinter, op: tile.LoadOp) -> None:
    fresh = ", fresh=True" if op.source in printer.written else ""
    access = _access(printer, op, shape_text(op.result.type))
    printer.assign(op, f"load(programs, {printer.names.of(op.source)}, {access}{fresh})")


def _write(function: str) -> Callable[[KernelPrinter, tile.WriteAccess], None]:
    def rule(printer: KernelPrinter, op: tile.WriteAccess) -> None:
        value, target = printer.texts([op.value, op.target])
        printer.writer.line(
            f"{function}(programs, {value}, {target}, {_access(printer, op, shape_text(op.value.type))})"
        )

    return rule


def _scatter_add(printer: KernelPrinter, op: tile.ScatterAddOp) -> None:
    rank = len(tile.shape_of(op.value))
    operands = [*op.indices, *([op.guard] if op.guard is not None else [])]
    placed = [_placed(printer, o, axes, rank) for o, axes in zip(operands, tile.axes_of(op.axes), strict=True)]
    guard = placed.pop() if op.guard is not None else "True"
    value, target = printer.texts([op.value, op.target])
    shape = shape_text(op.value.type)
    printer.writer.line(f"scatter_add(programs, {value}, {shape}, {target}, {tuple_of(placed)}, {guard})")


def _load_diagonals(printer: KernelPrinter, op: tile.LoadDiagonalsOp) -> None:
    shape, starts = shape_text(op.result.type), printer.tuple([op.rows, op.columns])
    access = f"{shape}, {printer.tuple(op.indices)}, {starts}, {op.turned is not None}"
    printer.assign(op, f"load_diagonals(programs, {printer.names.of(op.source)}, {access})")


def _add_diagonals(printer: KernelPrinter, op: tile.AddDiagonalsOp) -> None:
    value, target = printer.texts([op.value, op.target])
    access = f"{target}, {printer.tuple(op.indices)}, {op.turned is not None}"
    printer.writer.line(f"add_diagonals(programs, {value}, {shape_text(op.value.type)}, {access})")


# --- tensors -----------------------------------------------------------------------------------


def _placed(printer: KernelPrinter, value: SSAValue, axes: Sequence[int], rank: int) -> str:
    """An operand reshaped so that it broadcasts against `rank` tile axes."""
    text = printer.names.of(value)
    if isinstance(value.type, tile.GlobalType) or len(axes) == rank or value in printer.uniform:
        return text
    if not axes:
        return f"at({text}, {rank})"
    if len(axes) == 1 and rank == 2:
        return f"{text}.unsqueeze({-2 if axes[0] else -1})"
    picks = ", ".join(":" if axis in axes else "None" for axis in range(rank))
    return f"{text}[..., {picks}]" if picks.rstrip("None, ") else f"{text}[{picks}]"


def _map(printer: KernelPrinter, op: tile.MapOp) -> None:
    rank = len(tile.shape_of(op.outputs[0]))
    block = op.body.block
    for argument, operand, axes in zip(block.args, op.inputs, tile.axes_of(op.axes), strict=True):
        text = _placed(printer, operand, axes, rank)
        if text.isidentifier() or operand in printer.uniform:
            printer.names.bind(argument, text)
        else:
            printer.writer.line(f"{printer.names.of(argument)} = {text}")
        printer.axes[argument] = frozenset(axes)
        if operand in printer.uniform:
            printer.uniform.add(argument)
    printer.print_block(block)
    last = block.last_op
    assert last is not None
    for output, value in zip(op.outputs, last.operands, strict=True):
        if len(printer.axes.get(value, ())) == rank:
            printer.names.bind(output, printer.names.of(value))
        else:
            text = f"full({printer.names.of(value)}, {shape_text(output.type)}, {dtype_of(tile.element_of(output))})"
            printer.writer.line(f"{printer.names.of(output)} = {text}")


def _range(printer: KernelPrinter, op: tile.RangeOp) -> None:
    printer.assign(op, f"iota({printer.names.of(op.start)}, {tile.shape_of(op.result)[0]})")


def _dot(printer: KernelPrinter, op: tile.DotOp) -> None:
    """A zero constant is not added; a product that is free again at the end of its block has one buffer for all trips."""
    a, b, acc = printer.texts([op.a, op.b, op.acc])
    source = op.acc.owner
    if isinstance(source, arith.ConstantOp) and isinstance(source.value, DenseIntOrFPElementsAttr):
        number = tile.splat_of(source.value)
        acc = "None" if isinstance(number, FloatAttr) and number.value.data == 0 else acc
    if acc == "None" and local(op.result):
        printer.assign(op, f"product({a}, {b}, programs, {printer.buffer()})")
        return
    lends = acc != "None" and printer.lends(op.acc, op)
    printer.assign(op, f"dot({a}, {b}, {acc}{f', programs.own({acc})' if lends else ''})")


def _axis(value: SSAValue, axis: int) -> int:
    """A tile axis counted from the end, as torch needs it after the batch axes."""
    return axis - len(tile.shape_of(value))


def _reduce(printer: KernelPrinter, op: tile.ReduceOp) -> None:
    axis = _axis(op.value, op.axis.value.data)
    value = printer.names.of(op.value)
    dtype = dtype_of(tile.element_of(op.value))
    text = {
        tile.Reduction.SUM: f"{value}.sum({axis}, dtype={dtype})",
        tile.Reduction.MAX: f"{value}.amax({axis})",
        tile.Reduction.MIN: f"{value}.amin({axis})",
    }[op.kind.data]
    printer.assign(op, text)


def _scan(printer: KernelPrinter, op: tile.ScanOp) -> None:
    axis = _axis(op.value, op.axis.value.data)
    flip = f".flip({axis})" if op.reverse is not None else ""
    scan = {
        tile.Reduction.SUM: f".cumsum({axis}, dtype={dtype_of(tile.element_of(op.value))})",
        tile.Reduction.MAX: f".cummax({axis}).values",
        tile.Reduction.MIN: f".cummin({axis}).values",
    }[op.kind.data]
    printer.assign(op, f"{printer.names.of(op.value)}{flip}{scan}{flip}")


def _transpose(printer: KernelPrinter, op: tile.TransposeOp) -> None:
    printer.assign(op, f"{printer.names.of(op.value)}.transpose(-1, -2)")


def _slice(printer: KernelPrinter, op: tile.SliceOp) -> None:
    axis = op.axis.value.data
    size = tile.shape_of(op.result)[axis]
    printer.assign(op, f"{printer.names.of(op.value)}.narrow({_axis(op.value, axis)}, {op.start.value.data}, {size})")


def _concat(printer: KernelPrinter, op: tile.ConcatOp) -> None:
    printer.assign(op, f"concat({printer.tuple(op.values)}, {_axis(op.result, op.axis.value.data)})")


_RULES: dict[type[Operation], Callable[..., None]] = {
    **SCALAR_RULES,
    scf.ForOp: _for,
    scf.IfOp: _if,
    tile.ProgramIdOp: _program_id,
    tile.DimOp: _dim,
    tile.LoadOp: _load,
    tile.StoreOp: _write("store"),
    tile.AtomicAddOp: _write("atomic_add"),
    tile.AtomicMaxOp: _write("atomic_max"),
    tile.ScatterAddOp: _scatter_add,
    tile.LoadDiagonalsOp: _load_diagonals,
    tile.AddDiagonalsOp: _add_diagonals,
    tile.MapOp: _map,
    tile.RangeOp: _range,
    tile.DotOp: _dot,
    tile.ReduceOp: _reduce,
    tile.ScanOp: _scan,
    tile.TransposeOp: _transpose,
    tile.SliceOp: _slice,
    tile.ConcatOp: _concat,
}
