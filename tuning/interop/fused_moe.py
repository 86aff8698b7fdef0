"""The fused MoE config files of vLLM and SGLang, read only.

A file's name carries the problem: ``E=<experts>,N=<size>,device_name=<GPU name with underscores>``, then perhaps
``,dtype=...``, ``,block_shape=[..]`` and more; its content is, for each number of tokens M, one flat config:
``BLOCK_SIZE_M`` and so on, ``num_warps``, ``num_stages``. vLLM may add ``triton_version``; SGLang keeps a folder for
each version of Triton, ``triton_3_4_0``.

Both engines launch ``fused_moe_kernel`` with the config of the nearest M; no autotuner is involved. In the tables that
are read here, M stands in the key beside the fields of the file's name, so that every row can be looked up, compared
and shown. The nearest M is a rule that our tables do not have (``on_miss="nearest"`` is close to it): a loss, said once
for each file. Writing is not offered: the engines choose a file by their own device name and their own fields.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from tuning._table_schema import fail
from tuning.interop._configs import NAME, launch_config
from tuning.interop._documents import Node, find_files, parse, read_bytes
from tuning.interop._known import KnownKernels
from tuning.interop._result import Imported, Losses
from tuning.interop._rows import Rows, check_arch
from tuning.interop._values import encode_foreign
from tuning.tables import Entry, TableFile

__all__ = ["KERNELS", "parse_file", "read"]

KERNELS = {
    "vllm-moe": "vllm.model_executor.layers.fused_moe.fused_moe.fused_moe_kernel",
    "sglang-moe": "sglang.srt.layers.moe.fused_moe_triton.fused_moe_triton_kernels.fused_moe_kernel",
}
"""The kernel whose configs the files of each engine hold; a mapping from ``fused_moe_kernel`` names another."""

_BARE = "fused_moe_kernel"
_FIELD = re.compile(r"([A-Za-z_]\w*)=(\[[^\[\]]*\]|[^,\[\]]*)(?:,|$)")
_FOLDER = re.compile(r"triton_(\d+)_(\d+)_(\d+)")
_LAUNCH = ("num_warps", "num_stages", "num_ctas", "maxnreg")


def read(
    paths: Iterable[str | os.PathLike[str]], known: KnownKernels, arch: str | None, *, engine: str = "vllm-moe"
) -> Imported:
    """Read files, and all files of folders.

    Args:
        paths: files and folders.
        known: a mapping from ``fused_moe_kernel`` in it decides which kernel is meant.
        arch: what the device of the files is; they name it by its product name.
        engine: a name in :data:`KERNELS`.

    Raises:
        TableError: a file is none of these, several devices are mixed, or ``arch`` is missing.
    """
    losses = Losses()
    rows = Rows(check_arch(arch, engine), losses)
    devices: dict[str, str] = {}
    for path in find_files(paths, "**/E=*.json", "fused MoE config files"):
        device = _read_file(parse(read_bytes(path), path), known, losses, rows, engine)
        first = devices.setdefault(device, path)
        if len(devices) > 1 and first is path:
            other = next(name for name in devices if name != device)
            fail(path, "file name", f"the device {other}, as in {devices[other]}", device, "read one device at a time")
    return Imported(_tables(rows, devices), losses.all())


def parse_file(data: bytes, file: str, known: KnownKernels, arch: str, *, engine: str = "vllm-moe") -> Imported:
    """Read the bytes of one file, whose name says its problem.

    Raises:
        TableError: they are none of these.
    """
    losses = Losses()
    rows = Rows(arch, losses)
    device = _read_file(parse(data, file), known, losses, rows, engine)
    return Imported(_tables(rows, {device: file}), losses.all())


def _tables(rows: Rows, devices: dict[str, str]) -> tuple[TableFile, ...]:
    return rows.tables(device=", ".join(devices).replace("_", " "))


def _problem(file: str) -> tuple[dict[str, str], str]:
    """The fields of a file's name in their order, and what stands behind them (SGLang's ``_down``)."""
    name = os.path.basename(file).removesuffix(".json")
    stem = name.removesuffix("_down")
    fields: dict[str, str] = {}
    at = 0
    while at < len(stem):
        found = _FIELD.match(stem, at)
        if found is None or found[1] in fields:
            break
        fields[found[1]] = found[2]
        at = found.end()
    sound = at == len(stem) and not stem.endswith(",") and list(fields)[:3] == ["E", "N", "device_name"]
    if not sound or not fields["device_name"] or not all(re.fullmatch(r"[0-9]{1,18}", fields[name]) for name in "EN"):
        fail(
            file,
            "file name",
            "E=<experts>,N=<size>,device_name=<GPU>[,dtype=...][,block_shape=[..]].json",
            repr(name[:200]),
        )
    return fields, name[len(stem) :]


def _key(fields: dict[str, str], suffix: str) -> tuple[tuple[str, str], ...]:
    values: dict[str, object] = {"E": int(fields["E"]), "N": int(fields["N"])}
    for name, text in fields.items():
        if name in ("E", "N", "device_name"):
            continue
        numbers = re.fullmatch(r"\[\s*(\d{1,9}(?:\s*,\s*\d{1,9})*)\s*\]", text)
        values[name] = [int(number) for number in numbers[1].split(",")] if numbers else text
    if suffix:
        values["variant"] = suffix.lstrip("_")
    return tuple((name, encode_foreign(value)) for name, value in values.items())


def _read_file(document: Node, known: KnownKernels, losses: Losses, rows: Rows, engine: str) -> str:
    """Take over the rows of a file and return its device."""
    fields, suffix = _problem(document.file)
    problem = _key(fields, suffix)
    chosen = known.qualified(_BARE)
    kernel = known.resolve(_BARE, document, losses) if chosen else KERNELS[engine]
    members = document.members("an object of configs by number of tokens")
    folder = _FOLDER.fullmatch(os.path.basename(os.path.dirname(document.file)))
    triton = ".".join(folder.groups()) if folder else ""
    if "triton_version" in members:
        triton = members.pop("triton_version").text("a version", empty=True)
    if kernel is None:
        return fields["device_name"]
    evidence = {"reported_by": f"{engine} file {os.path.basename(document.file)}", "measured": False}
    for text, node in members.items():
        if not re.fullmatch(r"[1-9][0-9]{0,17}|0", text):
            node.fail("a number of tokens as the member's name", f"the name {text[:80]!r}")
        parts = node.members("a config, as an object", ("num_warps", "num_stages"))
        kwargs = {name: part.argument() for name, part in parts.items() if name not in _LAUNCH}
        for name in kwargs:
            if not NAME.fullmatch(name):
                parts[name].fail("the name of a kernel parameter", "another name")
        config = launch_config(kwargs, {name: part for name, part in parts.items() if name in _LAUNCH})
        key = (("M", text), *problem)
        rows.add(Entry(kernel, key, None, (), config, evidence), node.place, triton)
    losses.add(
        "lookup",
        document.file,
        f"{engine.partition('-')[0]} takes the nearest M for a number of tokens that is not listed; a table here has "
        "exact entries, and on_miss decides about the rest",
    )
    return fields["device_name"]
