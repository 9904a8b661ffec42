"""What a definition depends on: the key of a trace, and the tensors that it reads, found anew without tracing.

Everything that a function can reach is walked in a fixed order: its code, closure cells, defaults,
the globals it names, and of objects, classes and modules the attributes that any of the code names.
Plain values enter the key by value; tensors by dtype, rank and by which of them are one and the same,
and their order in the walk is their address.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from attn_engine.frontend.custom_io import CustomIO
from attn_engine.frontend.definition import Definition
from attn_engine.frontend.online_func import OnlineFunc
from attn_engine.frontend.region import as_number

Key: TypeAlias = tuple[object, ...]

# Modules whose contents do not change, and whose functions give the same for the same.
_CONSTANT_MODULES = frozenset(
    {"torch", "math", "cmath", "operator", "_operator", "functools", "_functools", "builtins", "typing", "attn_engine"}
)
_WALKED = frozenset(
    {
        "attn_engine.compat.attention_autotuner",
        "attn_engine.frontend.mask_algebra",
        "attn_engine.frontend.packed",
        "attn_engine.library",
        "attn_engine.masks",
        "attn_engine.runtime.block_mask",
        "attn_engine.runtime.engine",
        "torch.nn.attention.flex_attention",
    }
)
"""Of those, modules whose functions hold what users gave them."""
_REFLECTIVE = frozenset(
    {
        "getattr",
        "setattr",
        "vars",
        "globals",
        "locals",
        "eval",
        "exec",
        "open",
        "input",
        "__import__",
        "id",
        "next",
        "iter",
    }
)
_PLAIN = (bool, int, str, bytes, complex, range, type(None), type(Ellipsis), torch.dtype, torch.device, enum.Enum)
_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_GLOBAL_OPS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class written in Python
_NO_BEHAVIOUR = frozenset(
    {"__dict__", "__weakref__", "__module__", "__doc__", "__annotations__", "__builtins__", "__repr__", "__str__"}
)
_CONSTRUCTION = frozenset({"__init__", "__new__", "__post_init__", "__init_subclass__", "__del__", "__reduce__"})
_MAX_NODES = 2000


class _UndecidableError(Exception):
    """Something that the walk cannot vouch for."""


class _Names(NamedTuple):
    """What a function's code, functions inside of it included, takes by name."""

    globals: frozenset[str]
    attributes: frozenset[str]
    imports: bool


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> _Names:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    used = [(i.opname, cast("str", i.argval)) for i in dis.get_instructions(code) if i.opcode in dis.hasname]
    return _Names(
        frozenset(n for op, n in used if op in _GLOBAL_OPS).union(*(i.globals for i in inner)),
        frozenset(n for op, n in used if op not in _GLOBAL_OPS).union(*(i.attributes for i in inner)),
        any(op.startswith("IMPORT") for op, _ in used) or any(i.imports for i in inner),
    )


@dataclass
class _Walk:
    """One walk, in which `attributes` are read of objects: the tensors met, the name each was found under."""

    attributes: frozenset[str] = frozenset()
    mentioned: set[str] = field(default_factory=set[str])
    met_members: bool = False
    tensors: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    names: list[str] = field(default_factory=list[str])
    seen: dict[int, int] = field(default_factory=dict[int, int])
    nodes: int = 0

    def value(self, value: object, name: str) -> Key:
        """The key of any value."""
        self.nodes += 1
        if self.nodes > _MAX_NODES:
            raise _UndecidableError
        if isinstance(value, float):
            return ("float", value.hex())
        if isinstance(value, _PLAIN):
            return (type(value), value)
        if isinstance(value, torch.Tensor):
            return self.tensor(value, name)
        if id(value) in self.seen:
            return ("again", self.seen[id(value)])
        self.seen[id(value)] = len(self.seen)
        return self.compound(value, name)

    def tensor(self, tensor: torch.Tensor, name: str) -> Key:
        first = next((i for i, met in enumerate(self.tensors) if met is tensor), len(self.tensors))
        self.tensors.append(tensor)
        self.names.append(name)
        return ("tensor", tensor.dtype, tensor.ndim, tensor.requires_grad, first)

    def compound(self, value: object, name: str) -> Key:
        match value:
            case types.FunctionType():
                return self.function(value)
            case types.MethodType():
                return ("method", self.value(value.__self__, name), self.value(value.__func__, name))
            case functools.partial():
                part = cast("functools.partial[Any]", value)
                return ("partial", *(self.value(p, name) for p in (part.func, part.args, part.keywords)))
            case tuple() | list():
                items = cast("list[object]", value)
                return (type(items), *(self.value(item, f"{name}{i}") for i, item in enumerate(items)))
            case dict():
                table = cast("dict[object, object]", value)
                entries = table.items()
                return (type(table), *((self.value(k, name), self.value(v, f"{name}_{k}")) for k, v in entries))
            case staticmethod() | classmethod():
                return self.value(cast("object", value.__func__), name)  # type: ignore[reportUnknownMemberType]
            case CustomIO():
                return ("custom", tuple(value.shapes.items()))
            case _:
                return self.opaque(value, name)

    def opaque(self, value: Any, name: str) -> Key:
        """Something known by identity, by the number it is, or by its attributes."""
        if (number := as_number(value)) is not None:
            return ("number", value.dtype.str, repr(number))
        if isinstance(value, _BUILTIN):
            return self.builtin(value)
        if isinstance(value, types.ModuleType | type):
            if _is_constant(value.__name__ if isinstance(value, types.ModuleType) else value.__module__):
                return ("constant", value)
            return (value, *self.members(value, vars(value).get))
        if type(value).__flags__ & _HEAP_TYPE or isinstance(value, types.SimpleNamespace):
            return (
                "object",
                cast("type[object]", type(value)),
                *self.members(value, functools.partial(_attribute, value)),
            )
        raise _UndecidableError

    def builtin(self, function: Any) -> Key:
        module = getattr(function, "__module__", None) or getattr(
            getattr(function, "__objclass__", None), "__module__", ""
        )
        owner = getattr(function, "__self__", None)
        if not _is_constant(module) or not isinstance(owner, types.ModuleType | type | None):
            raise _UndecidableError
        return ("constant", function)

    def function(self, function: types.FunctionType) -> Key:
        module = function.__module__ or ""
        if _is_constant(module) and not (
            module in _WALKED and (function.__closure__ or module == "attn_engine.library")
        ):
            return ("constant", function)
        names = _names(function.__code__)
        if names.imports or names.globals & _REFLECTIVE or "__dict__" in names.attributes:
            raise _UndecidableError
        self.mentioned |= names.attributes
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        return (
            function.__code__,
            *(self.value(_contents(cell), name) for name, cell in cells),
            self.value(function.__defaults__, "default"),
            self.value(function.__kwdefaults__, "default"),
            *(self.value(value, name) for name, value in _globals(function, names.globals)),
            *((n, self.value(v, n)) for n, v in sorted(vars(function).items()) if n in self.attributes),
        )

    def members(self, value: object, get: Any) -> Iterator[Key]:
        """The attributes that the code mentions, and the operators that a class defines.

        The methods of a base class that is not walked (one of torch's) may read and call everything.
        """
        self.met_members = True
        kind = value if isinstance(value, type) else type(value)
        written = [k for k in kind.__mro__ if k.__flags__ & _HEAP_TYPE and not _is_constant(k.__module__)]
        inherits = any(k.__flags__ & _HEAP_TYPE and _is_constant(k.__module__) for k in kind.__mro__)
        called = {n for k in written for n in vars(k) if n.startswith("__") or inherits}
        if inherits and not isinstance(value, type):
            called |= _state(value)
        ignored = _NO_BEHAVIOUR if isinstance(value, type) else _NO_BEHAVIOUR | _CONSTRUCTION
        for name in sorted((self.attributes | called) - ignored):
            found = get(name)
            if isinstance(found, property | functools.cached_property):
                raise _UndecidableError
            if found is not None:
                yield (name, self.value(found, name))


def _is_constant(module: str | None) -> bool:
    return (module or "").split(".")[0] in _CONSTANT_MODULES


def _globals(function: types.FunctionType, names: frozenset[str]) -> Iterator[tuple[str, object]]:
    for name in sorted(names):
        if name in function.__globals__:
            yield name, function.__globals__[name]
        elif hasattr(builtins, name):
            yield name, getattr(builtins, name)


def _contents(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _state(value: Any) -> set[str]:
    """The names under which an object keeps what its methods may read."""
    stored: dict[str, object] = getattr(value, "__dict__", {})
    if not isinstance(value, torch.nn.Module):
        return set(stored)
    if any(stored[name] for name in stored if name.endswith("_hooks")):
        raise _UndecidableError
    tables = (value._parameters, value._buffers, value._modules)  # type: ignore[reportPrivateUsage]
    return {name for name in stored if not name.startswith("_")}.union(*tables)


def _attribute(value: Any, name: str) -> object:
    """An attribute that an object stores, or what its class holds under that name."""
    if isinstance(value, torch.nn.Module):
        for store in (value._parameters, value._buffers, value._modules):  # type: ignore[reportPrivateUsage]
            if name in store:
                return cast("Mapping[str, object]", store)[name]
    if name in getattr(value, "__dict__", {}):
        return value.__dict__[name]
    for kind in type(value).__mro__:
        if name in vars(kind) and not _is_constant(kind.__module__):
            found = vars(kind)[name]
            return getattr(value, name, None) if isinstance(found, types.MemberDescriptorType) else found
    return None


def _walk(definition: Definition) -> tuple[Key, _Walk]:
    """Walk until the attributes that are read of objects are all that the code mentions."""
    attributes: frozenset[str] = frozenset()
    while True:
        walk = _Walk(attributes)
        key: list[object] = [definition.bare_score, tuple(definition.custom_io.shapes.items())]
        if isinstance(definition.row, OnlineFunc):
            key += [(n, str(s.var.value)) for n, s in definition.row.online_rowscales.items()]
            key += definition.row.final_rowscales
        key += [(name, walk.value(function, name)) for name, function in definition.functions()]
        if not walk.met_members or walk.mentioned <= attributes:
            return tuple(key), walk
        attributes |= walk.mentioned


def definition_key(definition: Definition) -> Key | None:
    """A hashable key: equal keys give equal traces. None where that cannot be decided."""
    return identify(definition)[0]


def identify(definition: Definition) -> tuple[Key | None, list[torch.Tensor]]:
    """The key, and the tensors that the functions reach where there is one, of a single walk."""
    try:
        key, walk = _walk(definition)
        hash(key)
    except (_UndecidableError, TypeError):
        return None, []
    return key, walk.tensors


def reachable_tensors(definition: Definition) -> tuple[list[torch.Tensor], list[str], bool]:
    """The tensors that the functions reach, in a fixed order, the name of each, and whether these are all."""
    try:
        _, walk = _walk(definition)
    except _UndecidableError:
        return *_shallow_tensors(definition), False
    return walk.tensors, walk.names, True


def _shallow_tensors(definition: Definition) -> tuple[list[torch.Tensor], list[str]]:
    """The tensors right in closures and globals, for their names only."""
    tensors: list[torch.Tensor] = []
    names: list[str] = []
    for _, function in definition.functions():
        plain = getattr(function, "__func__", function)
        if not isinstance(plain, types.FunctionType):
            continue
        cells = zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True)
        pairs = [(name, _contents(cell)) for name, cell in cells]
        for name, value in [*pairs, *_globals(plain, _names(plain.__code__).globals)]:
            if isinstance(value, torch.Tensor):
                tensors.append(value)
                names.append(name)
    return tensors, names
