"""Ops that are alike are held against their definition once in a process.

Tests verify modules after every pass, and xDSL goes through all fields of an op's definition each time: a fifth of
the tests' time. What the definition says of an op depends on its types and attributes alone. Traits, `verify_` and
the op's place among others are checked every time, and so is an op that failed.
"""

from __future__ import annotations

from functools import cache

from xdsl.ir import Attribute, Operation, Region
from xdsl.irdl import OpDef
from xdsl.traits import OpTrait

Key = tuple[object, ...]

MOST = 200_000
"""Attributes that are kept."""


class Alike:
    """What definitions were right of: one number for all equal attributes, and the ops seen in such numbers."""

    def __init__(self) -> None:
        self._numbers: dict[Attribute, int] = {}
        self._objects: dict[int, tuple[Attribute, int]] = {}  # holds the objects, so that no other gets their ids
        self._checks: dict[int, tuple[OpTrait, ...]] = {}
        self.right: set[Key] = set()

    def _number(self, attribute: Attribute) -> int:
        found = self._objects.get(id(attribute))
        if found is None:
            found = attribute, self._numbers.setdefault(attribute, len(self._numbers))
            self._objects[id(attribute)] = found
        return found[1]

    def key(self, definition: OpDef, op: Operation) -> Key:
        """All that a definition looks at."""
        if len(self._objects) > MOST:
            self._numbers, self._objects, self.right = {}, {}, set()
        number = self._number
        return (
            id(definition),
            len(op.successors),
            tuple([number(o.type) for o in op.operands]),
            tuple([number(r.type) for r in op.results]),
            tuple([(name, number(a)) for name, a in op.properties.items()]),
            tuple([(name, number(a)) for name, a in op.attributes.items()]),
            tuple([self._region(r) for r in op.regions]) if op.regions else (),
        )

    def _region(self, region: Region) -> Key:
        first = region.first_block
        return (len(region.blocks), first and tuple([self._number(a.type) for a in first.args]))

    def traits(self, definition: OpDef) -> tuple[OpTrait, ...]:
        """Those that ask for anything."""
        found = self._checks.get(id(definition))
        if found is None:
            found = tuple(t for t in definition.traits if type(t).verify is not OpTrait.verify)
            self._checks[id(definition)] = found
        return found


@cache
def verify_alike_once() -> None:
    """From now on, in this process."""
    alike, against_definition = Alike(), OpDef.verify

    def verify(definition: OpDef, op: Operation) -> None:
        key = alike.key(definition, op)
        if key not in alike.right:
            against_definition(definition, op)
            alike.right.add(key)
            return
        for trait in alike.traits(definition):
            trait.verify(op)

    OpDef.verify = verify
