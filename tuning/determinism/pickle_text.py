"""Read what a pickle says without doing what it says.

Checkpoints of torch keep the layout of their tensors in a pickle, and a pickle is a program: loading one runs it. This
reader walks the opcodes as text and builds containers, numbers and strings; whatever would import or call something
becomes a :class:`Symbol` that only records it. Nothing is imported, nothing is called, so a hostile file can lie about
a layout and do no more.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Symbol", "read_pickle_text"]


@dataclass(eq=False)
class Symbol:
    """A name, or a call that a pickle asks for.

    Attributes:
        name: ``module.attribute`` of what is named or called; ``persistent`` for a persistent id.
        args: the arguments of the call; None where it is only a name.
        state: what the pickle would hand to the object's ``__setstate__``.
        items: entries that it would store into the object.
    """

    name: str
    args: tuple[Any, ...] | None = None
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)


_MARK = object()

_LITERAL = frozenset(
    {
        "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
        "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
        "BINBYTES8", "BYTEARRAY8",
    }
)  # fmt: skip
_CONSTANT: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_SIZES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def since_mark(self) -> list[Any]:
        start = len(self.stack) - 1 - self.stack[::-1].index(_MARK)
        values = self.stack[start + 1 :]
        del self.stack[start:]
        return values

    def last(self, count: int) -> list[Any]:
        if count > len(self.stack):
            raise ValueError("a value is missing")
        values = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return values

    def store(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        entries = target.items if isinstance(target, Symbol) else target
        entries.update(zip(pairs[::2], pairs[1::2], strict=True))

    def extend(self, values: list[Any]) -> None:
        if isinstance(self.stack[-1], list):
            self.stack[-1].extend(values)

    def step(self, name: str, arg: Any) -> None:
        stack = self.stack
        if name in _LITERAL:
            stack.append(arg)
        elif name in _CONSTANT:
            stack.append(_CONSTANT[name])
        elif name in _SIZES:
            stack.append(tuple(self.last(_SIZES[name])))
        elif name in ("PROTO", "FRAME"):
            pass
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "EMPTY_LIST" or name == "EMPTY_SET":
            stack.append([])
        elif name == "TUPLE":
            stack.append(tuple(self.since_mark()))
        elif name == "LIST" or name == "FROZENSET":
            stack.append(self.since_mark())
        elif name == "DICT":
            pairs = self.since_mark()
            stack.append({})
            self.store(pairs)
        elif name == "SETITEM":
            self.store(self.last(2))
        elif name == "SETITEMS":
            self.store(self.since_mark())
        elif name == "APPEND":
            self.extend(self.last(1))
        elif name == "APPENDS" or name == "ADDITEMS":
            self.extend(self.since_mark())
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self.memo[arg] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self.memo[arg])
        elif name == "POP":
            self.last(1)
        elif name == "POP_MARK":
            self.since_mark()
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "GLOBAL":
            stack.append(Symbol(".".join(arg.split(" ", 1))))
        elif name == "STACK_GLOBAL":
            module, attribute = self.last(2)
            stack.append(Symbol(f"{module}.{attribute}"))
        elif name in ("REDUCE", "NEWOBJ"):
            function, args = self.last(2)
            stack.append(Symbol(getattr(function, "name", "?"), tuple(args)))
        elif name == "NEWOBJ_EX":
            function, args, _ = self.last(3)
            stack.append(Symbol(getattr(function, "name", "?"), tuple(args)))
        elif name == "BUILD":
            (state,) = self.last(1)
            if isinstance(stack[-1], Symbol):
                stack[-1].state = state
        elif name == "BINPERSID":
            stack.append(Symbol("persistent", tuple(self.last(1))))
        elif name == "PERSID":
            stack.append(Symbol("persistent", (arg,)))
        else:
            raise ValueError(f"the opcode {name} is not expected here")


def read_pickle_text(data: bytes) -> Any:
    """The object that a pickle describes, with a :class:`Symbol` for everything that would run code.

    Raises:
        ValueError: ``data`` is no pickle, or one that this reader does not understand.
    """
    machine = _Machine()
    try:
        for opcode, arg, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.stack[-1]
            machine.step(opcode.name, arg)
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the pickle cannot be followed: {type(error).__name__}: {error}") from error
    raise ValueError("the pickle has no end")
