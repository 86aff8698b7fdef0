"""Values of keys and parameters: our encoding to Python's values and back, as far as other formats can hold them."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from tuning.spec import Json, encode_value

__all__ = ["Unportable", "decode", "decode_scalar", "encode_foreign", "str_of", "value_of_str"]


class Unportable(ValueError):
    """A value that the format cannot hold; the message says why."""


def encode_foreign(value: Json) -> str:
    """Our encoding of a JSON value of another system.

    A JSON number with a point is a float. An array stands for a tuple: a kernel takes no list as an argument that
    Triton can compile for, and these formats write both as arrays.
    """
    return encode_value(_untuple(value))


def _untuple(value: Json) -> object:
    if isinstance(value, list):
        return tuple(map(_untuple, value))
    if isinstance(value, dict):
        return {name: _untuple(item) for name, item in value.items()}
    return value


def decode(text: str) -> Any:
    """The Python value of an encoded one, if JSON can hold it: null, booleans, integers, strings, floats, sequences.

    Raises:
        Unportable: it is of a type that JSON does not have.
    """
    return _decode(json.loads(text))


def _decode(value: Json) -> Any:
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "float":
        number = float(content)
        if not math.isfinite(number):
            raise Unportable(f"the float {content} is not JSON")
        return number
    if tag == "tuple":
        return tuple(map(_decode, content))
    if tag == "list":
        return list(map(_decode, content))
    raise Unportable(f"a value of the kind {tag!r} has no form in JSON")


def decode_scalar(text: str) -> Any:
    """As :func:`decode`, for a place where a sequence would come back as another type.

    Raises:
        Unportable: it is no null, boolean, integer, string or float.
    """
    value = decode(text)
    if isinstance(value, (tuple, list)):
        raise Unportable("a sequence would come back as a list")
    return value


_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,39}")
_DTYPE = re.compile(r"torch\.([A-Za-z]\w*)")
_WORDS: dict[str, object] = {"None": None, "True": True, "False": False}


def str_of(text: str) -> str:
    """Python's ``str`` of the value that was encoded.

    Raises:
        Unportable: it is of a type whose ``str`` is not known here.
    """
    value = json.loads(text)
    if isinstance(value, dict):
        ((tag, content),) = value.items()
        if tag == "float":
            return str(content)
        if tag == "dtype":
            return str(content) if "." in content else f"torch.{content}"
        if tag in ("tuple", "list"):
            return str(decode(text))
        raise Unportable(f"Python's text of a value of the kind {tag!r} is not known")
    return str(value)


def value_of_str(text: str) -> tuple[str, bool]:
    """The encoded value that most likely has this ``str``, and whether that is beyond reasonable doubt.

    ``128`` is an integer and ``True`` a boolean; the strings of the same text are given up. What is no word, number or
    dtype stays a string; where it looks like a sequence or an object, that is in doubt.
    """
    if text in _WORDS:
        return encode_value(_WORDS[text]), True
    if _INTEGER.fullmatch(text):
        return encode_value(int(text)), True
    if found := _DTYPE.fullmatch(text):
        return json.dumps({"dtype": found[1]}, separators=(",", ":")), True
    try:
        if len(text) <= 40 and repr(float(text)) == text:
            return encode_value(float(text)), True
    except ValueError:
        pass
    return encode_value(text), not text.startswith(("(", "[", "{", "<"))
