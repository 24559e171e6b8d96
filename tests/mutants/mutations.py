"""Mutations of formulas: small changes of a module's syntax tree, one at a time.

They change operators, comparisons, numbers, signs, terms of sums, and pairs of functions such as min and max.
Annotations, decorators, error messages, assertions and type checks are left alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

OPERATORS: dict[Any, Any] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
COMPARISONS: dict[Any, Any] = {  # loosened or tightened, and negated
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,),
}  # fmt: skip
PAIRS = [("min", "max"), ("amin", "amax"), ("minimum", "maximum"), ("argmin", "argmax"), ("any", "all"),
         ("floor", "ceil"), ("sum", "mean")]  # fmt: skip
NAMES = dict(PAIRS) | {second: first for first, second in PAIRS}
TYPE_CHECKS = {"isinstance", "issubclass", "hasattr", "cast", "TypeVar"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Edit(NamedTuple):
    """The replacement of an attribute of a node, or of one entry of an attribute that is a list."""

    node: ast.AST
    field: str
    index: int | None
    new: Any

    def apply(self) -> Edit:
        """Make the replacement; return the edit that undoes it."""
        entries, key = vars(self.node), self.field
        if self.index is not None:
            entries, key = entries[key], self.index
        old, entries[key] = entries[key], self.new
        return self._replace(new=old)


class Mutant(NamedTuple):
    """A change of a module. `statement` is the line of its statement, which may run only `at_import` of the module."""

    path: Path
    tree: ast.Module
    edit: Edit
    line: int
    statement: int
    at_import: bool
    before: str
    after: str

    def code(self) -> CodeType:
        """The compiled module. The tree stays changed: call this in a process of its own."""
        self.edit.apply()
        return compile(self.tree, str(self.path), "exec", dont_inherit=True)


def mutants_of(path: Path) -> list[Mutant]:
    """All mutants of a file, in the order of their lines."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    mutants = []
    for edit, node, statement, shown, at_import in _edits(tree, tree, tree, True):
        before, undo = ast.unparse(shown), edit.apply()
        after, _ = ast.unparse(shown), undo.apply()
        mutants.append(Mutant(path, tree, edit, node.lineno, statement.lineno, at_import, *_shortened(before, after)))
    return sorted(mutants, key=lambda mutant: mutant.line)


def with_probes(path: Path) -> CodeType:
    """The unchanged module, in which each statement of a function first calls `__reached__(path, line)`."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and not isinstance(node, (ast.Module, ast.ClassDef)):
                block[:] = [statement for old in block for statement in (*_probe(path, old), old)]
    return compile(tree, str(path), "exec", dont_inherit=True)


def _probe(path: Path, statement: ast.stmt) -> list[ast.stmt]:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):  # a docstring stays the first
        return []
    probe = ast.parse(f"__reached__({str(path)!r}, {statement.lineno})").body[0]
    for node in ast.walk(probe):
        ast.copy_location(node, statement)
    return [probe]


def _edits(parent: ast.AST, statement: Any, shown: Any, at_import: bool) -> Iterator[tuple[Edit, Any, Any, Any, bool]]:
    """Edits below a node, each with its node, its statement, what to show of the statement, and `at_import`."""
    for field, value in ast.iter_fields(parent):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        early = at_import and not (isinstance(parent, FUNCTIONS) and field == "body")
        for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(node, ast.AST) or _is_skipped(node):
                continue
            alone = isinstance(node, ast.stmt) or (isinstance(node, ast.expr) and hasattr(shown, "body"))
            whole = node if alone and not isinstance(shown, ast.expr) else shown
            near = node if isinstance(node, ast.stmt) else statement
            for edit in _edits_of(node, Edit(parent, field, index, None)):
                yield edit, node, near, whole, early
            yield from _edits(node, near, whole, early)


def _is_skipped(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return getattr(node.func, "id", "") in TYPE_CHECKS
    if isinstance(node, ast.If):
        return getattr(node.test, "id", "") == "TYPE_CHECKING"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):  # a type such as `int | None`
        return any(isinstance(side, ast.Constant) and side.value is None for side in (node.left, node.right))
    return isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr))


def _edits_of(node: ast.AST, place: Edit) -> Iterator[Edit]:
    if isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in OPERATORS:
        yield Edit(node, "op", None, OPERATORS[type(node.op)]())
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
            yield place._replace(new=node.left)
            if isinstance(node.op, ast.Add):
                yield place._replace(new=node.right)
    elif isinstance(node, ast.Compare):
        for at, operator in enumerate(node.ops):
            yield from (Edit(node, "ops", at, other()) for other in COMPARISONS.get(type(operator), ()))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not, ast.Invert)):
        yield place._replace(new=node.operand)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield Edit(node, "value", None, node.value + 1 if type(node.value) is int else 2 * node.value or 1.0)
    elif isinstance(node, ast.Call):
        name = "id" if isinstance(node.func, ast.Name) else "attr"
        called = getattr(node.func, name, "")
        if called in NAMES and (name, called) != ("id", "sum"):  # there is no builtin `mean`
            yield Edit(node.func, name, None, NAMES[called])
        if called.startswith("clamp"):
            yield from (Edit(k, "arg", None, NAMES[k.arg]) for k in node.keywords if k.arg in NAMES)


def _shortened(before: str, after: str, context: int = 50) -> tuple[str, str]:
    """Both texts on one line, without what they share far from the change."""
    before, after = " ".join(before.split()), " ".join(after.split())
    most = min(len(before), len(after))
    start = next((k for k in range(most) if before[k] != after[k]), most)
    end = next((k for k in range(most - start) if before[-1 - k] != after[-1 - k]), most - start)
    head, tail = max(0, start - context), max(0, end - context)
    left, right = "..." if head else "", "..." if tail else ""
    return left + before[head : len(before) - tail] + right, left + after[head : len(after) - tail] + right
