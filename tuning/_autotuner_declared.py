"""How many candidates a source lists for an autotuner, and what cut them down before the autotuner was made.

Read in the source, never run: ``choose([Config(...), Config(...)])`` lists two, whatever ``choose`` returns. Followed
are names to what the module's own top level assigned to them last, sums of lists, slices, and comprehensions over what
can be counted. What cannot be read so (a loop that appends, a conditional, a function without arguments) is not known.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

__all__ = ["OWN_FORM", "Assignments", "Declared", "count_declared", "resolved"]

OWN_FORM = "the source's own "
"""With this begins what a count went through where it is no function but written out: a slice, or an ``if``."""

_KEEPS_ALL = {"list", "tuple", "sorted", "reversed"}
_SHOWN = 80


class Declared(NamedTuple):
    """What a source says of a list of candidates.

    Attributes:
        number: how many it lists; None where it cannot be read.
        through: what they went through: the qualified name of a function, or :data:`OWN_FORM` and the form; None for
            nothing.
    """

    number: int | None
    through: str | None


_UNKNOWN = Declared(None, None)


class Assignments:
    """What the top level of a module assigns to each name, in order."""

    def __init__(self, tree: ast.Module) -> None:
        self._found: dict[str, list[tuple[int, ast.expr | None]]] = {}
        for statement in tree.body:
            for name, value in _assigned(statement):
                self._found.setdefault(name, []).append((statement.lineno, value))

    def is_rebound(self, name: str) -> bool:
        """Whether a name is assigned in more than one place."""
        return len(self._found.get(name, ())) > 1

    def last(self, name: str, before: int) -> tuple[int, ast.expr] | None:
        """Line and value of the last assignment above line ``before``; None where there is none, or none to be read."""
        above = [item for item in self._found.get(name, ()) if item[0] < before]
        if not above or above[-1][1] is None:
            return None
        return above[-1][0], above[-1][1]


def _assigned(statement: ast.stmt) -> Iterator[tuple[str, ast.expr | None]]:
    """Names that a statement of the top level assigns, each with the value where it is one expression."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Name):
                yield target.id, statement.value
            elif isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                for part, value in zip(target.elts, statement.value.elts, strict=False):
                    if isinstance(part, ast.Name):
                        yield part.id, value
        return
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        if statement.value is not None:
            yield statement.target.id, statement.value
        return
    for node in ast.walk(statement):  # a branch, a loop, ``+=``: which value holds cannot be read
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield node.id, None
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name, None) for alias in node.names)


def count_declared(
    expression: ast.expr | None, namespace: Mapping[str, Any], assignments: Assignments | None, line: int
) -> Declared:
    """Count the candidates that an expression at ``line`` lists.

    Args:
        expression: what is passed as ``configs``.
        namespace: the module's, as it is after import: where a name leads no farther in the source, the list that it
            stands for is counted.
        assignments: those of the module; None for an expression in a function, whose names may be its own.
        line: where the expression stands.
    """

    def count(node: ast.expr | None, line: int, bound: frozenset[str] = frozenset()) -> Declared:
        if isinstance(node, (ast.List, ast.Tuple)):
            plain = not any(isinstance(item, ast.Starred) for item in node.elts)
            return Declared(len(node.elts) if plain else None, None)
        if isinstance(node, ast.Name):
            return _UNKNOWN if node.id in bound else named(node.id, line)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = count(node.left, line, bound), count(node.right, line, bound)
            known = left.number is not None and right.number is not None
            total = (left.number or 0) + (right.number or 0) if known else None
            return Declared(total, left.through or right.through)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            through = f"{OWN_FORM}slice [{ast.unparse(node.slice)}]"
            return Declared(count(node.value, line, bound).number, through)
        if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
            return comprehended(node, line, bound)
        if isinstance(node, ast.Call):
            return called(node, line, bound)
        return _UNKNOWN

    def named(name: str, line: int) -> Declared:
        last = assignments.last(name, line) if assignments is not None else None
        if assignments is not None and last is not None:
            read = count(last[1], last[0])
            # A list that went through nothing is counted as it is now, grown or not, unless the name is another's now.
            if read.number is not None and (read.through is not None or assignments.is_rebound(name)):
                return read
        value = namespace.get(name)
        return Declared(len(value) if isinstance(value, (list, tuple)) else None, None)

    def comprehended(node: ast.ListComp | ast.GeneratorExp, line: int, bound: frozenset[str]) -> Declared:
        total, through = 1, None
        for part in node.generators:
            read = count(part.iter, line, bound)
            if read.number is None:
                return _UNKNOWN
            total *= read.number
            through = through or read.through
            if part.ifs:
                through = f"{OWN_FORM}if {ast.unparse(part.ifs[0])}"[:_SHOWN]
            targets = {each.id for each in ast.walk(part.target) if isinstance(each, ast.Name)}
            bound |= targets
        return Declared(total, through)

    def called(node: ast.Call, line: int, bound: frozenset[str]) -> Declared:
        function = node.func.id if isinstance(node.func, ast.Name) and node.func.id not in namespace else None
        if function == "range":
            try:
                return Declared(len(range(*(ast.literal_eval(each) for each in node.args))), None)
            except (TypeError, ValueError):
                return _UNKNOWN
        if not node.args:
            return _UNKNOWN
        if function in _KEEPS_ALL:
            return count(node.args[0], line, bound)
        source = node.args[1] if function == "filter" and len(node.args) > 1 else node.args[0]
        # The outermost is what the autotuner was given.
        return Declared(count(source, line, bound).number, resolved(node.func, namespace))

    return count(expression, line)


def resolved(node: ast.expr, namespace: Mapping[str, Any]) -> str:
    """Qualified name of a function as a module calls it."""
    text = ast.unparse(node)
    value: Any = namespace.get(text.partition(".")[0])
    for part in text.split(".")[1:]:
        value = getattr(value, part, None)
    name, module = getattr(value, "__qualname__", None), getattr(value, "__module__", None)
    return f"{module}.{name}" if isinstance(name, str) and isinstance(module, str) else text
