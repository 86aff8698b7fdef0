"""Launches that reach memory which is no argument: they are not replayed, for copies do not hold what they would write.

A pointer may come out of a tensor: a grouped matrix multiplication reads the addresses of its operands from a table of
integers. A replay on a copy of the table works on the run's own memory, and what adds to it adds twice. Two signs are
looked for: source that makes pointers of integers, and integers that are addresses of memory which is allocated now.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from ._launch_arguments import CannotBeCopied, Copies

__all__ = ["copies_to_replay"]


def copies_to_replay(autotuner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Copies:
    """Makes copies of a launch's arguments, on which it may be replayed.

    Raises:
        CannotBeCopied: an argument cannot be copied, or the launch may reach memory that is none of its arguments'.
    """
    copies = Copies(tuple(autotuner.arg_names), args, kwargs)
    function = autotuner.base_fn
    line = _pointer_cast(function, copies.tensors.keys())
    if line:
        raise CannotBeCopied(
            f"{function.__module__}.{function.__qualname__} makes pointers of integers ({line}): a replay would reach "
            "memory that is no copy"
        )
    for name, tensor in copies.tensors.items():
        if _holds_addresses(tensor):
            raise CannotBeCopied(
                f"argument {name!r} holds integers that are addresses of allocated memory: a replay would reach it, "
                "and it is no copy"
            )
    return copies


def _plain(function: Any) -> Any:
    """The Python function in what a decorator of Triton made of it."""
    for _ in range(8):
        if inspect.isfunction(function):
            return function
        function = getattr(function, "fn", None)
    return None


def _trees(function: Any) -> Iterator[tuple[Any, ast.AST]]:
    """The syntax trees of a kernel and of the functions that it calls by name, as far as their source is at hand."""
    seen: set[int] = set()
    left = [_plain(function)]
    while left:
        found = left.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(found)))
        except (OSError, TypeError, SyntaxError):
            continue
        yield found, tree
        for call in (node.func for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name, *rest = ast.unparse(call).split(".")
            target = found.__globals__.get(name)
            for part in rest:
                target = getattr(target, part, None)
            called = _plain(target) if target is not None else None
            if called is not None and not called.__module__.startswith("triton."):
                left.append(called)


def _pointer_cast(function: Any, pointers: Any) -> str:
    """The first expression that makes a pointer of an integer, of a kernel whose pointer arguments have these names."""
    kernel = _plain(function)
    for found, tree in _trees(function):
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node).rpartition(".")[2] == "pointer_type":
                return ast.unparse(node)
            # x.to(out.dtype), where out is a pointer: to the type of the pointer, not of what it points to.
            is_call = isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("to", "cast")
            for argument in [*node.args, *(each.value for each in node.keywords)] if is_call else ():  # type: ignore[attr-defined]
                text = ast.unparse(argument)
                name = text.removesuffix(".dtype")
                if found is kernel and name != text and name in pointers and not _assigned(tree, name):
                    return ast.unparse(node)
    return ""


def _assigned(tree: ast.AST, name: str) -> bool:
    """Whether a name stands for something else by then, such as for what was loaded from the pointer."""
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store) for node in ast.walk(tree)
    )


def _holds_addresses(tensor: Any) -> bool:
    import torch

    if tensor.dtype not in (torch.int64, torch.uint64) or tensor.numel() == 0:
        return False
    values = tensor.reshape(-1).view(torch.int64)
    # Nothing lies in the first 64 KiB. Indices and lengths beyond that are looked up.
    values = values[values >= 1 << 16]
    if values.numel() == 0:
        return False
    ranges = sorted(_allocated())
    if not ranges:
        return False
    starts, ends = torch.tensor(ranges, dtype=torch.int64).unbind(1)
    values = values.cpu()
    at = torch.searchsorted(starts, values, right=True) - 1
    return bool(((at >= 0) & (values < ends[at.clamp(min=0)])).any())


def _allocated() -> Iterator[tuple[int, int]]:
    """First address and the one behind the last, of memory that arguments may point to now."""
    torch = sys.modules["torch"]
    if torch.cuda._initialized:
        for segment in torch.cuda.memory_snapshot():
            yield segment["address"], segment["address"] + segment["total_size"]
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                place, mode, _, _, inode, *_ = line.split()
                if mode.startswith("rw") and inode == "0":
                    low, high = (int(each, 16) for each in place.split("-"))
                    if high < 1 << 63:
                        yield low, high
    except OSError:
        return  # not Linux
