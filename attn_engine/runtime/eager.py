"""Calls that only autograd looks at, what is decided once for those of a kind, and launches where tensors are.

An op of torch that Python implements can be traced, transformed and intercepted; its dispatch, and checks and choices made
anew, cost more on the host than small kernels take on the device. A call that nothing traces, transforms or intercepts goes
without the op, and what was decided for a call of its kind holds for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import wraps
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

Value = TypeVar("Value")
Called = TypeVar("Called", bound=Callable[..., Any])
Kind: TypeAlias = tuple[Hashable, ...]

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_FORWARD: Any = forward_ad
_KINDS = (Tensor, Parameter)
_DEVICES = ("cpu", "cuda")
MOST_KINDS = 4096
"""Lengths may grow with every call: what is kept of them must not."""


_PLAIN: set[int] = set()
"""Dispatch keys of tensors of which torch's dispatcher knows nothing but where they are, as far as such have been met."""


def _meets(x: Tensor) -> bool:
    """Whether a tensor has the keys of a new one on its device, which is asked of no device that has no tensor yet."""
    if type(x) not in _KINDS or x.device.type not in _DEVICES:
        return False
    keys: int = _C._dispatch_keys(x).raw_repr()
    for inference in (False, True):
        with torch.inference_mode(inference):
            new = torch.empty(0, device=x.device)
        if _C._dispatch_keys(new).raw_repr() == keys:
            _PLAIN.add(keys)
            return True
    return False


def is_plain(tensors: Iterable[Tensor | None]) -> bool:
    """Whether these are tensors on a CPU or a GPU, outside of modes, transforms, tracing and forward differentiation.

    Not plain are subclasses, and those that the dispatcher must do something about first: negated views, say.
    """
    if torch.compiler.is_compiling() or _C._get_tracing_state() is not None:
        return False
    if _C._len_torch_dispatch_stack() or _C._len_torch_function_stack():
        return False
    if _FORWARD._current_level >= 0 or _C._functorch.maybe_current_level() is not None:
        return False
    keys, of = _PLAIN, _C._dispatch_keys
    # Lists: generators take longer than what they look at.
    others = [x for x in tensors if x is not None and (type(x) not in _KINDS or of(x).raw_repr() not in keys)]
    return not others or all(map(_meets, others))


def trains(tensors: Iterable[Tensor | None]) -> bool:
    """Whether autograd records a call with these."""
    return torch.is_grad_enabled() and bool([x for x in tensors if x is not None and x.requires_grad])


def kind_of(tensors: Iterable[Tensor | None]) -> Kind:
    """Of plain tensors all but their numbers, and of where they lie only whether blocks could be copied from there."""
    return tuple(
        [
            x if x is None else (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16, x.requires_grad)
            for x in tensors
        ]
    )


def keep(table: dict[Any, Value], key: Hashable, value: Value) -> Value:
    """Remembers what was decided for a kind; a table that is full starts anew."""
    if len(table) >= MOST_KINDS:
        table.clear()
    table[key] = value
    return value


def launch(plan: Callable[..., None], device: torch.device, arguments: tuple[Any, ...]) -> None:
    """Runs a plan where its tensors are, and in the precision that it says: not in that of autocast."""
    if device.type == "cuda":
        if torch.cuda.current_device() == device.index:
            plan(*arguments)
        else:
            with torch.cuda.device(device):
                plan(*arguments)
    elif torch.is_autocast_enabled(device.type):
        with torch.autocast(device.type, enabled=False):
            plan(*arguments)
    else:
        plan(*arguments)


_BREAK: Any = torch.compiler.disable(reason="attention reads the tensors that its functions capture at each call")


def not_compiled(function: Called) -> Called:
    """The function, around which `torch.compile` breaks its graph; where it is given the function itself, inside of it."""
    inner = _BREAK(function)

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return inner(*arguments, **named)

    return cast("Called", call)
