"""``attn-engine``: look at any stage of a definition, at what was proved about it, and at what works here."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from attn_engine.backends.backend import BACKENDS
from attn_engine.errors import AttnEngineError, DefinitionNotFoundError, StageError

if TYPE_CHECKING:
    from attn_engine.runtime.attention import Attention
    from attn_engine.runtime.inspect import View
    from attn_engine.runtime.recurrence_engine import LinearAttentionEngine
    from attn_engine.runtime.recurrence_inspect import RecurrenceView

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

STAGES = ("traced", "attn", "tile")
PACKAGES = ("attn-engine", "torch", "triton", "tilelang", "xdsl")


class Dtype(StrEnum):
    """Element types of q, k and v."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


Target = Annotated[
    str, typer.Argument(help="FILE.py:NAME, NAME being what attn_engine.compile returned, or an engine.")
]
Arch = Annotated[str, typer.Option(help="Device architecture: sm_80, sm_90, gfx90a, gfx942 ...")]
Type = Annotated[Dtype, typer.Option(help="Of q, k and v.")]
HeadDim = Annotated[
    int, typer.Option(help="Channels of q and k; an engine of a recurrence knows its own.", min=1, max=256)
]
HeadDimV = Annotated[int | None, typer.Option(help="Channels of v; those of q if absent.", min=1, max=256)]
ReturnLse = Annotated[bool, typer.Option("--return-lse", help="With the log-sum-exp as a second result.")]
Assembled = Annotated[str, typer.Option("--backend", help="Whose schedules are assembled, where that can be: gluon.")]
Emit = Annotated[str, typer.Option(help=f"IR after a stage or a backend's text: {', '.join((*STAGES, *BACKENDS))}.")]


def load_file(path: Path) -> ModuleType:
    """The module of a Python file, imported under a name of its own; its neighbours can be imported from it."""
    spec = importlib.util.spec_from_file_location(f"_attn_engine_user_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise DefinitionNotFoundError(f"'{path}' is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except AttnEngineError:
        raise
    except Exception as error:
        raise DefinitionNotFoundError(f"'{path}' cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    return module


def find_definition(target: str) -> Attention | LinearAttentionEngine:
    """`FILE.py:NAME`, where NAME is what `attn_engine.compile` returned, an AttentionEngine, or a LinearAttentionEngine."""
    from attn_engine.runtime.attention import Attention
    from attn_engine.runtime.engine import AttentionEngine
    from attn_engine.runtime.recurrence_engine import LinearAttentionEngine

    file, _, name = target.rpartition(":")
    if not file:
        raise DefinitionNotFoundError(f"'{target}' names no definition; write FILE.py:NAME")
    module = load_file(Path(file))
    found: Any = getattr(module, name, None)
    if isinstance(found, AttentionEngine):
        return found.attention
    if not isinstance(found, Attention | LinearAttentionEngine):
        known = [
            n for n, v in vars(module).items() if isinstance(v, Attention | AttentionEngine | LinearAttentionEngine)
        ]
        names = ", ".join(known) or "none; make one with attn_engine.compile(...)"
        raise DefinitionNotFoundError(f"'{name}' in {file} is no compiled definition; there are: {names}")
    return found


def make_view(dtype: Dtype, head_dim: int, head_dim_v: int | None, backward: bool, lse: bool, arch: str) -> View:
    """For which tensors and device to look; an unknown architecture is an error that lists the known ones."""
    import torch

    from attn_engine.arch import get_arch
    from attn_engine.runtime.inspect import View

    types = {Dtype.bf16: torch.bfloat16, Dtype.fp16: torch.float16, Dtype.fp32: torch.float32}
    return View(types[dtype], head_dim, head_dim_v, backward, lse, get_arch(arch).name)


def recurrence_view(view: View) -> RecurrenceView:
    """The same of a recurrence."""
    from attn_engine.runtime.recurrence_inspect import RecurrenceView

    return RecurrenceView(
        view.dtype, key=view.head_dim, value=view.head_dim_v or view.head_dim, backward=view.backward, arch=view.arch
    )


@app.command()
def compile(
    target: Target,
    emit: Emit = "attn",
    backward: Annotated[bool, typer.Option("--backward", help="With the gradients of q, k, v and captures.")] = False,
    arch: Arch = "sm_90",
    dtype: Type = Dtype.bf16,
    head_dim: HeadDim = 128,
    head_dim_v: HeadDimV = None,
    return_lse: ReturnLse = False,
) -> None:
    """Print a stage of a definition; no GPU is needed."""
    if emit not in (*STAGES, *BACKENDS):
        raise StageError(emit, (*STAGES, *BACKENDS))
    from attn_engine.runtime.attention import Attention

    view = make_view(dtype, head_dim, head_dim_v, backward, return_lse, arch)
    definition = find_definition(target)
    if isinstance(definition, Attention):
        typer.echo(definition.ir(emit, view) if emit in STAGES else definition.source(emit, view))
    else:
        own = recurrence_view(view)
        typer.echo(definition.ir(emit, own) if emit in STAGES else definition.source(emit, own))


@app.command()
def explain(
    target: Target,
    dtype: Type = Dtype.bf16,
    head_dim: HeadDim = 128,
    return_lse: ReturnLse = False,
    backend: Assembled = "triton",
) -> None:
    """Say how many loops over the keys a row function takes and why, and what its backward saves; of a recurrence, how
    each plan is cut for the device."""
    from attn_engine.runtime.attention import Attention
    from attn_engine.tools import explain as tool

    view = replace(make_view(dtype, head_dim, None, True, return_lse, "sm_90"), backend=backend)
    found = find_definition(target)
    typer.echo(tool.explain(found, view) if isinstance(found, Attention) else found.explain(recurrence_view(view)))


@app.command()
def doctor() -> None:
    """Say which backends work on this machine, and what the others miss."""
    from attn_engine.backends.backend import get_backend

    table = Table("backend", "works here", "why not")
    for name in BACKENDS:
        available = get_backend(name).check()
        table.add_row(name, "yes" if available.ok else "no", available.reason)
    console = Console()
    console.print(table)
    for line in (*versions(), *gpus()):
        console.print(line, highlight=False)


def versions() -> list[str]:
    """Versions of what we stand on."""
    from importlib.metadata import PackageNotFoundError, version

    lines: list[str] = []
    for package in PACKAGES:
        try:
            lines.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            lines.append(f"{package} is not installed")
    return lines


def gpus() -> list[str]:
    """The GPUs that torch sees, each with the architecture that schedules are made for."""
    import torch

    from attn_engine.runtime.devices import arch_of

    devices = [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
    return [f"GPU {d.index}: {torch.cuda.get_device_name(d)} ({arch_of(d)})" for d in devices] or ["no GPU"]


def describe(error: AttnEngineError) -> str:
    """The class and the message; where there is a source line of the user's it follows, indented."""
    first, *rest = str(error).splitlines() or [""]
    return "\n".join([f"{type(error).__name__}: {first}", *(f"  {line}" for line in rest)])


def main() -> None:
    """The entry point: errors of ours are a message and exit code 1, not a traceback."""
    try:
        app()
    except AttnEngineError as error:
        typer.echo(describe(error), err=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
