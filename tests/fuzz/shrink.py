"""Makes a failing case small: simpler expressions, fewer functions and smaller sizes, as long as it fails alike."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.grammar import Case, captures_of

MOST_CHECKS = 80


def shrink(case: Case, fails: Callable[[Case], bool], checks: int = MOST_CHECKS) -> Case:
    """The smallest case found that still fails; `fails` is asked at most `checks` times."""
    progress = True
    while progress and checks > 0:
        progress = False
        for smaller in _smaller(case):
            checks -= 1
            if fails(smaller):
                case, progress = smaller, True
                break
            if checks <= 0:
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Cases of one step less: whole functions first, then expressions from the outside in, then sizes."""
    tree = ast.parse(case.source)
    seen = {case.source}
    for candidate in (*_without_function(tree), *_with_simpler_expression(tree)):
        smaller = _rebuilt(case, candidate)
        if smaller.source not in seen:
            seen.add(smaller.source)
            yield smaller
    for name, small in (("b", 1), ("hkv", 1), ("sq", 1), ("skv", 1), ("d", 4), ("dv", 4)):
        for size in (small, case.sizes[name] // 2):
            if small <= size < case.sizes[name]:
                yield _resized(case, name, size)


def _resized(case: Case, name: str, size: int) -> Case:
    sizes = case.sizes | {name: size}
    if name == "hkv":
        sizes["h"] = case.sizes["h"] // case.sizes["hkv"]
    return replace(case, sizes=sizes)


def _rebuilt(case: Case, tree: ast.Module) -> Case:
    """A case from its tree, with the captures that are still read."""
    make = tree.body[0]
    assert isinstance(make, ast.FunctionDef)
    captures = captures_of("\n".join(ast.unparse(part) for part in make.body))
    make.args.args = [ast.arg(name) for name in captures]
    return replace(case, source=ast.unparse(ast.fix_missing_locations(tree)) + "\n", captures=captures)


def _without_function(tree: ast.Module) -> Iterator[ast.Module]:
    make = tree.body[0]
    assert isinstance(make, ast.FunctionDef)
    for function in make.body[:-1]:
        smaller = copy.deepcopy(tree)
        body = smaller.body[0].body  # type: ignore[attr-defined]
        kept = [part for part in body[:-1] if part.name != function.name]  # type: ignore[attr-defined]
        names = [ast.Constant(part.name) for part in kept], [ast.Name(part.name) for part in kept]
        smaller.body[0].body = [*kept, ast.Return(ast.Dict(*names))]  # type: ignore[attr-defined]
        yield smaller


def _with_simpler_expression(tree: ast.Module) -> Iterator[ast.Module]:
    """Each expression replaced by one of its parts, of whatever type: what does not run does not fail alike."""
    for number, node in enumerate(_expressions(tree)):
        for part in (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)):
            if not _is_part(node, part):
                continue
            smaller = copy.deepcopy(tree)
            _Replace(_expressions(smaller)[number], copy.deepcopy(part)).visit(smaller)
            yield smaller


def _is_part(node: ast.expr, part: ast.expr) -> bool:
    """Whether a part is a value of its own: neither the function that is called nor the tensor that is read."""
    named = isinstance(part, ast.Name | ast.Attribute) and isinstance(node, ast.Call | ast.Attribute | ast.Subscript)
    return not named or (isinstance(node, ast.Call) and part in node.args)


def _expressions(tree: ast.Module) -> list[ast.expr]:
    """Expressions that have parts, inside of the functions, outermost first."""
    make = tree.body[0]
    assert isinstance(make, ast.FunctionDef)
    functions = [part for part in make.body if isinstance(part, ast.FunctionDef)]
    kinds = (ast.BinOp, ast.UnaryOp, ast.Call, ast.Compare)
    return [node for function in functions for node in ast.walk(function) if isinstance(node, kinds)]


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.expr, new: ast.expr):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else super().visit(node)
