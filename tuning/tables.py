"""Tables: read, check, overlay and write the reviewed configs of each arch.

A table lies at ``FOLDER/<arch>/<package>.json``. Its layout (``tables/schema.json`` is the same as a JSON Schema)::

    {
    "schema_version": 1,
    "arch": "sm90",
    "package": "mamba_ssm",
    "package_version": "2.3.2.post1",
    "triton": "3.6.0",
    "device": "NVIDIA H200",
    "multiprocessors": 132,
    "entries": [
    {"kernel": ..., "key": {...}, "dtypes": {...}, "config": {...}, "source_hash": ..., "evidence": {...}},
    ...
    ],
    "denied": [
    {"kernel": ..., "key": "*", "config": {...}, "reason": ..., "source": ...}
    ]
    }

Why so, and what else was weighed:

* *JSON, one entry a line, canonical order.* Tables are reviewed in diffs and written by several tools, so equal tables
  must be equal bytes and a changed entry one changed line. YAML has several spellings of a value and needs a package,
  TOML has no null, a binary form cannot be reviewed, and pretty-printed JSON spreads one entry over thirty lines.
* *Key and dtypes are objects by name, in declaration order.* A list of values alone (as Triton's own cache keeps)
  silently changes meaning when an autotuner's key list is reordered; Megatron-LM's joined string loses types. Identity
  disregards the order, but files keep it, because other systems' formats can only be written with it.
* *Dtypes may be a sequence instead.* Reported figures come without argument names, and naming them afterwards would be
  a guess that depends on the version of the package.
* *Values are the encoding of* :mod:`tuning.spec`, *as JSON and not as a string of JSON*: integers read as integers.
* *Evidence is free but for a few typed members.* What is worth saying differs between a measurement, a report and a
  copy; a closed list would push facts into prose. Everything else is closed: an unknown member is an error, since a
  misspelt ``num_wraps`` would otherwise be a silent miss.
* *Bit classes hold configs, not positions*: positions change with the candidate list.
* *One version number*, checked first; a file of a newer version is refused, never half understood.

Folders are overlaid entry by entry, the first on top; the packaged tables are at the bottom. Denied lists are joined:
an exact entry in an upper layer does *not* allow again what a lower layer denies, because the denial says that the
results are wrong.
"""

from __future__ import annotations

import copy
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tuning._atomic import write_atomically
from tuning._table_index import DeniedIndex, RowIndex
from tuning._table_rows import SCHEMA_VERSION, Denied, Entry, TableFile, render
from tuning._table_scan import LoadedFile, load
from tuning._table_schema import ARCH, MAX_BYTES, PACKAGE, fail, parse
from tuning.errors import TableError
from tuning.spec import Key, LaunchConfig

__all__ = [
    "MAX_BYTES",
    "SCHEMA_VERSION",
    "Denied",
    "Entry",
    "TableFile",
    "Tables",
    "archs_in",
    "bundled_folder",
    "load_tables",
    "parse_table",
    "read_table",
    "table_bytes",
    "write_table",
]

_LAYOUT = "FOLDER/<arch>/<package>.json, such as FOLDER/sm90/mamba_ssm.json"


def parse_table(data: bytes, file: str | None = None) -> TableFile:
    """Check the bytes of a table in full and return what they hold; ``file`` is their origin, for errors.

    Raises:
        TableError: they are not a table; it says where, what was expected and what was found.
    """
    return parse(data, file)


def read_table(path: str | os.PathLike[str], *, in_place: bool = True) -> TableFile:
    """Read one table file, checking all of it.

    Args:
        path: the file, ``FOLDER/<arch>/<package>.json``.
        in_place: check that the header's arch and package are those that the path says. False for a file that lies
            somewhere else, such as an attachment to be looked at.

    Raises:
        TableError: the file cannot be read, or is not a table, or is one for another arch or package.
    """
    file = os.fspath(path)
    data = _read(file)
    if not in_place:
        return parse(data, file)
    place = Path(os.path.abspath(file))
    return parse(data, file, arch=place.parent.name, package=place.name.removesuffix(".json"))


def _read(file: str) -> bytes:
    try:
        # Looked at before it is opened: opening a named pipe would wait for a writer that may never come.
        found = os.stat(file)
        if not stat.S_ISREG(found.st_mode):
            fail(file, None, "a regular file", "a folder" if stat.S_ISDIR(found.st_mode) else "something else")
        if found.st_size > MAX_BYTES:
            fail(file, None, f"at most {MAX_BYTES} bytes", str(found.st_size), "split the table by package")
        with open(file, "rb") as stream:
            return stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        fail(file, None, "a file that can be read", getattr(error, "strerror", None) or str(error))


def table_bytes(table: TableFile) -> bytes:
    """The canonical bytes of a table: equal tables give equal bytes, whatever the order of their rows.

    Raises:
        TableError: the table holds what the reader would refuse, or what would not come back the same.
    """
    try:
        data = render(table).encode("ascii")
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        fail(table.path, "$", "a table made of JSON values", f"{type(error).__name__}: {error}")
    back = parse(data, table.path)
    # Evidence is left out of the comparison: a tuple comes back as a list. Identity and config must survive exactly.
    kept = {row.identity: row.config for row in _all_rows(back)}
    for row in _all_rows(table):
        if kept.get(row.identity) != row.config:
            fail(table.path, "$", "rows whose values are in canonical encoding", f"one that reads back changed: {row}")
    return data


def _all_rows(table: TableFile) -> tuple[Entry | Denied, ...]:
    return (*table.entries, *table.denied)


def write_table(folder: str | os.PathLike[str], table: TableFile) -> Path:
    """Write ``folder/<arch>/<package>.json`` and return its path; the folders are made where they are missing.

    The file is replaced as a whole: a reader sees the old bytes or the new, and with several writers the last one wins.

    Raises:
        TableError: the table holds what the reader would refuse, or the file cannot be written.
    """
    data = table_bytes(table)
    path = Path(folder) / table.arch / f"{table.package}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
    except OSError as error:
        fail(os.fspath(path), None, "a place that can be written", error.strerror or str(error))
    return path


_NOTHING: Mapping[LaunchConfig, Denied] = {}


class Tables:
    """The table files of one arch, overlaid.

    Attributes:
        arch: the arch.
        others: the tables of other archs, for a rule that looks beyond this one; see :meth:`beside`.
    """

    others: tuple[Tables, ...] = ()

    def __init__(self, arch: str, layers: Sequence[Sequence[TableFile | LoadedFile]] = ()) -> None:
        """Overlay ``layers``, each the files of one folder, the first on top.

        Raises:
            TableError: a file is for another arch.
        """
        self.arch = arch
        self._layers = [
            [file if isinstance(file, LoadedFile) else LoadedFile.of(file) for file in layer] for layer in layers
        ]
        self._denied: dict[str, DeniedIndex] = {}
        for file in self._all():
            head = file.head
            if head.arch != arch:
                fail(head.path, "$.arch", f'"{arch}"', f'"{head.arch}"', "tables are for one arch")
            for row in head.denied:
                self._denied.setdefault(row.kernel, DeniedIndex()).add(row)
        # Built when a kernel is first asked for: a process uses a few kernels of a table of thousands of entries.
        self._index: dict[str, tuple[RowIndex, ...]] = {}

    def beside(self, others: Iterable[Tables]) -> Tables:
        """These tables, with those of other archs at hand; sorted by arch, and this arch left out."""
        found = copy.copy(self)
        found.others = tuple(sorted((one for one in others if one.arch != self.arch), key=lambda one: one.arch))
        return found

    def _all(self) -> Iterator[LoadedFile]:
        return (file for layer in self._layers for file in layer)

    def _of(self, kernel: str) -> Iterator[list[Entry]]:
        """The kernel's entries, layer by layer."""
        for layer in self._layers:
            entries = [entry for file in layer for entry in file.entries(kernel)]
            if entries:
                yield entries

    @property
    def files(self) -> tuple[TableFile, ...]:
        """The files, top layer first, by package within a layer."""
        return tuple(file.table for file in self._all())

    def _rows(self, kernel: str) -> tuple[RowIndex, ...]:
        rows = self._index.get(kernel)
        if rows is None:
            rows = self._index[kernel] = tuple(map(RowIndex, self._of(kernel)))
        return rows

    def exact(self, kernel: str, key: Key) -> Entry | None:
        """The entry for this key, from the topmost layer that has one.

        In each layer an entry that names its dtypes comes first, then one whose sequence of dtypes is the key's in the
        signature's order, then one whose dtypes are the same in another order, if it is the only such entry.
        """
        for rows in self._rows(kernel):
            entry = rows.exact(key)
            if entry is not None:
                return entry
        return None

    def wildcard(self, kernel: str) -> Entry | None:
        """The kernel's ``*`` entry, from the topmost layer that has one."""
        for rows in self._rows(kernel):
            if rows.wildcard is not None:
                return rows.wildcard
        return None

    def denied(self, kernel: str, key: Key) -> Mapping[LaunchConfig, Denied]:
        """The configs that must not be launched for this key, from all layers; where several deny one, the topmost."""
        rows = self._denied.get(kernel)
        return rows.matching(key) if rows is not None else _NOTHING

    def entries(self, kernel: str) -> tuple[Entry, ...]:
        """The kernel's entries that no upper layer hides, top layer first."""
        kept: dict[object, Entry] = {}
        for layer in self._of(kernel):
            for entry in layer:
                kept.setdefault(entry.identity, entry)
        return tuple(kept.values())

    def kernels(self) -> tuple[str, ...]:
        """Qualified names of the kernels that have an entry or a denied config, sorted."""
        return tuple(sorted({kernel for file in self._all() for kernel in file.kernels} | self._denied.keys()))

    def __repr__(self) -> str:
        packages = sorted({file.head.package for file in self._all()})
        return f"Tables({self.arch!r}: {', '.join(packages) or 'none'})"


def bundled_folder() -> Path:
    """Folder of the tables that come with the library.

    In a wheel they are package data at ``tuning/_tables``; in a checkout, and so in an editable install, they are
    the folder ``tables`` beside the package. Either is known by its ``schema.json``: a folder ``tables`` in
    site-packages may be PyTables.

    Raises:
        TableError: neither is there; the installation is broken.
    """
    package = Path(__file__).resolve().parent
    folders = (package / "_tables", package.parent / "tables")
    for folder in folders:
        if (folder / "schema.json").is_file():
            return folder
    expected, found = "the packaged tables with their schema.json", f"neither that nor {folders[1]}"
    return fail(os.fspath(folders[0]), None, expected, found, "install the library again")


def load_tables(arch: str, table_path: Sequence[str | os.PathLike[str]] = (), *, neighbours: bool = False) -> Tables:
    """The tables of one arch: the folders of ``table_path``, the first on top, over the packaged ones.

    Args:
        arch: Triton's target, such as ``sm90``. An arch for which nothing is packaged is no error.
        table_path: folders laid out as ``FOLDER/<arch>/<package>.json``. One that has tables for other archs only is no
            error either.
        neighbours: with the tables of every other arch that these folders have, see :meth:`Tables.beside`.

    Raises:
        TableError: a folder does not exist or is not laid out so, or a file of this arch is not a sound table.
    """
    if not ARCH.fullmatch(arch):
        raise TableError(f"arch: expected a name such as sm90, found {arch!r}", expected="an arch", found=repr(arch))
    if isinstance(table_path, (str, bytes, os.PathLike)):
        found = repr(table_path)
        raise TableError(f"table_path: expected a sequence of folders, found {found}", expected="folders", found=found)
    layers = [_layer(Path(folder), arch) for folder in table_path]
    layers.append(_files(bundled_folder() / arch))
    tables = Tables(arch, layers)
    if not neighbours:
        return tables
    known = {name for folder in (*table_path, bundled_folder()) for name in archs_in(folder)} - {arch}
    return tables.beside(load_tables(name, table_path) for name in known)


def archs_in(folder: str | os.PathLike[str]) -> tuple[str, ...]:
    """Names of the archs for which a folder has tables, sorted; other folders in it (``.git``, notes) are none.

    Raises:
        TableError: the folder cannot be read.
    """
    try:
        return tuple(sorted(child.name for child in Path(folder).iterdir() if child.is_dir() and _names(child)))
    except OSError as error:
        return fail(os.fspath(folder), "$", "a folder that can be read", error.strerror or str(error))


def _layer(folder: Path, arch: str) -> list[LoadedFile]:
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        fail(os.fspath(folder), None, f"a folder laid out as {_LAYOUT}", found, "correct table_path")
    try:
        if not any(_names(child) for child in folder.iterdir() if child.is_dir()):
            fail(os.fspath(folder), None, f"tables at {_LAYOUT}", "no such file", "correct table_path")
    except OSError as error:
        fail(os.fspath(folder), None, "a folder that can be read", error.strerror or str(error))
    return _files(folder / arch)


def _names(folder: Path) -> list[Path]:
    if not ARCH.fullmatch(folder.name):
        return []
    # Sorted: the order in which a file system lists names is its own affair. Hidden files are writers' and editors'.
    return sorted(path for path in folder.iterdir() if re.fullmatch(r"[^.].*\.json", path.name))


def _files(folder: Path) -> list[LoadedFile]:
    if not folder.is_dir():
        return []
    try:
        paths = _names(folder)
    except OSError as error:
        fail(os.fspath(folder), None, "a folder that can be read", error.strerror or str(error))
    files = []
    for path in paths:
        package = path.name.removesuffix(".json")
        if not PACKAGE.fullmatch(package):
            fail(os.fspath(path), None, "a file named after a top-level package", f"the name {path.name}")
        files.append(load(_read(os.fspath(path)), os.fspath(path), folder.name, package))
    return files
