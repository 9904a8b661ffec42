"""``attn-engine``: look at any stage of a definition, and at what works on this machine."""

from __future__ import annotations

import importlib.util
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from attn_engine.errors import AttnEngineError, DefinitionNotFoundError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


class Emit(str, Enum):
    """What `compile` prints: IR after a stage, or a backend's text."""

    traced = "traced"
    attn = "attn"
    tile = "tile"
    triton = "triton"
    cpu = "cpu"


class Dtype(str, Enum):
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


def load_file(path: Path) -> ModuleType:
    """The module of a Python file, imported under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"_attn_engine_user_{path.stem}", path)
    if spec is None or spec.loader is None or not path.exists():
        raise DefinitionNotFoundError(f"'{path}' is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def find_definition(target: str) -> Any:
    """`FILE.py:NAME`, where NAME is what `attn_engine.compile` returned (or an AttentionEngine)."""
    from attn_engine.runtime.attention import Attention
    from attn_engine.runtime.engine import AttentionEngine

    file, _, name = target.rpartition(":")
    if not file:
        raise DefinitionNotFoundError(f"'{target}' names no definition; write FILE.py:NAME")
    module = load_file(Path(file))
    found = getattr(module, name, None)
    if isinstance(found, AttentionEngine):
        return found.attention
    if not isinstance(found, Attention):
        known = [n for n, v in vars(module).items() if isinstance(v, Attention | AttentionEngine)]
        names = ", ".join(known) or "none; make one with attn_engine.compile(...)"
        raise DefinitionNotFoundError(f"'{name}' in {file} is no compiled definition; there are: {names}")
    return found


@app.command()
def compile(  # noqa: A001
    target: Annotated[str, typer.Argument(help="FILE.py:NAME, NAME being the result of attn_engine.compile.")],
    emit: Annotated[Emit, typer.Option(help="The stage or backend to print.")] = Emit.attn,
    backward: Annotated[bool, typer.Option("--backward", help="With the gradients of q, k, v and captures.")] = False,
    arch: Annotated[str, typer.Option(help="Device architecture: sm_80, sm_90, gfx90a, gfx942 ...")] = "sm_90",
    dtype: Annotated[Dtype, typer.Option(help="Of q, k and v.")] = Dtype.bf16,
    head_dim: Annotated[int, typer.Option(help="Channels of q and k.", min=1, max=256)] = 128,
    head_dim_v: Annotated[int | None, typer.Option(help="Channels of v; those of q if absent.")] = None,
    return_lse: Annotated[bool, typer.Option("--return-lse", help="With the log-sum-exp as a second result.")] = False,
) -> None:
    """Print a stage of a definition; no GPU is needed."""
    import torch

    from attn_engine.arch import get_arch
    from attn_engine.runtime.inspect import STAGES, View

    types = {Dtype.bf16: torch.bfloat16, Dtype.fp16: torch.float16, Dtype.fp32: torch.float32}
    get_arch(arch)
    view = View(types[dtype], head_dim, head_dim_v, backward, return_lse, arch)
    definition = find_definition(target)
    text = definition.ir(emit.value, view) if emit.value in STAGES else definition.source(emit.value, view)
    typer.echo(text)


@app.command()
def doctor() -> None:
    """Say which backends work on this machine, and what the others miss."""
    from attn_engine.backends.backend import BACKENDS, get_backend
    from attn_engine.runtime.devices import arch_of

    table = Table("backend", "works here", "why not")
    for name in BACKENDS:
        available = get_backend(name).check()
        table.add_row(name, "yes" if available.ok else "no", available.reason)
    console = Console()
    console.print(table)
    for line in versions():
        console.print(line)
    import torch

    if torch.cuda.is_available():
        console.print(f"GPU: {torch.cuda.get_device_name()} ({arch_of(torch.device('cuda'))})")


def versions() -> list[str]:
    """Versions of what we stand on."""
    from importlib.metadata import PackageNotFoundError, version

    lines: list[str] = []
    for package in ("attn-engine", "torch", "triton", "tilelang", "xdsl"):
        try:
            lines.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            lines.append(f"{package} is not installed")
    return lines


def main() -> None:
    """The entry point: errors of ours are one message, not a traceback."""
    try:
        app()
    except AttnEngineError as error:
        Console(stderr=True).print(f"[bold red]{type(error).__name__}[/]: {error}", soft_wrap=True, highlight=False)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
