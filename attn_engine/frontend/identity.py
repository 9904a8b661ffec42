"""What a definition depends on: the key of a trace, and the tensors that it reads, found anew without tracing.

Everything that a function can reach is walked in a fixed order: its code, closure cells, defaults,
the globals it names, and of objects, classes and modules the attributes that any of the code names.
Plain values enter the key by value; tensors by dtype, rank and by which of them are one and the same,
and their order in the walk is their address.
"""

from __future__ import annotations

import abc
import builtins
import dis
import enum
import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from attn_engine.frontend.custom_io import CustomIO
from attn_engine.frontend.definition import Definition
from attn_engine.frontend.online_func import OnlineFunc
from attn_engine.frontend.region import as_number
from attn_engine.frontend.trail import Trail, contents, recall, remember

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
_LOOKING = frozenset({"__dict__", "__getattribute__", "attrgetter", "methodcaller"})
"""Attributes with which code reads others, that it does not name."""
_AMBIENT = frozenset(
    {
        "are_deterministic_algorithms_enabled",
        "get_autocast_dtype",
        "get_default_device",
        "get_default_dtype",
        "get_float32_matmul_precision",
        "is_autocast_enabled",
        "is_grad_enabled",
        "is_inference_mode_enabled",
    }
)
"""What torch says of the moment, not of its arguments."""
_PLAIN = (bool, int, str, bytes, complex, range, type(None), type(Ellipsis), torch.dtype, torch.device, enum.Enum)
_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_COLLECTIONS = (tuple, list, dict)
_METACLASSES = (type, abc.ABCMeta, enum.EnumMeta)
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


_FIELD = cast("type[object]", type(vars(_Names)["imports"]))
"""What a named tuple's class has under the name of a field; the items tell what it gives."""


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
    trail: Trail = field(default_factory=lambda: Trail(_never_changes))

    def value(self, value: object, name: str) -> Key:
        """The key of any value."""
        self.nodes += 1
        if self.nodes > _MAX_NODES:
            raise _UndecidableError
        if isinstance(value, float):
            return ("float", value.hex()) if type(value) is float else ("float", value.hex(), *self.beside(value))
        if isinstance(value, _PLAIN):
            return (type(value), value) if type(value) in _PLAIN else (type(value), value, *self.beside(value))
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
        self.trail.tensor(tensor)
        return ("tensor", tensor.dtype, tensor.ndim, tensor.requires_grad, first, *self.attached(tensor))

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
                inside = (self.value(item, f"{name}{i}") for i, item in enumerate(items))
                return (type(items), *inside, *self.beside(items))
            case dict():
                table = cast("dict[object, object]", value)
                inside = ((self.value(k, name), self.value(v, f"{name}_{k}")) for k, v in table.items())
                return (type(table), *inside, *self.beside(table))
            case staticmethod() | classmethod():
                return self.value(cast("object", value.__func__), name)
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
            if isinstance(value, type) and not _is_plain_metaclass(type(value)):
                raise _UndecidableError
            return (value, *self.members(value))
        if isinstance(value, _FIELD):
            return ("field",)
        if type(value).__flags__ & _HEAP_TYPE or isinstance(value, types.SimpleNamespace):
            return ("object", cast("type[object]", type(value)), *self.members(value))
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
        if _is_given(function):
            return ("constant", function)
        names = _names(function.__code__)
        read = names.globals | names.attributes
        if names.imports or names.globals & _REFLECTIVE or read & (_LOOKING | _AMBIENT):
            raise _UndecidableError
        self.mentioned |= names.attributes
        self.trail.function(function, names.globals)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        return (
            function.__code__,
            *(self.value(contents(cell), name) for name, cell in cells),
            self.value(function.__defaults__, "default"),
            self.value(function.__kwdefaults__, "default"),
            *(self.value(value, name) for name, value in _globals(function, names.globals)),
            *self.attached(function),
        )

    def attached(self, value: object) -> Key:
        """Of the attributes that someone gave a function or a tensor, those that the code mentions."""
        given: dict[str, object] = getattr(value, "__dict__", {})
        if not given:
            return ()
        self.met_members = True
        return tuple((name, self.value(given[name], name)) for name in sorted(given.keys() & self.attributes))

    def beside(self, value: object) -> Key:
        """What a class written in Python adds to the number or collection that its object is."""
        kind = type(value)
        if kind in _COLLECTIONS or isinstance(value, enum.Enum):
            return ()
        return tuple(self.members(value)) if kind.__flags__ & _HEAP_TYPE and not _is_constant(kind.__module__) else ()

    def members(self, value: object) -> Iterator[Key]:
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
            for found in _definitions(value, name, written):
                if isinstance(found, property | functools.cached_property):
                    raise _UndecidableError
                yield (name, self.value(found, name))


def _is_constant(module: str | None) -> bool:
    return (module or "").split(".")[0] in _CONSTANT_MODULES


def _is_given(function: types.FunctionType) -> bool:
    """Whether a function gives the same for the same, and holds nothing of a user."""
    module = function.__module__ or ""
    walked = module in _WALKED and (function.__closure__ or module == "attn_engine.library")
    return _is_constant(module) and not walked


def _never_changes(value: object) -> bool:
    """Whether a walk takes a module, class or function as it is."""
    if isinstance(value, types.FunctionType):
        return _is_given(value)
    if isinstance(value, types.ModuleType):
        return _is_constant(value.__name__)
    return type(value) in _BUILTIN or (type(value) is type and _is_constant(value.__module__))


def _globals(function: types.FunctionType, names: frozenset[str]) -> Iterator[tuple[str, object]]:
    for name in sorted(names):
        if name in function.__globals__:
            yield name, function.__globals__[name]
        elif hasattr(builtins, name):
            yield name, getattr(builtins, name)


def _state(value: Any) -> set[str]:
    """The names under which an object keeps what its methods may read."""
    stored: dict[str, object] = getattr(value, "__dict__", {})
    if not isinstance(value, torch.nn.Module):
        return set(stored)
    if any(stored[name] for name in stored if name.endswith("_hooks")):
        raise _UndecidableError
    tables = (value._parameters, value._buffers, value._modules)  # type: ignore[reportPrivateUsage]
    return {name for name in stored if not name.startswith("_")}.union(*tables)


def _definitions(value: Any, name: str, kinds: Sequence[type]) -> Iterator[object]:
    """What a module, or an object and each of its classes, has under a name: `super()` may take any of them."""
    if isinstance(value, torch.nn.Module):
        for store in (value._parameters, value._buffers, value._modules):  # type: ignore[reportPrivateUsage]
            if name in store:
                yield cast("Mapping[str, object]", store)[name]
    stored = not isinstance(value, type) and name in getattr(value, "__dict__", {})
    if stored:
        yield value.__dict__[name]
    for kind in kinds:
        if name in vars(kind):
            found = vars(kind)[name]
            if isinstance(found, types.MemberDescriptorType):
                found = None if isinstance(value, type) else getattr(value, name, None)
            if not (stored and isinstance(found, functools.cached_property)):
                yield found


def _is_plain_metaclass(kind: type) -> bool:
    """Whether attributes of such classes are those that they and their bases have."""
    return kind in _METACLASSES or _is_constant(kind.__module__)


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
    """The key, and the tensors that the functions reach where there is one, of a single walk or of one that is remembered."""
    d = definition
    functions = (d.score_mod, d.mask_mod, d.row, d.query_mod, d.key_mod, d.value_mod)
    start = (d.bare_score, *d.custom_io.shapes.items())
    try:
        found = recall(start, functions)
        if found is not None:
            return found
        key, walk = _walk(definition)
        hash(key)
    except (_UndecidableError, TypeError):
        return None, []
    remember(start, functions, walk.trail, key)
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
        pairs = [(name, contents(cell)) for name, cell in cells]
        for name, value in [*pairs, *_globals(plain, _names(plain.__code__).globals)]:
            if isinstance(value, torch.Tensor):
                tensors.append(value)
                names.append(name)
    return tensors, names
