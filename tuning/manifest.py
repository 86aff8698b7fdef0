"""What ran: one document that says which config every kernel got, by which rule, from which table, on what.

Pure data: everything is passed in, nothing is looked up. The file is JSON in one canonical form: members sorted, one
choice to a line, so that ``diff`` is of use on it. It has two parts. ``run`` says what ran; ``place`` on which host and
rank. The digest is the SHA-256 of the canonical text of ``run`` alone, without the paths in it, so that all ranks of a
run that agree have one digest, and a run that is repeated elsewhere, from tables in another folder, has it too. There
is no date in it, for the same reason.

Choices are sorted by kernel, arch and key, but those of one key keep the order in which they were made: a key has
several where a config could not be launched for lack of resources. Each choice carries what a table entry needs (key
names in order of declaration, dtypes by argument name, source hash), so that a table that makes the same choices can be
made from a manifest.

Weighed and left: MessagePack (this is read by people, and kept for years beside results); launch order (it differs with
the threads of a run that is otherwise the same); a digest over the file's bytes (it would differ between ranks).

A manifest fails as a table does: :class:`tuning.errors.TableError` names the file, the place in it, what was expected,
and what was found.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tuning._atomic import write_atomically
from tuning._bounded import read_regular
from tuning._manifest_content import (
    SCHEMA_VERSION,
    AutotunerState,
    AutotunerUse,
    Launch,
    Manifest,
    TableUse,
    plain,
)
from tuning._manifest_diff import Change, diff_manifests
from tuning._manifest_reader import MAX_BYTES, Reader
from tuning.errors import TableError
from tuning.spec import Choice, Environment, canonical_json

__all__ = [
    "SCHEMA_VERSION",
    "AutotunerState",
    "AutotunerUse",
    "Change",
    "Launch",
    "Manifest",
    "TableUse",
    "build_manifest",
    "diff_manifests",
    "manifest_bytes",
    "manifest_from_bytes",
    "read_manifest",
    "write_manifest",
]


def build_manifest(
    *,
    library: str,
    mode: str,
    policy: Any,
    environment: Environment,
    deterministic: bool = False,
    compilers: Mapping[str, str] | None = None,
    tables: Iterable[TableUse] = (),
    choices: Iterable[Choice] = (),
    source_hashes: Mapping[str, str | None] | None = None,
    benchmarks: Mapping[str, int] | None = None,
    autotuners: Iterable[AutotunerUse] = (),
    notices: Iterable[tuple[str, str]] = (),
) -> Manifest:
    """Bring what is known of a run into canonical order; equal facts in any order give an equal manifest.

    Args:
        policy: a dataclass of plain values and tuples, or a mapping of such values.
        choices: in the order in which they were made.
        source_hashes: by qualified name of the kernel.
        benchmarks: number of candidates timed, by kernel in scope.

    The other arguments are as the attributes of :class:`Manifest`.
    """
    fields = plain(policy) if dataclasses.is_dataclass(policy) else dict(policy)
    hashes = source_hashes or {}
    launches = dict.fromkeys(Launch.of(choice, hashes.get(choice.kernel)) for choice in choices)
    return Manifest(
        library=library,
        mode=mode,
        deterministic=deterministic,
        policy=json.loads(canonical_json(fields)),
        environment=dataclasses.replace(environment, packages=tuple(sorted(environment.packages))),
        compilers=tuple(sorted((compilers or {}).items())),
        tables=tuple(
            sorted(set(tables), key=lambda table: (table.arch, table.package, table.path or "", table.sha256))
        ),
        choices=tuple(sorted(launches, key=lambda launch: launch.place)),
        benchmarks=tuple(sorted((kernel, count) for kernel, count in (benchmarks or {}).items() if count)),
        autotuners=tuple(sorted(set(autotuners), key=lambda each: (each.kernel, each.state, each.reason))),
        notices=tuple(sorted(set(notices))),
    )


def manifest_bytes(manifest: Manifest) -> bytes:
    """The file: canonical JSON, each item of a list on a line of its own, with a newline at the end."""
    document = manifest.to_json()
    head = [f'"{name}":{canonical_json(document[name])},' for name in ("schema_version", "digest", "place")]
    members = []
    for name, value in sorted(document["run"].items()):
        if isinstance(value, list) and value:
            items = ",\n ".join(canonical_json(item) for item in value)
            members.append(f'"{name}":[\n {items}\n]')
        else:
            members.append(f'"{name}":{canonical_json(value)}')
    return ("\n".join(["{", *head, '"run":{', ",\n".join(members), "}", "}"]) + "\n").encode()


def write_manifest(path: str | os.PathLike[str], manifest: Manifest) -> Path:
    """Write the file, whole or not at all, and return its path.

    Raises:
        TableError: it cannot be written.
    """
    target = Path(path)
    try:
        write_atomically(target, manifest_bytes(manifest))
    except OSError as error:
        raise TableError(
            f"manifest {target}: cannot be written ({error.strerror or error}); give a file in a folder that exists "
            "and can be written",
            file=str(target),
            expected="a file that can be written",
            found=str(error),
        ) from error
    return target


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read a manifest that :func:`write_manifest` wrote.

    Raises:
        TableError: the file cannot be read, is no manifest of this version, or is not as it was written.
    """
    try:
        content = read_regular(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TableError(
            f"manifest {os.fspath(path)}: cannot be read ({reason}); expected the file of a run",
            file=os.fspath(path),
            expected="a file that can be read",
            found=str(error),
        ) from error
    return manifest_from_bytes(content, file=os.fspath(path))


def manifest_from_bytes(content: bytes, *, file: str | None = None) -> Manifest:
    """Inverse of :func:`manifest_bytes`.

    Args:
        file: what to call it in errors.

    Raises:
        TableError: as :func:`read_manifest`.
    """
    return Reader(file).manifest(content)
