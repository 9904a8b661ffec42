"""Plans that are replayed launch what their texts launch, and only for calls of the very same kind."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_engine import library
from attn_engine.backends.triton import gluon_build
from attn_engine.backends.triton import replay as replaying
from attn_engine.backends.triton.build import build
from attn_engine.backends.triton.replay import Fill, Launch, Record, Replayed
from attn_engine.frontend import Definition
from attn_engine.frontend import build as traced_of
from attn_engine.runtime import driver
from attn_engine.runtime.devices import Target
from attn_engine.runtime.schedules import default_schedule
from tests.support.launches import Launches, pretended

pytest.importorskip("triton")
DTYPE = torch.bfloat16
Tensors = dict[str, Tensor]
PROCESSORS: Callable[[torch.device], int] = lambda _: 132  # noqa: E731


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launches]:
    _as_with_tilelang()
    with pretended(tmp_path_factory.mktemp("driver")) as found:
        yield found


def _as_with_tilelang() -> None:
    """What TileLang, where it is, has every process that imports it load: other tests in this one may have done so, or not."""
    package = find_spec("tilelang")
    if package is not None and package.origin is not None:
        for stub in Path(package.origin).parent.glob("lib/libstub_cuda.so"):
            ctypes.CDLL(str(stub), mode=ctypes.RTLD_GLOBAL)


def plans(backend: str, definition: Definition | None = None) -> dict[str, Any]:
    """Those of an attention with gradients, with descriptors."""
    traced = traced_of(definition or Definition(mask_mod=library.causal), dtype=DTYPE, head_dim=64, head_dim_v=64)
    captured = [str(n) for n, c in enumerate(traced.captures) if c.requires_grad]
    schedule = default_schedule(Target(backend, "sm_90"), traced.module)
    request = driver.Request(("q", "k", "v", *captured), backend, schedule, driver.Facts(True, True), descriptors=True)
    parts = driver.to_parts(driver.to_attn(traced.module, request.wrt), request)
    make = {"triton": build, "gluon": gluon_build.build}
    return {name: plan for part in parts for name, plan in make[part.backend.name](part.source).items()}


def tensors(heads: int = 2, length: int = 256, inside: bool = False) -> Tensors:
    """q, k, v, o and the saved row; with `inside`, heads lie inside of positions."""

    def block() -> Tensor:
        shape = (1, length, heads, 64) if inside else (1, heads, length, 64)
        made = torch.empty(shape, dtype=DTYPE)
        return made.transpose(1, 2) if inside else made

    return {name: block() for name in ("q", "k", "v", "o")} | {"lse": torch.empty(1, heads, length)}


def gradients(given: Tensors) -> Tensors:
    named = {"d_o": "o", "dq": "q", "dk": "k", "dv": "v"}
    found = {name: torch.empty_like(given[other]) for name, other in named.items()}
    return {n: {**given, **found}[n] for n in ("q", "k", "v", "o", "d_o", "lse", "dq", "dk", "dv")}


def shown(launches: Launches, plan: Callable[..., None], given: Tensors, scale: float = 0.125) -> list[tuple[Any, ...]]:
    return launches.of(lambda: plan(*given.values(), scale), given)


def settled(plan: Replayed, given: Tensors) -> None:
    """Calls of a kind until it is replayed."""
    for _ in range(2):
        plan(*given.values(), 0.125)
    assert any(record is not None for record in plan.records.values())


@pytest.fixture(autouse=True)
def processors(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_engine.backends.triton import gluon_host

    monkeypatch.setattr(gluon_host, "processor_count", PROCESSORS)


@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize("backend", ["triton", "gluon"])
def test_a_replay_launches_what_the_text_does(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, backend: str, name: str
):
    plan = plans(backend)[name]
    make = (lambda: tensors()) if name == "forward" else (lambda: gradients(tensors()))
    monkeypatch.setitem(plan.plan.__globals__, "processor_count", PROCESSORS)
    text = [shown(launches, plan, given := make()), shown(launches, plan, given)]
    settled(plan, given)
    monkeypatch.setattr(plan, "plan", None)  # nothing but records is run from here
    for other in (given, make()):
        found = shown(launches, plan, other)
        assert text[0] == text[1] == found
        assert len(found) == len(text[0]) > 0
        assert all(stream == 7 for _, stream, *_ in found)


def shifted(given: Tensors) -> Tensors:
    q = given["q"]
    moved = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view_as(q)
    assert moved.data_ptr() % 16
    return given | {"q": moved}


def doubled(given: Tensors) -> Tensors:
    """k and v are one tensor."""
    return given | {"v": given["k"]}


OTHERS: dict[str, Callable[[], tuple[Tensors, float]]] = {
    "lengths": lambda: (tensors(length=192), 0.125),
    "heads": lambda: (tensors(heads=3), 0.125),
    "lengths of larger tensors": lambda: ({n: x[:, :, :192] for n, x in tensors().items()}, 0.125),
    "strides": lambda: (tensors(inside=True), 0.125),
    "strides of one": lambda: (tensors() | {"k": tensors(inside=True)["k"]}, 0.125),
    "a scale": lambda: (tensors(), 0.25),
    "the sign of zero": lambda: (tensors(), -0.0),
    "one number": lambda: (tensors(heads=1), 0.125),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_call_of_another_kind_is_not_replayed(launches: Launches, name: str):
    plan = plans("triton")["forward"]
    settled(plan, tensors())
    plan(*tensors().values(), 0.0)
    plan(*tensors().values(), 0.0)
    given, scale = OTHERS[name]()
    for _ in range(3):
        text = launches.of(lambda: plan.plan(*given.values(), scale), given)
        assert shown(launches, plan, given, scale) == text


def test_a_start_that_no_descriptor_takes_is_refused_after_good_calls(launches: Launches):
    from attn_engine.errors import DescriptorError

    plan = plans("triton")["forward"]
    settled(plan, tensors())
    for _ in range(3):
        with pytest.raises(DescriptorError):
            plan(*shifted(tensors()).values(), 0.125)


def test_a_start_is_part_of_a_kind_without_descriptors(launches: Launches):
    """Kernels are specialised for pointers that are multiples of 16."""
    plan = plans("triton", Definition(score_mod=library.alibi(torch.rand(2))))["forward"]
    slopes = torch.rand(9)
    for start in (slopes[:2], slopes[4:6]):
        given = tensors() | {"slopes": start}
        settled(plan, given)
    odd = tensors() | {"slopes": slopes[1:3]}
    text = launches.of(lambda: plan.plan(*odd.values(), 0.125), odd)
    functions = [function for _, _, function, _ in shown(launches, plan, given)]
    for _ in range(3):
        assert shown(launches, plan, odd) == text
    assert [function for _, _, function, _ in text] != functions


def test_tensors_that_coincided_are_told_apart(launches: Launches):
    plan = plans("triton")["forward"]
    settled(plan, doubled(tensors()))
    given = tensors()
    assert shown(launches, plan, given) == launches.of(lambda: plan.plan(*given.values(), 0.125), given)


def test_hooks_see_every_launch(launches: Launches):
    from triton import knobs

    plan, given = plans("triton")["forward"], tensors()
    settled(plan, given)
    hooks: Any = knobs.runtime
    seen: list[str] = []

    def before(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    hooks.launch_enter_hook.add(before)
    try:
        plan(*given.values(), 0.125)
        assert seen == ["forward_kernel"]
    finally:
        hooks.launch_enter_hook.remove(before)
    plan(*given.values(), 0.125)
    assert seen == ["forward_kernel"]


def test_hooks_of_a_kernel_are_called(launches: Launches):
    plan, given = plans("triton")["forward"], tensors()
    settled(plan, given)
    kernel = plan.plan.__globals__["forward_kernel"]
    seen: list[int] = []

    def before(*_: Any, **__: Any) -> None:
        seen.append(1)

    kernel.add_pre_run_hook(before)
    try:
        plan(*given.values(), 0.125)
    finally:
        kernel.pre_run_hooks.clear()
    assert seen == [1]


def test_launchers_that_are_called_in_another_way_are_left_to_triton(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
):
    plan, given = plans("triton")["forward"], tensors()
    monkeypatch.setattr(replaying, "_CALLED", "another")
    text = launches.of(lambda: plan.plan(*given.values(), 0.125), given)
    for _ in range(4):
        assert shown(launches, plan, given) == text
    assert all(record is None or not record.replayable for record in plan.records.values())


def test_few_records_and_maps_are_kept(launches: Launches, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replaying, "MOST_RECORDS", 4)
    monkeypatch.setattr(replaying, "MOST_MAPS", 2)
    plan = plans("triton")["forward"]
    for length in (64, 128, 192, 256, 320, 384, 448):
        settled(plan, tensors(length=length))
        assert len(plan.records) <= 4
    held = [tensors(length=448) for _ in range(5)]
    for given in held:
        assert shown(launches, plan, given) == launches.of(lambda given=given: plan.plan(*given.values(), 0.125), given)
    steps = [step for record in plan.records.values() if record is not None for step in record.steps]
    assert all(len(maps.made) <= 2 for step in steps for *_, maps in step.maps)


def test_zeros_are_there_whenever_the_text_has_them(launches: Launches):
    """Slot 0 is an argument; 1 is zeroed and read, 2 is written before it is zeroed, 3 becomes ones, 4 is zeroed twice."""
    seen: list[list[float]] = []

    def start(*arguments: Any) -> None:
        pointers = arguments[-4:]
        seen.append([ctypes.c_float.from_address(pointer).value for pointer in pointers])
        for pointer in pointers:
            ctypes.c_float.from_address(pointer).value = 5.0

    kernel = SimpleNamespace(pre_run_hooks=[])

    def launch() -> Launch:
        pointers = [(place, place + 1) for place in range(4)]
        return Launch(start, (1, 1, 1), (), [None] * 4, pointers, [], kernel, None)

    made = Record([0], [((1,), torch.float32)] * 5)
    fills = [Fill(1, 0.0), Fill(3, 1.0), Fill(4, 0.0)]
    made.steps += [*fills, launch(), Fill(2, 0.0), Fill(4, 0.0), launch()]
    made.settle()
    made.stream_of = int
    for _ in range(3):
        seen.clear()
        made.replay((torch.zeros(1),))
        first, second = seen
        assert [first[0], *first[2:]] == [0.0, 1.0, 0.0]
        assert second == [5.0, 0.0, 5.0, 0.0]


def test_what_is_filled_is_filled_again(launches: Launches):
    """Sums that programs add to start at zero, whatever the memory holds."""
    slopes = torch.rand(2, requires_grad=True)
    plan = plans("triton", Definition(score_mod=library.alibi(slopes)))["backward"]
    given = gradients(tensors())
    last = {n: given.pop(n) for n in ("dq", "dk", "dv")}
    given |= {"slopes": slopes.detach(), **last, "d_slopes": torch.full((2,), 7.0)}
    settled(plan, given)
    given["d_slopes"].fill_(7.0)
    plan(*given.values(), 0.125)
    assert given["d_slopes"].tolist() == [0.0, 0.0]
