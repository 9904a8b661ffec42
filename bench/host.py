"""What a call costs the host, beside peers: `python -m bench.host --peers DIR --out DIR`.

Microseconds until a call returns; what it launches runs meanwhile. Shapes are small, as in decoding and small models, where the
host decides how long a call takes. Medians over rounds in which every contender makes some calls, without waiting between them;
they are too few to fill the device's queue. Peers are torch's SDPA, compiled FlexAttention and, with `--peers`, fla.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

import attn_engine
from attn_engine import library
from bench.timing import alone

CALLS, ROUNDS = 20, 41
Calls = dict[str, Callable[[], object]]
NAMES = ("attn_engine", "`attention(...)`", "SDPA", "FlexAttention", "fla")


def host_times(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Median microseconds of the host per call."""
    for call in calls.values():
        for _ in range(10):
            call()
    torch.cuda.synchronize()
    found: dict[str, list[float]] = {name: [] for name in calls}
    with alone():
        for _ in range(ROUNDS):
            for name, call in calls.items():
                start = time.perf_counter()
                for _ in range(CALLS):
                    call()
                found[name].append((time.perf_counter() - start) / CALLS * 1e6)
                torch.cuda.synchronize()
    return {name: statistics.median(times) for name, times in found.items()}


def unrecorded(call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return call()

    return run


def backward_of(call: Callable[[], Any], leaves: list[Tensor]) -> Callable[[], object]:
    o: Tensor = call()
    d_o = torch.randn_like(o)
    return lambda: torch.autograd.grad(o, leaves, d_o, retain_graph=True)


def randn(*shape: int, trains: bool = False) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_(trains)


def attention_calls() -> dict[str, Calls]:
    """Causal attention of B1 H4 S256 D64."""
    leaves = [randn(1, 4, 256, 64, trains=True) for _ in range(3)]
    mask: Any = create_block_mask(library.causal, None, None, 256, 256)
    flex: Any = torch.compile(flex_attention)
    calls: Calls = {
        NAMES[0]: partial(attn_engine.compile(mask_mod=library.causal), *leaves),
        NAMES[1]: partial(attn_engine.attention, *leaves, mask_mod=library.causal),
        NAMES[2]: partial(scaled_dot_product_attention, *leaves, is_causal=True),
        NAMES[3]: partial(flex, *leaves, block_mask=mask),
    }
    return {
        "attention, no gradients": {name: unrecorded(call) for name, call in calls.items()},
        "attention, recorded": calls,
        "its backward, of three gradients": {
            name: backward_of(call, leaves) for name, call in calls.items() if name != NAMES[1]
        },
    }


def decoding_calls() -> dict[str, Calls]:
    """One query of 32 heads over 2048 keys of 8."""
    q, (k, v) = randn(1, 32, 1, 128), (randn(1, 8, 2048, 128) for _ in range(2))
    flex: Any = torch.compile(flex_attention)
    calls: Calls = {
        NAMES[0]: partial(attn_engine.compile(), q, k, v),
        NAMES[1]: partial(attn_engine.attention, q, k, v),
        NAMES[2]: partial(scaled_dot_product_attention, q, k, v, enable_gqa=True),
        NAMES[3]: partial(flex, q, k, v, enable_gqa=True),
    }
    return {"decoding, 1 query": {name: unrecorded(call) for name, call in calls.items()}}


def growing_calls() -> dict[str, Calls]:
    """The same with a key more in every call: nothing of the last call's kind is known. Torch's SDPA needs 50 milliseconds for a new length."""
    q, (k, v) = randn(1, 32, 1, 128), (randn(1, 8, 4096, 128) for _ in range(2))
    attend, length = attn_engine.compile(), 2048

    def grown() -> object:
        nonlocal length
        length = 2048 + (length - 2047) % 2048
        return attend(q, k[:, :, :length], v[:, :, :length])

    return {"decoding, a key more in every call": {NAMES[0]: unrecorded(grown)}}


def recurrence_calls(peers: bool) -> dict[str, Calls]:
    """A decay per token and head, B1 S256 H4 D64, and a step of it."""
    leaves = [randn(1, 256, 4, 64, trains=True) for _ in range(3)]
    decay = logsigmoid(torch.randn(1, 256, 4, device="cuda")).requires_grad_()
    state = torch.zeros(1, 4, 64, 64, device="cuda")
    one, step_decay = [x.detach()[:, :1] for x in leaves], decay.detach()[:, :1]

    def ours() -> Tensor:
        return attn_engine.recurrence(*leaves, decay=decay)[0]

    calls: Calls = {NAMES[0]: ours}
    steps: Calls = {NAMES[0]: lambda: attn_engine.recurrence_step(*one, state=state, decay=step_decay)}
    if peers:
        import importlib

        theirs: Any = importlib.import_module("fla.ops.simple_gla")
        calls[NAMES[4]] = lambda: theirs.chunk_simple_gla(*leaves, g=decay)[0]
        steps[NAMES[4]] = lambda: theirs.fused_recurrent_simple_gla(
            *one, g=step_decay, initial_state=state, output_final_state=True
        )
    return {
        "recurrence, no gradients": {name: unrecorded(call) for name, call in calls.items()},
        "recurrence, recorded": calls,
        "its backward, of four gradients": {name: backward_of(call, [*leaves, decay]) for name, call in calls.items()},
        "a step": {name: unrecorded(call) for name, call in steps.items()},
    }


GROUPS: dict[str, Callable[[bool], dict[str, Calls]]] = {
    "attention": lambda _: attention_calls(),
    "decoding": lambda _: decoding_calls() | growing_calls(),
    "recurrence": recurrence_calls,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--peers", type=Path, help="folder with fla")
    parser.add_argument("--only", choices=GROUPS, nargs="*", default=[*GROUPS], help="groups of rows; all by default")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.peers is not None:
        sys.path.insert(0, str(options.peers))
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, Python"
        f" {sys.version.split()[0]}; bf16; `python -m bench.host`. Microseconds of the host per call.",
        "",
        f"| call | {' | '.join(NAMES)} |",
        f"|{'---|' * (len(NAMES) + 1)}",
    ]
    print("\n".join(lines), flush=True)
    peers = options.peers is not None
    for name in options.only:
        for what, calls in GROUPS[name](peers).items():
            times = host_times(calls)
            cells = [f"{times[n]:.0f}" if n in times else "" for n in NAMES]
            lines.append(f"| {what} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    (options.out / "host.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
