"""Carry a recording between machines: its journals, compacted, in one ``.tar.xz``; and parts of a compile cache."""

from __future__ import annotations

import argparse
import fnmatch
import io
import json
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import record_stand_in
from tuning._merge_contexts import breaks_context
from tuning.journal import SUFFIX, JournalWriter, read_journal
from tuning.spec import Environment, TuningRecord

__all__ = ["Compacted", "compact", "pack", "pack_cache", "unpack", "unpack_cache"]

LIMIT = 16 << 20
"""Most bytes of a packed file."""


def pack(folder: Path, summary: Any, file: Path) -> str:
    """Pack the journals and results of a recording; says how large they are.

    Raises:
        ValueError: they are over 16 MiB.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    with tarfile.open(part, "w:xz", preset=6) as archive:
        _add(archive, "summary.json", json.dumps(summary, indent=1).encode())
        for step in ("collect", *_rounds(folder)):
            for path in sorted((folder / step).glob("*/*")):
                if path.name == "log" and path.stat().st_size > 20000:
                    _add(archive, str(path.relative_to(folder)), path.read_bytes()[-20000:])
                elif path.name == "log" or path.name == "result.json" or path.suffix == ".journal":
                    archive.add(path, str(path.relative_to(folder)))
        for name in ("compiled.jsonl", "compilers.log"):
            if (folder / name).exists():
                _add(archive, name, (folder / name).read_bytes()[-(8 << 20) :])
    size = part.stat().st_size
    if size > LIMIT:
        part.unlink()
        raise ValueError(f"{file}: {size} bytes, over {LIMIT}: pack fewer workloads (--only); nothing is written")
    part.replace(file)
    return f"{file}: {size / 1e6:.2f} MB"


def _rounds(folder: Path) -> list[str]:
    """The folders of a recording's rounds, in order."""
    found = [path.name for path in folder.glob("time*") if path.is_dir() and path.name[4:].isdigit()]
    return sorted(found, key=lambda name: int(name[4:]))


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def unpack(file: Path, folder: Path, only: str = "") -> None:
    """Unpack what :func:`pack` wrote, into the folder of a recording.

    What was compiled is in no cache of this machine, so ``compiled.jsonl`` is left behind, but for its failures.
    """
    with tarfile.open(file, "r:xz") as archive:
        for member in archive:
            name = member.name
            if not member.isfile() or name == "summary.json" or (only and not name.startswith(f"{only}/")):
                continue
            if (folder / name).exists():
                continue
            stream = archive.extractfile(member)
            assert stream is not None
            content = stream.read()
            if name == "compiled.jsonl":
                content = b"".join(line for line in content.splitlines(keepends=True) if b'"error"' in line)
            target = folder / name
            if folder.resolve() not in target.resolve().parents:
                raise ValueError(f"{file}: {name} is outside of the folder")
            target.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(target, content)


def _entries(cache: Path, glob: str) -> Iterator[Path]:
    for group in sorted(cache.glob("*/__grp__*.json")):
        if fnmatch.fnmatchcase(group.name.removeprefix("__grp__").removesuffix(".json"), glob):
            yield group.parent


def pack_cache(cache: Path, glob: str, file: str) -> str:
    """Pack the compile cache of the kernels whose bare names match: binaries and what names them, not the sources.

    Files of at most 15 MB each are written: ``FILE``, then ``FILE.1`` and so on before its ending.
    """
    names: list[str] = []
    folders = list(_entries(cache, glob))
    written, start = 0, 0
    base = Path(file)
    while start < len(folders):
        path = base if not names else base.with_name(f"{base.name.split('.')[0]}.{len(names)}.tar.xz")
        path.parent.mkdir(parents=True, exist_ok=True)
        raw, end = 0, start
        while end < len(folders) and raw < 40 << 20:  # binaries shrink to a third or less
            raw += sum(each.stat().st_size for each in _kept(folders[end]))
            end += 1
        with tarfile.open(path, "w:xz", preset=6) as archive:
            for folder in folders[start:end]:
                for each in _kept(folder):
                    archive.add(each, f"{folder.name}/{each.name}")
        names.append(f"{path}: {path.stat().st_size / 1e6:.2f} MB")
        written += end - start
        start = end
    return "\n".join([f"{written} compiled kernels", *names])


def _kept(folder: Path) -> list[Path]:
    return [each for each in sorted(folder.iterdir()) if each.suffix in (".json", ".cubin", ".hsaco", ".so")]


def unpack_cache(file: Path, cache: Path) -> None:
    """Put a packed compile cache in place; its lists of files name this machine's folder."""
    cache.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "r:xz") as archive:
        for member in archive:
            target = cache / member.name
            if not member.isfile() or cache.resolve() not in target.resolve().parents:
                continue
            stream = archive.extractfile(member)
            assert stream is not None
            content = stream.read()
            if target.name.startswith("__grp__"):
                group = json.loads(content)
                names = {name: str(target.parent / name) for name in group["child_paths"]}
                content = json.dumps({"child_paths": names}).encode()
            target.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(target, content)


def _write_whole(target: Path, content: bytes) -> None:
    """A file that is there is whole: one that is not is unpacked again."""
    part = target.with_name(target.name + ".part")
    part.write_bytes(content)
    part.replace(target)


# --- what is committed ------------------------------------------------------------------------------------------------


@dataclass
class Compacted:
    """What compacting found.

    Attributes:
        files: the journals written.
        records: how many records they hold.
        left_out: records left out, a line each: a candidate broke the context (kernel, key and error), or nothing shows
            that they were timed.
    """

    files: list[Path]
    records: int
    left_out: list[str]


def compact(source: Path, out: Path) -> Compacted:
    """Write the timings of a recording, a folder or what :func:`pack` wrote, as one journal for each package and round.

    Of a workload that did not come to its end, killed or failed, a record is taken where its candidates were shown
    different times, which no made-up times are; what another workload was timed to the end for goes before it.

    Args:
        source: the recording.
        out: a folder, which must not hold journals yet; it is there with all of them or not at all.

    Raises:
        ValueError: ``out`` holds journals, or the recording has no timings, or none that were measured.
    """
    if any(out.glob("*.journal")):
        raise ValueError(f"{out}: holds journals already: give a new folder")
    if source.is_file():
        with tempfile.TemporaryDirectory() as folder:
            unpack(source, Path(folder))
            return compact(Path(folder), out)
    found = Compacted([], 0, [])
    written: list[tuple[str, Environment, dict[str, TuningRecord]]] = []
    for step in _rounds(source):
        packages: dict[str, tuple[Environment, dict[str, TuningRecord]]] = {}
        # Those that came to their end first: of two records of a key the first one met stays.
        for _, path, result in sorted(_recorded(source / step), key=lambda item: item[0]):
            reused = set(result.get("reused", ()))
            journal = read_journal(path)
            if journal.environment.device == record_stand_in.NAME:
                raise ValueError(f"{path}: was recorded without a GPU: its times are made up")
            for record in journal.records:
                identity = f"{record.kernel.qualified_name} {record.key.text}"
                if not record.timings or identity in reused:
                    continue
                where = f"round {step.removeprefix('time')}: {record.kernel.qualified_name} [{record.key}]"
                broken = next((item.error for item in record.timings if breaks_context(item.error)), None)
                if broken is not None:
                    found.left_out.append(f"{where}: {broken}")
                    continue
                if not result.get("finished", False) and not _shows_times(record):
                    found.left_out.append(f"{where}: {path.parent.name} did not end, and nothing shows it was timed")
                    continue
                environment, records = packages.setdefault(record.kernel.package, (journal.environment, {}))
                records.setdefault(identity, replace(record, specialization=None))
        for package, (environment, records) in sorted(packages.items()):
            written.append((f"{package}.{step.removeprefix('time')}", environment, records))
            found.records += len(records)
    if not written:
        raise ValueError(f"{source}: expected timings, found none")
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=_made(out.resolve().parent)) as folder:
        whole = _made(Path(folder) / "whole")
        names = [_write(whole, name, environment, records).name for name, environment, records in written]
        if out.exists():  # with other files than journals
            for name in names:
                (whole / name).rename(out / name)
        else:
            whole.rename(out)
    found.files += [out / name for name in names]
    return found


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _recorded(step: Path) -> Iterator[tuple[tuple[bool, str], Path, dict[str, Any]]]:
    """Journals of a round with the results of their workloads, and by what to sort them."""
    for path in step.glob("*/*.journal"):
        file = path.parent / "result.json"
        result = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        yield (not result.get("finished", False), str(path)), path, result


def _shows_times(record: TuningRecord) -> bool:
    return len({item.times_ms for item in record.timings if item.times_ms is not None}) > 1


def _write(out: Path, name: str, environment: Environment, records: dict[str, TuningRecord]) -> Path:
    with JournalWriter(f"{out}/", replace(environment, host="")) as writer:
        for _, record in sorted(records.items()):
            writer.write(record)
    return Path(writer.path).rename(out / f"{name}{SUFFIX}")


def main(arguments: list[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m bench.record_pack", description=__doc__)
    command = parser.add_subparsers(dest="command", required=True).add_parser("compact", help=compact.__doc__)
    command.add_argument("source", type=Path, help="folder of a recording, or what --pack wrote")
    command.add_argument("-o", "--out", type=Path, required=True, help="folder, named after the date of the recording")
    options = parser.parse_args(arguments)
    try:
        done = compact(options.source, options.out)
    except ValueError as error:
        sys.exit(str(error))
    for line in done.left_out:
        print(f"left out: {line}")
    size = sum(path.stat().st_size for path in done.files)
    print(f"{done.records} records in {len(done.files)} journals, {size / 1e6:.2f} MB, in {options.out}")


if __name__ == "__main__":
    main()
