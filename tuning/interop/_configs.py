"""Configs as other systems write them: an object with ``kwargs``, ``num_warps``, ``num_stages`` and a few more."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tuning.interop._documents import Node
from tuning.interop._result import Losses
from tuning.interop._values import Unportable, decode_scalar, encode_foreign
from tuning.spec import CONFIG_DEFAULTS, Json, LaunchConfig

__all__ = ["NAME", "config_to_json", "launch_config", "read_config", "read_kwargs"]

NAME = re.compile(r"[^\W\d]\w*")
"""Name of an argument."""

_FIELDS = ("kwargs", "num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")
_WARPS = tuple(1 << power for power in range(11))


def read_config(node: Node, losses: Losses, *, extra: bool = False, parameters: str = "kwargs") -> LaunchConfig:
    """The config that an object holds.

    Args:
        node: the object.
        losses: told of members that are not read.
        extra: whether further members are fields of the config, as where Triton writes a vendor's config; else the
            other side does not read them either.
        parameters: name of the member that holds the kernel's parameters.

    Raises:
        TableError: it is no config that Triton could launch.
    """
    members = node.members("a config, as an object", (parameters, "num_warps", "num_stages"))
    further: dict[str, Json] = {}
    for name, member in members.items():
        if name in (*_FIELDS, parameters) or member.value is None:
            continue
        if name == "pre_hook":
            losses.add("hook", member.place, "a pre_hook in a file is not executed")
        elif extra and NAME.fullmatch(name):
            if not (type(member.value) is int and member.value == 0):
                further[name] = member.argument()
        else:
            losses.add("unknown_member", member.place, f"the member {name!r} of a config is not read")
    return launch_config(read_kwargs(members[parameters]), members, further)


def read_kwargs(node: Node) -> dict[str, Json]:
    """A kernel's parameters: an object of values by name."""
    found = node.members("an object of kernel parameters")
    for name, member in found.items():
        if not NAME.fullmatch(name):
            member.fail("the name of an argument", "another name")
    return {name: member.argument() for name, member in found.items()}


def launch_config(
    kwargs: Mapping[str, Json], fields: Mapping[str, Node], further: Mapping[str, Json] | None = None
) -> LaunchConfig:
    """A config of parameters and of the launch fields that are there.

    Raises:
        TableError: a field holds what Triton could not launch.
    """
    core: dict[str, Any] = dict(CONFIG_DEFAULTS)
    for name, what, least in (
        ("num_stages", "an integer of at least 0, or null", 0),
        ("num_ctas", "an integer of at least 1, or null", 1),
        ("maxnreg", "an integer of at least 1, or null", 1),
    ):
        if name in fields:
            core[name] = None if fields[name].value is None else fields[name].count(what, least)
    warps = fields["num_warps"]
    if warps.value is not None and warps.count("a power of two up to 1024, or null", 1) not in _WARPS:
        warps.fail("a power of two up to 1024, or null")
    core["num_warps"] = warps.value
    override = fields.get("ir_override")
    if override is not None and override.value is not None:
        core["ir_override"] = override.text("a file name, or null")
    return LaunchConfig(
        tuple(sorted((name, encode_foreign(value)) for name, value in kwargs.items())),
        extra=tuple(sorted((name, encode_foreign(value)) for name, value in (further or {}).items())),
        **core,
    )


def config_to_json(config: LaunchConfig) -> Json:
    """The object that other systems read, every field spelt out: FLA demands ``num_ctas`` from Triton 3.5.1 on.

    Raises:
        Unportable: the config has a field or a value that the object cannot hold.
    """
    if config.extra:
        raise Unportable(f"the field {config.extra[0][0]} has no place in it")
    return {
        "kwargs": {name: decode_scalar(text) for name, text in config.kwargs},
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **{name: getattr(config, name) for name in CONFIG_DEFAULTS},
    }
