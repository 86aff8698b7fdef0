"""Read and write other systems' tuning files: Megatron-LM, FLA, Triton's disk cache; read vLLM's and SGLang's.

:func:`read` gives tables, :func:`write` takes them, and both give the list of what could not come along: these formats
know bare kernel names, keys without names, dtypes in the order of the call, no denied configs and no evidence. What is
missing may be made up by ``names`` (see :func:`known_kernels`); what then still cannot be carried is a :class:`Loss`,
never dropped in silence. Files are read as table files are: with bounds, every error naming file and place.

One function for all formats, rather than a class for each behind a registry: there are six formats, each a module of
its own with the options that it alone has, and what a command line needs of them is a name, a direction and a summary.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tuning.errors import TuningError
from tuning.interop import fla, fused_moe, megatron, triton_cache
from tuning.interop._known import AutotunerLike, KnownKernels, known_kernels
from tuning.interop._result import Exported, Imported, Loss, LossKind
from tuning.interop.fla import FlaMode
from tuning.journal import Journal, Scan
from tuning.tables import TableFile

__all__ = [
    "FORMATS",
    "AutotunerLike",
    "Exported",
    "FlaMode",
    "Format",
    "Imported",
    "KnownKernels",
    "Loss",
    "LossKind",
    "known_kernels",
    "read",
    "write",
]


@dataclass(frozen=True)
class Format:
    """A format, for help texts and checks.

    Attributes:
        name: as given to :func:`read` and :func:`write`.
        summary: what it is, in a few words.
        reads, writes: whether it can be.
        needs_arch: whether its files do not say the arch, so that :func:`read` has to be told.
        of_journals: whether it is written from journals rather than from tables.
    """

    name: str
    summary: str
    reads: bool = True
    writes: bool = True
    needs_arch: bool = True
    of_journals: bool = False


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        each.name: each
        for each in (
            Format("megatron", "Megatron-LM core.tuning: tables, and rank files for reading", needs_arch=False),
            Format(
                "megatron-ranks",
                "Megatron-LM core.tuning: rank files, written from journals",
                needs_arch=False,
                of_journals=True,
            ),
            Format("fla", "flash-linear-attention's config folder (FLA_CONFIG_DIR)"),
            Format("triton-cache", "Triton's disk cache of timings (*.autotune.json)"),
            Format("vllm-moe", "vLLM's fused MoE config files", writes=False),
            Format("sglang-moe", "SGLang's fused MoE config files", writes=False),
        )
    }
)
"""The formats, by name."""


def _format(name: str) -> Format:
    found = FORMATS.get(name)
    if found is None:
        raise TuningError(f"format: expected one of {', '.join(FORMATS)}, found {name!r}")
    return found


def read(
    format: str,
    paths: Iterable[str | os.PathLike[str]],
    *,
    arch: str | None = None,
    names: object = None,
    mode: FlaMode = "full",
) -> Imported:
    """Read another system's files.

    Args:
        format: a name in :data:`FORMATS`.
        paths: files, and folders of them.
        arch: what they are for. Megatron-LM's files say it; there, it selects one.
        names: what is known of kernels, anything that :func:`known_kernels` takes. Where several kernels have one bare
            name, a mapping among it says which is meant (``[inventory, {"kernel": "pkg.ops.kernel"}]``); what no
            mapping decides is a loss.
        mode: for FLA: the ``FLA_CACHE_MODE`` in which the folder is used; ``full`` takes over all of it.

    Raises:
        TableError: a file is not of this format, or ``arch`` is missing.
        TuningError: the format or the mode is unknown, or ``names`` holds something else.
    """
    known = known_kernels(names)
    name = _format(format).name
    if name == "fla":
        return fla.read(paths, known, arch, mode=mode)
    if name == "triton-cache":
        return triton_cache.read(paths, known, arch)
    if name in fused_moe.KERNELS:
        return fused_moe.read(paths, known, arch, engine=name)
    return megatron.read(paths, known, arch)


def write(
    format: str,
    tables: Iterable[TableFile],
    folder: str | os.PathLike[str],
    *,
    names: object = None,
    journals: Iterable[Journal | Scan] = (),
    mode: FlaMode = "strict",
    source: str | None = None,
) -> Exported:
    """Write tables as another system's files.

    Args:
        format: a name in :data:`FORMATS`.
        tables: the tables; none for a format that is written from journals.
        folder: where to, made where it is missing: ``FLA_CONFIG_DIR``, ``TRITON_CACHE_DIR`` and so on.
        names: what is known of kernels, anything that :func:`known_kernels` takes. Journals and manifests know in
            which order callers pass their tensors, by which all these systems look dtypes up.
        journals: what a format of journals is written from; for the others they are as good as in ``names``.
        mode: for FLA: the ``FLA_CACHE_MODE`` in which the folder will be used.
        source: for Megatron-LM: the text that says where the table is from.

    Raises:
        TuningError: the format is unknown or read-only, or is given what it is not written from.
        TableError: a file cannot be written.
    """
    chosen = _format(format)
    if not chosen.writes:
        raise TuningError(f"format: {chosen.name} can be read only; writable are {', '.join(_writable())}")
    given, recorded = tuple(tables), tuple(journals)
    if chosen.of_journals:
        if given or not recorded:
            raise TuningError(f"format: {chosen.name} is written from journals: give journals, and no tables")
        return megatron.write_rank_files(recorded, folder)
    if not given:
        raise TuningError(f"format: {chosen.name} is written from tables: give at least one")
    known = known_kernels(names, recorded)
    if chosen.name == "fla":
        return fla.write(given, folder, known, mode=mode)
    if chosen.name == "triton-cache":
        return triton_cache.write(given, folder, known)
    return megatron.write(given, folder, known, source=source)


def _writable() -> list[str]:
    return [each.name for each in FORMATS.values() if each.writes]
