"""What only the source of a module says about its autotuners.

An autotuner knows its candidates, but not how many there were before a filter ran at import; it knows the names of its
key, but not what callers put there; and a decorator in a function that nobody called has made no autotuner yet. All of
that stands in the source, which is read here and never run.

Everything concluded is a guess from names, and is worded as one. A parameter may fragment the key, that is take a new
value with every new batch, if its name is that of a token count or sequence length, or if a launch in the same module
passes an expression over such a name: ``NB=triton.cdiv(T, 2048)`` does, ``BT=min(64, next_power_of_2(T))`` does not,
for it takes a few values only.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ._autotuner_declared import Assignments, count_declared
from ._autotuner_info import Problem
from ._package_walk import module_source
from .interception import AutotunerFacts

__all__ = ["AutotuneCall", "ImportedSources", "ModuleSource", "counts_tokens", "parse_source"]

_AUTOTUNE = re.compile(r"(?:.*_)?autotune|.*Autotuner")
_TOKENS = re.compile(
    r"T|M|NT|n_?ctx|n_?rows|num_rows|(?:(?:n|num|nr|total|max)_?)*(?:tokens?|toks?|seq_?lens?|seq_?lengths?)(?:_.*)?"
    r"|(?:(?:n|num|total|max|cu)_)?(?:seq|ctx|context|kv|q|k|src|tgt|prefix|prompt|total)_?len(?:s|gths?)?(?:_.*)?"
)
# Calls that keep a count a count. `min`, `next_power_of_2` and the like bound it; of unknown calls nothing is claimed.
_KEEPS = {"cdiv", "ceil_div", "ceildiv", "div_up", "len", "int", "max", "abs", "round", "sum"}
_WHY_NOT = "a branch not taken, a decorator that raised, or replaced"
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Div, ast.LShift, ast.RShift)


def counts_tokens(name: str) -> bool:
    """Whether a parameter's name says that it is a number of tokens or rows, or a sequence length."""
    return any(_TOKENS.fullmatch(spelling) for spelling in (name, name.lower()))


@dataclass(frozen=True)
class AutotuneCall:
    """One place in a source that makes an autotuner.

    Attributes:
        line: of the decorated function's first decorator, or of the call.
        kernel: name of the function that is decorated, where it can be read.
        function: qualified name of the function that it stands in; None at module level.
        decorates: True for a decorator, False for a plain call.
        configs: the expression of the candidates.
    """

    line: int
    kernel: str | None
    function: str | None
    decorates: bool
    configs: ast.expr | None


@dataclass(frozen=True)
class _Launch:
    arguments: Mapping[str, ast.expr]
    scope: ast.AST


class ModuleSource:
    """The parsed source of one module.

    Args:
        text: the source.
        file: shown in reasons; only its last component.

    Raises:
        SyntaxError: the text is no Python of the running version.
    """

    def __init__(self, text: str, file: str = "") -> None:
        self.file = file
        tree = ast.parse(text)
        calls, self._launches = _read(tree)
        self._assignments = Assignments(tree)
        self.calls: tuple[AutotuneCall, ...] = tuple(calls)

    def call_of(self, function_name: str, line: int) -> AutotuneCall | None:
        """The place that made the autotuner of a function whose code starts at ``line``."""
        named = [call for call in self.calls if call.kernel == function_name]
        at_line = [call for call in named if call.decorates and call.line == line]
        return next(iter(at_line or [call for call in named if not call.decorates]), None)

    # -- candidates --

    def declared(self, call: AutotuneCall, namespace: Mapping[str, Any]) -> tuple[int | None, str | None]:
        """How many candidates the source lists, and the name of what they were passed through.

        ``configs=choose([Config(...), Config(...)])`` gives 2 and the name of ``choose``; None where it cannot be read.
        See :mod:`tuning._autotuner_declared`.
        """
        assignments = self._assignments if call.function is None else None
        return count_declared(call.configs, namespace, assignments, call.line)

    # -- keys --

    def fragmenting(self, kernel: str, arg_names: Sequence[str], key_names: Iterable[str]) -> dict[str, str]:
        """Key names that may take a new value with every batch, each with the reason."""
        launches = [_Launch(_arguments(call, arg_names), scope) for call, scope in self._launches.get(kernel, ())]
        found: dict[str, str] = {}
        for name in key_names:
            reason = self._reason(name, launches)
            if reason is not None:
                found[name] = reason
        return found

    def _reason(self, name: str, launches: Sequence[_Launch]) -> str | None:
        if "BUCKET" in name.upper():
            return None
        for launch in launches:
            expression = launch.arguments.get(name)
            if expression is None:
                continue
            assigned = _assignments(launch.scope)
            if isinstance(expression, ast.Name) and expression.id == name and name in assigned:
                options = assigned[name]
            else:
                options = [expression]
            for option in options:
                count = _token_count(option, assigned, {name})
                if count is not None and count != name:
                    line = option.lineno
                    return f"{ast.unparse(option)[:80]} at {self.file}:{line}, and {count} reads as a token count"
        if counts_tokens(name):
            return "the name reads as a token count or sequence length"
        return None


def _read(tree: ast.AST) -> tuple[list[AutotuneCall], dict[str, list[tuple[ast.Call, ast.AST]]]]:
    """The places that make autotuners, and the launches by kernel name, each with the function that it stands in.

    Bodies of kernels are left out: they launch nothing and are most of such a source.
    """
    calls: list[AutotuneCall] = []
    launches: dict[str, list[tuple[ast.Call, ast.AST]]] = {}
    applied: set[int] = set()  # calls that belong to a decorator or to a larger call, which was counted
    stack: list[tuple[ast.AST, ast.AST, str | None]] = [(tree, tree, None)]
    while stack:
        node, scope, function = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            is_kernel = False
            for decorator in node.decorator_list:
                target = decorator.func if isinstance(decorator, ast.Call) else decorator
                if _is_autotune(target):
                    applied.add(id(decorator))
                    configs = _configs(decorator) if isinstance(decorator, ast.Call) else None
                    calls.append(AutotuneCall(node.decorator_list[0].lineno, node.name, function, True, configs))
                is_kernel = is_kernel or _last(target) == "jit"
            stack += [(decorator, scope, function) for decorator in node.decorator_list]
            if not is_kernel:
                inner = f"{function}.{node.name}" if function else node.name
                stack += [(statement, node, inner) for statement in node.body]
            continue
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Call) and _is_autotune(node.func.func) and node.args:
                applied.add(id(node.func))
                kernel = node.args[0].id if isinstance(node.args[0], ast.Name) else None
                calls.append(AutotuneCall(node.lineno, kernel, function, False, _configs(node.func)))
            elif id(node) not in applied and _is_autotune(node.func) and _configs(node) is not None:
                calls.append(AutotuneCall(node.lineno, None, function, False, _configs(node)))
            elif isinstance(node.func, ast.Subscript):  # kernel[grid](...)
                name = _last(node.func.value)
                if name is not None:
                    launches.setdefault(name, []).append((node, scope))
        stack += [(child, scope, function) for child in ast.iter_child_nodes(node)]
    calls.sort(key=lambda call: (call.line, call.kernel or ""))
    for found in launches.values():
        found.sort(key=lambda launch: launch[0].lineno)
    return calls, launches


def _last(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def _is_autotune(node: ast.AST) -> bool:
    name = _last(node)
    return name is not None and _AUTOTUNE.fullmatch(name) is not None


def _configs(call: ast.Call) -> ast.expr | None:
    named = next((keyword.value for keyword in call.keywords if keyword.arg == "configs"), None)
    return named if named is not None else next(iter(call.args), None)


def _arguments(call: ast.Call, arg_names: Sequence[str]) -> dict[str, ast.expr]:
    positional: list[ast.expr] = []
    for argument in call.args:
        if isinstance(argument, ast.Starred):
            break
        positional.append(argument)
    named = dict(zip(arg_names, positional, strict=False))
    named.update((keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg is not None)
    return named


def _assignments(scope: ast.AST) -> dict[str, list[ast.expr]]:
    """What is assigned to each name in a function; names unpacked from one expression are left out."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(scope):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            assert isinstance(node, ast.Assign)
            if isinstance(target, ast.Name):
                found.setdefault(target.id, []).append(node.value)
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for part, value in zip(target.elts, node.value.elts, strict=False):
                    if isinstance(part, ast.Name):
                        found.setdefault(part.id, []).append(value)
    return found


def _token_count(node: ast.expr, assigned: Mapping[str, list[ast.expr]], visited: set[str]) -> str | None:
    """The name of the token count that an expression grows with, or None."""
    if isinstance(node, ast.Name):
        if counts_tokens(node.id):
            return node.id
        if node.id in visited:
            return None
        inner = (_token_count(value, assigned, visited | {node.id}) for value in assigned.get(node.id, ()))
        return next((name for name in inner if name is not None), None)
    if isinstance(node, ast.Attribute):
        return node.attr if counts_tokens(node.attr) else None
    parts: list[ast.expr] = []
    if isinstance(node, ast.BinOp) and isinstance(node.op, _ARITHMETIC):
        parts = [node.left, node.right] if not isinstance(node.op, (ast.FloorDiv, ast.Div)) else [node.left]
    elif isinstance(node, ast.IfExp):
        parts = [node.body, node.orelse]
    elif isinstance(node, ast.Call) and _last(node.func) in _KEEPS:
        parts = list(node.args) if _last(node.func) in ("max", "sum") else list(node.args[:1])
    found = (_token_count(part, assigned, visited) for part in parts)
    return next((name for name in found if name is not None), None)


def parse_source(text: str | None, file: str = "") -> ModuleSource | None:
    """Parse a source that speaks of autotuning; None for any other, and for one that is no Python."""
    if not text or "autotune" not in text.lower():
        return None
    try:
        return ModuleSource(text, os.path.basename(file))
    except (SyntaxError, ValueError):
        return None


class ImportedSources:
    """The sources of the modules that were imported, and which of their autotune calls made an autotuner."""

    def __init__(self, modules: Mapping[str, ModuleType]) -> None:
        self._modules = modules
        self._sources: dict[str, ModuleSource] = {}
        for name, module in modules.items():
            text = module_source(module)
            source = parse_source(text, getattr(module, "__file__", None) or "")
            if source is not None:
                self._sources[name] = source
        self._made: set[tuple[str, AutotuneCall]] = set()

    def declared(self, module: str, function: str, line: int) -> tuple[int | None, str | None]:
        """See :meth:`ModuleSource.declared`. The call that made the autotuner is marked as seen."""
        source = self._sources.get(module)
        call = source.call_of(function, line) if source is not None else None
        if source is None or call is None:
            return None, None
        self._made.add((module, call))
        return source.declared(call, vars(self._modules[module]))

    def fragmenting(self, module: str, function: str, read: AutotunerFacts) -> dict[str, str]:
        """See :meth:`ModuleSource.fragmenting`; by names alone where there is no source."""
        source = self._sources.get(module) or ModuleSource("")
        return source.fragmenting(function, read.arg_names, read.key_names)

    def unmade(self) -> list[Problem]:
        """Autotune calls that made no autotuner that was found."""
        problems: list[Problem] = []
        for name, source in self._sources.items():
            calls = [call for call in source.calls if (name, call) not in self._made and call.kernel is not None]
            later = [call for call in calls if call.function is not None]
            never = [call for call in calls if call.function is None]
            if later:
                where = ", ".join(f"{call.kernel} in {call.function}" for call in later)
                reason = f"made only when a function runs: {where}"
                problems.append(Problem(name, "made when called", reason, len(later)))
            if never:
                where = ", ".join(f"{call.kernel} at line {call.line}" for call in never)
                reason = f"decorated in the source, yet no autotuner is there ({_WHY_NOT}): {where}"
                made = {call.kernel for module, call in self._made if module == name and call.function is None}
                # Of two definitions of one name, in branches or one after the other, the other is listed.
                count = sum(call.kernel not in made for call in never)
                problems.append(Problem(name, "not made", reason, count))
        return problems
