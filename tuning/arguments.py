"""The policy as command-line flags, as a YAML section, and back to an argument list.

Everything here is generated from :func:`tuning.policy.policy_fields`; no field is named twice. A training script needs
``add_arguments(parser)`` and ``policy_from_args(args)``.

**How a policy is spelled as arguments.** :func:`policy_to_argv` writes one ``--flag=value`` token per value, and
repeats the flag where a field holds several. The alternative, ``--flag value value``, reads better and breaks on values
that begin with ``-`` (a flag to argparse) or with a ``fromfile_prefix_chars`` character, and swallows positional
arguments that follow. Both spellings are read. That is why a repeated flag adds to the field instead of replacing it.

Flags that are not given leave no attribute on the namespace (``argparse.SUPPRESS``), so that *given* can be told from
*not given*. What is given is stored as plain ``str``, ``int``, ``bool`` and ``list``, because training frameworks put
the namespace into their checkpoints.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from tuning._bounded import read_regular
from tuning._words import a_few
from tuning.errors import PolicyError
from tuning.policy import AutotunePolicy, PolicyField, policy_fields, shown

__all__ = ["add_arguments", "policy_from_args", "policy_from_mapping", "policy_from_yaml", "policy_to_argv"]

_DETERMINISTIC_FLAG = "--deterministic-mode"

_MAX_BYTES = 1 << 20  # of a YAML file: PyYAML takes some ten seconds for as much

_SECTION = "triton_autotune"
"""Name of the YAML section, and prefix of the attributes on a namespace."""


def _dest(name: str) -> str:
    return f"{_SECTION}_{name}"


def _flag(name: str) -> str:
    return f"--{_dest(name)}".replace("_", "-")


def _names() -> tuple[str, ...]:
    return tuple(spec.name for spec in policy_fields())


class _Gather(argparse.Action):
    """Values of a repeated flag add up; a default set through ``parser.set_defaults`` is replaced, not added to."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        held = getattr(namespace, self.dest, self.default)
        earlier = [] if held is self.default else held
        setattr(namespace, self.dest, [*earlier, *(values or ())])


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add one flag per policy field, ``--triton-autotune-<field-with-hyphens>``, in a group of their own.

    And ``--deterministic-mode``, for ``install(policy, deterministic=args.deterministic_mode)``, unless the parser has
    a flag of this name already (Megatron-LM's does, with the same meaning).

    Returns the parser, so that it serves as it is where a framework asks for a function that takes a parser and returns
    it (Megatron-LM's ``extra_args_provider``).

    Raises:
        PolicyError: the parser has one of these flags already; it is left as it was.
    """
    # argparse would notice only at the first conflict, with the group added, and not at all under
    # conflict_handler="resolve"; it offers no public way to ask.
    taken = [flag for flag in map(_flag, _names()) if flag in parser._option_string_actions]
    if taken:
        raise PolicyError(
            f"add_arguments: the parser already has {taken[0]}; expected a parser without these flags: "
            "call add_arguments once on each parser",
            expected="a parser without these flags",
        )
    group = parser.add_argument_group(
        "Triton autotuning", "How Triton autotuners get their configs, and what is recorded and checked about it."
    )
    for spec in policy_fields():
        group.add_argument(_flag(spec.name), dest=_dest(spec.name), default=argparse.SUPPRESS, **_form(spec))
    if _DETERMINISTIC_FLAG not in parser._option_string_actions:
        group.add_argument(
            _DETERMINISTIC_FLAG,
            action="store_true",
            help="Put the whole process into deterministic mode: environment, torch, attention and kernels, with the "
            "autotune mode pinned unless another is given. What cannot be made deterministic is refused.",
        )
    return parser


def _form(spec: PolicyField) -> dict[str, Any]:
    """What argparse needs to know about one field. Values are checked by the policy; argparse checks their form."""
    if spec.kind == "switch":
        return {"action": argparse.BooleanOptionalAction, "help": spec.help}
    if spec.kind == "choice":
        return {"choices": spec.choices, "help": spec.help}
    form: dict[str, Any] = {"metavar": spec.metavar, "help": spec.help}
    if spec.kind == "count":
        return {**form, "type": int}
    if spec.kind == "path":
        return form
    return {**form, "nargs": "*", "action": _Gather}


def policy_from_args(args: argparse.Namespace, section: Mapping[str, Any] | None = None) -> AutotunePolicy:
    """The policy that parsed flags ask for, or that a YAML section asks for; one of the two, not both.

    Args:
        args: what a parser with :func:`add_arguments` returned. Other attributes are ignored.
        section: the inside of the ``triton_autotune:`` section, where the run has a YAML file and the file has one.

    Raises:
        PolicyError: a value cannot be used, or flags and a section are both given.
    """
    try:
        vars(args)
    except TypeError:
        raise PolicyError(
            f"args: expected an argparse.Namespace, got {shown(args)}; use policy_from_mapping for a mapping of fields",
            value=args,
            expected="an argparse.Namespace",
        ) from None
    attributes = {name: getattr(args, _dest(name), None) for name in _names()}
    given = {name: value for name, value in attributes.items() if value is not None}
    if section is None:
        return _build(given, {name: _flag(name) for name in _names()})
    if given:
        keys = ", ".join(str(key) for key in section) if isinstance(section, Mapping) and section else "no keys"
        raise PolicyError(
            f"flags and YAML section given together: {', '.join(map(_flag, given))} on the command line, and "
            f"{_SECTION} ({keys}) in YAML; keep one of the two",
            value=[_flag(name) for name in given],
            expected="flags or a YAML section",
        )
    return policy_from_mapping(section)


def policy_from_mapping(section: Mapping[str, Any] | None) -> AutotunePolicy:
    """The policy that the inside of a ``triton_autotune:`` section asks for.

    Keys are field names. A null value means the default, and so does a section that is null itself. Values keep the
    types that YAML gives them: a quoted number or boolean is an error.

    Raises:
        PolicyError: an unknown key, or a value that cannot be used; the message names ``triton_autotune.<field>``.
    """
    return _from_section(section, {})


def _from_section(section: Any, lines: Mapping[Any, str]) -> AutotunePolicy:
    """``lines`` holds where each key stands, as a prefix of messages; under None, where the section itself stands."""
    top = lines.get(None, "")
    if section is None:
        return AutotunePolicy()
    if not isinstance(section, Mapping):
        expected = "a mapping of policy fields"
        raise PolicyError(
            f"{top}{_SECTION}: expected {expected}, got {shown(section)}", value=section, expected=expected
        )
    for key, value in section.items():
        if key not in _names():
            raise _unknown(key, value, lines.get(key, top))
    places = {name: f"{lines.get(name, top)}{_SECTION}.{name}" for name in _names()}
    return _build({name: value for name, value in section.items() if value is not None}, places)


def _unknown(key: object, value: object, place: str) -> PolicyError:
    close = difflib.get_close_matches(str(key).lower(), _names(), n=1)
    expected = f"one of {', '.join(_names())}"
    hint = f"did you mean {close[0]!r}?" if close else f"expected {expected}"
    if key == _SECTION:
        hint = "pass the section itself, what stands under this key"
    return PolicyError(
        f"{place}{_SECTION}: unknown key {shown(key)}; {hint}", field=str(key), value=value, expected=expected
    )


def _build(values: Mapping[str, Any], places: Mapping[str, str]) -> AutotunePolicy:
    """The policy with these fields; an error begins with the field's place on the surface that it came from."""
    try:
        return AutotunePolicy(**values)
    except PolicyError as error:
        if error.field is None:
            raise
        rest = error.message.removeprefix(error.field)
        raise PolicyError(
            places[error.field] + rest, field=error.field, value=error.value, expected=error.expected
        ) from None


def policy_from_yaml(path: str | os.PathLike[str]) -> AutotunePolicy:
    """The policy in the ``triton_autotune:`` section of a YAML file, which may hold anything else beside it.

    Only that section is built, with PyYAML's safe loader; tags elsewhere in the file are no concern of ours. A section
    that is empty (null) gives the default policy; a file without one is an error, because it was named for it.

    Raises:
        PolicyError: PyYAML is missing, the file cannot be read, is over 1 MiB or is no YAML, the section is missing, a
            key stands in it twice, or a value cannot be used. The message begins with the file, and the line where
            there is one.
    """
    file = os.fspath(path)
    try:
        import yaml
    except ModuleNotFoundError:
        raise PolicyError(
            f"{file}: reading YAML needs PyYAML, which is not installed; run: pip install 'triton-tuning[yaml]'",
            value=file,
            expected="PyYAML to be installed",
        ) from None
    text = _read(file)
    try:
        loader = yaml.SafeLoader(text)
        line, node = _find_section(loader, file)
        _refuse_duplicates(node, file, set())
        section = _construct(loader, node, file)
        lines: dict[Any, str] = {None: f"{file}:{line}: "}
        if isinstance(section, dict):
            # Construction has also merged in what "<<" names, so that every key's node stands here with its own line.
            lines |= {loader.construct_object(key): f"{file}:{_line(key)}: " for key, _ in node.value}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise _malformed(file, mark.line + 1 if mark else 1, what) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _malformed(file, line, f"character U+{error.character:04X} is not allowed") from None
    except RecursionError:
        raise _malformed(file, 1, "it is nested too deeply, or contains itself") from None
    return _from_section(section, lines)


def _read(file: str) -> str:
    expected = f"a YAML file with a {_SECTION!r} section"
    try:
        data = read_regular(file, _MAX_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PolicyError(
            f"{file}: cannot be read ({reason}); expected {expected}", value=file, expected=expected
        ) from None
    if len(data) > _MAX_BYTES:
        raise PolicyError(
            f"{file}: cannot be read (it is over {_MAX_BYTES} bytes); expected {expected}: put the section into a "
            "file of its own",
            value=file,
            expected=expected,
        )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _malformed(file, line, f"byte 0x{data[error.start]:02x} is no UTF-8") from None


def _malformed(file: str, line: int, what: str) -> PolicyError:
    return PolicyError(f"{file}:{line}: malformed YAML: {what}", value=file, expected="a well-formed YAML document")


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


def _find_section(loader: Any, file: str) -> tuple[int, Any]:
    """The line of the section's key and the node of its inside."""
    root = loader.get_single_node()
    if root is not None and root.id != "mapping":
        raise PolicyError(
            f"{file}:{_line(root)}: expected a mapping at the top level, got a {root.id}",
            value=file,
            expected="a mapping at the top level",
        )
    pairs = root.value if root is not None else []
    found = _keys_named(_SECTION, pairs)
    if not found and root is not None:
        loader.flatten_mapping(root)  # the section may come through a merge key
        found = _keys_named(_SECTION, root.value)
    if not found:
        names = a_few([key.value for key, _ in pairs if key.id == "scalar"]) or "nothing"
        expected = f"a section {_SECTION!r} at the top level"
        raise PolicyError(f"{file}: expected {expected}, found {names}", value=file, expected=expected)
    if len(found) > 1:
        raise _twice(file, found[0][0], found[1][0])
    key, inside = found[0]
    return _line(key), inside


def _keys_named(name: str, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    return [(key, value) for key, value in pairs if key.id == "scalar" and key.value == name]


def _refuse_duplicates(node: Any, file: str, seen: set[int]) -> None:
    """YAML forbids a key that stands twice in one mapping; PyYAML lets the last one win, without a word."""
    if node.id == "scalar" or id(node) in seen:
        return
    seen.add(id(node))
    first: dict[tuple[str, str], Any] = {}
    for item in node.value:
        key, value = item if node.id == "mapping" else (None, item)
        if key is not None and key.id == "scalar" and key.tag != "tag:yaml.org,2002:merge":
            earlier = first.setdefault((key.tag, key.value), key)
            if earlier is not key:
                raise _twice(file, earlier, key)
        _refuse_duplicates(value, file, seen)


def _twice(file: str, earlier: Any, later: Any) -> PolicyError:
    return PolicyError(
        f"{file}:{_line(later)}: key {shown(later.value)} stands here and at line {_line(earlier)}; keep one",
        field=later.value,
        value=file,
        expected="each key once",
    )


def _construct(loader: Any, node: Any, file: str) -> Any:
    """The section as Python values, each value by itself first, for the line of one that cannot be built."""
    if node.id == "mapping":
        loader.flatten_mapping(node)
        for _, value in node.value:
            _construct_one(loader, value, file)
    return _construct_one(loader, node, file)


def _construct_one(loader: Any, node: Any, file: str) -> Any:
    try:
        return loader.construct_object(node, deep=True)
    except (ValueError, KeyError, AttributeError) as error:
        # What PyYAML lets through for a scalar of the right form and an impossible value: 2025-02-30, !!bool maybe.
        raise _malformed(file, _line(node), f"this value cannot be built: {shown(error)}") from None


def policy_to_argv(policy: AutotunePolicy) -> list[str]:
    """The arguments that give this policy back through :func:`add_arguments` and :func:`policy_from_args`.

    Only fields that differ from the default are written, one ``--flag=value`` token per value. A field that is empty
    where its default is not is written as the bare flag, which takes the arguments after it up to the next flag: put
    positional arguments before this list, not behind it.
    """
    argv: list[str] = []
    for name, value in policy.changes().items():
        flag = _flag(name)
        if isinstance(value, bool):
            argv.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, tuple):
            argv += [f"{flag}={_word(item)}" for item in value] or [flag]
        else:
            argv.append(f"{flag}={value}")
    return argv


def _word(item: str | tuple[str, int]) -> str:
    return item if isinstance(item, str) else f"{item[0]}={item[1]}"
